"""P0: every planted fault must be named by a probe that does not know of it, and every sound subject must be green.

A fault is planted in a private copy of a synthetic checkpoint (`dsv4.probes.faults.profile`), the subject is opened
as `dsv4 audit` opens it, and probes run until a FAIL or ERROR names one of the fault's `parts`. A red check that names
something else does not count: such a fault is seen, but not named, and is a gap. So is one that no probe sees.
"""

import os
import pkgutil
import re
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from multiprocessing import active_children, get_context, parent_process
from pathlib import Path
from types import ModuleType

import torch

from dsv4.errors import InputError
from dsv4.kernels.errors import Dsv4Error
from dsv4.model.load import resolve_backend, resolve_device
from dsv4.model.numerics import NUMERICS
from dsv4.probes import faults as mutations
from dsv4.probes.audit import open_subject
from dsv4.probes.catalogue import fresh_process
from dsv4.probes.faults import Mutation, Site
from dsv4.probes.faults.gqa_profiles import GQA_PROFILES
from dsv4.probes.machine import gpu_names
from dsv4.probes.probe import applying, available, execute, probe_named
from dsv4.probes.report.document import count
from dsv4.probes.result import Check, Status
from dsv4.probes.subject import Subject

RED = (Status.FAIL, Status.ERROR)
# a fault of the process, not the planted one
BLUNDER = re.compile("same device|two devices|got a tensor on cpu")
# how a process that dies says what of: an assertion on a device, an exception that nothing caught
LAST_WORDS = re.compile(r"Assertion|what\(\):|error", re.I)


@dataclass(frozen=True)
class Bench:
    """Where faults are planted: the folder of the profiles, and how subjects are opened. probe: the only one that is
    asked; None: all."""

    profiles: Path
    backend: str = "auto"
    device: str = "cpu"
    probe: str | None = None

    @property
    def probes(self) -> list[str]:
        return available() if self.probe is None else [self.probe]

    def where(self, backend: str) -> tuple[str, str]:
        """(backend, device) of a subject: a fault of a backend by name is planted in host memory, where the training
        backend takes every shape and the cpu backend always runs."""
        return (backend, "cpu") if backend in ("training", "cpu") else (backend or self.backend, self.device)

    @property
    def resolved(self) -> str:
        """The backend that runs. Raises InputError for the reference, which is the definition: no kernel is changed in
        it."""
        backend = resolve_backend(self.backend, resolve_device(self.device))
        if backend == "reference":
            raise InputError(
                f"on {self.device} with backend {self.backend!r} the reference would run, in which no kernel can be "
                "wrong; choose --backend cpu, or triton on a GPU"
            )
        return backend


@dataclass(frozen=True)
class Found:
    """The result of one fault.

    by: the probe, or 'load' for a refusal while loading; status, finding, where, part: of the check; word: of the
    mutation's parts that it names; seen: probes that were red before and named something else; note: why it was not
    caught.
    """

    caught: bool = False
    by: str = ""
    status: str = ""
    finding: str = ""
    where: str = ""
    part: str = ""
    word: str = ""
    seen: tuple[str, ...] = ()
    note: str = ""


@dataclass(frozen=True)
class Outcome:
    """A mutation and its result; left: places that were not restored when it was undone."""

    mutation: Mutation
    found: Found
    seconds: float = 0.0
    left: tuple[str, ...] = ()


@dataclass(frozen=True)
class Clean:
    """The whole catalogue on a subject in which nothing is planted."""

    profile: str
    numerics: str
    backend: str
    totals: dict[Status, int] = field(default_factory=dict)
    red: tuple[str, ...] = ()
    vacuous: tuple[str, ...] = ()
    texts: tuple[str, ...] = ()  # what each check could name, for the chance level
    seconds: float = 0.0
    caches: tuple[str, str] = ("auto", "auto")

    @property
    def green(self) -> bool:
        return not self.red and self.totals.get(Status.PASS, 0) > 0


