"""`--subject package.module:factory`: an implementation that is named by the function that opens it.

factory(path of the checkpoint) returns a `Subject`, or any object with `run`; of `run` the token ids are the first
argument, and `schedule` and `want` are given if it takes them.
"""

import importlib
import inspect
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from dsv4.errors import Dsv4Error, InputError
from dsv4.probes import families
from dsv4.probes.subject import CAPABILITIES, Capture, Subject
from dsv4.probes.subjects.answers import Answer
from dsv4.probes.subjects.dump import steps_of
from dsv4.probes.subjects.files import FilesSubject

SPEC = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
EXPECTED = "expected PACKAGE.MODULE:FACTORY, a module that can be imported from here"
OURS = ("ours", "files", "transformers", "dump")


def is_foreign(kind: str) -> bool:
    """Whether a --subject names a factory: 'ours:fp32' does not."""
    return bool(SPEC.fullmatch(kind)) and kind.partition(":")[0] not in OURS


def open_foreign(kind: str, checkpoint: str | Path) -> "ForeignSubject":
    """The subject that the factory makes. Raises InputError, in one line, for whatever goes wrong on the way."""
    module_name, _, name = kind.partition(":")
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    try:
        factory = getattr(importlib.import_module(module_name), name, None)
    except Exception as error:  # a module may do anything while it is imported
        raise InputError(f"module {module_name!r} cannot be imported ({_first(error)}); {EXPECTED}") from error
    if not callable(factory):
        raise InputError(f"module {module_name!r} has no function {name!r}; {EXPECTED}")
    try:
        made = factory(str(checkpoint))
    except Dsv4Error:
        raise
    except Exception as error:
        raise InputError(f"{kind} failed on {Path(checkpoint).name} ({_first(error)})") from error
    if not callable(getattr(made, "run", None)):
        raise InputError(f"{kind} returns a {type(made).__name__} without `run`; expected a Subject, or such an object")
    return ForeignSubject(kind, made, checkpoint)


class ForeignSubject(Subject):
    """What a factory made, held to the interface: answers in any of `answers.FORMS` become Captures, and wrong ones
    raise InputError. What it does not say of itself (config, files, can) is the checkpoint's."""

    def __init__(self, kind: str, made, checkpoint: str | Path):
        stored = FilesSubject(checkpoint)
        own = lambda name: getattr(made, name, None) or getattr(stored, name)
        self.made, self.files, self.config, self.family = made, own("files"), own("config"), stored.family
        self.name = str(getattr(made, "name", "") or kind)
        self.numerics = str(getattr(made, "numerics", "") or "")
        self.provenance = stored.provenance | dict(getattr(made, "provenance", None) or {}) | {"factory": kind}
        self.without = dict(getattr(made, "without", None) or {})
        weight = getattr(made, "weight", None)
        self.weight = stored.weight if weight is None or getattr(weight, "__func__", 0) is Subject.weight else weight
        can = frozenset(getattr(made, "can", None) or {"run"}) | {"run", "files"}
        if unknown := can - set(CAPABILITIES):
            raise InputError(f"{kind} says it can {sorted(unknown)[0]!r}; expected some of {', '.join(CAPABILITIES)}")
        self.can = can

    def __getattr__(self, name: str):
        if name == "made":
            raise AttributeError(name)
        return getattr(self.made, name)

    def run(self, ids: torch.Tensor, schedule: Sequence[int] = (), want: Sequence[str] = ()) -> Capture:
        """See `Subject.run`. Raises InputError for an answer that is none."""
        return _sound(self.answer(ids, schedule, want), self.name)

    def answer(self, ids: torch.Tensor, schedule: Sequence[int] = (), want: Sequence[str] = ()) -> Answer:
        """What `run` says, with everything that is wrong about it."""
        steps_of(ids.shape[1], schedule)
        given = {"want": tuple(want)} | ({"schedule": list(schedule)} if len(schedule) > 1 else {})
        return self._as_answer(_call(self.made.run, self.name, ids, given), ids)

    def attention(self, layer, attn_in, ids, schedule=(), want=()) -> Capture:
        """See `Subject.attention`."""
        return _sound(self._as_answer(self.made.attention(layer, attn_in, ids, schedule, want), ids), self.name)

    def block(self, layer, streams, ids, want=()) -> Capture:
        """See `Subject.block`."""
        return _sound(self._as_answer(self.made.block(layer, streams, ids, want), ids), self.name)

    def cache_bytes(self, batch: int, max_context: int) -> dict[tuple[str, str], int]:
        """See `Subject.cache_bytes`."""
        return self.made.cache_bytes(batch, max_context)

    def _as_answer(self, result, ids: torch.Tensor) -> Answer:
        return families.of(self).answer(result, self.config, *ids.shape)


def _call(run: Callable, name: str, ids: torch.Tensor, given: dict):
    """run(ids, …) with those of `given` that it takes. Raises InputError for a schedule that it does not take."""
    parameters = inspect.signature(run).parameters
    takes = lambda key: key in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    if "schedule" in given and not takes("schedule"):
        raise InputError(f"{name} takes no schedule, so {given['schedule'][:4]} cannot be run; give `run` one")
    words = {key: value for key, value in given.items() if takes(key)}
    first = next(iter(parameters.values()), None)
    if first is not None and first.kind is first.KEYWORD_ONLY:
        return run(**{first.name: ids}, **words)
    return run(ids, **words)


def _sound(answer: Answer, name: str) -> Capture:
    for problem in answer.problems:
        what = "" if problem.key is None else f"{problem.key[1]} of layer {problem.key[0]}: "
        what = "logits: " if problem.key == (-1, "logits") else what
        raise InputError(f"{name} gives {what}{problem.said}; dsv4 audit conform lists all such")
    return answer.capture


def _first(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:100]}"
