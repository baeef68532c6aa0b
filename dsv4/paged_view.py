"""Some rows of a paged cache as a cache of their own, which keeps its place in memory whichever rows it shows.

A captured step reads tensors where they were when it was captured. The pools of a `PagedCache` stay; which pages a row
holds does not. So the rows' tables are copied into those of this one before a step runs, where anything changed, and
one graph serves every row.
"""

from collections.abc import Sequence

from dsv4.cache import Cache, Lengths
from dsv4.page_tables import PageTable
from dsv4.paged_cache import PagedCache
from dsv4.sending import sent


class PagedView(Cache):
    """`places` rows: those of `cache` that `show` was last asked for. Lengths are copies: whoever runs steps moves
    those of `cache` on.

    A place that shows nobody is an empty row whose every page is page 0: what a step computes there, nothing else
    reads. A row may be shown up to the `reach` of `cache`: what counts of a step ends before, at its max_context.
    """

    def __init__(self, cache: PagedCache, places: int = 1):
        self.whole, self.batch, self.max_context, self.max_rewind = cache, places, cache.reach, cache.max_rewind
        self.made_for = cache.made_for
        self._device = next(iter(cache.tables.values())).physical.device
        self.tables = {
            name: PageTable(group, places, cache.reach, self._device) for name, group in cache.groups.items()
        }
        layers = [
            cache.layout.layer(plan, self.tables, layer.tensors)
            for plan, layer in zip(cache.plan, cache.layers + cache.mtp_layers, strict=True)
        ]
        self.layers, self.mtp_layers = layers[: len(cache.layers)], layers[len(cache.layers) :]
        self._main, self._mtp = (Lengths(places, of.max_rewind) for of in (cache._main, cache._mtp))
        self._rows: list[int | None] = []
        self._changes: dict[str, int] = {}  # of each table of `cache`, when it was copied

    def show(self, rows: Sequence[int | None], tokens: int, mtp: bool = False) -> None:
        """Place i shows row rows[i] from now on (None: nobody), with pages for `tokens` more. Raises OutOfPages before
        any is shown."""
        for b in rows:
            if b is not None:
                self.whole.make_room(slice(b, b + 1), tokens, mtp)
        if list(rows) != self._rows:
            self._rows, self._changes = list(rows), {}
            # behind the last row: nobody's
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
        """As of the whole cache: layers find rows through tables."""
        self.whole.place(step, op)

    def guess(self, layers, i: int, step) -> None:
        """As of the whole cache."""
        self.whole.guess(layers, i, step)

    @property
    def nbytes(self) -> int:
        """Bytes of the tables: all else belongs to the whole cache."""
        return sum(table.physical.nbytes for table in self.tables.values())
