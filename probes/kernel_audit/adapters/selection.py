"""DeepGEMM's scores with vLLM's or torch's top-k, for `select_entries`."""

from dataclasses import replace
from functools import partial

import torch

from dsv4.kernels.cache_rows import RowFormat
from dsv4.probes.kernel_audit.adapters import Adapter
from dsv4.probes.kernel_audit.adapters.indexer import WORKSPACE, deep_gemm, keys_in
from dsv4.probes.kernel_audit.adapters.installed import library

COMPILED = (512, 1024, 2048)  # k of vLLM's kernels
fp8_keys = keys_in(RowFormat.INDEX_FP8)


def scored(case) -> str | None:
    """What DeepGEMM's scores take."""
    return fp8_keys(replace(case, arguments=case.arguments[:4]))


def compiled(case) -> str | None:
    """What DeepGEMM's scores and vLLM's top-k take."""
    k = case.arguments[4]
    return scored(case) or (None if k in COMPILED else f"it takes k of 512, 1024 or 2048, not {k}")


def with_vllm(name: str, device: str):
    """The scores, then torch.ops._C.NAME(scores, lengths, out, workspace, k, longest)."""
    scores_of, op = deep_gemm(device), getattr(library("_C_stable_libtorch", "_C"), name)
    workspace = torch.zeros(WORKSPACE, dtype=torch.uint8, device=device)

    def prepare(q, weights, keys, visible, k, rounded):
        score, _ = scores_of(q, weights, keys, visible)
        (B, T), count, lengths = q.shape[:2], min(k, keys.count), visible.flatten().int()

        def run():
            out = torch.full((B * T, k), -1, dtype=torch.int32, device=q.device)
            scores = score()  # rows of a multiple of 256 numbers, so aligned
            op(scores, lengths, out, workspace, k, scores.shape[1])
            return out

        return run, lambda found: found[:, :count].long().view(B, T, count)

    return prepare


def with_torch(device: str):
    """The scores with −inf behind the lengths, then torch.topk; picks of −inf become −1."""
    scores_of = deep_gemm(device)

    def prepare(q, weights, keys, visible, k, rounded):
        score, finish = scores_of(q, weights, keys, visible)
        count = min(k, keys.count)

        def run():
            best = finish(score()).topk(count, -1, sorted=False)
            return best.indices.masked_fill(best.values == float("-inf"), -1)

        return run, lambda found: found

    return prepare


SCORES, DIFFERS = "deep_gemm (in vllm 0.33.0) fp8_fp4_paged_mqa_logits, ", "queries are E4M3, quantised beforehand"
ADAPTERS = (
    *(
        Adapter(
            *(f"deep_gemm-{short}", "select_entries", f"{SCORES}vllm 0.33.0 {name}", partial(with_vllm, name)),
            takes=compiled,
            differs=DIFFERS,
        )
        for short, name in (("vllm", "cooperative_topk"), ("vllm-persistent", "persistent_topk"))
    ),
    Adapter(
        *("deep_gemm-torch", "select_entries", f"{SCORES}torch.topk", with_torch),
        takes=scored,
        differs=DIFFERS,
    ),
)
