"""Compiles the kernels of a request in many processes, while weights are read.

Triton compiles a kernel when it is first launched, one after another, each for about a second. Here a process that is
forked before the GPU is touched finds what a request will launch (`dsv4.runtime.launches`) and compiles it, with
processes of its own, into Triton's cache on disk, whose keys are those of the launches themselves: the source of a
kernel, its arguments, versions and the GPU. Nothing is promised: a launch that was not foreseen compiles when it is
made.

The cache may be copied to another machine, or shared (TRITON_CACHE_DIR). It keeps a mark of each request that was
compiled whole, by which the next process with the same request knows that there is nothing to do, and a list of what
was compiled, by which other requests know what they lack.
"""

import hashlib
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import suppress
from functools import cache
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Thread
from types import ModuleType
from typing import NamedTuple

import torch

from dsv4.errors import Dsv4Error, InputError
from dsv4.kernels.launch import GPU
from dsv4.kernels.recording import Launch, target_of
from dsv4.kernels.triton_cache import triton_key
from dsv4.model.causal import CausalLM
from dsv4.parallel.ranks_asked import end_with
from dsv4.runtime.driver import CAPABILITY, PROCESSORS, attribute
from dsv4.runtime.launches import Runs, Work, launches
from dsv4.runtime.threads import usable_processors

CONTEXT = get_context("fork")
_found: list[Launch] = []  # of a process that was forked: what the one before it found


class Compiled(NamedTuple):
    """kernels: that a request launches; new: those that were not in the cache; failed: those that did not compile, and
    will say why when they are launched; seconds: from the beginning to the last; why: of none of them, the reason."""

    kernels: int = 0
    new: int = 0
    failed: int = 0
    seconds: float = 0.0
    why: str = ""

    def __str__(self) -> str:
        if self.why:
            return f"kernels are compiled as they are launched: {self.why}"
        failed = f", {self.failed} failed" if self.failed else ""
        return f"{self.kernels} kernels, {self.new} of them compiled in {self.seconds:.1f} s{failed}"


class Compiling:
    """What compiles, beside this process; `wait` until it is done."""

    def __init__(self, plan: Callable[[], CausalLM], subject: object, work: Runs, gpu: GPU, jobs: int | None = None):
        """plan: makes the model of the backend triton on the device `meta`. subject: all that it depends on, as
        something with a repr. jobs: processes; default: one a usable processor. Nothing may have used CUDA: a fork of a
        process that did cannot be trusted."""
        if torch.cuda.is_initialized():
            raise AssertionError("processes are forked to compile, and this one has used CUDA already")
        self._mark, self._process = mark(subject, work, gpu), None
        if self._mark.exists():
            return
        self._said, theirs = CONTEXT.Pipe(duplex=False)
        self._process = CONTEXT.Process(
            target=_compile_all, args=(plan, work, gpu, jobs or usable_processors(), theirs)
        )
        self._process.start()
        theirs.close()

    @property
    def needed(self) -> bool:
        """Whether something may be missing in the cache."""
        return self._process is not None

    def wait(self, progress: Callable[[int, int], None] = lambda done, of: None) -> Compiled:
        """progress(done, of): after every kernel."""
        if self._process is None:
            return Compiled()
        found = Compiled(why="the process that was to compile them ended early")
        with suppress(EOFError):
            while not isinstance(said := self._said.recv(), Compiled):
                progress(*said)
            found = said
        self._process.join()
        if not found.failed and not found.why:
            with suppress(OSError):  # a cache that can only be read
                self._mark.parent.mkdir(parents=True, exist_ok=True)
                self._mark.touch()
        return found

    def cancel(self) -> None:
        """End it, compiled or not."""
        if self._process is not None:
            self._process.kill()
            self._process.join()


def hashing_triton() -> Thread:
    """Of a process that does not fork any more: before its first launch Triton hashes its own files, which may be done
    beside the reading of weights. Until the thread ends, a launch would hash them again."""
    thread = Thread(target=triton_key, daemon=True)
    thread.start()
    return thread


def mark(subject: object, work: Runs, gpu: GPU) -> Path:
    """The file in Triton's cache that says that this request was compiled whole, by these sources and versions."""
    from triton import __version__, knobs

    told = (sources(), __version__, torch.__version__, gpu, work, subject)
    return Path(knobs.cache.dir) / "dsv4" / hashlib.sha256(repr(told).encode()).hexdigest()