def look(mutation: Mutation, bench: Bench) -> Outcome:
    """Plant, open, probe, undo. No crash that the fault causes leaves this function."""
    begun, before = time.monotonic(), state()
    # a process that is killed leaves it to the one that made the profiles
    with tempfile.TemporaryDirectory(prefix="dsv4-selftest-", dir=bench.profiles) as folder:
        profile = bench.profiles / mutation.profile
        site = Site(Path(shutil.copytree(profile, Path(folder) / mutation.profile)))
        if mutation in mutations.catalogue():  # a new process finds it by name
            again = ("dsv4.probes.selftest.run:replanted", [mutation.name, str(profile), str(Path(folder) / "again")])
            site.patch(fresh_process, "PREPARATIONS", [again])
        try:
            found = _found(mutation, site, bench)
        finally:
            site.undo()
    return Outcome(mutation, found, time.monotonic() - begun, left_over(before, state()))


def replanted(name: str, profile: str, copy: str) -> Callable[[Subject], None]:
    """Plant a fault in a new process, which opens the checkpoint that was damaged before: on another copy of the
    profile, so that only its code changes. Returns what changes the loaded subject."""
    mutation = next(m for m in mutations.catalogue() if m.name == name)
    site = Site(Path(shutil.copytree(profile, f"{copy}-{os.getpid()}")))
    mutation.plant(site)

    def change(subject: Subject) -> None:
        for planted in site.loaded:
            planted(subject)

    return change


def _found(mutation: Mutation, site: Site, bench: Bench) -> Found:
    try:
        mutation.plant(site)
    except Exception as error:
        return Found(note=f"it could not be planted: {said(error)}")
    try:
        subject = open_subject(
            site.checkpoint, "ours", mutation.numerics, *bench.where(mutation.backend), *mutation.caches
        )
    except Exception as error:
        return _judged(mutation, "load", [refusal(error)], ())
    try:
        for change in site.loaded:
            change(subject)
    except Exception as error:
        return Found(note=f"it could not be planted: {said(error)}")
    found = Found()
    for name in order(mutation, applying(subject, bench.probes)):
        checks, _ = execute(probe_named(name)(), subject)
        blunder = next((c.note for c in checks if c.status is Status.ERROR and BLUNDER.search(c.note)), None)
        if blunder:
            return Found(seen=found.seen, note=f"the fault itself mixes devices, which any probe sees: {blunder}")
        found = _judged(mutation, name, checks, found.seen)
        if found.caught:
            break
    return found


def refusal(error: Exception) -> Check:
    """A typed error while loading is a finding; any other is a crash, and counts only if it names the part all the
    same."""
    if isinstance(error, Dsv4Error):
        return Check("refused while loading", Status.FAIL, note=said(error))
    return Check("crash while loading", Status.ERROR, note=said(error))


def said(error: Exception) -> str:
    """One line of an exception, with the type if it is not one of this project's."""
    line = str(error).splitlines()[0] if str(error) else ""
    return line if isinstance(error, Dsv4Error) else f"{type(error).__name__}: {line}"


def order(mutation: Mutation, names: list[str]) -> list[str]:
    """The mutation's own probes first, which saves time, then the others of `names`."""
    first = [name for name in mutation.probes if name in names]
    return first + [name for name in names if name not in first]


def _judged(mutation: Mutation, probe: str, checks: list[Check], seen: tuple[str, ...]) -> Found:
    red = [check for check in checks if check.status in RED]
    for check in red:
        word = named(mutation.parts, texts_of(check))
        if word:
            return Found(
                True,
                probe,
                check.status.value,
                check.name,
                check.at,
                check.part,
                word,
                seen,
                check.note if probe == "load" or check.status is Status.ERROR else "",
            )
    seen = (*seen, probe) if red else seen
    first = f"; {probe} said: {red[0].name}: {red[0].note}" if red and probe == "load" else ""
    return Found(seen=seen, note=("seen, but not named" if seen else "no probe saw it") + first)


def texts_of(check: Check) -> tuple[str, ...]:
    """What a check says of where the fault is. The name of an ERROR is only the probe's title; its note says what
    broke."""
    about = (check.part, check.at)
    if check.status is Status.ERROR or check.name.endswith("while loading"):
        return (*about, check.note)
    return (*about, check.name)


