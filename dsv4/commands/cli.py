"""The command line. Every error is one line on stderr and exit code 2; data goes to stdout, progress to stderr."""

import os
import sys
from collections.abc import Callable
from functools import cache
from typing import Annotated

import typer

from dsv4 import __version__
from dsv4.commands import checkpoint as checkpoint_commands
from dsv4.commands import decode as commands
from dsv4.commands.audit import (  # only the command line imports the engine and the probes above it
    audit_app,
    audit_commands,
)
from dsv4.commands.demo import demo
from dsv4.commands.fidelity import fidelity
from dsv4.commands.help import dress
from dsv4.commands.kernel import kernel_app
from dsv4.commands.recall import recall
from dsv4.commands.regime import regime_app
from dsv4.commands.sparse_prefill import sparse_prefill
from dsv4.commands.terminal import errors
from dsv4.commands.termination import termination
from dsv4.commands.warm import warm
from dsv4.errors import Dsv4Error, InputError, RankLost
from dsv4.parallel.ranks_asked import LOST, WATCHED, asked, settle_streams, speaks

INTERRUPTED, CLOSED_PIPE = 130, 141  # 128 + SIGINT, 128 + SIGPIPE, as a shell reports them
COMPLETION = "_DSV4_COMPLETE"  # set by the shell's completion
RANKED = ("generate", "batch", "recall", "fidelity", "audit", "--version", "--help", "")  # commands of several ranks
RANKED_AUDITS = ("run", "record")
OUT_OF_MEMORY = "out of memory; lower --max-context, or spread the model with --device-map auto --max-memory"

app = typer.Typer(
    add_completion=True,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Run, measure and audit DeepSeek-V4-style checkpoints.",
)
app.add_typer(audit_app, name="audit", help="Probe a checkpoint and an implementation of it.")
app.add_typer(kernel_app, name="kernel", help="Audit anybody's kernel of one operation.")
app.add_typer(regime_app, name="regime", help="What decode attention costs, and where reading sparsely pays.")
for function in (
    *(demo, commands.generate, commands.batch),
    *(checkpoint_commands.inspect, checkpoint_commands.plan, warm, checkpoint_commands.convert),
    *(recall, fidelity, sparse_prefill, termination),
):
    app.command()(function)


def _print_version(asked: bool) -> None:
    if asked:
        print(f"dsv4 {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and exit.")
    ] = False,
):
    """Run, measure and audit DeepSeek-V4-style checkpoints."""


@cache
def command():
    """The tree of commands, with its help laid out (`dsv4.commands.help`)."""
    return dress(typer.main.get_command(app))


def main() -> None:
    """Entry point of `dsv4`."""
    guarded(_invoke)


def guarded(run: Callable[[], None]) -> None:
    """Run a command and exit: expected failures become one line and an exit code.

    Exit codes: 0 done, 1 findings or a plan that does not fit, 2 bad input, 130 interrupted, 141 the reader of a pipe
    left.
    """
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a character that the terminal lacks must not end the run
    try:
        code = _code(run)
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()  # the reader of a pipe may have left; here the error can still be handled
    except BrokenPipeError:
        code = CLOSED_PIPE
        _leave_streams()
    except OSError as error:  # files outside of the checkpoint's own errors, or a full disk below stdout
        what = f"{error.filename}: {error.strerror}" if error.filename else f"standard output: {error.strerror}"
        code = _fail(f"cannot read or write {what}; see that it exists, may be used and has room")
        _leave_streams()
    if dist_started():
        from dsv4.parallel.processes import leave

        leave(code)
    sys.exit(code)


def dist_started() -> bool:
    """Whether this process has joined other ranks."""
    found = sys.modules.get("torch.distributed")
    return found is not None and found.is_available() and found.is_initialized()


def _invoke() -> None:
    if COMPLETION in os.environ:
        command().main(prog_name="dsv4")  # answers the shell, and exits
    if asked() is not None and (alone := _alone(sys.argv[1:])):
        raise InputError(f"RANK and WORLD_SIZE are set, and {alone!r} runs in one process: unset them")
    with command().make_context("dsv4", sys.argv[1:]) as context:  # not main(), which makes a closed pipe code 1
        command().invoke(context)


def _alone(arguments: list[str]) -> str:
    """The command of a command line, if it does not run as several ranks; else ''."""
    named, *then = [*arguments, ""]
    if named == "audit" and then[0] in audit_commands():
        return "" if then[0] in RANKED_AUDITS else f"audit {then[0]}"
    return "" if named in RANKED else named


def _code(run: Callable[[], None]) -> int:
    if sys.stdout is None:
        return _fail("standard output is closed, and results go there; leave it open, or send it to /dev/null")
    try:
        settle_streams()
        run()
        return 0
    except typer.Exit as stop:
        return stop.exit_code if speaks() else 0  # a verdict, which rank 0 gives: this rank has not failed
    except (typer.Abort, KeyboardInterrupt):
        return INTERRUPTED
    except RankLost as error:
        return LOST if WATCHED in os.environ else _fail(str(error))
    except Dsv4Error as error:
        return _fail(str(error))
    except MemoryError:
        return _fail(OUT_OF_MEMORY)
    except Exception as error:  # usage errors of the command line library, and torch's own out-of-memory error
        if type(error).__name__ == "OutOfMemoryError" or "DefaultCPUAllocator: can't allocate memory" in str(error):
            return _fail(OUT_OF_MEMORY)
        if not hasattr(error, "exit_code"):
            raise
        # a group without a command: the exception holds the help, which may be printed already
        if type(error).__name__ == "NoArgsIsHelpError":
            sys.stdout.write(error.message and error.message.rstrip() + "\n")
            return error.exit_code
        return _fail(error.format_message())


def _fail(message: str) -> int:
    errors.print("error: " + " ".join(message.split()))
    return 2


def _leave_streams() -> None:
    """Point streams that can no longer be written to at os.devnull, so that the interpreter's last flush is silent."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(nothing, stream.fileno())
