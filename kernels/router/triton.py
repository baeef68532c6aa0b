"""Expert routing on a GPU.

By score: the logits of a few tokens are computed in pieces of the columns, so that the whole GPU reads the gate's 2 MB;
then one warp a token sums the pieces and chooses. By hash: one program a token reads the rows of its experts only.
"""

import torch
import triton
import triton.language as tl

from dsv4.kernels.errors import UnsupportedInput
from dsv4.kernels.launch import dependent_launch, dot_in_fp32, next_power, require_device
from dsv4.kernels.linear.triton import gemm
from dsv4.kernels.linear.triton_skinny import skinny, tokens
from dsv4.kernels.linear.triton_streams import TOKENS, early
from dsv4.kernels.linear.triton_weights import check, hold
from dsv4.kernels.linear.triton_words import begin, launch_dependents
from dsv4.kernels.quantize.triton_codes import widen
from dsv4.kernels.quantize.weights import PackedWeight, WeightFormat
from dsv4.kernels.router import reference

PIECE = 512  # columns of a program's part of the logits
SLICES = 4  # slices of 128 columns that its warps take in parallel
SPLIT_TOKENS = 4 * TOKENS  # tokens up to which logits are computed in pieces, for TOKENS of them at a time
MAX_EXPERTS = 4096
HASH_COLUMNS = 4096


