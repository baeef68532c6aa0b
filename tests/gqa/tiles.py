"""A contiguous cache with as many slots as pages give a step: sums over slots are then split alike, and bits can be compared."""

import torch

from dsv4.generate import sample
from dsv4.gqa.cache import slots


class Grown:
    """One row of a `GroupedCache` that is made anew whenever its tokens need more tiles, or fewer. Pages have no part in it."""

    def __init__(self, model):
        self.model, self.cache = model, model.new_cache(1, slots(1))

    @property
    def length(self) -> int:
        return self.cache.lengths[0]

    def append(self, ids: list[int], prompt: bool = False, logits: str = "all") -> torch.Tensor:
        """Logits [len(ids) or 1, vocab] of more tokens, in one piece."""
        end = self.length + len(ids)
        if slots(end) != self.cache.max_context:
            self._resize(slots(end))
        return self.model.append(torch.tensor([ids]), self.cache, prompt=prompt, logits=logits)[0]

    def read(self, ids: list[int], logits: str = "all") -> torch.Tensor:
        """The same of a prompt whose beginning may be here, in pieces that end at multiples of 128: logits of the last piece."""
        while self.length < len(ids):
            found = self.append(ids[self.length:(self.length // 128 + 1) * 128], True, logits)
        return found

    def rewind(self, n: int) -> None:
        self.cache.rewind(n)

    def _resize(self, count: int) -> None:
        old, self.cache = self.cache, self.model.new_cache(1, count)
        for before, after in zip(old.layers, self.cache.layers):
            for name, tensor in before.tensors.items():
                rows = min(tensor.shape[2], after.tensors[name].shape[2])
                after.tensors[name][:, :, :rows] = tensor[:, :, :rows]
        self.cache._main.advance(slice(0, 1), old.lengths[0])


def cold(model, request) -> tuple[list[int], torch.Tensor]:
    """Tokens of a request by itself, and the logits [n, vocab] that each was chosen from."""
    row, generator, seen, ids = Grown(model), torch.Generator().manual_seed(request.sampling.seed), [], []
    logits = row.read(list(request.prompt_ids), "last")
    while True:
        seen.append(logits[-1])
        ids.append(sample(logits[-1], request.sampling, generator))
        if len(ids) == request.max_tokens:
            return ids, torch.stack(seen)
        logits = row.append(ids[-1:])
