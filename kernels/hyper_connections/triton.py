"""mHC on a GPU: everything between two sublayers in two kernels.

The first (`triton_statistics`) mixes the last sublayer's output into the streams and multiplies them with fn, split
over d; the second (`triton_merge`) makes the mixing weights and the next sublayer's input, normalised or not.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from dsv4.kernels.collectives.unsummed import Unsummed
from dsv4.kernels.errors import UnsupportedInput
from dsv4.kernels.hyper_connections import reference
from dsv4.kernels.hyper_connections.triton_merge import merge
from dsv4.kernels.hyper_connections.triton_mixing import coefficients, mixed
from dsv4.kernels.hyper_connections.triton_statistics import statistics
from dsv4.kernels.launch import dependent_launch, require_device
from dsv4.kernels.quantize.triton_codes import narrow

MOST_STREAMS = 8  # comb's n² numbers are registers of one thread
WIDEST = 32768  # columns of a stream, which one program collapses and normalises
COLUMNS = 1024  # of one program of mhc_post


def mhc_pre(streams, fn, scale, base, iters: int, eps: float, norm_eps: float):
    return _pre("mhc_pre", None, streams, fn, scale, base, iters, eps, norm_eps, None, 0.0)[1:]


def mhc_post(out: torch.Tensor, streams: torch.Tensor, post: torch.Tensor, comb: torch.Tensor) -> torch.Tensor:
    streams, (out, post, comb) = checked("mhc_post", streams, (out, post, comb))
    new = torch.empty_like(streams)
    N, n, d = streams.shape
    if new.numel():
        pdl = dependent_launch(streams.device)
        _post[(N, triton.cdiv(d, COLUMNS))](
            out, streams, post, comb, new, d, n, COLUMNS, pdl, num_warps=4, launch_pdl=pdl
        )
    return new


def mhc_head(streams, fn, scale, base, eps: float, norm_eps: float) -> torch.Tensor:
    streams, (fn, scale, base) = checked("mhc_head", streams, (fn, scale, base))
    if not streams.shape[0]:
        return streams.new_empty(0, streams.shape[2])
    _, parts = statistics(streams, fn, None)
    return merge(streams, parts, scale, base, 0, eps, norm_eps, None, 0.0, head=True)[0]


def mhc_pre_norm(
    streams, fn, scale, base, iters: int, eps: float, norm_eps: float, weight, rms_eps: float,
    coded: bool = False, rounded: bool = False,
):  # fmt: skip
    """`mhc_pre`, its first result normalised by weight [d]: returns (x [N, d], post, comb). coded: x may be
    `CodedRows`; rounded: it may be `RoundedRows`."""
    given = streams, fn, scale, base, iters, eps, norm_eps, weight, rms_eps
    return _pre("mhc_pre_norm", None, *given, coded, rounded)[1:]


def mhc_post_pre_norm(
    out, streams, post, comb, fn, scale, base, iters: int, eps: float, norm_eps: float, weight, rms_eps: float,
    coded: bool = False, rounded: bool = False,
):  # fmt: skip
    """Merge a sublayer's output into the streams, and compute the next sublayer's input: returns (streams, x, post,
    comb). out may be `Unsummed` over ranks. coded, rounded: as of `mhc_pre_norm`."""
    given = streams, fn, scale, base, iters, eps, norm_eps, weight, rms_eps
    return _pre("mhc_post_pre_norm", (out, post, comb), *given, coded, rounded)


mhc_pre.__doc__, mhc_post.__doc__, mhc_head.__doc__ = (
    reference.mhc_pre.__doc__,
    reference.mhc_post.__doc__,
    reference.mhc_head.__doc__,
)


def _pre(name, merged, streams, fn, scale, base, iters, eps, norm_eps, weight, rms_eps, coded=False, rounded=False):
    """(streams, y, post, comb), after mhc_post if `merged` = (out, post, comb), y normalised if `weight`, and perhaps
    rounded too."""
    streams, (fn, scale, base, weight, *merged) = checked(name, streams, (fn, scale, base, weight, *(merged or ())))
    N, n, d = streams.shape
    if not N:
        empty = lambda *shape, dtype=torch.float32: torch.empty(0, *shape, dtype=dtype, device=streams.device)
        return streams, empty(d, dtype=streams.dtype), empty(n), empty(n, n)
    streams, parts = statistics(streams, fn, tuple(merged) or None)
    return streams, *merge(streams, parts, scale, base, iters, eps, norm_eps, weight, rms_eps, False, coded, rounded)


def checked(name: str, streams: torch.Tensor, others: tuple) -> tuple[torch.Tensor, list]:
    """Contiguous streams and other tensors (or what else is given), on the device. Raises UnsupportedInput."""
    require_device(name, streams, *(t for t in others if not isinstance(t, Unsummed)))
    if streams.shape[1] > MOST_STREAMS:
        raise UnsupportedInput(f"{name}: {streams.shape[1]} streams; the triton backend takes at most {MOST_STREAMS}")
    if streams.shape[2] > WIDEST:
        raise UnsupportedInput(
            f"{name}: streams of {streams.shape[2]} columns; the triton backend takes at most {WIDEST}"
        )
    return streams.contiguous(), [t.contiguous() if isinstance(t, torch.Tensor) else t for t in others]


@triton.jit
def _post(OUT, H, POST, COMB, NEW, d: tl.constexpr, n: tl.constexpr, B: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    t, c, h, x = tl.program_id(0).to(tl.int64), tl.program_id(1) * B + tl.arange(0, B), (), ()
    for j in tl.static_range(n):
        h = h + (tl.load(H + (t * n + j) * d + c, mask=c < d, other=0.0),)
    out, w = tl.load(OUT + t * d + c, mask=c < d, other=0.0), coefficients(POST, COMB, t, True, n)
    for k in tl.static_range(n):
        x = x + (narrow(mixed(h, out, w, k, n), NEW.dtype.element_ty),)
    for k in tl.static_range(n):
        tl.store(NEW + (t * n + k) * d + c, x[k], mask=c < d)
