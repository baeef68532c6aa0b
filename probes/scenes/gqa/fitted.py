"""A contiguous cache of a GQA model that has as many slots as its tokens need tiles: sums over slots then run in the
order in which they run over pages, and bits can be compared."""

from dsv4.model.gqa.cache import GroupedCache, LayerRows, cache_streams, slots


class FittedCache(GroupedCache):
    """One row. Its buffers are made anew before a step whose end needs more tiles, or fewer."""

    def __init__(self, model, max_context: int):
        policy = model.attention.policy
        super().__init__(
            model.config,
            model.numerics,
            1,
            max_context,
            [model.device] * len(model.layers),
            None if policy.selector is None else policy,
            model.op.summarise_blocks,
        )
        self.policy = None if policy.selector is None else policy

    def make_room(self, rows: slice, tokens: int) -> None:
        """Called before `tokens` tokens are written: the layers have slots for these and no more tiles."""
        end = slots(self.lengths[0] + tokens)
        if end != self.layers[0].keys.shape[2]:
            plan = cache_streams(self.config, 1, end, self.numerics, self.policy)
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
