"""Which tile of host memory each staging slot holds, and in which slot each tile is."""

from typing import NamedTuple

import torch

from dsv4.kernels.errors import UnsupportedInput

OLDEST = 255  # steps since a slot was wanted, beyond which ages count as equal; 8 bits
WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


class SlotTable(NamedTuple):
    """State of the staging slots of G groups (a group: one row and KV head, or one row), all on the device.

    held int32 [G, slots]: item that a slot holds, −1 none. used int64 [G, slots]: `clock` when it was last wanted, 0
    never. clock int64 [G]: fetches so far. count int64 [G, 2]: hits and misses so far. current int32 [G]: item in the
    tail slot (after the others, for the item that is still being written), −1 none. where int32 [G, N]: slot of each
    item, valid only if that slot holds the item (so it is never cleared); order int32 [G, slots]: scratch. Only the
    GPU's kernels use these two.
    """

    held: torch.Tensor
    used: torch.Tensor
    clock: torch.Tensor
    count: torch.Tensor
    current: torch.Tensor
    where: torch.Tensor
    order: torch.Tensor

    @property
    def state(self) -> tuple[torch.Tensor, ...]:
        """The state that `fetch` and `write_back` define: everything except the scratch."""
        return self.held, self.used, self.clock, self.count, self.current

    def forget(self, since: int | torch.Tensor = 0) -> None:
        """Unstage the items from number `since` (int, or [G, 1]) on, and the tail: their rows in host memory have
        changed, or are about to."""
        stale = self.held >= since
        self.held.masked_fill_(stale, -1)
        self.used.masked_fill_(stale, 0)
        self.current.fill_(-1)


def new_table(groups: int, items: int, slots: int, device: torch.device | str) -> SlotTable:
    """An empty table. `slots` without the tail."""
    if slots < 1:
        raise UnsupportedInput(f"a staging buffer of {slots} slots; expected at least 1")
    absent = lambda *shape: torch.full(shape, -1, dtype=torch.int32, device=device)
    zero = lambda *shape: torch.zeros(shape, dtype=torch.int64, device=device)
    return SlotTable(
        absent(groups, slots),
        zero(groups, slots),
        zero(groups),
        zero(groups, 2),
        absent(groups),
        absent(groups, items),
        torch.zeros(groups, slots, dtype=torch.int32, device=device),
    )


class Pool(NamedTuple):
    """Items in host memory and their staging slots, as words: host [G, pages, per, width], staged [G, pages', per,
    width], strided views in which the words of an item are adjacent. Item or slot i is at [:, i // per, i % per]."""

    host: torch.Tensor
    staged: torch.Tensor

    @property
    def slots(self) -> int:
        return self.staged.shape[1] * self.staged.shape[2]

    @property
    def item_bytes(self) -> int:
        return self.host.shape[3] * self.host.element_size()


def items_of(rows: torch.Tensor, block: int) -> torch.Tensor:
    """Contiguous rows [..., S, D] as items of `block` rows: a view [groups, S / block, 1, block · D]."""
    if not rows.is_contiguous() or rows.shape[-2] % block:
        raise UnsupportedInput(
            f"items of {block} rows of a tensor {tuple(rows.shape)} with strides {rows.stride()}; expected whole "
            "items, contiguous"
        )
    return rows.view(-1, rows.shape[-2] // block, 1, block * rows.shape[-1])


def paired(host: torch.Tensor, staged: torch.Tensor) -> Pool:
    """A pool of items [G, pages, per, width] at two places, as the widest words in which both can be read."""
    if host.dtype is not staged.dtype or host.shape[0] != staged.shape[0] or host.shape[2:] != staged.shape[2:]:
        raise UnsupportedInput(
            f"items {host.dtype} {tuple(host.shape)} cannot be staged in {staged.dtype} {tuple(staged.shape)}; "
            "expected the same type, groups and width"
        )
    if host.stride(3) != 1 or staged.stride(3) != 1:
        raise UnsupportedInput(
            f"items with strides {host.stride()} and {staged.stride()}; expected their numbers side by side"
        )
    size = host.element_size()
    spans = [n * size for t in (host, staged) for n in (t.shape[3], t.storage_offset(), *t.stride()[:3])]
    word = next(
        w
        for w in WORDS
        if w >= size and all(n % w == 0 for n in spans) and (host.data_ptr() | staged.data_ptr()) % w == 0
    )
    return Pool(host.view(WORDS[word]), staged.view(WORDS[word]))
