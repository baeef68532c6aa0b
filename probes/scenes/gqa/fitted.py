"""A contiguous cache of a GQA model that has as many slots as its tokens need tiles: sums over slots then run in the
order in which they run over pages, and bits can be compared."""

from dsv4.model.gqa.cache import GroupedCache, LayerRows, slots


class FittedCache(GroupedCache):
    """One row. Its buffers are made anew before a step whose end needs more tiles, or fewer."""

    def __init__(self, model, max_context: int):
        super().__init__(model.cache_layout(), 1, max_context, 0, [model.device] * len(model.layers))

    def make_room(self, rows: slice, tokens: int, mtp: bool = False) -> None:
        """Called before `tokens` tokens are written: the layers have slots for these and no more tiles."""
        end = slots(self.lengths[0] + tokens)
        if end != self.layers[0].keys.shape[2]:
            plan = self.layout.plan(1, end, 0)
            self.layers = [
                self._resized(old, LayerRows(p, old.keys.device, old.block))
                for old, p in zip(self.layers, plan, strict=True)
            ]

    @staticmethod
    def _resized(old: LayerRows, new: LayerRows) -> LayerRows:
        for name, tensor in new.tensors.items():
            kept = min(tensor.shape[2], old.tensors[name].shape[2])
            tensor[:, :, :kept] = old.tensors[name][:, :, :kept]
        return new
