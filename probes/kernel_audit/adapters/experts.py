"""vLLM's Marlin kernels for `experts`."""

import torch

from dsv4.kernels.quantize import WeightFormat
from dsv4.probes.kernel_audit.adapters import Adapter, as_it_is
from dsv4.probes.kernel_audit.adapters.installed import at_least, library
from dsv4.probes.kernel_audit.adapters.marlin import E2M1, locks, padded_rows, permuted_scales, repacked

WIDTH = 128  # columns of either product are a multiple of this
BLOCKS, MOST, FULL = (8, 16, 32, 48), 64, 0.9  # rows of a tile, and how full it may be on average


def mxfp4_plain(case) -> str | None:
    """MXFP4 weights and bf16 activations as they are."""
    x, _, _, w13, w2, limit, simulate = case.arguments
    if x.dtype is not torch.bfloat16:
        return "it takes bf16 activations"
    if w13.format is not WeightFormat.MXFP4 or w2.format is not WeightFormat.MXFP4:
        return "it takes MXFP4 weights"
    if simulate:
        return "it does not round activations to FP8"
    D, I = x.shape[1], w2.weight.shape[-1] * 2
    if D % WIDTH or I % WIDTH:
        return f"it takes multiples of {WIDTH} columns, not {D} and {I}"
    return None if limit is not None and limit > 0 else "it takes a clamp over 0"


def tile_of(pairs: int, experts: int) -> tuple[int, int]:
    """(rows of a tile, slots of the sorted list) for pairs of a token and an expert."""
    tile = next((b for b in BLOCKS if pairs / experts / b < FULL), MOST)
    slots = pairs + experts * (tile - 1)
    return tile, min(pairs * tile, slots) if pairs < experts else slots


class Product:
    """moe_wna16_marlin_gemm of sorted pairs. `sorted`: (order, owner, padded length) as moe_align_block_size writes
    them."""

    def __init__(self, op, sorted, routing, tile: int):
        self.op, self.sorted, self.routing, self.tile = op, sorted, routing, tile
        self.locks = locks(routing.device)

    def __call__(self, a, out, weight, scale, top_k: int, weighted: bool):
        size = a.shape[0], out.shape[1], a.shape[1]
        parts = a, out, weight, None, scale, None, None, None, self.locks, *self.sorted, self.routing
        self.op(*parts, self.tile, top_k, weighted, E2M1, *size, False, True, False, -1, -1, -1)


def marlin(device: str):
    """moe_align_block_size, moe_wna16_marlin_gemm, silu_and_mul_with_clamp, moe_wna16_marlin_gemm with the routing
    weights, and the sum over a token's experts."""
    at_least(8)
    moe, ops = library("_moe_C_stable_libtorch", "_moe_C"), library("_C_stable_libtorch", "_C")

    def prepare(x, indices, routing, w13, w2, limit, simulate):
        (N, k), (E, rows, _), D = indices.shape, w13.weight.shape, x.shape[1]
        if not N:
            return lambda: torch.empty(0, D, device=x.device), as_it_is
        x, chosen, routing = x.contiguous(), indices.int().contiguous(), routing.contiguous()
        (tile, slots), whole = tile_of(N * k, E), lambda n: torch.empty(n, dtype=torch.int32, device=x.device)
        sorted = whole(slots), whole(-(-slots // tile)), whole(1)
        product = Product(moe.moe_wna16_marlin_gemm, sorted, routing, tile)
        packed = [repacked(ops.gptq_marlin_repack, w.weight) for w in (w13, w2)]
        scales = [permuted_scales(padded_rows(w, WIDTH)[1]) for w in (w13, w2)]
        gate_up, hidden, down = (x.new_empty(N * k, n) for n in (rows, rows // 2, D))

        def run():
            moe.moe_align_block_size(chosen, E, tile, *sorted, None)
            product(x, gate_up, packed[0], scales[0], k, False)
            ops.silu_and_mul_with_clamp(hidden, gate_up, limit, 1.0, 0.0)
            product(hidden, down, packed[1], scales[1], 1, True)
            return down.view(N, k, D).sum(1)

        return run, lambda out: out.float()

    return prepare


ADAPTERS = (
    Adapter(
        *("marlin", "experts", "vllm 0.33.0 torch.ops._moe_C.moe_wna16_marlin_gemm", marlin),
        takes=mxfp4_plain,
        accuracy="weight-after-w2",
        differs="results of both products and the sum over experts are rounded to bf16; no tokens are answered by the "
        "adapter",
        prepared=("indices", "w13", "w2"),
    ),
)
