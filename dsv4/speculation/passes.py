"""Ways to run a pass over drafts that capture nothing: one append, or single steps."""

from typing import Protocol

import torch

from dsv4.cache.cache import Cache
from dsv4.kernels.quantize.kept import keeping
from dsv4.model.causal import CausalLM
from dsv4.model.cut_values import Logits, joined_along


class Verify(Protocol):
    """A way to run one pass over a batch."""

    def __call__(self, ids: torch.Tensor, counts: list[int], want_streams: bool) -> tuple[Logits, torch.Tensor | None]:
        """ids int64 [B, W]: row b's first counts[b] are run (0: the row rests), and more may be. Returns logits fp32
        [B, W, vocab], of several ranks each its own, and, if wanted, the streams [B, W, n, d] before the head; beyond a
        row's count both may hold anything. cache.lengths advance by the tokens that really ran."""


class Append:
    """One append. pads: rows with fewer drafts run pads if they have room for them: one uniform pass of the model
    instead of a piece for each length. The caller's rewind drops pads as it drops wrong drafts."""

    def __init__(self, model: CausalLM, cache: Cache, pads: bool = True):
        self.model, self.cache, self.pads = model, cache, pads

    def __call__(self, ids: torch.Tensor, counts: list[int], want_streams: bool) -> tuple[Logits, torch.Tensor | None]:
        width = ids.shape[1]
        if (
            self.pads
            and all(n + width <= self.cache.max_context for n in self.cache.lengths)
            and width <= self.cache.max_rewind
        ):
            counts = [width] * len(counts)
        out = self.model.append(ids, self.cache, n_new=counts, return_streams=want_streams, whole=False)
        return out if want_streams else (out, None)


class SingleSteps:
    """Runs the tokens of a pass one at a time, as plain decoding does, so its logits are equal bit for bit, in any
    numerics. The steps of a pass share dequantised weights; otherwise this is no faster than plain decoding."""

    def __init__(self, model: CausalLM, cache: Cache, pads: bool = False):
        self.model, self.cache = model, cache

    def __call__(self, ids: torch.Tensor, counts: list[int], want_streams: bool) -> tuple[Logits, torch.Tensor | None]:
        parts = []
        with keeping():
            for t in range(max(counts)):
                now = [int(n > t) for n in counts]
                one = ids[:, t : t + 1]
                parts.append(self.model.append(one, self.cache, n_new=now, return_streams=True, whole=False))
        logits, streams = zip(*parts)
        return joined_along(logits, 1), torch.cat(streams, 1) if want_streams else None
