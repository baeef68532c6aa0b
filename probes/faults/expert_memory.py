"""Section 1.21: which experts stand in slots, and which the kernels read there."""

from collections.abc import Callable

import torch

from dsv4.model.host_experts import HostExperts
from dsv4.probes.faults import Site, mutation

SECTION = "1.21", "Experts in host memory"

FIRST = dict(bugs=(), probes=("expert_memory",), numerics="native")


def fetcher(site: Site, change: Callable) -> None:
    """Experts are fetched by change(real, table, pools, wanted, *rest)."""
    site.kernel("fetch", lambda real: lambda *given: change(real, *given))


def slots_of(table, out) -> tuple[list[int], list[int]]:
    """Slots of wanted experts that were there, and of those that were fetched, by the clocks of the table before."""
    held = set(table)
    pairs = [(e, s) for e, s in out if e >= 0]
    return [s for e, s in pairs if e in held], [s for e, s in pairs if e not in held]


@mutation("1.21", parts=("slot table",), **FIRST)
def an_evicted_expert_stays_in_the_table(site: Site) -> None:
    """A slot that gets another expert still says that it holds the old one, which is then taken for a hit."""

    def change(real, table, *rest):
        held = table.held.clone()
        out = real(table, *rest)
        table.held.copy_(torch.where((held >= 0) & (table.held >= 0), held, table.held))
        return out

    fetcher(site, change)


@mutation("1.21", parts=("overwritten",), **FIRST)
def a_chosen_expert_is_overwritten(site: Site) -> None:
    """A fetched expert is copied over one that the same step has found in its slot."""

    def change(real, table, pools, wanted, *rest):
        held = table.held[0].tolist()
        out = real(table, pools, wanted, *rest)
        there, fetched = slots_of(held, list(zip(wanted[0].tolist(), out[0].tolist())))
        if there and fetched:
            for pool in pools:
                pool.staged[0, there[0]] = pool.staged[0, fetched[0]]
        return out

    fetcher(site, change)


@mutation("1.21", parts=("one slot for two experts",), **FIRST)
def two_experts_share_a_slot(site: Site) -> None:
    """A fetched expert is read in the slot of one that the same step has found."""

    def change(real, table, pools, wanted, *rest):
        held = table.held[0].tolist()
        out = real(table, pools, wanted, *rest)
        there, fetched = slots_of(held, list(zip(wanted[0].tolist(), out[0].tolist())))
        return torch.where(out == fetched[0], there[0], out) if there and fetched else out

    fetcher(site, change)


@mutation("1.21", parts=("scales of another expert",), **FIRST)
def scales_are_fetched_of_the_expert_before(site: Site) -> None:
    """Codes come from the chosen expert, scales from the one before."""

    def change(real, table, pools, *rest):
        early = [pool._replace(host=pool.host.roll(1, 1)) if i % 2 else pool for i, pool in enumerate(pools)]
        return real(table, tuple(early), *rest)

    fetcher(site, change)


@mutation("1.21", parts=("cut short",), **FIRST)
def the_end_of_an_expert_is_not_copied(site: Site) -> None:
    """The last quarter of each matrix stays what its slot held before."""

    def change(real, table, pools, *rest):
        old = [pool.staged.clone() for pool in pools]
        out = real(table, pools, *rest)
        for pool, before in zip(pools, old):
            end = pool.staged.shape[3] * 3 // 4
            pool.staged[..., end:] = before[..., end:]
        return out

    fetcher(site, change)


@mutation("1.21", parts=("not copied",), **FIRST)
def down_projections_are_not_fetched(site: Site) -> None:
    """Only gate and up projections are copied."""
    fetcher(site, lambda real, table, pools, *rest: real(table, pools[: len(pools) // 2], *rest))


@mutation("1.21", parts=("another expert",), **FIRST)
def the_expert_before_is_fetched(site: Site) -> None:
    """Every matrix that a decoding step misses is copied from one expert early in host memory."""

    def change(real, table, pools, wanted, *rest):
        if wanted.shape[1] < table.held.shape[1]:  # else all slots are filled, from a buffer that may lack that expert
            pools = tuple(pool._replace(host=pool.host.roll(1, 1)) for pool in pools)
        return real(table, pools, wanted, *rest)

    fetcher(site, change)


@mutation("1.21", parts=("slot number",), **FIRST)
def slots_are_counted_from_one(site: Site) -> None:
    """The kernels are told the slot after the one that holds the expert."""
    real = HostExperts._numbers
    site.patch(HostExperts, "_numbers", lambda self, *given: (real(self, *given) + 1) % self.slots)


@mutation("1.21", parts=("matrices",), **FIRST)
def a_prompts_experts_are_brought_from_wrong_slots(site: Site) -> None:
    """Experts that a prompt finds in slots are copied from the slot beside."""
    rolled = lambda pool: pool._replace(staged=pool.staged.roll(1, 1))
    site.kernel("bring", lambda real: lambda table, pools, *rest: real(table, tuple(map(rolled, pools)), *rest))


@mutation("1.21", parts=("expert memory, output",), backend="cpu", **FIRST)
def weights_of_slots_are_kept(site: Site) -> None:
    """Dequantised weights of a slot are read again after another expert took it."""
    real = HostExperts._packed
    site.patch(HostExperts, "_packed", lambda self, *given: real(self, *given)._replace(of=None))


@mutation("1.21", parts=("expert memory, traffic",), **FIRST)
def experts_of_a_prompt_are_not_counted(site: Site) -> None:
    """What a chunk of a prompt brings is no hit and no miss."""
    real = HostExperts._bring

    def silent(self, wanted):
        before = self.table.count.clone()
        real(self, wanted)
        self.table.count.copy_(before)

    site.patch(HostExperts, "_bring", silent)
