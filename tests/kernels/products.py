"""What tests of products share: weights of every format, exact products, poisoned buffers, graph replays."""

import pytest
import torch

from dsv4.kernels.quantize import PackedWeight, WeightFormat, quantize_fp8, quantize_mxfp4, quantize_nvfp4, to_float

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
needs_gpu = pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
FORMATS = ["dense fp32", "dense bf16", "fp8", "fp8 fp32 scales", "fp8 blocks of 32", "mxfp4", "nvfp4", "nvfp4 of two"]
QUANTISED = FORMATS[2:]
DTYPES = [torch.float32, torch.bfloat16] if CUDA else [torch.float32]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 4e-3}


@pytest.fixture(autouse=True)
def poison(monkeypatch):
    """Fresh buffers of floats hold NaN: a kernel that reads what nothing wrote, or leaves a result unwritten, shows
    it."""
    fill_fresh_buffers(monkeypatch)


def fill_fresh_buffers(monkeypatch, integer: int | None = None) -> None:
    """Floats with NaN, and integers with that number if one is given."""

    def filled(make):
        def call(*args, **kwargs):
            t = make(*args, **kwargs)
            if t.is_floating_point():
                return t.fill_(float("nan")) if t.element_size() > 1 else t
            most = 1 if t.dtype is torch.bool else torch.iinfo(t.dtype).max
            return t if integer is None else t.fill_(min(integer, most))

        return call

    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, filled(getattr(torch, name)))


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(DEVICE)


def pack(w: torch.Tensor, form: str) -> PackedWeight:
    match form:
        case "dense fp32":
            return PackedWeight(WeightFormat.DENSE, w)
        case "dense bf16":
            return PackedWeight(WeightFormat.DENSE, w.bfloat16())
        case "fp8" | "fp8 blocks of 32":
            block = (128, 128) if form == "fp8" else (32, 32)
            return PackedWeight(WeightFormat.FP8, *quantize_fp8(w, block), None, block)
        case "fp8 fp32 scales":
            codes, scale = quantize_fp8(w)
            return PackedWeight(WeightFormat.FP8, codes, scale.float() * 1.3)
        case "fp8 fp32 scales of blocks of 32":
            codes, scale = quantize_fp8(w, (32, 32))
            return PackedWeight(WeightFormat.FP8, codes, scale.float() * 1.25, None, (32, 32))
        case "mxfp4":
            return PackedWeight(WeightFormat.MXFP4, *quantize_mxfp4(w))
        case "nvfp4":
            codes, scale, glob = quantize_nvfp4(w)
            return PackedWeight(WeightFormat.NVFP4, codes, scale, glob.view(1))
        case "nvfp4 of two":
            (a, s, g), (b, t, h) = (quantize_nvfp4(part) for part in (w.chunk(2)[0], 3 * w.chunk(2)[1]))
            raw = torch.cat((s.view(torch.uint8), t.view(torch.uint8))).view(s.dtype)
            return PackedWeight(WeightFormat.NVFP4, torch.cat((a, b)), raw, torch.stack((g, h)))


def stack(E: int, O: int, K: int, form: str, parts: int, seed: int = 0) -> PackedWeight:
    """E matrices [O, K], each of `parts` stacked along its rows."""
    made = [[pack(randn(O // parts, K, seed=seed + 7 * e + p) * (1 + p), form) for p in range(parts)] for e in range(E)]
    first = made[0][0]

    def join(field: str):
        if getattr(first, field) is None:
            return None
        raw = lambda t: t.view(torch.uint8) if t.dtype.itemsize == 1 else t
        return torch.stack([torch.cat([raw(getattr(p, field)) for p in w]) for w in made]).view(
            getattr(first, field).dtype
        )

    return PackedWeight(first.format, join("weight"), join("scale"), join("global_scale"), first.block)


def exact(x: torch.Tensor, w: PackedWeight) -> torch.Tensor:
    return x.double() @ to_float(w).double().T


def distance(got: torch.Tensor, wanted: torch.Tensor) -> float:
    assert got.shape == wanted.shape
    return ((got.double() - wanted.double()).norm() / wanted.double().norm().clamp(min=1e-30)).item()


def graphed(run):
    """run() as a CUDA graph: replays it twice, and returns its output."""
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for _ in range(2):
        graph.replay()
    torch.cuda.synchronize()
    return out
