"""The model arguments of lm_eval's command line (`--model_args`), with the meaning of the options of `dsv4 generate`
and `dsv4 batch`. Needs no lm_eval."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from dsv4.commands.generate import Choices
from dsv4.errors import InputError, brief
from dsv4.model.gqa.choice import Attention, attention_named
from dsv4.units import count_named

DEFAULTS = {"batch_size": "1", "device": "cpu"}  # of the command line, where a model argument may say otherwise


@dataclass(frozen=True)
class Arguments:
    """attention to prefill_chunks as `attention_named` takes them, numerics to index_cache as `load_model`.
    max_context: tokens, a number or as '4K'; None: the checkpoint's. batch_size: rows that run at once. together: they
    decode as one batch, else each alone.

    Raises InputError for values of another type and for what contradicts itself.
    """

    checkpoint: str
    attention: str | None = None
    attention_tokens: int | str | None = None
    terminate: bool = False
    terminate_rule: str | None = None
    prefill_chunks: str | None = None
    numerics: str = "native"
    backend: str = "auto"
    device: str = "cpu"
    cache: str = "auto"
    index_cache: str = "auto"
    max_context: int | str | None = None
    batch_size: int = 1
    together: bool = True

    def __post_init__(self):
        for field in fields(self):
            value, kind = getattr(self, field.name), field.type
            if not isinstance(value, kind) or isinstance(value, bool) and kind is not bool:
                wanted = {bool: "true or false", int: "a whole number"}.get(kind, "text")
                raise InputError(f"model argument {field.name} is {brief(value)!r}; expected {wanted}")
        for name, value, least in (("batch_size", self.batch_size, 1), ("max_context", self.context, 2)):
            if value is not None and value < least:
                raise InputError(f"model argument {name} is {value}; expected at least {least}")
        self.reads  # what contradicts itself is refused before a checkpoint is read

    @property
    def choices(self) -> Choices:
        return Choices(self.numerics, self.backend, self.device, self.cache, self.index_cache)

    @property
    def context(self) -> int | None:
        return None if self.max_context is None else count_named("max_context", self.max_context)

    @cached_property
    def reads(self) -> Attention | None:
        return attention_named(
            self.attention, self.attention_tokens, self.terminate, self.prefill_chunks, self.terminate_rule
        )


def arguments_named(given: Mapping[str, Any]) -> Arguments:
    """`given` as lm_eval has read it: numbers, true and false, and lists in brackets are values of Python; None is not
    given. Raises InputError for an unknown argument, no checkpoint, and as `Arguments` does."""
    found = {name: value for name, value in given.items() if value is not None}
    found.pop("trust_remote_code", None)  # lm_eval's option for data sets; dsv4 runs no code of a checkpoint
    known = [field.name for field in fields(Arguments)]
    if unknown := [name for name in found if name not in known]:
        raise InputError(f"model argument {brief(unknown[0])!r} is unknown; expected {', '.join(known)}")
    if "checkpoint" not in found:
        raise InputError("no checkpoint was named; pass --model_args checkpoint=DIRECTORY")
    if isinstance(cut := found.get("prefill_chunks"), list | tuple):
        found["prefill_chunks"] = ",".join(map(str, cut))
    if str(found.get("batch_size")).isdecimal():
        found["batch_size"] = int(found["batch_size"])  # lm_eval's own --batch_size is text
    return Arguments(**found)


def joined(given: Mapping[str, Any], beside: Mapping[str, Any]) -> dict[str, Any]:
    """Model arguments, and beside them lm_eval's own options (None: not given). Raises InputError where both give the
    same one differently."""
    beside = {name: value for name, value in beside.items() if value is not None}
    for name in given.keys() & beside.keys():
        mine, other = str(given[name]), str(beside[name])
        if other not in (mine, DEFAULTS.get(name)):
            raise InputError(f"--{name} {other} and the model argument {name}={mine} were given; leave out one")
    return {**beside, **given}