def named(words: Iterable[str], texts: Iterable[str]) -> str:
    """The first of `words` that stands in a text, not as part of a longer word; '' for none. 'sink' is not in
    'Sinkhorn'."""
    texts = list(texts)
    for word in words:
        before, after = ("(?<![a-z0-9])" * word[:1].isalnum(), "(?![a-z0-9])" * word[-1:].isalnum())
        if any(re.search(before + re.escape(word) + after, text, re.I) for text in texts):
            return word
    return ""


def chance(mutation: Mutation, texts: tuple[str, ...]) -> float:
    """Share of a sound subject's checks that the mutation's words would match: how often any red check would count."""
    return sum(bool(named(mutation.parts, [text])) for text in texts) / len(texts) if texts else float("nan")


# ---- nothing stays behind -----------------------------------------------------------------


def state() -> dict[str, object]:
    """What modules, classes and tables of this project hold, by place."""
    held: dict[str, object] = {}
    for module_name, module in list(sys.modules.items()):
        if module is None or module_name.partition(".")[0] != "dsv4":
            continue
        for name, value in list(vars(module).items()):
            place = f"{module_name}.{name}"
            if isinstance(value, ModuleType) or name.startswith("__"):
                continue
            held[place] = value
            if isinstance(value, type) and value.__module__ == module_name:
                held |= {f"{place}.{k}": v for k, v in vars(value).items() if not k.startswith("__") or k == "__init__"}
            elif isinstance(value, dict) and name.isupper():
                held |= {f"{place}[{k!r}]": v for k, v in value.items()}
    return held


def left_over(before: dict[str, object], after: dict[str, object]) -> tuple[str, ...]:
    """Places that do not hold the same object any more; modules that were imported since are new, not changed."""
    return tuple(sorted(place for place, value in before.items() if after.get(place) is not value))


# ---- sound subjects -----------------------------------------------------------------------


def settings(mutations: Iterable[Mutation], backend: str, everything: bool) -> list[Clean]:
    """What must be green: where faults are planted; if `everything`, the default profile in all numerics and with
    packed caches, and the GQA models in theirs, also as reference."""
    plain = ("auto", "auto")
    found = {(m.profile, m.numerics, m.backend or backend, m.caches): None for m in mutations}
    if everything:
        choices = [*((numerics, plain) for numerics in NUMERICS), ("qat", ("fp8", "fp4")), ("qat", ("fp8", "fp8"))]
        found |= {
            ("default", numerics, b, caches): None for b in ("reference", backend) for numerics, caches in choices
        }
        found |= {
            (name, numerics, b, plain): None
            for name in GQA_PROFILES
            for b, numerics in (("reference", "fp32"), (backend, "fp32"), (backend, "native"))
        }
    return [Clean(*key, caches=caches) for *key, caches in sorted(found)]


def audit_clean(setting: Clean, bench: Bench) -> Clean:
    """The whole catalogue."""
    begun = time.monotonic()
    subject = open_subject(
        bench.profiles / setting.profile, "ours", setting.numerics, *bench.where(setting.backend), *setting.caches
    )
    checks = [
        (name, check) for name in applying(subject, bench.probes) for check in execute(probe_named(name)(), subject)[0]
    ]
    tell = lambda name, c: f"{name}: {c.name}" + (f" at {c.at}" if c.at else "") + (f" ({c.part})" if c.part else "")
    return replace(
        setting,
        totals=count(c for _, c in checks),
        red=tuple(tell(name, c) + (f": {c.note}" if c.note else "") for name, c in checks if c.status in RED),
        vacuous=tuple(tell(name, c) for name, c in checks if c.status is Status.VACUOUS),
        texts=tuple("\n".join(texts_of(c)) for _, c in checks),
        seconds=time.monotonic() - begun,
    )


# ---- all of them --------------------------------------------------------------------------


def work(task: Mutation | Clean, bench: Bench) -> Outcome | Clean:
    return look(task, bench) if isinstance(task, Mutation) else audit_clean(task, bench)


