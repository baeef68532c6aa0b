"""Section 1.16: when attention stops reading, and in which order it reads."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from dsv4.kernels.gather_attention import reference as gathering
from dsv4.kernels.grouped_attention import Termination
from dsv4.kernels.grouped_attention import reference as dense
from dsv4.kernels.grouped_attention.termination import newest_first
from dsv4.probes.faults import Site, mutation

SECTION = "1.16", "Run-time termination"

STOPPING = dict(probes=("termination",), profile="qwen2")


def ruled(site: Site, change: Callable[[Termination], Termination]) -> None:
    """Attention stops by the rule change(rule)."""

    def terminating(real):
        return lambda *given: (
            real(*given[:-1], change(given[-1])) if isinstance(given[-1], Termination) else real(*given)
        )

    for name in ("grouped_attention", "gather_attention"):
        site.kernel(name, terminating)


def defined(site: Site, change: Callable) -> None:
    """Where there is a rule, attention is change(definition, arguments), by the definition in plain torch."""
    for name, definition in (
        ("grouped_attention", dense.grouped_attention),
        ("gather_attention", gathering.gather_attention),
    ):
        site.kernel(
            name,
            lambda real, definition=definition: (
                lambda *given: change(definition, given) if isinstance(given[-1], Termination) else real(*given)
            ),
        )


@dataclass(frozen=True)
class Together(Termination):
    """A rule whose queries do not decide for themselves: dims of [B, T, KV, G] that stop with the first of them.
    broken: whether an unstable tile ends a streak."""

    dims: tuple[int, ...] = ()
    broken: bool = True
    held: dict = field(default_factory=dict, compare=False)

    wait = property(lambda self: 1)

    def stable(self, x: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
        good, streak = super().stable(x, before), self.held.get("streak", 0)
        streak = self.held["streak"] = torch.where(good, streak + 1, 0 if self.broken else streak)
        stop = streak >= (self.patience if self.persistence else 1)
        for dim in self.dims:
            stop = stop.any(dim, keepdim=True).expand_as(good)
        return stop


def together(rule: Termination, **more) -> Termination:
    names = ("tau", "phi", "patience", "scale", "direction", "persistence", "tile", "splits", "least")
    return Together(**{name: getattr(rule, name) for name in names}, **more)


@mutation("1.16", bugs=(), parts=("direction ignored",), **STOPPING)
def termination_ignores_direction(site: Site) -> None:
    """A small change is stable, wherever it turns to."""
    ruled(site, lambda rule: replace(rule, direction=False) if rule.scale else rule)


@mutation("1.16", bugs=(), parts=("scale ignored",), **STOPPING)
def termination_ignores_scale(site: Site) -> None:
    """An output that keeps its direction is stable, however much it grows or shrinks."""
    ruled(site, lambda rule: replace(rule, scale=False) if rule.direction else rule)


@mutation("1.16", bugs=(), parts=("patience ignored",), **STOPPING)
def termination_without_patience(site: Site) -> None:
    """The first stable tile ends the traversal."""
    ruled(site, lambda rule: replace(rule, persistence=False))


@mutation("1.16", bugs=(), parts=("streak not broken",), **STOPPING)
def stable_tiles_counted_not_in_a_row(site: Site) -> None:
    """An unstable tile does not end a streak."""
    defined(site, lambda definition, given: definition(*given[:-1], together(given[-1], broken=False)))


@mutation("1.16", bugs=(), parts=("the first head to stop stops its group",), **STOPPING)
def a_head_stops_its_group(site: Site) -> None:
    """A tile is no longer read as soon as one query head of the group has stopped."""
    defined(site, lambda definition, given: definition(*given[:-1], together(given[-1], dims=(3,))))


@mutation("1.16", bugs=(), parts=("the first row to stop stops its neighbours",), **STOPPING)
def a_row_stops_its_neighbours(site: Site) -> None:
    """A row of the batch that stops early takes the others with it."""
    defined(site, lambda definition, given: together_by_group(definition, given))


def together_by_group(definition: Callable, given: tuple):
    """Rows read as many tiles as the first of them that stops: those of fewer tiles than that, all of theirs."""
    rule, never = given[-1], replace(given[-1], tau=0.0, scale=True)
    _, read = definition(*given)
    fewest = read.flatten(0, 1).amin(0) if read.dim() == 3 else read
    out, _ = definition(*given[:-1], never)
    whole = definition(*given[:-1], never)[1]
    del rule
    return out, torch.minimum(whole, fewest.expand_as(whole)).int()


@mutation("1.16", bugs=(), parts=("termination, output", "first tile not read first"), **STOPPING)
def termination_skips_the_sink(site: Site) -> None:
    """Dense attention is read from the newest tile back: the sinks come last, and are mostly never read."""

    def newest(position, first, n, tile):
        last = (position // tile).unsqueeze(-1)
        number = last - torch.arange(n, device=position.device)
        place = number.unsqueeze(-1) * tile + torch.arange(tile, device=position.device)
        return torch.where(number.unsqueeze(-1) >= 0, place, -1).unsqueeze(2)

    ordered(site, newest)


@mutation("1.16", bugs=(), parts=("oldest tiles first",), **STOPPING)
def oldest_tiles_first(site: Site) -> None:
    """Dense attention is read from the first tile on."""

    def oldest(position, first, n, tile):
        number = torch.arange(n, device=position.device).expand(*position.shape, n)
        number = torch.where(number <= (position // tile).unsqueeze(-1), number, -1)
        place = number.unsqueeze(-1) * tile + torch.arange(tile, device=position.device)
        return torch.where(number.unsqueeze(-1) >= 0, place, -1).unsqueeze(2)

    ordered(site, oldest)


def ordered(site: Site, order: Callable) -> None:
    """Tiles of dense attention in another order."""

    def change(definition, given):
        dense.newest_first = order
        try:
            return definition(*given)
        finally:
            dense.newest_first = newest_first

    defined(site, change)


@mutation("1.16", bugs=(), parts=("order of blocks",), **STOPPING)
def blocks_terminated_in_the_order_of_their_numbers(site: Site) -> None:
    """The list that is read until it stops is the ascending one: what was found to matter most comes anywhere."""
    site.kernel("choose_blocks", lambda real: lambda *given: real(*given[:7]))


@mutation("1.16", bugs=(), parts=("one tile early", "tiles counted", "termination, output"), **STOPPING)
def last_tile_not_counted(site: Site) -> None:
    """The tile at whose end attention stops is read and not counted."""

    def change(definition, given):
        out, read = definition(*given)
        return out, (read - 1).clamp(min=1)

    defined(site, change)


@mutation("1.16", bugs=(), parts=("termination, never stopping", "never stopping"), **STOPPING)
def terminated_although_never_asked_to(site: Site) -> None:
    """A threshold of 0 stops after the first tile that changes nothing in fp32: the comparison is ≤."""
    ruled(site, lambda rule: replace(rule, tau=rule.tau + 1e-1, phi=2.0) if rule.tau == 0 else rule)


@mutation("1.16", bugs=(), parts=("termination, output",), **STOPPING)
def output_not_divided_by_what_was_read(site: Site) -> None:
    """The output of a traversal that stopped is scaled as if every tile had been read."""

    def change(definition, given):
        out, read = definition(*given)
        whole = definition(*given[:-1], replace(given[-1], tau=0.0, scale=True))[1]
        share = (read / whole).repeat_interleave(out.shape[2] // read.shape[2], -1).unsqueeze(-1)
        return out * share.to(out.dtype), read

    defined(site, change)
