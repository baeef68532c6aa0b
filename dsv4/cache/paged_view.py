"""Some rows of a paged cache as a cache at a fixed place in memory, whichever rows it shows.

A captured step reads tensors at their address during capture. The pools of a `PagedCache` do not move, but the pages of
a row change. So the rows' tables are copied into those of this view before a step runs, if they changed, and one graph
serves every row.
"""

from collections.abc import Sequence

from dsv4.cache.cache import Cache, Lengths
from dsv4.cache.page_tables import PageTable
from dsv4.cache.paged import PagedCache
from dsv4.sending import sent


class PagedView(Cache):
    """`places` rows: those of `cache` in the last `show`. Lengths are copies: the caller of a step advances those of
    `cache`.

    A place without a row is an empty row whose every page is page 0: nothing else reads what a step computes there. A
    row may be shown up to the `reach` of `cache`; the valid tokens of a step end before, at its max_context.
    """

    def __init__(self, cache: PagedCache, places: int = 1):
        self.whole, self.batch, self.max_context, self.max_rewind = cache, places, cache.reach, cache.max_rewind
        self.made_for = cache.made_for
        self._device = next(iter(cache.tables.values())).physical.device
        self.tables = {
            name: PageTable(group, places, cache.reach, self._device) for name, group in cache.groups.items()
        }
        layers = [
            cache.layout.paged(plan, self.tables, layer.tensors)
            for plan, layer in zip(cache.plan, cache.layers + cache.mtp_layers, strict=True)
        ]
        self.layers, self.mtp_layers = layers[: len(cache.layers)], layers[len(cache.layers) :]
        self._main, self._mtp = (Lengths(places, of.max_rewind) for of in (cache._main, cache._mtp))
        self._rows: list[int | None] = []
        self._changes: dict[str, int] = {}  # counter of each table of `cache` at its last copy

    def show(self, rows: Sequence[int | None], tokens: int, mtp: bool = False) -> None:
        """Place i shows row rows[i] from now on (None: no row), with pages for `tokens` more. Raises OutOfPages before
        any is shown."""
        for b in rows:
            if b is not None:
                self.whole.make_room(slice(b, b + 1), tokens, mtp)
        if list(rows) != self._rows:
            self._rows, self._changes = list(rows), {}
            # after the last row: the empty row
            self._held = sent([self.whole.batch if b is None else b for b in rows], self._device)
        for name, table in self.tables.items():
            of = self.whole.tables[name]
            if self._changes.get(name) != of.changes:
                self._changes[name] = of.changes
                table.physical.copy_(of.with_nobody.index_select(0, self._held))
        for own, of in ((self._main, self.whole._main), (self._mtp, self.whole._mtp)):
            own.now, own.high, own.low = (
                [0 if b is None else held[b] for b in rows] for held in (of.now, of.high, of.low)
            )

    def place(self, step, op) -> None:
        """As in the whole cache: layers find rows through tables."""
        self.whole.place(step, op)

    @property
    def nbytes(self) -> int:
        """Bytes of the tables: all else belongs to the whole cache."""
        return sum(table.physical.nbytes for table in self.tables.values())