def run_all(tasks: list[Mutation | Clean], bench: Bench, jobs: int) -> Iterator[tuple[int, Outcome | Clean]]:
    """(number of the task, its result), as they become ready. Sound subjects come last, in processes where faults were
    planted; but first, since they take longest, where every task has a process of its own.

    A fault that kills its process takes the pool with it: the tasks that are lost are done again, each in a process of
    its own.
    """
    if jobs == 1:
        yield from _here(tasks, bench)
        return
    todo = dict(enumerate(tasks))
    if _lives(bench) == 1:
        todo = dict(sorted(todo.items(), key=lambda item: isinstance(item[1], Mutation)))
    with _pool(jobs, bench) as pool:
        waiting = {pool.submit(work, task, bench): i for i, task in todo.items()}
        for future in as_completed(waiting):
            try:
                result = future.result()
            except BrokenProcessPool:
                break
            yield waiting[future], result
            del todo[waiting[future]]
    for i, task in todo.items():
        yield i, _alone(task, bench)


def _here(tasks: list[Mutation | Clean], bench: Bench) -> Iterator[tuple[int, Outcome | Clean]]:
    """In this process, on one thread as in the others: on a busy machine threads mostly wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield from ((i, work(task, bench)) for i, task in enumerate(tasks))
    finally:
        torch.set_num_threads(threads)


@contextmanager
def _pool(jobs: int, bench: Bench, heard: str | None = None) -> Iterator[ProcessPoolExecutor]:
    """Processes for tasks. Left by an exception, Ctrl-C's too, tasks that wait are dropped, and those that run end.
    heard: a file for what they write to stderr."""
    lives = _lives(bench)
    context = get_context("spawn" if lives is None else "forkserver")
    if lives is not None:  # many processes: each is a copy of one that has imported everything and touched no device
        context.set_forkserver_preload(preloaded())
    # processes are shared out to all, if none is named
    gpus = gpu_names(torch.cuda.device_count()) if bench.device == "cuda" else ()
    begins = gpus, context.Value("q", 0), heard
    pool = ProcessPoolExecutor(jobs, context, _begin, begins, max_tasks_per_child=lives)
    with pool:
        try:
            yield pool
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for worker in active_children():
                worker.kill()
            raise


def preloaded() -> list[str]:
    """Modules that a process imports before it is copied."""
    return [
        *(f"dsv4.probes.faults.{m.name}" for m in pkgutil.iter_modules(mutations.__path__)),
        *(f"dsv4.probes.catalogue.{name}" for name in available()),
        "dsv4.probes.subjects.ours",
        "dsv4.probes.oracle.model",
        "torch.fx.experimental.symbolic_shapes",
        "dsv4.probes.scenes.forkserver",
    ]


def _lives(bench: Bench) -> int | None:
    """Tasks of a process: a fault on a GPU ends every later call of its process."""
    return 1 if bench.device.startswith("cuda") else None


def _begin(gpus: tuple[str, ...], begun, heard: str | None) -> None:
    """Of a worker: one thread, one of the GPUs by turns (begun: a Value shared by all workers), `heard` as stderr, and
    an end when the process that started it ends, however that was ended."""
    torch.set_num_threads(1)
    if heard is not None:  # the descriptor itself: a library that aborts asks no Python
        os.dup2(os.open(heard, os.O_WRONLY | os.O_APPEND), 2)
    if gpus:  # read when CUDA is first called, which no process has done that workers are copies of
        with begun.get_lock():
            os.environ["CUDA_VISIBLE_DEVICES"] = gpus[begun.value % len(gpus)]
            begun.value += 1
    parent = parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def _alone(task: Mutation | Clean, bench: Bench) -> Outcome | Clean:
    with tempfile.NamedTemporaryFile("r", prefix="dsv4-selftest-", errors="replace") as heard:
        try:
            with _pool(1, bench, heard.name) as pool:
                return pool.submit(work, task, bench).result()
        except BrokenProcessPool:
            died = _death(heard.read())
            return Outcome(task, Found(note=died)) if isinstance(task, Mutation) else replace(task, red=(died,))
        finally:
            heard.seek(0)
            sys.stderr.write(heard.read())


def _death(said: str) -> str:
    """What a process died of, by the first line of what it said that tells of an error."""
    words = next((line.strip() for line in said.splitlines() if LAST_WORDS.search(line)), "")
    return f"the process died: {words}" if words else "the process died, without a word of what it died of"
