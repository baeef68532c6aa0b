"""SGLang's Triton kernels, FlashInfer's, and DeepGEMM's product with them, for hyper-connections."""

import torch
import torch.nn.functional as F

from dsv4.probes.kernel_audit.adapters import Adapter, as_it_is
from dsv4.probes.kernel_audit.adapters.installed import at_least, hopper, processors, require

N, MIXES, FACTOR = 4, 24, 2.0  # streams; rows of fn; the factor of post
PIECES = (1, 2, 4, 8, 16)  # numbers of pieces that FlashInfer adds up
SLICE = 64  # numbers of a row of fn that one step of the products reads


def four_streams(at: int):
    """takes(case) of a kernel for four bf16 streams, which are argument `at`."""

    def takes(case) -> str | None:
        streams = case.arguments[at]
        if streams.dtype is not torch.bfloat16:
            return "it takes bf16 streams"
        if streams.shape[1] != N:
            return f"it takes {N} streams, not {streams.shape[1]}"
        return None if streams.shape[2] % SLICE == 0 else f"it takes multiples of {SLICE} dims, not {streams.shape[2]}"

    return takes


def positive_eps(case) -> str | None:
    """FlashInfer wants four bf16 streams and positive eps."""
    eps = case.arguments[5:7]
    return four_streams(0)(case) or (None if min(eps) > 0 else f"it takes eps over 0, not {list(eps)}")