def listed(gpu: GPU) -> Path:
    """The list in Triton's cache of launches that were compiled: a `digest` a line."""
    return mark("launches", Work(0, 0), gpu)


def digest(launch: Launch) -> str:
    kernel = launch.kernel
    return hashlib.sha256(f"{kernel.__module__}.{kernel.__name__} {launch.key}".encode()).hexdigest()


@cache
def sources() -> str:
    """A hash of this project's code, on which depend the kernels and which of them are launched."""
    import dsv4.kernels

    found = hashlib.sha256()
    for folder in (Path(dsv4.__file__).parent, Path(dsv4.kernels.__file__).parent):
        for file in sorted(folder.rglob("*.py")):
            found.update(file.read_bytes())
    return found.hexdigest()


def present_gpu(index: int = 0) -> GPU:
    """GPU `index` of this process, by the driver's library, which leaves torch's CUDA unused. Raises InputError if
    there is none."""
    processors = attribute(PROCESSORS, index)
    if processors is None:
        raise InputError(f"this machine has no CUDA device {index}; name a card, e.g. --device h100")
    return GPU((attribute(CAPABILITY[0], index), attribute(CAPABILITY[1], index)), processors)


# ---- in processes that are forked ---------------------------------------------------------


def _compile_all(plan: Callable[[], CausalLM], work: Runs, gpu: GPU, jobs: int, said: Connection) -> None:
    """Find what is launched and compile it. Sends (done, of) after every kernel, then `Compiled`."""
    global _found
    end_with(parent_process().pid)
    begun = time.monotonic()
    _without_dynamo()
    try:
        _found = launches(plan(), gpu, work)
    except Exception as error:  # the request itself will say it better
        name = "" if isinstance(error, Dsv4Error) else f"{type(error).__name__}: "
        said.send(Compiled(why=f"{name}{error}"))
        return
    known, new, failed = listed(gpu), 0, 0
    held = set(known.read_text().split()) if known.exists() else set()
    left = [i for i, launch in enumerate(_found) if digest(launch) not in held]
    done = len(_found) - len(left)
    said.send((done, len(_found)))
    if left:
        triton_key()  # once, and not in each process
        with ProcessPoolExecutor(min(jobs, len(left)), CONTEXT, _begin, (gpu,)) as pool:
            waiting = {pool.submit(_compile, i): i for i in left}
            for future in as_completed(waiting):
                done += 1
                failed += future.exception() is not None
                if future.exception() is None:
                    new += future.result()
                    _note(known, digest(_found[waiting[future]]))
                said.send((done, len(_found)))
    said.send(Compiled(done, new, failed, time.monotonic() - begun))


def _note(known: Path, line: str) -> None:
    with suppress(OSError):  # a cache that can only be read
        known.parent.mkdir(parents=True, exist_ok=True)
        with open(known, "a") as file:
            file.write(f"{line}\n")


def _without_dynamo() -> None:
    """Operations on `meta` tensors that torch has in Python would import its compiler, 2 s, only to be left out of
    what it compiles. Nothing is compiled in this process."""
    stand_in = ModuleType("torch._dynamo")
    stand_in.disable = lambda function, *_, **__: function  # type: ignore[attr-defined]
    sys.modules.setdefault("torch._dynamo", stand_in)


class _Driver:
    """What Triton asks of a GPU in order to compile for it."""

    def __init__(self, gpu: GPU):
        self._target = target_of(gpu)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self):
        return self._target


def _begin(gpu: GPU) -> None:
    from triton.runtime.driver import driver

    end_with(parent_process().pid)
    driver.set_active(_Driver(gpu))
    torch.set_num_threads(1)


def _compile(i: int) -> bool:
    """Compile launch i. Returns whether it was not in the cache."""
    from triton import knobs

    found: list[bool] = []
    knobs.compilation.listener = lambda *, cache_hit, **_: found.append(not cache_hit)
    launch = _found[i]
    kernel = launch.kernel.run(*launch.args, grid=(1,), warmup=True, **launch.options)
    _build_launcher(kernel)
    return any(found)


def _build_launcher(kernel) -> None:
    """Triton before 3.7 compiles a C function a signature that launches a kernel, when it is first launched."""
    from triton.backends.nvidia import driver

    if hasattr(driver, "make_launcher"):
        with suppress(Exception):  # without a driver's library it cannot be linked
            driver.CudaLauncher(kernel.src, kernel.metadata)
