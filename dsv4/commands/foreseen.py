"""What the requests of a batch will launch, known before the weights are loaded (`dsv4.runtime.launches`)."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from dsv4.cache.paged_view import PagedView
from dsv4.cache.paging import BLOCK
from dsv4.commands.batch import Options, new_pool
from dsv4.engine.state import Request
from dsv4.model.causal import CausalLM
from dsv4.runtime.launches import block, keep_kinds, pieces, steps


class Foreseen(NamedTuple):
    """Requests of these sizes, (tokens of the prompt, most new tokens), over one pool of pages, run by the host."""

    sizes: tuple[tuple[int, int], ...]
    options: Options

    @classmethod
    def of(cls, asked: Iterable[Request], options: Options) -> "Foreseen":
        return cls(tuple(sorted({(len(r.prompt_ids), r.max_tokens) for r in asked})), options)

    def run(self, model: CausalLM) -> None:
        """Prompts piece by piece, each row alone, then passes of one row and of all rows if they share passes."""
        options, policy = self.options, self.options.policy
        asked = [Request("", (0,) * prompt, most) for prompt, most in self.sizes]
        cache = new_pool(model, asked, options)
        keep_kinds(model, cache)
        drafted = bool(len(model.mtp)) and options.speculate == "mtp"
        for tokens, skipped in _pieces([prompt for prompt, _ in self.sizes], model.chunk if _chunked(model) else BLOCK):
            row = slice(0, 1)
            cache.leave(0)
            cache.make_room(row, skipped)
            if drafted:
                cache.make_room(row, max(0, skipped - 1), mtp=True)
            cache._main.advance(row, skipped)
            cache.make_room(row, tokens)
            ids = torch.zeros(options.rows, tokens, dtype=torch.int64, device=model.device)
            counts = [tokens] + [0] * (options.rows - 1)
            chunk = {} if _chunked(model) else {"chunk": BLOCK}
            out = model.append(ids, cache, counts, "last", return_streams=drafted, prompt=True, whole=False, **chunk)
            if drafted:
                cache._mtp.advance(row, max(0, skipped - 1))
                block(model, cache, out[1], ids, [tokens - (not skipped), *counts[1:]])  # one token behind
        cache.leave(0)
        for places in {1, options.rows if options.batched else 1}:
            steps(model, PagedView(cache, places), policy.sizes if policy else ())


def _chunked(model: CausalLM) -> bool:
    return model.attention is not None and model.attention.prefill is not None


def _pieces(prompts: Sequence[int], piece: int) -> list[tuple[int, int]]:
    """(tokens, tokens before them) of pieces of these prompts; of pieces that launch the same, one is enough."""
    found = set()
    for prompt in prompts:
        before = 0
        for tokens, skipped in pieces(prompt, piece):
            found.add((tokens, before + skipped))
            before += skipped + tokens
    return sorted(found)
