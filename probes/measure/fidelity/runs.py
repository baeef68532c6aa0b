"""The texts that fidelity is measured on: a prompt, a greedy continuation of it, and the text's own continuation by
teacher forcing."""

from collections.abc import Callable

import torch

from dsv4.cache.cache import Cache
from dsv4.model.causal import CausalLM
from dsv4.probes.measure.base.asking import PASS, Limits
from dsv4.probes.measure.base.logits import Positions, exact_prefixes, joined, positions
from dsv4.probes.measure.base.models import Advance, Say
from dsv4.probes.measure.base.variants import Variant

HELD = 1 << 30  # bytes of the exact run's logits that exist at once
See = Callable[[int, torch.Tensor], None]


def compare(
    model: CausalLM,
    variants: list[Variant],
    ids: torch.Tensor,
    tail: int,
    new: int,
    limits: Limits,
    say: Say = lambda text: None,
    advance: Advance = lambda tokens: None,
) -> dict[str, tuple[Positions, list[int]]]:
    """Each variant but the first against the first, the exact run: name → (positions, exact prefixes).

    ids int64 [B, T]: the first T − tail tokens of each row are its prompt, prefilled; `new` tokens follow it greedily,
    and then, after a rewind, the row's own last `tail` tokens are predicted: B · tail positions, by batch, pass and
    row. The prompt's last token is run as decoding.
    """
    exact, others = variants[0], variants[1:]
    (B, T), vocab = ids.shape, model.config.vocab_size
    shared = all(v.decode_only for v in variants)  # then prompts are the same under all of them, and are run once
    size = max(1, min(limits.tokens // T, HELD // (4 * tail * vocab)))
    parts: dict[str, list[Positions]] = {v.name: [] for v in others}
    prefixes: dict[str, list[int]] = {v.name: [] for v in others}
    for batch in ids.split(size):
        kept: list[torch.Tensor] = []
        say(f"{exact.name}: {len(batch)} rows of {T} tokens")
        cache = prefilled(model, exact, batch, tail, new, limits.chunk) if shared else None
        dense = run(model, exact, batch, tail, new, limits.chunk, lambda at, logits: kept.append(logits.cpu()), cache)
        logits = torch.cat(kept, 1)
        advance(batch.numel())
        for variant in others:

            def see(at: int, own: torch.Tensor) -> None:
                places = slice(at, at + own.shape[1])
                following = batch[:, T - tail :][:, places]
                parts[variant.name].append(
                    positions(logits[:, places].to(own.device).flatten(0, 1), own.flatten(0, 1), following.flatten())
                )

            say(f"{variant.name}: {len(batch)} rows of {T} tokens")
            prefixes[variant.name] += exact_prefixes(
                dense, run(model, variant, batch, tail, new, limits.chunk, see, cache)
            )
            advance(batch.numel())
    return {v.name: (joined(parts[v.name]), prefixes[v.name]) for v in others}


def prefilled(model: CausalLM, variant: Variant, ids: torch.Tensor, tail: int, new: int, chunk: int) -> Cache:
    """A cache that holds what comes before the last token of the prompt, the first T − tail tokens of ids int64 [B, T],
    with room for the whole row and for a continuation of `new` tokens."""
    B, T = ids.shape
    prompt = T - tail
    with variant.on(model):
        cache = model.new_cache(B, max(T, prompt + new), max_rewind=max(new, 1))
        if prompt > 1:
            model.append(ids[:, : prompt - 1], cache, logits="none", chunk=chunk, prompt=True)
    return cache


def run(
    model: CausalLM,
    variant: Variant,
    ids: torch.Tensor,
    tail: int,
    new: int,
    chunk: int,
    see: See,
    cache: Cache | None = None,
) -> torch.Tensor:
    """The greedy continuation int64 [B, new] of the first T − tail tokens of ids [B, T]; see(at, logits [B, n, vocab])
    is given what predicts the row's own tokens T − tail + at …, in order. Variants that act in decoding alone run both
    in passes of PASS tokens.
    cache: as `prefilled` gives it, of any variant that acts in decoding alone, and left so (None, and for variants that
    are not resumable: prefilled under this variant)."""
    T, given = ids.shape[1], cache is not None and variant.resumable
    prompt = T - tail
    cache = cache if given else prefilled(model, variant, ids, tail, new, chunk)
    with variant.resumed(model, cache) if given else variant.on(model):
        continuation, token = [], ids[:, prompt - 1 : prompt]
        for _ in range(new):
            token = model.append(token, cache, logits="last").argmax(-1).cpu()
            continuation.append(token)
        cache.rewind(new)
        each = PASS if variant.decode_only else chunk
        for at in range(0, tail, each):
            stop = min(at + each, tail)
            see(
                at,
                model.append(
                    ids[:, prompt - 1 + at : prompt - 1 + stop], cache, chunk=chunk, prompt=not variant.decode_only
                ),
            )
        if given:
            cache.rewind(tail)
    return torch.cat(continuation, 1) if new else ids[:, :0]
