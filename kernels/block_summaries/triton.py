"""Summaries of blocks on the GPU: a program for each touched block, head and slice of channels."""

import torch
import triton
import triton.language as tl

from dsv4.kernels.block_summaries import reference
from dsv4.kernels.errors import UnsupportedInput
from dsv4.kernels.launch import dependent_launch, next_power, require_device
from dsv4.kernels.quantize.triton_codes import narrow, widen

CHANNELS = 64  # of a program
LARGEST = 1 << 8  # tokens of a block that a program holds


def summarise_blocks(
    keys: torch.Tensor,
    start: torch.Tensor,
    tokens: int,
    low: torch.Tensor | None,
    high: torch.Tensor | None,
    mean: torch.Tensor | None,
    block: int,
) -> None:
    """Computes what the reference does, for contiguous bf16 and fp32; raises UnsupportedInput beyond."""
    require_device("summarise_blocks", keys, start, low, high, mean)
    (B, KV, S, D), written = keys.shape, [t for t in (low, high, mean) if t is not None]
    check(keys, start, low, high, mean, block)
    if not written or not tokens or not keys.numel():
        return
    columns, early = min(CHANNELS, max(16, next_power(D))), dependent_launch(keys.device)
    some, pooled = low if low is not None else keys, mean if mean is not None else keys
    grid = reference.touched_blocks(tokens, block), B * KV, triton.cdiv(D, columns)
    _summarise[grid](
        keys,
        start,
        some,
        high if high is not None else keys,
        pooled,
        tokens,
        KV,
        S,
        written[0].shape[2],
        D,
        columns,
        block,
        low is not None,
        mean is not None,
        early,
        num_warps=4,
        launch_pdl=early,
    )


summarise_blocks.__doc__ = f"{reference.summarise_blocks.__doc__}\n\n    {summarise_blocks.__doc__}"


def check(keys, start, low, high, mean, block: int) -> None:
    """Raise UnsupportedInput for what the kernel cannot take."""
    B, KV, S, D = keys.shape
    if (low is None) != (high is None):
        raise UnsupportedInput("summarise_blocks takes low and high together; found only one of them")
    if block > LARGEST or block & (block - 1):
        raise UnsupportedInput(f"summarise_blocks takes blocks of up to {LARGEST} tokens, a power of two, not {block}")
    if start.dtype is not torch.int64 or start.shape != (B,):
        raise UnsupportedInput(f"summarise_blocks takes start as int64 [{B}], not {start.dtype} {tuple(start.shape)}")
    for name, t in (("keys", keys), ("low", low), ("high", high), ("mean", mean)):
        if t is None:
            continue
        if not t.is_contiguous() or t.dtype not in (torch.bfloat16, torch.float32):
            raise UnsupportedInput(
                f"summarise_blocks takes {name} contiguous in bf16 or fp32, not {t.dtype} with strides {t.stride()}"
            )
        if name != "keys" and t.shape != (B, KV, S // block, D):
            raise UnsupportedInput(
                f"summarise_blocks takes {name} of shape {(B, KV, S // block, D)}, not {tuple(t.shape)}"
            )
        if name in ("low", "high") and t.dtype is not keys.dtype:
            raise UnsupportedInput(f"summarise_blocks takes {name} in the keys' dtype {keys.dtype}, not {t.dtype}")


@triton.jit(do_not_specialize=["tokens"])
def _summarise(
    KEYS,
    START,
    LOW,
    HIGH,
    MEAN,
    tokens,
    KV,
    S,
    N,
    D: tl.constexpr,
    BD: tl.constexpr,
    BLOCK: tl.constexpr,
    EXTREMES: tl.constexpr,
    POOLED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Summaries of the j-th touched block (axis 0) of a row and head (axis 1), BD channels (axis 2)."""
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    head, d = tl.program_id(1).to(tl.int64), tl.program_id(2) * BD + tl.arange(0, BD)
    start = tl.load(START + tl.program_id(1) // KV).to(tl.int32)
    end, number, i = start + tokens, start // BLOCK + tl.program_id(0), tl.arange(0, BLOCK)
    if (number * BLOCK < end) & (number < N):
        seen = (number * BLOCK + i < end)[:, None] & (d < D)[None, :]  # rows after the end are not read
        k = widen(tl.load(KEYS + (head * S + number * BLOCK) * D + i[:, None] * D + d[None, :], mask=seen, other=0.0))
        to = (head * N + number) * D + d
        if EXTREMES:
            tl.store(LOW + to, narrow(tl.min(tl.where(seen, k, float("inf")), 0), LOW.dtype.element_ty), mask=d < D)
            tl.store(HIGH + to, narrow(tl.max(tl.where(seen, k, float("-inf")), 0), HIGH.dtype.element_ty), mask=d < D)
        if POOLED:
            count = tl.minimum(end - number * BLOCK, BLOCK).to(tl.float32)
            tl.store(MEAN + to, narrow(tl.sum(k, 0) / count, MEAN.dtype.element_ty), mask=d < D)
