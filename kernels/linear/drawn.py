"""Weights of every format, for the cases of contracts of products."""

import math

import torch

from dsv4.kernels.quantize import PackedWeight, WeightFormat, encode_e8m0, quantize_fp8, quantize_nvfp4

DENSE, DENSE_FP32, FP8, FP8_FP32, MXFP4, NVFP4, NVFP4_TWO = FORMS = (
    "dense",
    "dense fp32",
    "fp8",
    "fp8 fp32 scales",
    "mxfp4",
    "nvfp4",
    "nvfp4 of two",
)
QUANTISED = FORMS[2:]
SCALE_BLOCK = {FP8: (128, 128), FP8_FP32: (128, 128), MXFP4: (1, 32), NVFP4: (1, 16), NVFP4_TWO: (1, 16)}


def allowed(forms: tuple[str, ...], w, *columns: int) -> tuple[str, ...]:
    """Those of `forms` that matrices of so many columns can have: scales of a few columns must divide them, and weights
    of GQA models are dense."""
    divides = lambda form: form in (FP8, FP8_FP32) or all(K % SCALE_BLOCK[form][1] == 0 for K in columns)
    return tuple(f for f in forms if f not in QUANTISED or not w.num_key_value_heads and divides(f))


def weight(form: str, w: torch.Tensor, draw) -> PackedWeight:
    """A matrix fp32 [O, K] in one of FORMS.

    'dense': in the dtype of activations. 'fp8 fp32 scales': scales that are no powers of two. 'nvfp4 of two': two
    matrices stacked along O, with different global scales.
    """
    match form:
        case "dense fp32":
            return PackedWeight(WeightFormat.DENSE, w)
        case "fp8 fp32 scales":
            codes, scale = quantize_fp8(w)
            return PackedWeight(WeightFormat.FP8, codes, scale.float() * (1.1 + 0.8 * draw.uniform(0, 1, *scale.shape)))
        case "nvfp4 of two":
            parts = [quantize_nvfp4(part * size) for part, size in zip(w.chunk(2), (1.0, 3.0))]
            code, scale, top = (join(tensors) for tensors in zip(*parts))
            return PackedWeight(WeightFormat.NVFP4, code, scale, top)
    return draw.weight(WeightFormat(form), w)


def join(tensors) -> torch.Tensor:
    """Tensors after one another along the first axis, numbers as a vector; float8 through their bytes."""
    tensors = [t.reshape(1) if t.dim() == 0 else t for t in tensors]
    raw = [t.view(torch.uint8) if t.dtype.itemsize == 1 else t for t in tensors]
    return torch.cat(raw).view(tensors[0].dtype)


def stack(weights: list[PackedWeight]) -> PackedWeight:
    """Matrices of one format as a stack [E, O, K]."""
    each = lambda i: None if weights[0][i] is None else join([w[i].unsqueeze(0) for w in weights])
    return weights[0]._replace(weight=each(1), scale=each(2), global_scale=each(3))


def coded(form: str, O: int, K: int, draw) -> PackedWeight:
    """A random matrix of which each scale block is 2^−2 … 2^2 times as large as its neighbours by its place, so that
    a scale that is taken from another place shows."""
    rows, columns = SCALE_BLOCK.get(form, (1, K))
    place = 3 * (torch.arange(O) // rows).unsqueeze(1) + 2 * (torch.arange(K) // columns)
    return weight(form, draw.matrix(O, K) * 2.0 ** (place % 5 - 2), draw)


def whole_numbers(form: str, O: int, K: int, draw) -> PackedWeight:
    """Whole numbers −3 … 3, exact in 'dense', 'fp8' and 'mxfp4'; sums with whole numbers are exact in fp32."""
    return weight(form, draw.integers(-3, 3, O, K).float(), draw)


def scale_byte(form: str, byte: int, O: int, K: int, draw) -> PackedWeight:
    """'fp8' with codes of size 1 to 1.875, or 'mxfp4' of size 1 or 1.5, and every E8M0 scale 2^(byte − 127)."""
    sign = draw.below(2, O, K)
    if form == FP8:
        codes = ((1 - 2 * sign) * (1 + draw.below(8, O, K) / 8)).to(torch.float8_e4m3fn)
        scale = torch.full((-(-O // 128), -(-K // 128)), byte - 127)
        return PackedWeight(WeightFormat.FP8, codes, encode_e8m0(scale))
    code = (2 + draw.below(2, O, K) + 8 * sign).to(torch.uint8)
    scale = torch.full((O, K // 32), byte - 127)
    return PackedWeight(WeightFormat.MXFP4, code[:, 0::2] | (code[:, 1::2] << 4), encode_e8m0(scale))


def every_byte(form: str, O: int, K: int, draw) -> PackedWeight:
    """A weight whose bytes are all 256 in turn (NaN codes of E4M3 left out), with scales of a random matrix; dense ones
    are random."""
    made = weight(form, draw.matrix(O, K), draw)
    if made.format is WeightFormat.DENSE:
        return made
    place = (torch.arange(made.weight.numel()).view(made.weight.shape) * 5 + draw.below(256, 1)) % 256
    if made.format is WeightFormat.FP8:
        place = torch.where(place & 127 == 127, 1, place)
    raw = place.to(torch.uint8)
    return made._replace(weight=raw.view(made.weight.dtype))


def stored(form: str, *shape: int, draw, parts: int = 1) -> PackedWeight:
    """A matrix [O, K] or a stack of them in one of FORMS: random codes, with scales by which a row's norm is near 1.
    For large weights, as speed does not depend on their values. 'dense' is bf16. parts: global scales of NVFP4."""
    *lead, O, K = shape
    if form in (DENSE, DENSE_FP32):
        return PackedWeight(
            WeightFormat.DENSE, draw.matrix(*shape).to(torch.bfloat16 if form == DENSE else torch.float32)
        )
    exponent = 127 - round(math.log2(K) / 2)  # of K^-0.5
    if form in (FP8, FP8_FP32):
        codes = draw.bytes(0, 120, *shape) | draw.bytes(0, 2, *shape) << 7  # not NaN
        blocks = *lead, -(-O // 128), -(-K // 128)
        scale = draw.bytes(exponent - 7, exponent - 5, *blocks).view(torch.float8_e8m0fnu)
        scale = draw.uniform(0.01, 0.02, *blocks) * K**-0.5 if form == FP8_FP32 else scale
        return PackedWeight(WeightFormat.FP8, codes.view(torch.float8_e4m3fn), scale)
    codes = draw.bytes(0, 256, *lead, O, K // 2)
    if form == MXFP4:
        scale = draw.bytes(exponent - 2, exponent, *lead, O, K // 32)
        return PackedWeight(WeightFormat.MXFP4, codes, scale.view(torch.float8_e8m0fnu))
    scale = draw.bytes(0x30, 0x40, *lead, O, K // 16).view(torch.float8_e4m3fn)
    return PackedWeight(WeightFormat.NVFP4, codes, scale, torch.full((*lead, parts), 0.3 * K**-0.5, device=draw.device))
