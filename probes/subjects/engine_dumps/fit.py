"""Joined tensors of one step in the shapes of the capture points, and entries of several steps in a row."""

from collections.abc import Sequence

import torch

from dsv4.probes.oracle import kinds
from dsv4.probes.subject import POINTS
from dsv4.probes.subjects.engine_dumps.pieces import WrongShape

ENTRIES = ("compressed_kv", "index_keys")  # [B, n, …]: a row an entry, not a row a token
TELL = "correct the renaming table, or leave the name out with `false`"


def layers_of(point: str, ratio: int) -> bool:
    """Whether a layer of that compression ratio has the point."""
    if point in ("index_keys", "index_scores", "selection"):
        return ratio == kinds.CSA
    return point != "compressed_kv" or ratio > 0


def rows(what: str, point: str, value: torch.Tensor, n: int, rest: Sequence[int | None], names: Sequence[str]):
    """[1, n, …] of a step's value, [n, …] or [1, n, …] or with its tokens where `names` say; heads and streams may lie
    flat. rest: sizes behind the tokens, None for one that may be anything. Raises WrongShape."""
    flat = _in_front(value, n, names)
    if flat is not None:
        tail = tuple(flat.shape[1:])
        if len(tail) == len(rest) and all(want in (None, size) for want, size in zip(rest, tail)):
            return flat.unsqueeze(0)
        if None not in rest and len(tail) == 1 and tail[0] == _product(rest):
            return flat.reshape(1, n, *rest)
    wanted = [n, *("any" if size is None else size for size in rest)]
    raise WrongShape(
        f"{what} has shape {list(value.shape)}; expected {wanted} of {n} tokens, {POINTS[point]}; {TELL}".replace(
            "'", ""
        )
    )


def _in_front(value: torch.Tensor, n: int, names: Sequence[str]) -> torch.Tensor | None:
    """The value with its tokens first and no batch; None if it has not n tokens."""
    if names:
        places = [i for i, name in enumerate(names) if name in ("t", "s")]
        if len(places) != 1 or value.shape[places[0]] != n:
            return None
        value = value.movedim(places[0], 0)
        others = [name for i, name in enumerate(names) if i != places[0]]
        for i in reversed([i for i, name in enumerate(others, 1) if name in ("b", "1") and value.shape[i] == 1]):
            value = value.squeeze(i)
        return value
    if value.dim() > 1 and value.shape[0] == n:
        return value
    return value[0] if value.dim() > 2 and value.shape[0] == 1 and value.shape[1] == n else None


def _product(sizes: Sequence[int]) -> int:
    found = 1
    for size in sizes:
        found *= size
    return found


def scores(value: torch.Tensor, n: int) -> torch.Tensor:
    """[1, t, ≤ n]: columns behind the last entry of the run are cut off where nothing is visible in them."""
    beyond = value[..., n:]
    return value[..., :n] if bool((beyond == float("-inf")).all()) else value


class Entries:
    """Rows [n, …] of a compressed cache, of steps that dump the whole of it or what they added."""

    def __init__(self, ratio: int):
        self.ratio, self.held = ratio, None

    def add(self, what: str, value: torch.Tensor, start: int, n: int) -> None:
        """Raises WrongShape for neither as many rows as the cache then has nor as many as the step completes."""
        value = value[0] if value.dim() == 3 and value.shape[0] == 1 else value
        before, after = start // self.ratio, (start + n) // self.ratio
        if value.dim() == 2 and len(value) == after:
            self.held = value
        elif value.dim() == 2 and len(value) == after - before:
            self.held = value if self.held is None else torch.cat((self.held[:before], value))
        else:
            raise WrongShape(
                f"{what} has shape {list(value.shape)}; expected {after} rows, all entries, or {after - before}, "
                f"those of the step; {TELL}"
            )
