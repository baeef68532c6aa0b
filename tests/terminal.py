"""A real pseudo-terminal for a command: the forked process has imported torch already, so it costs what it computes."""

import fcntl
import os
import pty
import select
import signal
import struct
import sys
import termios
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

from dsv4.commands import cli
from dsv4.commands.terminal import errors

COLUMNS = 2000  # of the pseudo-terminal: no line of text is broken by its edge


@dataclass
class Done:
    """code: exit code; shown: what the terminal got; out, err: what was redirected to files."""

    code: int
    shown: str
    out: str = ""
    err: str = ""


def in_terminal(*args, folder: Path, out: bool = True, err: bool = True, head: int | None = None, interrupt: str = ""):
    """Run `dsv4 …` as a process of its own, whose stdin is a pseudo-terminal.

    out, err: whether stdout and stderr are it too; else they go to files. head: stdout is a pipe whose reader leaves
    after so many bytes. interrupt: SIGINT is sent when the terminal shows this. Returns a Done.
    """
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 50, COLUMNS, 0, 0))
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)  # the least: a short output must not go in whole before it is closed
    files = [os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_TRUNC) for name in ("out", "err")]
    ends = (slave, writer if head is not None else slave if out else files[0], slave if err else files[1])
    sys.stdout.flush(), sys.stderr.flush()
    child = os.fork()
    if not child:
        _become(args, slave, ends, (reader, writer, master))
    for end in (slave, writer):
        os.close(end)
    if head is not None:
        os.read(reader, head)
        os.close(reader)
    shown = _watch(master, child, interrupt)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os.close(master)
    return Done(code, shown, *((folder / name).read_text(errors="replace") for name in ("out", "err")))


def _become(args, slave: int, ends: tuple, others: tuple) -> None:
    """Of the forked process: take the terminal, run the command, and end without what pytest does at its end."""
    code = 70
    try:
        os.setsid()
        fcntl.ioctl(slave, termios.TIOCSCTTY, 0)
        for number, end in enumerate(ends):
            os.dup2(end, number)
        for end in others:
            os.close(end)
        os.environ["TERM"] = "xterm-256color"
        signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w")
        errors.__init__(stderr=True)  # as a new process would have found the terminal
        sys.argv = ["dsv4", *map(str, args)]
        cli.main()
    except SystemExit as stop:
        code = stop.code
    except BaseException:
        traceback.print_exc()
    finally:
        try:
            sys.stdout.flush(), sys.stderr.flush()
        finally:
            os._exit(code or 0)


def _watch(master: int, child: int, interrupt: str) -> str:
    """What the terminal gets until the process ends."""
    shown, sent, until = b"", False, time.time() + 240
    while time.time() < until:
        ready, _, _ = select.select([master], [], [], 1)
        try:
            more = os.read(master, 65536) if ready else b"" if os.waitid(os.P_PID, child, WAIT) is None else None
        except OSError:  # the other end is closed
            break
        if more is None:
            break
        shown += more
        if interrupt and not sent and interrupt in shown.decode(errors="replace"):
            os.kill(child, signal.SIGINT)
            sent = True
    else:
        os.kill(child, signal.SIGKILL)
    return shown.decode(errors="replace")


WAIT = os.WEXITED | os.WNOHANG | os.WNOWAIT


def screen(shown: str) -> str:
    """What is left on the terminal: carriage returns, cursor up and erased lines are carried out, colours left out."""
    lines, row, column, i = [""], 0, 0, 0
    while i < len(shown):
        c = shown[i]
        i += 1
        if c == "\x1b" and shown[i : i + 1] == "[":
            end = next(j for j in range(i + 1, len(shown)) if shown[j].isalpha())
            count, kind, i = shown[i + 1 : end], shown[end], end + 1
            if kind == "A":
                row = max(0, row - int(count or 1))
            elif kind == "K":
                lines[row] = "" if count == "2" else lines[row][:column]
        elif c == "\r":
            column = 0
        elif c == "\n":
            row += 1
            lines += [""] * (row == len(lines))
        else:
            lines[row] = lines[row][:column].ljust(column) + c + lines[row][column + 1 :]
            column += 1
    return "\n".join(lines)
