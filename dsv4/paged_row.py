"""One row of a paged cache as a cache of its own, which keeps its place in memory whichever row it shows.

A captured step reads tensors where they were when it was captured. The pools of a `PagedCache` stay; which pages a row holds does not. So
the row's tables are copied into those of this one before a step runs: a few hundred bytes a group, and one graph serves every row.
"""

from dsv4.cache import Cache, Lengths
from dsv4.page_tables import PageTable
from dsv4.paged_cache import PagedCache


class PagedRow(Cache):
    """The row of `cache` that `show` was last asked for. Lengths are copies: whoever runs steps moves those of `cache` on."""

    def __init__(self, cache: PagedCache):
        self.whole, self.batch, self.max_context, self.max_rewind = cache, 1, cache.max_context, cache.max_rewind
        device = next(iter(cache.tables.values())).physical.device
        self.tables = {name: PageTable(group, 1, cache.max_context, device) for name, group in cache.groups.items()}
        layers = [cache.layout.layer(plan, self.tables, layer.tensors)
                  for plan, layer in zip(cache.plan, cache.layers + cache.mtp_layers, strict=True)]
        self.layers, self.mtp_layers = layers[:len(cache.layers)], layers[len(cache.layers):]
        self._main, self._mtp = Lengths(1, cache.max_rewind), Lengths(1, cache.max_rewind)

    def show(self, b: int, tokens: int, mtp: bool = False) -> None:
        """Row b from now on, with pages for `tokens` more. Raises OutOfPages before anything is changed."""
        self.whole.make_room(slice(b, b + 1), tokens, mtp)
        for name, table in self.tables.items():
            table.physical.copy_(self.whole.tables[name].physical[b:b + 1])
        for own, of in ((self._main, self.whole._main), (self._mtp, self.whole._mtp)):
            own.now, own.high, own.low = of.now[b:b + 1], of.high[b:b + 1], of.low[b:b + 1]

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
