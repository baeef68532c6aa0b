"""Rows that are read together, each beside itself alone."""

import torch

from dsv4.kernels.chunked_prefill import Chunking
from dsv4.probes.measure.base.text import Text
from dsv4.probes.measure.sparse_prefill.reading import read
from dsv4.probes.measure.sparse_prefill.settings import way

TOLERANCE = 1e-3  # of logits, in fp32: sums over rows of other shapes round differently


def compared(model, cut: Chunking, text: Text, seed: int) -> dict:
    """Three rows of different lengths, as JSON values: the largest difference of a logit, and the share of memory
    tokens that are the same."""
    lengths = [4 * cut.chunk - 1, 3 * cut.chunk, 2 * cut.chunk + cut.chunk // 3]
    lengths = [min(n, model.config.max_position_embeddings, len(text.ids)) for n in lengths]
    rows = torch.zeros(len(lengths), max(lengths), dtype=torch.int64)
    for b, n in enumerate(lengths):
        begin = (seed + b * len(text.ids) // len(lengths)) % (len(text.ids) - n + 1)
        rows[b, :n] = torch.from_numpy(text.ids[begin : begin + n].copy())
    together = read(model, rows, cut, cut.chunk, counts=lengths)
    apart, same, of = 0.0, 0, 0
    for b, n in enumerate(lengths):
        alone = read(model, rows[b : b + 1, :n], cut, cut.chunk)
        for at in range(0, n, 1024):
            places = slice(at, min(at + 1024, n))
            apart = max(apart, (together.logits(model, b, places) - alone.logits(model, 0, places)).abs().max().item())
        for layer, own in alone.positions.items():
            until = cut.chunks(n)
            mine, theirs = own[1:until, 0], together.positions[layer][1:until, b]
            same += sum(
                len(set(x.tolist()) & set(y.tolist())) for x, y in zip(mine.flatten(0, 1), theirs.flatten(0, 1))
            )
            of += mine.numel()
    return {
        "lengths": lengths,
        **way(cut),
        "largest_difference": apart,
        "same_memory": same / of,
        "verdict": "met" if apart < TOLERANCE else "MISSED",
        "tolerance": TOLERANCE,
    }