def route_scored(x, weight, bias, topk: int, routed_scaling_factor: float):
    require_device("route_scored", x, weight, bias)
    x = check("route_scored", x, weight.shape[1])
    (N, D), E = x.shape, weight.shape[0]
    if not 1 <= topk <= E <= MAX_EXPERTS:
        raise UnsupportedInput(f"route_scored: {topk} of {E} experts; the triton backend takes up to {MAX_EXPERTS}")
    indices, weights = _results(x, topk)
    if not N:
        return indices, weights
    h, pdl = hold("route_scored", PackedWeight(WeightFormat.DENSE, weight)), dependent_launch(x.device)
    if N <= SPLIT_TOKENS and h.streams:
        fp32, pieces = dot_in_fp32(x) or h.format == "fp32", triton.cdiv(D, PIECE)
        logits = torch.empty(pieces, N, E, dtype=torch.float32, device=x.device)
        _logits[(triton.cdiv(E, 16), pieces, triton.cdiv(N, TOKENS))](
            x,
            N,
            x.stride(0),
            h.words,
            logits,
            E,
            D,
            PIECE,
            SLICES,
            2,
            1 if N <= 8 else 2,
            h.format,
            fp32,
            early(x.device),
            num_warps=SLICES,
            num_stages=1,
            launch_pdl=pdl,
        )
    else:
        pieces, logits = 1, torch.empty(1, N, E, dtype=torch.float32, device=x.device)
        gemm("route_scored", x, h, logits[0], 1)
    _choose[(N,)](
        logits,
        N,
        pieces,
        bias.contiguous(),
        indices,
        weights,
        float(routed_scaling_factor),
        E,
        topk,
        next_power(E),
        next_power(topk),
        pdl,
        num_warps=max(1, next_power(E) // 1024),
        launch_pdl=pdl,
    )
    return indices, weights


def route_hashed(x, weight, tid2eid, ids, routed_scaling_factor: float):
    require_device("route_hashed", x, weight, tid2eid, ids)
    x = check("route_hashed", x, weight.shape[1])
    hold("route_hashed", PackedWeight(WeightFormat.DENSE, weight))  # raises for unsupported dtypes
    (N, D), k = x.shape, tid2eid.shape[1]
    indices, weights = _results(x, k)
    early = dependent_launch(x.device)
    if N:
        _look_up[(N,)](
            x,
            x.stride(0),
            weight.contiguous(),
            tid2eid.contiguous(),
            ids.contiguous(),
            indices,
            weights,
            float(routed_scaling_factor),
            D,
            k,
            next_power(k),
            min(HASH_COLUMNS, next_power(D)),
            early,
            num_warps=8,
            launch_pdl=early,
        )
    return indices, weights


route_scored.__doc__, route_hashed.__doc__ = reference.route_scored.__doc__, reference.route_hashed.__doc__


def _results(x: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    return tuple(torch.empty(x.shape[0], k, dtype=dtype, device=x.device) for dtype in (torch.int64, torch.float32))


@triton.jit(do_not_specialize=["N"])
def _logits(
    X,
    N,
    x_stride,
    W,
    Y,
    E: tl.constexpr,
    D: tl.constexpr,
    PIECE: tl.constexpr,
    KS: tl.constexpr,
    RH: tl.constexpr,
    NH: tl.constexpr,
    FORMAT: tl.constexpr,
    FP32: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Y fp32 [pieces, N, E]: sums over PIECE columns each. Programs: rows of the gate, pieces, groups of tokens."""
    token, mine = tokens(KS, NH, False)
    first, piece, before = tl.program_id(0) * (8 * RH), tl.program_id(1), tl.program_id(2) * (8 * NH)
    launch_dependents(EARLY)
    y = skinny(
        X,
        (before + token).to(tl.int64) * x_stride,
        mine & (before + token < N),
        W,
        None,
        first,
        E,
        D,
        KS,
        RH,
        NH,
        FORMAT,
        FP32,
        1,
        128,
        begin=piece * PIECE,
        SPAN=PIECE,
        EARLY=EARLY,
    )
    e, t = first + tl.arange(0, 8 * RH), before + tl.arange(0, 8 * NH)
    tl.store(Y + (piece * N + t[None, :]) * E + e[:, None], y, mask=(e[:, None] < E) & (t[None, :] < N))


@triton.jit
def _score(logit):
    """sqrt(softplus(l)), in the dtype of l, relatively exact also where 1 + e^l is 1."""
    # F.softplus: l itself above 20, else log1p(exp(l)); log1p(z) = log(u)·z/(u − 1) for u = 1 + z as rounded
    z = tl.exp(tl.where(logit > 20, 0.0, logit))
    u = 1 + z
    log1p = tl.where(u == 1, z, tl.log(u) * (z / tl.where(u == 1, 1.0, u - 1)))
    return tl.sqrt(tl.where(logit > 20, logit, log1p))


@triton.jit
def _weigh(logit, live, factor):
    """Weights fp32 of the chosen experts' logits fp32 [B]. Far below 0 a score is e^(l/2), which underflows later than
    e^l. If all logits are there, scores relative to the largest neither underflow nor sum to 0."""
    # chosen / chosen.sum(-1, keepdim=True) * routed_scaling_factor
    top = tl.max(tl.where(live, logit, float("-inf")), 0)
    far = tl.exp(0.5 * tl.minimum(tl.where(top < -80, logit - top, logit), 0.0))
    score = tl.where(live, tl.where(logit < tl.where(top < -80, 0.0, -20.0), far, _score(logit)), 0.0)
    return score / tl.sum(score, 0) * factor


@triton.jit(do_not_specialize=["N"])
def _choose(
    LOGITS,
    N,
    PIECES: tl.constexpr,
    BIAS,
    INDICES,
    WEIGHTS,
    factor,
    E: tl.constexpr,
    K: tl.constexpr,
    B: tl.constexpr,
    BK: tl.constexpr,
    EARLY: tl.constexpr,
):
    begin(EARLY)
    token, e = tl.program_id(0).to(tl.int64), tl.arange(0, B)
    logit = tl.zeros([B], tl.float32)
    for piece in tl.static_range(PIECES):
        logit += tl.load(LOGITS + (piece * N + token) * E + e, mask=e < E, other=0.0)
    biased = _score(logit) + tl.load(BIAS + e, mask=e < E, other=0.0)
    # torch.topk(scores.float() + bias): fp32 as integers in their order, NaN above all; of equals the first
    bits = tl.where(biased != biased, 0x7FC00000, biased.to(tl.int32, bitcast=True))
    key = tl.where(e < E, bits ^ ((bits >> 31) & 0x7FFFFFFF), -0x80000000)
    j = tl.arange(0, BK)
    chosen = tl.zeros([BK], tl.int32)
    for slot in tl.static_range(K):
        best = tl.min(tl.where(key == tl.max(key, 0), e, B), 0)
        key = tl.where(e == best, -0x80000000, key)
        chosen = tl.where(j == slot, best, chosen)
    logit = tl.zeros([BK], tl.float32)
    for piece in tl.static_range(PIECES):
        logit += tl.load(LOGITS + (piece * N + token) * E + chosen, mask=j < K, other=0.0)
    tl.store(INDICES + token * K + j, chosen.to(tl.int64), mask=j < K)
    tl.store(WEIGHTS + token * K + j, _weigh(logit, j < K, factor), mask=j < K)


@triton.jit
def _look_up(
    X,
    x_stride,
    W,
    TABLE,
    IDS,
    INDICES,
    WEIGHTS,
    factor,
    D: tl.constexpr,
    K: tl.constexpr,
    BK: tl.constexpr,
    B: tl.constexpr,
    EARLY: tl.constexpr,
):
    begin(EARLY)
    token, j, i = tl.program_id(0).to(tl.int64), tl.arange(0, BK), tl.arange(0, B)
    chosen = tl.load(TABLE + tl.load(IDS + token) * K + j, mask=j < K, other=0)
    total = tl.zeros([BK, B], tl.float32)
    for d in range(0, D, B):
        w = widen(
            tl.load(W + chosen[:, None] * D + (d + i)[None, :], mask=(j < K)[:, None] & (d + i < D)[None, :], other=0.0)
        )
        x = widen(tl.load(X + token * x_stride + d + i, mask=d + i < D, other=0.0))
        total += w * x[None, :]
    tl.store(INDICES + token * K + j, chosen, mask=j < K)
    tl.store(WEIGHTS + token * K + j, tl.sum(total, 1), mask=j < K)
    tl.debug_barrier()
    # read back, one per lane: a sum would leave all of them in every lane
    logit = tl.load(WEIGHTS + token * K + j, mask=j < K, other=0.0)
    tl.store(WEIGHTS + token * K + j, _weigh(logit, j < K, factor), mask=j < K)
