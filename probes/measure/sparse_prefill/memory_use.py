"""What sparse prefill takes beside dense: bytes by formula, and the peak of torch's allocator where the device has such
a count."""

import torch

from dsv4.kernels.chunked_prefill import Chunking
from dsv4.kernels.chunked_prefill.triton import splits, tiles
from dsv4.model.causal import CausalLM
from dsv4.probes.measure.sparse_prefill.measures import dense_bytes, extra_bytes, memory_bytes
from dsv4.probes.measure.sparse_prefill.reading import cut_by
from dsv4.probes.measure.sparse_prefill.settings import way

GOAL = 0.05  # of the dense call, at most
ASSUMED = (9, 0)  # capability that the formula's tiles are of: an H100's


def rows(
    model: CausalLM, cuts: list[Chunking], contexts: list[int], held: dict[Chunking, tuple[int, int]]
) -> list[dict]:
    """A row a cut and context, as JSON values. held: cut → (tokens read, bytes of all memories that the model then
    held), which must be what the formula says (ValueError otherwise)."""
    c, found = model.config, []
    heads, kv, D, itemsize = c.num_attention_heads, c.num_key_value_heads, c.head_dim, 2  # bf16
    layers = sum(window is None for window in c.windows)
    for cut in cuts:
        sets = cut.sets(heads, kv)
        parts = splits(tiles(False, D, cut, ASSUMED), cut, heads // sets)
        if cut in held and layers * memory_bytes(1, held[cut][0], sets, cut) != held[cut][1]:
            raise ValueError(
                f"the formula says {layers * memory_bytes(1, held[cut][0], sets, cut)} bytes, and {held[cut][1]} are "
                "held"
            )
        for tokens in contexts:
            more, dense = (
                extra_bytes(1, tokens, heads, sets, cut, parts),
                dense_bytes(1, tokens, heads, kv, D, itemsize),
            )
            kept = layers * memory_bytes(1, tokens, sets, cut)
            peak = measured(model, cut, tokens)
            found.append(
                way(cut)
                | {
                    "context": tokens,
                    "call_extra": more,
                    "call_dense": dense,
                    "call_share": more / dense,
                    "verdict": "met" if more < GOAL * dense else "MISSED",
                    "held_layers": kept,
                    "cache": 2 * layers * tokens * kv * D * itemsize,
                    "measured": peak,
                }
            )
    return found


def measured(model: CausalLM, cut: Chunking, tokens: int) -> dict | None:
    """Most bytes of torch's allocator while `tokens` tokens are read densely, and in chunks, in pieces as `generate`
    takes them; None on a host processor, whose plain torch has other buffers than the kernels."""
    if model.device.type != "cuda":
        return None
    found, ids = {}, torch.zeros(1, tokens, dtype=torch.int64, device=model.device)
    for name, how in (("dense", None), ("sparse", cut)):
        with cut_by(model, how):
            cache = model.new_cache(1, tokens)
            for _ in range(2):  # the first call compiles
                cache.reset()
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats(model.device)
                model.append(ids, cache, logits="last", prompt=True)
            torch.cuda.synchronize()
            found[name] = torch.cuda.max_memory_allocated(model.device)
            del cache
    return found
