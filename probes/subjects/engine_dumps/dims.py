"""How ranks share a tensor, in the words that SGLang's dumper takes as `dims`, and joining their parts again.

`t h[tp] d`: dimensions in order, one of which is cut over the ranks of the axis tp. `t d[tp:partial]`: every rank holds
a summand. `(h*d)[tp]`: two dimensions as one. `1`: a dimension of one. `# tp:replicated` at the end, and every axis
that is not named: each rank holds the whole, which is checked bit for bit.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from dsv4.probes.subjects.engine_dumps.pieces import (
    EngineDumpError,
    MissingPieces,
    RanksDiffer,
    dtype_name,
    same_bits,
)

TOKEN = re.compile(r"(?P<name>1|[A-Za-z_]\w*|\([^()]+\))(?:\[(?P<shares>[^\]]+)\])?")
ANY = "rank"  # the axis of a process of which the engine said its rank alone: whichever axis dims name
SEQUENCE = ("b", "s", "t")  # batch, tokens of a row, tokens of all rows
HELP = "expected words such as 't h[tp] d' or 't d[tp:partial]'"


@dataclass(frozen=True)
class Share:
    """Dimension `dim` is cut over the ranks of `axis`; with `partial`, the tensor is the sum of the ranks' parts."""

    dim: int
    axis: str
    partial: bool


@dataclass(frozen=True)
class Dims:
    """names: of the dimensions, () if nothing is known; shares: in the order in which they are undone."""

    names: tuple[str, ...] = ()
    shares: tuple[Share, ...] = ()


def parse(text: str) -> Dims:
    """Raises EngineDumpError for words that it does not know: an order of its own (zigzag) among them."""
    words, _, after = text.partition("#")
    for word in after.split():
        if not word.endswith(":replicated"):
            raise EngineDumpError(f"dims {text!r} says {word!r}, which is not understood; remove it, or dump one rank")
    names, shares = [], []
    for i, word in enumerate(words.split()):
        found = TOKEN.fullmatch(word)
        if not found:
            raise EngineDumpError(f"dims {text!r} has {word!r}; {HELP}")
        names.append(found["name"])
        cuts = [_share(text, i, found["name"], cut.strip()) for cut in (found["shares"] or "").split(",") if cut]
        shares += reversed(cuts)  # the last of them cut last
    if text.strip() and not names:
        raise EngineDumpError(f"dims {text!r} names no dimension; {HELP}")
    axes = [share.axis for share in shares]
    if len(set(axes)) < len(axes):
        raise EngineDumpError(f"dims {text!r} cuts twice over one axis; {HELP}")
    return Dims(tuple(names), tuple(shares))


def _share(text: str, dim: int, name: str, cut: str) -> Share:
    axis, _, rest = cut.partition(":")
    how = {word.strip() for word in rest.split("+") if word.strip()} - {"sharded", "natural"}
    if how - {"partial"}:
        raise EngineDumpError(
            f"dims {text!r} cuts in an order of its own ({', '.join(sorted(how))}), which is not undone"
        )
    if name in SEQUENCE and "partial" not in how and axis in ("cp", "attn_cp"):
        raise EngineDumpError(f"dims {text!r} cuts tokens over {axis}; run the engine without context parallelism")
    return Share(dim, axis, "partial" in how)


Part = tuple[Mapping[str, tuple[int, int]], torch.Tensor]  # coordinates of a rank, its tensor


def join(what: str, parts: Sequence[Part], dims: Dims) -> torch.Tensor:
    """The whole tensor of all ranks' parts. what: for messages.

    Raises RanksDiffer for parts that do not fit, for parts that should be equal and are not, and for summands that are
    equal on every rank; MissingPieces for a rank that is not there; EngineDumpError for dims of another tensor.
    """
    _fit(what, parts, dims)
    parts = _named(parts, dims)
    active = [s for s in dims.shares if any(s.axis in axes for axes, _ in parts)]
    names = sorted(s.axis for s in active)
    held: dict[tuple, torch.Tensor] = {}
    for axes, value in parts:
        at = tuple(axes.get(name, (0, 1))[0] for name in names)
        if at in held and not same_bits(held[at], value):
            raise RanksDiffer(
                f"{what} differs between ranks ({_others(parts, names)}) that should hold the same; say how they share "
                "it in the renaming table: dims = 't h[tp] d', 't d[tp:partial]'"
            )
        held.setdefault(at, value)
    sizes = {name: next(axes[name][1] for axes, _ in parts if name in axes) for name in names}
    left = names
    for share in active:
        held, left = _undo(what, share, held, left, sizes[share.axis]), [n for n in left if n != share.axis]
    _all_there(what, parts, names)
    return held[()]


