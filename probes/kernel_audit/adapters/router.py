"""vLLM's router for `route_scored` and `route_hashed`, behind torch's product."""

from functools import partial

import torch
import torch.nn.functional as F

from dsv4.probes.kernel_audit.adapters import Adapter
from dsv4.probes.kernel_audit.adapters.installed import at_least, library

NUMBERS = (1, 2, 4, 8, 16, 32, 64, 128, 192, 256, 320, 384, 512)  # of experts that the kernel is compiled for


def numbers_of(case) -> str | None:
    """Whether the kernel is compiled for the case's number of experts."""
    experts = case.arguments[1].shape[0]
    return None if experts in NUMBERS else f"it takes {', '.join(map(str, NUMBERS))} experts, not {experts}"


def as_pairs(found):
    """(weights, experts int32) → (experts int64, weights)."""
    return found[1].long(), found[0]


def router(hashed: bool, device: str):
    """topk_softplus_sqrt(weights, experts int32, places, logits, True, factor, bias, ids, table, None) of the logits
    x·Wᵀ in fp32. Ids and table are int32 and None without a table."""
    at_least(8)
    op = library("_moe_C_stable_libtorch", "_moe_C").topk_softplus_sqrt

    def call(x, gate, k, factor, *lists):
        x, gate = x.float(), gate.float()

        def run():
            weights = torch.empty(len(x), k, device=x.device)
            experts, places = (torch.empty(len(x), k, dtype=torch.int32, device=x.device) for _ in range(2))
            if len(x):
                op(weights, experts, places, F.linear(x, gate), True, factor, *lists, None)
            return weights, experts

        return run, as_pairs

    def scored(x, gate, bias, topk, factor):
        return call(x, gate, topk, factor, bias.float().contiguous(), None, None)

    def by_id(x, gate, tid2eid, ids, factor):
        table = tid2eid.int().contiguous()
        return call(x, gate, table.shape[1], factor, None, ids.int(), table)

    return by_id if hashed else scored


ABOUT = "torch linear, vllm 0.33.0 torch.ops._moe_C.topk_softplus_sqrt"
FP32 = "scores are fp32; the product is torch's; no tokens are answered by the adapter"
ADAPTERS = (
    Adapter("vllm", "route_scored", ABOUT, partial(router, False), numbers_of, "scores-fp32", FP32),
    Adapter("vllm", "route_hashed", ABOUT, partial(router, True), numbers_of, "scores-fp32", FP32),
)
