"""MXFP8 index keys, against torch's own casts of E4M3 and E8M0: bytes, numbers, scores, and a model that holds them."""

import pytest
import torch

from dsv4.kernels.cache_rows import PAGE, STREAM_FORMATS, PackedRows, RowFormat, decode_rows, encode_rows, write_rows
from dsv4.kernels.errors import UnsupportedInput
from dsv4.kernels.indexer import index_scores, reference, triton_scores
from dsv4.model.load import load_model
from tests.kernels import ptx

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FORM = STREAM_FORMATS["index"]["mxfp8"]


def values(M: int, D: int) -> torch.Tensor:
    """Blocks of many sizes, with zeros, ties, and maxima at and around 448 times a power of two."""
    g = torch.Generator().manual_seed(0)
    sizes = torch.exp2(torch.randint(-12, 12, (M, D // 32), generator=g))
    v = torch.randn(M, D, generator=g) * sizes.repeat_interleave(32, 1)
    v[0], v[1] = 0.0, -0.0
    v[2, :32] = torch.arange(32) / 16
    for row, largest in enumerate((448.0, 448.5, 447.0, 512.0, 449.0 / 1024), 3):
        v[row, 5] = largest
    return v


def by_torch(v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes, scales) uint8 of values [M, D]: the least scale 2^e with max|v| ≤ 448 · 2^e, max|v| at least 1e-4, found
    by trying; torch casts."""
    x = v.unflatten(1, (-1, 32)).double()
    largest, powers = x.abs().amax(-1).clamp(min=1e-4), torch.exp2(torch.arange(-60, 61).double())
    scale = powers[(largest.unsqueeze(-1) > 448 * powers).sum(-1)]
    codes = (x / scale.unsqueeze(-1)).float().to(torch.float8_e4m3fn)
    return codes.flatten(1).view(torch.uint8), scale.float().to(torch.float8_e8m0fnu).view(torch.uint8)


def pool(D: int, pages: int = 3) -> PackedRows:
    data = torch.full((pages, FORM.layout(D).page), 7, dtype=torch.uint8, device=DEVICE)
    return PackedRows(FORM, data, D, 0, pages * PAGE)


@pytest.mark.parametrize("D", [32, 96, 128])
@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_bytes_are_those_of_torchs_casts(D, backend):
    v, rows = values(16, D), pool(D)
    slots = torch.randperm(3 * PAGE, generator=torch.Generator().manual_seed(1))[:16]
    write_rows(rows, slots.to(DEVICE), v.to(DEVICE), backend=backend)
    codes, scales = by_torch(v)
    wanted = torch.full_like(rows.data, 7).cpu()
    for m, slot in enumerate(slots.tolist()):  # a page: 64 rows of codes, then 64 rows of scales
        page, at = divmod(slot, PAGE)
        wanted[page, at * D : (at + 1) * D] = codes[m]
        wanted[page, PAGE * D + at * D // 32 : PAGE * D + (at + 1) * D // 32] = scales[m]
    assert torch.equal(rows.data.cpu(), wanted)


def test_every_byte_is_decoded_as_torch_does():
    rows = pool(128)
    rows.payload[0, :2] = torch.arange(256, dtype=torch.uint8, device=DEVICE).view(2, 128)
    rows.scales[0, :2] = torch.tensor([[0, 1, 127, 254], [100, 130, 255, 200]], dtype=torch.uint8, device=DEVICE)
    scale = rows.scales[0, :2].view(torch.float8_e8m0fnu).float().repeat_interleave(32, 1)
    wanted = rows.payload[0, :2].view(torch.float8_e4m3fn).float() * scale
    torch.testing.assert_close(decode_rows(rows)[:2], wanted, rtol=0, atol=0, equal_nan=True)


def test_a_key_is_132_bytes_and_other_widths_are_refused():
    assert FORM.layout(128)[:2] == (128, 4) and FORM.layout(128).page == 64 * 132 and FORM is RowFormat.INDEX_MXFP8
    with pytest.raises(UnsupportedInput, match="MXFP8 index keys of 40 dims"):
        FORM.layout(40)


@pytest.mark.parametrize("D", [32, 64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scores_are_those_of_decoded_keys(D, dtype, monkeypatch):
    """Scales differ from block to block, so that any that is read for another shows."""
    if DEVICE == "cpu":  # the way of a GPU, with its PTX replaced
        monkeypatch.setitem(ptx.OPERATIONS, "min.u32", lambda a, b: a.clip(max=b))
        monkeypatch.setattr(triton_scores, "capability", lambda device: (9, 0))
        ptx.compiled(monkeypatch, triton_scores)
    g = torch.Generator().manual_seed(D)
    B, T, H, n = 2, 3, 4, 150
    sizes = torch.exp2(torch.randint(-6, 7, (B * n, D // 32), generator=g)).repeat_interleave(32, 1)
    payload, scales = encode_rows(torch.randn(B * n, D, generator=g) * sizes, FORM)
    rows = PackedRows(FORM, torch.zeros(B, 3, FORM.layout(D).page, dtype=torch.uint8), D, 0, n)
    e = torch.arange(n)
    rows.payload[:, e // PAGE, e % PAGE] = payload.view(B, n, -1)
    rows.scales[:, e // PAGE, e % PAGE] = scales.view(B, n, -1)
    rows = rows._replace(data=rows.data.to(DEVICE))
    q, w = torch.randn(B, T, H, D, generator=g).to(dtype), torch.randn(B, T, H, generator=g)
    visible = torch.randint(1, n + 1, (B, T), generator=g)
    given = [t.to(DEVICE) for t in (q, w)]
    found = index_scores(*given, rows, visible.to(DEVICE), backend="triton").cpu()
    wanted = reference.index_scores(q, w, decode_rows(rows).cpu(), visible)
    assert torch.equal(found.isinf(), wanted.isinf())
    torch.testing.assert_close(found, wanted, rtol=2e-5, atol=2e-5 * wanted[wanted.isfinite()].abs().max().item())


# a whole model takes minutes in Triton's interpreter
TRITON = pytest.param("triton", marks=[pytest.mark.gpu, pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")])


@pytest.mark.parametrize("backend", ["reference", "cpu", TRITON])
def test_a_model_holds_its_keys_so(official, backend):
    """In qat numerics keys are on the FP4 grid, which MXFP8 holds exactly: the logits are those of bf16 keys."""
    ids = torch.randint(0, 100, (2, 150), generator=torch.Generator().manual_seed(3))
    found = {}
    for name in ("bf16", "mxfp8"):
        device = DEVICE if backend == "triton" else "cpu"
        model = load_model(official, numerics="qat", backend=backend, device=device, index_cache=name)
        cache = model.new_cache(2, 160)
        model.append(ids[:, :-1], cache, logits="none")
        found[name] = model.append(ids[:, -1:], cache)
        found[name, "bytes"] = cache.nbytes
    assert torch.equal(found["bf16"], found["mxfp8"]) and found["mxfp8", "bytes"] < found["bf16", "bytes"]
