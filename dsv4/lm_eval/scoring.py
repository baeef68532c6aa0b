"""Log-likelihoods of continuations, from token ids: ragged batches through a model's `append`. Needs no lm_eval."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from dsv4.errors import InputError
from dsv4.model.causal import DECODED, CausalLM

SCORED = 256  # tokens whose logits [n, vocab] exist at once


class Row(NamedTuple):
    """Token ids that run: all but the last of a context and its continuation. The last `tail` of them predict the
    continuation."""

    ids: tuple[int, ...]
    tail: int


def row_of(context: Sequence[int], continuation: Sequence[int], most: int) -> Row:
    """The row of at most `most` tokens; a longer one loses its first tokens. Raises InputError for a continuation of
    no token, and of more than `most`."""
    n = len(continuation)
    if not n:
        raise InputError("a continuation adds no token to its context, so it has no log-likelihood")
    if n > most:
        raise InputError(f"a continuation has {n} tokens, over the {most} of the context; raise max_context")
    return Row(tuple([*context, *continuation][-most - 1 : -1]), n)


@torch.inference_mode()
def scores(
    model: CausalLM,
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
    most: int,
    batch_size: int,
    decoded: bool,
    done: Callable[[int], object] = lambda pairs: None,
) -> list[tuple[float, bool]]:
    """(sum of log-probabilities in nats, whether each token is the likeliest) of each continuation in `pairs` (context
    ids, continuation ids), in their order.

    most: tokens of a row; batch_size: rows that run together, of about one length. Continuations that differ in their
    last token alone share a row. decoded: tokens of a continuation run as decoding, else as a prompt. done(pairs that
    have come). Raises InputError as `row_of`.
    """
    shared, found = defaultdict(list), [(0.0, True)] * len(pairs)
    for number, pair in enumerate(pairs):
        shared[row_of(*pair, most)].append(number)
    rows = sorted(shared, key=lambda row: -len(row.ids))
    for start in range(0, len(rows), batch_size):
        batch = rows[start : start + batch_size]
        for row, at, logits in _logits(model, batch, decoded):
            likeliest, logs = logits.argmax(-1).cpu(), logits.log_softmax(-1)
            for number in shared[row]:
                ids = torch.tensor(pairs[number][1][at : at + len(likeliest)])
                own = logs.gather(1, ids.unsqueeze(1).to(logs.device)).double().sum()
                total, greedy = found[number]
                found[number] = total + float(own), greedy and bool((ids == likeliest).all())
        done(sum(len(shared[row]) for row in batch))
    return found


def _logits(model: CausalLM, rows: Sequence[Row], decoded: bool) -> Iterator[tuple[Row, int, torch.Tensor]]:
    """(row, at, logits fp32 [n, vocab]) that predict tokens at … of its continuation, in order; n ≤ SCORED."""
    ends = [len(row.ids) for row in rows]
    prompts = [end - (row.tail - 1 if decoded else 0) for end, row in zip(ends, rows)]
    cache = model.new_cache(len(rows), max(ends), 0)
    for stops, width, prompt in ((prompts, model.chunk, True), (ends, DECODED, False)):
        while any(now < stop for now, stop in zip(cache.lengths, stops)):
            begin = cache.lengths
            counts = [min(width, stop - now) for stop, now in zip(stops, begin)]
            ids = torch.zeros(len(rows), max(counts), dtype=torch.int64)
            for b, row in enumerate(rows):
                ids[b, : counts[b]] = torch.tensor(row.ids[begin[b] : begin[b] + counts[b]], dtype=torch.int64)
            _, streams = model.append(ids, cache, counts, logits="none", return_streams=True, prompt=prompt)
            for b, row in enumerate(rows):
                first = ends[b] - row.tail  # this token predicts the first one of the continuation
                for at in range(max(begin[b], first), begin[b] + counts[b], SCORED):
                    part = streams[b, at - begin[b] : min(at - begin[b] + SCORED, counts[b])]
                    yield row, at - first, model.head(model.features(part))
