"""The process of a subject, seen from the parent: asks with a time limit, and starts another where one died."""

import io
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import contextmanager, suppress
from multiprocessing import forkserver
from tempfile import TemporaryDirectory

import torch

from dsv4.errors import Dsv4Error
from dsv4.probes.kernel_audit.errors import SubjectDied, SubjectFailed
from dsv4.probes.kernel_audit.subject import SubjectSpec

START_LIMIT = 600  # seconds: a first import may compile


def packed(value) -> bytes:
    """Plain bytes: tensors by value, never by shared memory that the other side could keep."""
    stream = io.BytesIO()
    torch.save(value, stream, pickle_module=pickle)
    return stream.getvalue()


def unpacked(data: bytes):
    return torch.load(io.BytesIO(data), weights_only=False)


def serve(connection, spec: SubjectSpec, threads: int, folder: str) -> None:
    """Body of the process: (function, arguments) → ('ok', result) or ('failed' | 'refused' | 'lost', message). It ends
    behind 'lost': the device answers nothing more in this process. It ends without a word where the parent has gone, as
    it has after Ctrl-C. folder: for files, which the parent removes."""
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):
        _answer_all(connection, spec, threads, folder)


def _answer_all(connection, spec: SubjectSpec, threads: int, folder: str) -> None:
    from dsv4.probes.kernel_audit import solutions
    from dsv4.probes.kernel_audit.harness import Harness

    solutions.folder_of_process = folder
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)  # a subject's prints are not the report
    torch.set_num_threads(threads)
    try:
        harness = Harness(spec)
    except BaseException as error:
        connection.send_bytes(packed(("failed", _said(error))))
        return
    connection.send_bytes(packed(("ok", None)))
    while True:
        function, arguments = unpacked(connection.recv_bytes())
        try:
            answer = "ok", function(harness, *arguments)
        except SubjectFailed as error:
            answer = "refused" if error.refused else "failed", str(error)
        except BaseException as error:
            answer = "failed", _said(error)
        if answer[0] != "ok" and (why := lost(harness.device)):
            connection.send_bytes(packed(("lost", f"it left the device unusable: {why}")))
            return
        connection.send_bytes(packed(answer))


def lost(device: torch.device) -> str:
    """Why the device answers nothing more in this process, '' if it does: every call behind an illegal access or an
    illegal instruction fails, whatever it is."""
    if device.type != "cuda":
        return ""
    try:
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        return (str(error).splitlines() or [""])[0][:200]
    return ""


def _said(error: BaseException) -> str:
    """Type, first line and the innermost place in the subject's own code; an error of dsv4's says itself what it is
    about."""
    if isinstance(error, Dsv4Error):
        return (str(error).splitlines() or [""])[0]
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if "kernel_audit" not in f.filename and "/torch/" not in f.filename]
    place = f" at {os.path.basename(own[-1].filename)}:{own[-1].lineno}" if own else ""
    return f"{type(error).__name__}{place}: {(str(error).splitlines() or [''])[0][:300]}"


_starting, _interpreted = threading.Lock(), None  # how the process that others are copies of was started


def _ready(interpreted: bool):
    """The context whose processes are copies of one that has imported everything.

    Triton decides when it is imported whether kernels are interpreted. On a CPU they are, so that the process is
    started anew where the last subjects were of the other kind.
    """
    global _interpreted
    context = multiprocessing.get_context("forkserver")
    with _starting:
        if _interpreted is not None and _interpreted != interpreted:
            forkserver._forkserver._stop()
        context.set_forkserver_preload(["dsv4.probes.kernel_audit.harness", "dsv4.probes.kernel_audit.preload"])
        before = os.environ.get("TRITON_INTERPRET")
        os.environ["TRITON_INTERPRET"] = "1" if interpreted else "0"
        try:
            forkserver.ensure_running()
        finally:
            os.environ.pop("TRITON_INTERPRET") if before is None else os.environ.update(TRITON_INTERPRET=before)
        _interpreted = interpreted
    return context


@contextmanager
def _main_hidden():
    """A new process imports the caller's main file unless it does not know it: a script without a guard would run again
    there, and one from standard input has no file."""
    main = sys.modules["__main__"]
    hidden = {name: vars(main)[name] for name in ("__file__", "__spec__") if name in vars(main)}
    vars(main).pop("__file__", None)
    main.__spec__ = None
    try:
        yield
    finally:
        vars(main).update(hidden)


class Worker:
    """One process for one subject; use it as a context."""

    def __init__(self, spec: SubjectSpec, limit: float = 60.0, threads: int = 1):
        self.spec, self.limit, self.threads = spec, limit, threads
        self.deaths, self.asked = 0, 0
        self.process: multiprocessing.process.BaseProcess | None = None
        self.folder: TemporaryDirectory  # of the process

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stop()

    def start(self) -> None:
        """Raises SubjectFailed where the kernel cannot be loaded."""
        context = _ready(self.spec.device == "cpu")
        self.connection, other = context.Pipe()
        self.folder = TemporaryDirectory(prefix="dsv4-subject-", ignore_cleanup_errors=True)
        process = context.Process(target=serve, args=(other, self.spec, self.threads, self.folder.name), daemon=True)
        with _starting, _main_hidden():
            process.start()
        self.process = process
        other.close()
        self._answer(START_LIMIT)

    def ask(self, function: Callable, *arguments, limit: float | None = None):
        """function(harness, *arguments) in the process. Raises SubjectFailed, or SubjectDied after a crash or `limit`
        seconds."""
        if self.process is None:
            self.start()
        self.asked += 1
        try:
            self.connection.send_bytes(packed((function, arguments)))
        except (BrokenPipeError, OSError):
            self._died()
        return self._answer(limit or self.limit)

    def _answer(self, limit: float):
        try:
            if not self.connection.poll(limit):
                self.stop()
                self.deaths += 1
                raise SubjectDied(f"no answer within {limit:.0f} s; its process was ended")
            status, value = unpacked(self.connection.recv_bytes())
        except (EOFError, ConnectionResetError):
            self._died()
        if status == "ok":
            return value
        if status == "lost":
            self.stop()
            self.deaths += 1
            raise SubjectDied(value)
        raise SubjectFailed(value, refused=status == "refused")

    def _died(self):
        self.process.join(5)
        code = self.process.exitcode
        self.folder.cleanup()
        self.process, self.deaths = None, self.deaths + 1
        name = signal.Signals(-code).name if code and code < 0 else f"exit code {code}"
        raise SubjectDied(f"its process ended with {name}")

    def stop(self) -> None:
        """End the process."""
        if self.process is not None:
            self.process.kill()
            self.process.join(5)
            self.folder.cleanup()
            self.process, self.asked = None, 0
