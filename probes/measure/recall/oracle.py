"""The right index scores of one layer, on the subject's own attention inputs.

The steps are those of `dsv4.probes.oracle` (float64), with roundings where `dsv4.probes.catalogue.index_oracle` has
them. Two layers run side by side: `exact` rounds nothing; `matched` has the quantisation simulation and the cache dtype
of the subject's numerics.
"""

import torch

from dsv4.probes.oracle import attention as steps
from dsv4.probes.oracle.attention import Layer
from dsv4.probes.oracle.indexer import form, held, queries


class GrowingOracle:
    """Index keys of a context as it grows, and scores of queries against them. One row, from position 0."""

    def __init__(self, exact: Layer, matched: Layer):
        self.exact, self.matched = exact, matched
        w = lambda leaf: exact.w(f"attn.indexer.compressor.{leaf}")
        self._pooling = [w(leaf) for leaf in ("wkv.weight", "wgate.weight", "ape")]
        self._norm = w("norm.weight")
        self._exact_keys: list[torch.Tensor] = []
        self._matched_keys: list[torch.Tensor] = []
        self._tail = torch.empty(0, exact.config.hidden_size, dtype=torch.float64)
        self._done = 0

    def extend(self, x: torch.Tensor) -> None:
        """Attention inputs x [t, d] of the next t tokens; keys of the windows that they complete.

        What is kept of the tokens: those of an incomplete window, and the window before it, which the next entry pools
        too.
        """
        ratio, before = self.exact.ratio, min(self._done, 1)
        self._tail = torch.cat((self._tail, x.cpu().double()))
        new = len(self._tail) // ratio - before
        if new < 1:
            return
        tokens = (before + new) * ratio
        pooled = steps.pool(self._tail[:tokens].unsqueeze(0), *self._pooling, ratio, overlap=True)[:, before:]
        at = ratio * torch.arange(self._done, self._done + new)
        self._exact_keys.append(self._finished(self.exact, pooled, at))
        self._matched_keys.append(self._finished(self.matched, pooled, at))
        self._tail, self._done = self._tail[tokens - ratio :].clone(), self._done + new

    def _finished(self, layer: Layer, pooled: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        """Pooled [1, n, Di] of windows that begin at positions `at` [n] → keys [n, Di], as the cache holds them."""
        entries = held(layer, steps.rms(held(layer, pooled), self._norm, layer.config.rms_norm_eps))
        return layer.store(form(layer, steps.rotate(entries, at, layer.frequencies)))[0]

    def scores(self, x: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x [Q, d] at positions int64 [Q] → (exact, matched) scores float64 [Q, n], −inf where invisible.

        n: the entries visible to the last position.
        """
        x, n = x.cpu().double().unsqueeze(0), int(positions[-1] + 1) // self.exact.ratio
        return (
            self._scores(self.exact, x, positions, torch.cat(self._exact_keys)[:n]),
            self._scores(self.matched, x, positions, torch.cat(self._matched_keys)[:n]),
        )

    @staticmethod
    def _scores(layer: Layer, x: torch.Tensor, positions: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        weights = held(layer, steps.index_weights(layer, x))
        return steps.index_scores(queries(layer, x, positions), weights, keys.unsqueeze(0), positions, layer.ratio)[0]