def _named(parts: Sequence[Part], dims: Dims) -> Sequence[Part]:
    """Parts whose axis ANY is the one that dims name, if they name one."""
    axes = {share.axis for share in dims.shares}
    if len(axes) != 1 or not all(set(held) <= {ANY} for held, _ in parts):
        return parts
    (axis,) = axes
    return [(dict.fromkeys([axis] * len(held), held.get(ANY)), value) for held, value in parts]


def _fit(what: str, parts: Sequence[Part], dims: Dims) -> None:
    kinds = {dtype_name(value) for _, value in parts}
    if len(kinds) > 1:
        raise RanksDiffer(f"{what} is {' and '.join(sorted(kinds))} on different ranks; expected one dtype: dump again")
    if dims.names and any(value.dim() != len(dims.names) for _, value in parts):
        raise EngineDumpError(
            f"{what} has shape {list(parts[0][1].shape)}, and dims name {len(dims.names)} dimensions "
            f"({' '.join(dims.names)}); correct dims in the renaming table"
        )


def _all_there(what: str, parts: Sequence[Part], declared: Sequence[str]) -> None:
    """Ranks that hold the same are compared, so all must be there. Stages of a pipeline have their own layers."""
    undeclared = {name: size for axes, _ in parts for name, (_, size) in axes.items()}.items()
    for name, size in sorted((n, s) for n, s in undeclared if n not in declared and n != "pp"):
        seen = {axes[name][0] for axes, _ in parts if name in axes}
        if missing := sorted(set(range(size)) - seen):
            raise MissingPieces(f"{what} has no file of {name} rank {missing[0]} of {size}; dump every rank")


def _others(parts: Sequence[Part], declared: Sequence[str]) -> str:
    """Axes over which the ranks spread and of which dims say nothing."""
    spread = {name for axes, _ in parts for name in axes} - set(declared)
    return ", ".join(sorted(spread)) or "of the same place"


def _undo(what: str, share: Share, held: dict, names: list[str], size: int) -> dict:
    """The tensors without that axis: parts in a row, or their sum in fp32."""
    k, groups = names.index(share.axis), {}
    for at, value in held.items():
        groups.setdefault(at[:k] + at[k + 1 :], {})[at[k]] = value
    joined = {}
    for at, group in groups.items():
        if missing := sorted(set(range(size)) - set(group)):
            raise MissingPieces(f"{what} has no part of {share.axis} rank {missing[0]} of {size}; dump every rank")
        values = [group[rank] for rank in range(size)]
        joined[at] = _sum(what, share, values) if share.partial else _row(what, share, values)
    return joined


def _row(what: str, share: Share, values: list[torch.Tensor]) -> torch.Tensor:
    rest = {tuple(v.shape[: share.dim]) + tuple(v.shape[share.dim + 1 :]) for v in values}
    if len(rest) > 1:
        raise RanksDiffer(f"{what} has parts of shapes {[list(v.shape) for v in values]}, which make no row")
    return torch.cat(values, share.dim)


def _sum(what: str, share: Share, values: list[torch.Tensor]) -> torch.Tensor:
    if len({v.shape for v in values}) > 1:
        raise RanksDiffer(f"{what} has summands of shapes {[list(v.shape) for v in values]}; expected one shape")
    if bool(values[0].any()) and all(same_bits(values[0], v) for v in values[1:]):
        raise RanksDiffer(
            f"{what} is the same on all {len(values)} ranks of {share.axis}, so it is summed already; leave "
            f"':partial' out of dims"
        )
    return torch.stack([v.float() for v in values]).sum(0)
