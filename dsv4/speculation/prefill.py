"""Prompts of a ragged batch, with the streams that drafting needs: what every generation from an empty cache begins
with."""

from collections.abc import Callable

import torch

from dsv4.cache.cache import Cache
from dsv4.model.causal import CausalLM
from dsv4.model.cut_values import Logits

OnStreams = Callable[[torch.Tensor, torch.Tensor, list[int]], None]


def prefill(
    model: CausalLM,
    cache: Cache,
    prompts: list[list[int]],
    on_streams: OnStreams | None = None,
    on_prefill: Callable[[int, int], None] | None = None,
    chunk: int | None = None,
) -> tuple[Logits, torch.Tensor | None]:
    """Append the prompts to an empty cache in pieces of `chunk` tokens, by default `model.chunk_beside(cache)`.

    on_streams(streams [B, T, n, d], next ids int64 [B, T], counts): the main model's streams of a piece, the token
    after each, and for how many positions of each row that token is known (after a prompt's last token it is not).
    on_prefill(done, total). Returns the logits [B, 1, vocab] of each row's last token, of several ranks each its own,
    and, if on_streams is given, its streams [B, 1, n, d].
    """
    lengths, chunk = [len(row) for row in prompts], chunk or model.chunk_beside(cache)
    longest, held, logits = max(lengths), None, None
    ids = torch.tensor([row + [0] * (longest - n) for row, n in zip(prompts, lengths)])
    for start in range(0, longest, chunk):
        counts = [min(chunk, max(0, n - start)) for n in lengths]
        ending = [b for b, n in enumerate(lengths) if start < n <= start + chunk]
        out = model.append(
            ids[:, start : start + chunk],
            cache,
            n_new=counts,
            logits="last" if ending else "none",
            return_streams=on_streams is not None,
            prompt=True,
            whole=False,
        )
        fresh, streams = out if on_streams is not None else (out, None)
        if ending:
            logits = fresh.clone() if logits is None else logits
            logits[ending] = fresh[ending]
        if streams is not None:
            held = streams[:, :1].clone() if held is None else held
            for b in ending:
                held[b, 0] = streams[b, counts[b] - 1]
            known = [max(0, min(n - 1, start + chunk) - start) for n in lengths]
            on_streams(
                streams, torch.nn.functional.pad(ids, (0, 1))[:, start + 1 : start + 1 + streams.shape[1]], known
            )
        if on_prefill is not None:
            on_prefill(min(start + chunk, longest), longest)
    return logits, held
