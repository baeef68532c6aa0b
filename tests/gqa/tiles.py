"""A contiguous cache with as many slots as pages give a step: sums over slots are then split alike, and bits can be
compared."""

from functools import cache

import torch

from dsv4.probes.scenes.gqa.fitted import FittedCache
from dsv4.sampling import sample


class Grown:
    """One row of a contiguous cache that fits its tokens."""

    def __init__(self, model):
        self.model, self.cache = model, FittedCache(model, model.config.max_position_embeddings)

    @property
    def length(self) -> int:
        return self.cache.lengths[0]

    def append(self, ids: list[int], prompt: bool = False, logits: str = "all") -> torch.Tensor:
        """Logits [len(ids) or 1, vocab] of more tokens, in one piece."""
        return self.model.append(torch.tensor([ids]), self.cache, prompt=prompt, logits=logits)[0]

    def read(self, ids: list[int], logits: str = "all") -> torch.Tensor:
        """Logits of a prompt whose beginning may be here, in pieces that end at multiples of 128: logits of the last
        piece."""
        while self.length < len(ids):
            found = self.append(ids[self.length : (self.length // 128 + 1) * 128], True, logits)
        return found

    def rewind(self, n: int) -> None:
        self.cache.rewind(n)


def cold(model, request) -> tuple[list[int], torch.Tensor]:
    """Tokens of a request by itself, and the logits [n, vocab] that each was chosen from; found once for each way of
    reading."""
    ids, logits = _cold(model, model.attention, request.prompt_ids, request.max_tokens, request.sampling)
    return list(ids), logits.clone()


@cache
def _cold(model, attention, prompt: tuple[int, ...], tokens: int, sampling) -> tuple[list[int], torch.Tensor]:
    row, generator, seen, ids = Grown(model), torch.Generator().manual_seed(sampling.seed), [], []
    logits = row.read(list(prompt), "last")
    while True:
        seen.append(logits[-1])
        ids.append(sample(logits[-1], sampling, generator))
        if len(ids) == tokens:
            return ids, torch.stack(seen)
        logits = row.append(ids[-1:])
