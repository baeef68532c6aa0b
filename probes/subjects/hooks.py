"""Hooks on another implementation's modules that do not mind how it calls them: by position or by keyword, with a
tensor as the result or with tuples, lists, dictionaries or dataclasses around it."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass

import torch

from dsv4.errors import InputError

NAMES = ("hidden_states", "x", "hidden", "input", "inputs", "hidden_state")  # of the activations that a module is given


class Hooks:
    """Hooks while the `with` block lasts. see(tensor) is called at each call of the module."""

    def __init__(self):
        self._handles: list = []

    def __enter__(self) -> "Hooks":
        return self

    def __exit__(self, *_) -> None:
        for handle in self._handles:
            handle.remove()

    def input(self, module: torch.nn.Module, see: Callable, name: str | None = None) -> None:
        """The activations that the module is given: its argument `name`, or if that is None the first float tensor.

        see raises InputError, through the module's call, if there is none.
        """
        hook = lambda m, args, kwargs: see(argument(m, args, kwargs, name))
        self._handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))

    def output(self, module: torch.nn.Module, see: Callable, which: int | str = 0) -> None:
        """What the module returns: of several tensors number `which` in order, or the one of that name."""
        hook = lambda m, args, out: see(tensor(out, which, type(m).__name__))
        self._handles.append(module.register_forward_hook(hook))


def argument(module: torch.nn.Module, args: tuple, kwargs: Mapping, name: str | None = None) -> torch.Tensor:
    """The activations among a call's arguments. Raises InputError."""
    named = dict(kwargs)
    if name is not None and name not in named:
        named |= inspect.signature(module.forward).bind_partial(*args, **kwargs).arguments
    asked = [named.get(name)] if name is not None else [*args, *(named.get(n) for n in NAMES), *named.values()]
    found = next((v for v in asked if isinstance(v, torch.Tensor) and v.is_floating_point()), None)
    if found is None:
        given = ", ".join([f"{len(args)} by position", *kwargs])
        raise InputError(
            f"{type(module).__name__} is called with {given}; expected a float tensor {name or 'among them'}: say "
            "which argument it is, input(module, see, name)"
        )
    return found


def tensor(value, which: int | str = 0, of: str = "the module") -> torch.Tensor:
    """The tensor itself, or one of those in a tuple, list, dictionary or dataclass, without None. Raises InputError."""
    parts = parts_of(value)
    if isinstance(which, str) and which in parts:
        return parts[which]
    tensors = list(parts.values())
    if isinstance(which, int) and which < len(tensors):
        return tensors[which]
    raise InputError(
        f"{of} returns a {type(value).__name__} of {len(tensors)} tensors ({', '.join(parts) or 'none'}); expected one "
        f"called or numbered {which!r}"
    )


def parts_of(value) -> dict[str, torch.Tensor]:
    """Tensors by name or number, those within tuples in tuples first to last."""
    if isinstance(value, torch.Tensor):
        return {"0": value}
    if is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        value = value._asdict()
    pairs = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, tuple | list) else ()
    found: dict[str, torch.Tensor] = {}
    for key, part in pairs:
        inner = parts_of(part)
        found |= {str(key) if len(inner) == 1 else f"{key}.{name}": t for name, t in inner.items()}
    return found