def whole(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Each tensor contiguous."""
    return [t.contiguous() for t in tensors]


def sglang_post(device: str):
    """mhc_post_split_h(out [N, d], streams [N, 4, d], post, comb)."""
    at_least(8)
    merge = require("sglang.kernels.ops.layernorm.mhc_post_split_h").mhc_post_split_h

    def prepare(out, streams, post, comb):
        if not len(out):
            return lambda: torch.empty_like(streams), as_it_is
        fixed = whole(out, streams, post, comb)
        return lambda: merge(*fixed), as_it_is

    return prepare


def flashinfer_post(device: str):
    """mhc_post(out [N, d], streams [N, 4, d], post, comb)."""
    at_least(8)
    module = require("flashinfer.mhc")

    def prepare(out, streams, post, comb):
        if not len(out):
            return lambda: torch.empty_like(streams), as_it_is
        fixed = whole(out, streams, post, comb)
        return lambda: module.mhc_post(*fixed), as_it_is

    return prepare


def mixed(mhc, streams, fn, scale, base, iters, eps, norm_eps):
    """(y, post, comb): hc_mix_stats_sinkhorn(x [N, 4·d], fn, scale, base, 4, iterations, norm_eps, eps), then
    mhc_combine(x, pre, 4, dtype)."""
    flat = streams.flatten(1)
    pre, post, comb = mhc.hc_mix_stats_sinkhorn(flat, fn, scale, base, N, iters, norm_eps, eps)
    return mhc.mhc_combine(flat, pre, N, streams.dtype), post, comb


def nothing(streams) -> tuple[torch.Tensor, ...]:
    """Results of `mhc_pre` for no tokens."""
    empty = lambda *shape: torch.empty(0, *shape, device=streams.device)
    return streams.new_empty(0, streams.shape[2]), empty(N), empty(N, N)


def sglang_pre(device: str):
    """`mixed`."""
    at_least(8)
    mhc = require("sglang.kernels.ops.layernorm.mhc")

    def prepare(streams, fn, scale, base, iters, eps, norm_eps):
        if not len(streams):
            return lambda: nothing(streams), as_it_is
        fixed = *whole(streams, fn, scale, base), iters, eps, norm_eps
        return lambda: mixed(mhc, *fixed), as_it_is

    return prepare


def sglang_pre_norm(device: str):
    """`mixed`, then torch's norm."""
    run_pre = sglang_pre(device)

    def prepare(streams, fn, scale, base, iters, eps, norm_eps, weight, rms_eps):
        pre, _ = run_pre(streams, fn, scale, base, iters, eps, norm_eps)

        def run():
            y, post, comb = pre()
            return F.rms_norm(y, (y.shape[-1],), weight, rms_eps), post, comb

        return run, as_it_is

    return prepare


def sglang_post_pre_norm(device: str):
    """mhc_post_split_h, `mixed` of the new streams, then torch's norm."""
    run_post, mhc = sglang_post(device), require("sglang.kernels.ops.layernorm.mhc")

    def prepare(out, streams, post, comb, fn, scale, base, iters, eps, norm_eps, weight, rms_eps):
        merge, _ = run_post(out, streams, post, comb)
        rest = *whole(fn, scale, base), iters, eps, norm_eps

        def run():
            new = merge()
            y, post, comb = mixed(mhc, new, *rest) if len(new) else nothing(new)
            return new, F.rms_norm(y, (y.shape[-1],), weight, rms_eps), post, comb

        return run, as_it_is

    return prepare


def pieces(tokens: int, width: int, count: int) -> int:
    """Into how many pieces a product of `width` numbers is split on a device of `count` multiprocessors."""
    most = max(1, min(count // -(-tokens // 64), width // SLICE // 4))
    return max(s for s in PIECES if s <= most)


def deep_gemm_flashinfer(device: str):
    """tf32_hc_prenorm_gemm(x [N, 4·d] bf16, fn, products [pieces, N, 24], squares [pieces, N], pieces), then
    mhc_pre_big_fuse(products, squares, streams, scale, base, 4·d, …) → (post [N, 4, 1], comb, y)."""
    hopper()
    gemm, module = require("deep_gemm"), require("flashinfer.mhc")

    def prepare(streams, fn, scale, base, iters, eps, norm_eps):
        if not len(streams):
            return lambda: nothing(streams), as_it_is
        streams, fn, scale, base = whole(streams, fn, scale, base)
        T, flat = len(streams), streams.flatten(1)
        count = pieces(T, flat.shape[1], processors())
        products = torch.empty(count, T, MIXES, device=streams.device)
        squares = torch.empty(count, T, device=streams.device)
        parts = (products, squares) if count > 1 else (products[0], squares[0])
        more = dict(rms_eps=norm_eps, mhc_pre_eps=eps, mhc_sinkhorn_eps=eps, mhc_post_mult_value=FACTOR)
        more |= dict(sinkhorn_repeat=iters, num_splits=count)

        def run():
            gemm.tf32_hc_prenorm_gemm(flat, fn, products, squares, count)
            post, comb, y = module.mhc_pre_big_fuse(*parts, streams, scale, base, flat.shape[1], **more)
            return y, post, comb

        return run, lambda found: (found[0], found[1].squeeze(-1), found[2])

    return prepare


SGL, NO_TOKENS = "sglang 0.5.23 ", "no tokens are answered by the adapter"
MIX = f"{SGL}hc_mix_stats_sinkhorn, mhc_combine"
BIG_FUSE = "deep_gemm (in vllm 0.33.0) tf32_hc_prenorm_gemm, flashinfer 0.7.2 mhc_pre_big_fuse"
ADAPTERS = (
    Adapter(
        *("sglang", "mhc_post", f"{SGL}mhc_post_split_h", sglang_post),
        takes=four_streams(1),
        differs=NO_TOKENS,
    ),
    Adapter(
        *("flashinfer", "mhc_post", "flashinfer 0.7.2 mhc_post", flashinfer_post),
        takes=four_streams(1),
        differs=NO_TOKENS,
    ),
    Adapter(
        *("sglang", "mhc_pre", MIX, sglang_pre),
        takes=four_streams(0),
        differs=f"products are three TF32 products each; {NO_TOKENS}",
    ),
    Adapter(
        *("deep_gemm-flashinfer", "mhc_pre", BIG_FUSE, deep_gemm_flashinfer),
        takes=positive_eps,
        accuracy="tf32",
        differs=f"products are TF32; {NO_TOKENS}",
    ),
    Adapter(
        *("sglang", "mhc_pre_norm", f"{MIX}; torch rms_norm", sglang_pre_norm),
        takes=four_streams(0),
        differs=f"the norm is torch's; {NO_TOKENS}",
    ),
    Adapter(
        *("sglang", "mhc_post_pre_norm", f"{SGL}mhc_post_split_h, {MIX}; torch rms_norm", sglang_post_pre_norm),
        takes=four_streams(1),
        differs=f"the norm is torch's; {NO_TOKENS}",
    ),
)
