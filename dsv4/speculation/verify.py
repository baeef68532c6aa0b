"""How a verify pass is run: tokens in, logits after each of them out, and caches that hold them all until they are
rewound."""

from typing import Protocol

import torch

from dsv4.causal import CausalLM, TokenCache
from dsv4.graph import captures
from dsv4.kernels.quantize.kept import keeping


class Verify(Protocol):
    """A way to run one pass over a batch."""

    def __call__(
        self, ids: torch.Tensor, counts: list[int], want_streams: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """ids int64 [B, W]: row b's first counts[b] are run (0: the row rests), and more may be. Returns logits fp32
        [B, W, vocab] and the streams [B, W, n, d] before the head if wanted; beyond a row's count both may hold
        anything. cache.lengths have moved on by what was really run."""


class Append:
    """One append. pads: rows of fewer drafts run pads beside the others where they have room for them: one uniform pass
    of the model instead of a piece for each length; the caller's rewind forgets pads as it forgets wrong drafts."""

    def __init__(self, model: CausalLM, cache: TokenCache, pads: bool = True):
        self.model, self.cache, self.pads = model, cache, pads

    def __call__(
        self, ids: torch.Tensor, counts: list[int], want_streams: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        width = ids.shape[1]
        if (
            self.pads
            and all(n + width <= self.cache.max_context for n in self.cache.lengths)
            and width <= self.cache.max_rewind
        ):
            counts = [width] * len(counts)
        out = self.model.append(ids, self.cache, n_new=counts, return_streams=want_streams)
        return out if want_streams else (out, None)


class SingleSteps:
    """Runs the tokens of a pass one at a time, as plain decoding does: its logits are those, bit for bit, in any
    numerics. Steps of a pass share what they dequantise; else this is no faster than plain decoding."""

    def __init__(self, model: CausalLM, cache: TokenCache, pads: bool = False):
        self.model, self.cache = model, cache

    def __call__(
        self, ids: torch.Tensor, counts: list[int], want_streams: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        parts = []
        with keeping():
            for t in range(max(counts)):
                now = [int(n > t) for n in counts]
                parts.append(self.model.append(ids[:, t : t + 1], self.cache, n_new=now, return_streams=True))
        logits, streams = (torch.cat(found, 1) for found in zip(*parts))
        return logits, streams if want_streams else None


HOST = ("cpu", "reference")  # backends whose products of several rows are summed otherwise than those of one


def default(model: CausalLM, cache: TokenCache, pads: bool = True) -> Verify:
    """How passes are run unless something else is asked for: so that greedy text is that of plain decoding."""
    if captures(model):
        from dsv4.speculation.captured import Captured  # which appends where it cannot capture

        return Captured(model, cache, pads)
    # fp32: sums differ by 4e-5, and no choice was seen to
    exact = model.backend in HOST and model.numerics.name != "fp32"
    return (SingleSteps if exact else Append)(model, cache, pads)
