"""Triton's writing of packed rows against the reference, byte for byte, and its reading of FP8 rows."""

import pytest
import torch
import triton
import triton.language as tl

from dsv4.kernels.cache_rows import PackedRows, RowFormat, decode_rows, pack_layout, reference, write_rows
from dsv4.kernels.cache_rows.triton import load_fp8_rows
from dsv4.kernels.errors import UnsupportedInput

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HARDWARE = DEVICE == "cuda" and torch.cuda.get_device_capability() >= (8, 9)
FORMS = [
    (RowFormat.KV_FP8, 512, 64),
    (RowFormat.KV_FP8, 64, 32),
    (RowFormat.KV_FP8, 80, 16),
    (RowFormat.KV_FP8, 130, 0),
    (RowFormat.KV_FP8, 67, 2),
    (RowFormat.INDEX_FP8, 128, 0),
    (RowFormat.INDEX_FP8, 40, 0),
    (RowFormat.INDEX_FP8, 33, 0),
    (RowFormat.INDEX_FP4, 128, 0),
    (RowFormat.INDEX_FP4, 96, 0),
]
IDS = [f"{form.value} {width} keeps {rope}" for form, width, rope in FORMS]


def gpu(test):
    return pytest.mark.gpu(pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")(test))


def pool(form, width, rope, pages=3, fill=7):
    data = torch.full((pages, pack_layout(form, width, rope).page), fill, dtype=torch.uint8, device=DEVICE)
    return PackedRows(form, data, width, rope, pages * 64)


def values(M, D, dtype=torch.float32, seed=0):
    """Rows of all magnitudes; then what is special: zeros, −0, NaN, −NaN, infinities, subnormals, the largest
    numbers."""
    g = torch.Generator().manual_seed(seed)
    v = torch.randn(M, D, generator=g) * torch.exp2(torch.randint(-30, 30, (M, 1), generator=g).float())
    v[1], v[2] = 0.0, -0.0
    v[3, 3], v[4, 7] = float("nan"), -float("nan")
    v[5, 5], v[5, 1] = float("inf"), -float("inf")
    v[6] *= 1e-38
    v[7] *= 2.0**90
    v[8] = 3.0e38
    return v.to(dtype).to(DEVICE)


def ties(D):
    """Every E4M3 and E2M1 value and the middles between them, at scale 1 and around it."""
    steps = torch.arange(0, 129, device=DEVICE).float() / 16
    row = torch.cat((steps, steps.nextafter(steps + 1), steps.nextafter(steps - 1), steps * 60, -steps))
    row = row[: row.numel() // (D - 1) * (D - 1)].view(-1, D - 1)
    return torch.cat((row, torch.full((len(row), 1), 448.0, device=DEVICE)), 1)


@pytest.mark.parametrize("form,width,rope", FORMS, ids=IDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_bytes_are_the_references(form, width, rope, dtype):
    rows, wanted, v = pool(form, width, rope), pool(form, width, rope), values(12, width, dtype)
    slots = torch.randperm(3 * 64, generator=torch.Generator().manual_seed(1))[:12].to(DEVICE)
    if rope:  # which NaN a bf16 column gets is the machine's own choice
        v[:, width - rope :] = v[:, width - rope :].nan_to_num(nan=1.0, posinf=float("inf"), neginf=-float("inf"))
    reference.write_rows(wanted, slots, v)
    assert write_rows(rows, slots, v, backend="triton") is None
    assert torch.equal(rows.data, wanted.data)


@pytest.mark.parametrize("form,width,rope", [FORMS[1], FORMS[6], FORMS[9]], ids=[IDS[1], IDS[6], IDS[9]])
def test_ties_round_to_even(form, width, rope):
    v = ties(width)
    rows, wanted, slots = pool(form, width, rope), pool(form, width, rope), torch.arange(len(v), device=DEVICE)
    reference.write_rows(wanted, slots, v)
    write_rows(rows, slots, v, backend="triton")
    assert torch.equal(rows.data, wanted.data)


@pytest.mark.parametrize("form,width,rope", [FORMS[1], FORMS[5], FORMS[8]], ids=[IDS[1], IDS[5], IDS[8]])
def test_strides_of_pool_slots_and_values_are_kept_to(form, width, rope):
    wanted, page = pool(form, width, rope), pack_layout(form, width, rope).page
    wide = torch.full((3, 2, page + 24), 7, dtype=torch.uint8, device=DEVICE)
    rows = PackedRows(form, wide[:, 1, 8 : 8 + page], width, rope, 192)
    v, slots = values(9, width).nan_to_num(nan=1.0).t().contiguous().t(), torch.arange(18, device=DEVICE)[::2] * 10
    reference.write_rows(wanted, slots, v.contiguous())
    write_rows(rows, slots, v, backend="triton")
    assert torch.equal(rows.data, wanted.data)
    wide[:, 1, 8 : 8 + page] = 7
    assert bool((wide == 7).all())


def test_no_rows_a_negative_slot_and_pools_that_are_not_flat():
    rows = pool(RowFormat.KV_FP8, 64, 32)
    write_rows(
        rows, torch.empty(0, dtype=torch.int64, device=DEVICE), torch.empty(0, 64, device=DEVICE), backend="triton"
    )
    write_rows(rows, torch.tensor([-1], device=DEVICE), torch.ones(1, 64, device=DEVICE), backend="triton")
    assert bool((rows.data == 7).all())
    with pytest.raises(UnsupportedInput, match="flat"):
        batch = rows._replace(data=rows.data.unsqueeze(0))
        write_rows(batch, torch.tensor([1], device=DEVICE), torch.ones(1, 64, device=DEVICE), backend="triton")
    with pytest.raises(UnsupportedInput, match="columns"):
        write_rows(rows, torch.tensor([1], device=DEVICE), torch.ones(1, 32, device=DEVICE), backend="triton")


@triton.jit
def _read(
    DATA,
    INDEX,
    OUT,
    n,
    PAGE: tl.constexpr,
    D: tl.constexpr,
    ROPE: tl.constexpr,
    DP: tl.constexpr,
    BN: tl.constexpr,
    WORDS: tl.constexpr,
    HARDWARE: tl.constexpr,
):
    i, d = tl.arange(0, BN), tl.arange(0, DP)
    row = tl.load(INDEX + i, mask=i < n, other=-1)
    tl.store(OUT + i[:, None] * DP + d[None, :], load_fp8_rows(DATA, row, PAGE, D, ROPE, DP, WORDS, HARDWARE))


@pytest.mark.parametrize("words", [True, False], ids=["by words", "by bytes"])
@pytest.mark.parametrize("hardware", [False] + [True] * HARDWARE, ids=lambda h: "converted" if h else "by bits")
@pytest.mark.parametrize("form,width,rope", FORMS[:5], ids=IDS[:5])
def test_every_byte_is_read_as_the_reference_decodes_it(form, width, rope, hardware, words):
    rows, DP = pool(form, width, rope), max(64, triton.next_power_of_2(width))
    rows.data.copy_(
        torch.randint(0, 256, rows.data.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(3))
    )
    rows.payload[0, :4, : width - rope] = torch.arange(256, dtype=torch.uint8, device=DEVICE).repeat(2)[: width - rope]
    rows.scales[0, :4] = torch.tensor([0, 1, 255, 254], dtype=torch.uint8, device=DEVICE)[:, None]
    index = torch.tensor([0, 1, 2, 3, -1, 63, 64, 191, 100, -1], device=DEVICE)
    out = torch.empty(16, DP, device=DEVICE)
    page = rows.layout.page
    if words and (page % 8 or width % 2):
        pytest.skip("pages of this format do not begin at words")
    _read[(1,)](rows.data, index, out, len(index), page, width, rope, DP, 16, words, hardware)
    wanted = torch.zeros_like(out)
    wanted[: len(index), :width] = decode_rows(rows)[index.clamp(min=0)].masked_fill((index < 0)[:, None], 0)
    both = out.isnan() & wanted.isnan()
    assert torch.equal(out.masked_fill(both, 0).view(torch.int32), wanted.masked_fill(both, 0).view(torch.int32))


@gpu
def test_offsets_past_2_gib():
    form, width, rope = RowFormat.KV_FP8, 512, 64
    page = pack_layout(form, width, rope).page
    pages = (1 << 31) // page + 3
    rows = PackedRows(form, torch.empty(pages, page, dtype=torch.uint8, device=DEVICE), width, rope, pages * 64)
    v, slots = values(9, width), pages * 64 - 1 - torch.arange(9, device=DEVICE) * 30
    v[:, 448:] = 1.0
    write_rows(rows, slots, v, backend="triton")
    payload, scales = reference.encode_rows(v, form, rope)
    page, at = slots // 64, slots % 64
    assert torch.equal(rows.payload[page, at], payload) and torch.equal(rows.scales[page, at], scales)


@gpu
def test_a_replayed_graph_writes_new_values():
    rows, wanted = pool(RowFormat.KV_FP8, 512, 64), pool(RowFormat.KV_FP8, 512, 64)
    v, slots = torch.randn(8, 512, device=DEVICE), torch.arange(8, device=DEVICE)
    write_rows(rows, slots, v, backend="triton")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        write_rows(rows, slots, v, backend="triton")
    v.copy_(torch.randn_like(v))
    graph.replay()
    reference.write_rows(wanted, slots, v)
    assert torch.equal(rows.data, wanted.data)
