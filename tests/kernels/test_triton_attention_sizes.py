"""Triton's attention on a GPU: at V4-Flash's sizes and others, under CUDA graphs, repeated, and past 2 GiB."""

import pytest
import torch

from dsv4.kernels.attention import hca_attention, sparse_attention, triton_plan
from dsv4.kernels.attention import triton as kernels
from dsv4.kernels.cache_rows import PackedRows, RowFormat, pack_layout, write_rows
from tests.kernels.test_triton_attention import NAN, as_pool, close, listed, packed, poison, randn  # noqa: F401 (a fixture)

DEVICE, CUDA = "cuda", torch.cuda.is_available()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

H, D, ROPE, W, SCALE = 64, 512, 64, 128, 512**-0.5
FORMS = [("bf16", "bf16"), ("fp8", "fp8"), ("bf16", "fp8"), ("fp8", "bf16")]


def csa(N, forms, K=512, dtype=torch.bfloat16, rows=4096):
    window, entries = as_pool(randn(rows, D), forms[0], ROPE), as_pool(randn(rows, D, seed=1), forms[1], ROPE)
    return [
        randn(N, H, D, seed=2, dtype=dtype),
        window,
        listed(N, W, rows),
        entries,
        listed(N, K, rows, 1),
        randn(H),
        SCALE,
    ]


def hca(B, T, n, forms, dtype=torch.bfloat16, seen=None):
    window, entries = as_pool(randn(4096, D), forms[0], ROPE), as_pool(randn(B, n, D, seed=1), forms[1], ROPE, batch=B)
    if seen is None:
        seen = (
            torch.linspace(0, n, B * T, device=DEVICE).long().view(B, T)
            if B * T > 1
            else torch.tensor([[n]], device=DEVICE)
        )
    return [randn(B, T, H, D, seed=2, dtype=dtype), window, listed(B * T, W, 4096), entries, seen, randn(H), SCALE]


def exactly(operation, args):
    """The reference in fp32, of the same values."""
    return operation(args[0].float(), *args[1:])


@pytest.mark.parametrize("N", [1, 2, 8, 16, 64, 200], ids=lambda n: f"{n} queries")
@pytest.mark.parametrize("forms", FORMS, ids="+".join)
def test_csa_at_production_size(N, forms):
    args = csa(N, forms)
    close(sparse_attention(*args, backend="triton").float(), exactly(sparse_attention, args), 4e-3)


@pytest.mark.parametrize("B,T,n", [(1, 1, 64), (1, 1, 8192), (3, 1, 1000), (8, 1, 8192), (2, 150, 300)], ids=str)
@pytest.mark.parametrize("forms", FORMS, ids="+".join)
def test_hca_at_production_size(B, T, n, forms):
    args = hca(B, T, n, forms)
    close(hca_attention(*args, backend="triton").float(), exactly(hca_attention, args), 4e-3)


@pytest.mark.parametrize("splits", [1, 5, 70], ids=lambda n: f"{n} splits")
@pytest.mark.parametrize("form", ["bf16", "fp8"])
def test_every_tile_of_this_gpu(monkeypatch, form, splits):
    """Also those that its plans choose at other shapes; a part of the splits is empty, and one row sees no entry."""
    seen = torch.tensor([[0], [129], [300]], device=DEVICE)
    cases = (sparse_attention, csa(3, (form, form))), (hca_attention, hca(3, 1, 300, (form, form), seen=seen))
    for tile in triton_plan.tile_shapes(False, form == "fp8", True, torch.cuda.get_device_capability()):
        monkeypatch.setattr(kernels, "plan", lambda *shape: (tile, splits))
        for operation, args in cases:
            for heads in (64, 48, 128):
                q = randn(*args[0].shape[:-2], heads, D, seed=heads, dtype=torch.bfloat16)
                given = [q, *args[1:5], torch.linspace(-8, 8, heads, device=DEVICE), SCALE]
                close(operation(*given, backend="triton").float(), exactly(operation, given), 4e-3)


@pytest.mark.skipif(torch.cuda.get_device_capability() != (9, 0) if CUDA else True, reason="needs Hopper")
@pytest.mark.parametrize("form", ["bf16", "fp8"])
def test_programs_that_merge_give_the_bits_of_two_kernels(monkeypatch, form):
    """However columns are shared, again and again, and in replayed graphs; some splits are empty."""
    seen = torch.tensor([[0], [129], [300]], device=DEVICE)
    cases = (sparse_attention, csa(3, (form, form))), (hca_attention, hca(3, 1, 300, (form, form), seen=seen))
    shared_out = kernels.shared_out
    for tile in triton_plan.tile_shapes(False, form == "fp8", True, (9, 0)):
        for splits in (2, 5, 10) if tile.copied else ():
            monkeypatch.setattr(kernels, "plan", lambda *shape: (tile, splits))
            for operation, args in cases:
                monkeypatch.setattr(kernels, "shared_out", lambda *shape: None)
                wanted = operation(*args, backend="triton")
                monkeypatch.setattr(kernels, "shared_out", shared_out)
                for parts in (8, 4, 2, 1):
                    monkeypatch.setattr(triton_plan, "PARTS", parts)
                    assert all(torch.equal(operation(*args, backend="triton"), wanted) for _ in range(20))
                    graph = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(graph):
                        out = operation(*args, backend="triton")
                    for _ in range(20):
                        out.fill_(NAN)
                        graph.replay()
                        assert torch.equal(out, wanted)


def test_rows_that_do_not_begin_at_16_bytes():
    apart = lambda seed: randn(4096, D + 8, seed=seed, dtype=torch.bfloat16)[:, 4 : D + 4]
    args = csa(8, ("bf16", "bf16"))
    args[1], args[3] = apart(0), apart(1)
    close(sparse_attention(*args, backend="triton").float(), exactly(sparse_attention, args), 4e-3)


@pytest.mark.parametrize(
    "heads,width,rope", [(64, 512, 64), (128, 512, 64), (48, 256, 64), (8, 64, 32), (64, 80, 16)], ids=str
)
@pytest.mark.parametrize("N", [1, 300], ids=lambda n: f"{n} queries")
def test_other_sizes(heads, width, rope, N):
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 4e-3)):
        for forms in (("fp32", "fp32") if dtype is torch.float32 else ("bf16", "bf16"), ("fp8", "fp8")):
            window, entries = (
                as_pool(randn(300, width), forms[0], rope),
                as_pool(randn(500, width, seed=1), forms[1], rope),
            )
            args = [
                randn(N, heads, width, seed=2, dtype=dtype),
                window,
                listed(N, 70, 300),
                entries,
                listed(N, 90, 500, 1),
                randn(heads),
                width**-0.5,
            ]
            close(sparse_attention(*args, backend="triton").float(), exactly(sparse_attention, args), tolerance)


@pytest.mark.parametrize("forms", FORMS[:2], ids="+".join)
def test_twenty_repeats_and_a_replayed_graph_give_the_same_bits(forms):
    cases = (
        (sparse_attention, csa(8, forms)),
        (sparse_attention, csa(300, forms)),
        (hca_attention, hca(8, 1, 8192, forms)),
    )
    for operation, args in cases:
        wanted = operation(*args, backend="triton")
        assert all(torch.equal(operation(*args, backend="triton"), wanted) for _ in range(20))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = operation(*args, backend="triton")
        for seed in (7, 8):
            args[0].copy_(randn(*args[0].shape, seed=seed))
            args[4].copy_(args[4].roll(1, 0))
            graph.replay()
            assert torch.equal(out, operation(*args, backend="triton"))


def test_a_graph_of_full_capacity_sees_only_what_is_visible():
    args = hca(1, 1, 8192, ("bf16", "bf16"))
    entries, seen = args[3], args[4]
    hca_attention(*args, backend="triton")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = hca_attention(*args, backend="triton")
    for n in (0, 1, 31, 64, 1000, 8191):
        seen.fill_(n)
        kept = entries[:, n:].clone()
        entries[:, n:] = NAN
        graph.replay()
        close(out.float(), exactly(hca_attention, args), 4e-3)
        entries[:, n:] = kept


@pytest.mark.parametrize("form", ["bf16", "fp8"])
def test_offsets_past_2_gib(form):
    """Row numbers whose offsets need 64 bits: in numbers for bf16, in bytes for packed rows."""
    rows = (1 << 31) // (D if form == "bf16" else 585) + 256
    if form == "bf16":
        pool = torch.zeros(rows, D, dtype=torch.bfloat16, device=DEVICE)
        pool[-200:] = randn(200, D)
        near = pool[-200:].clone()
    else:
        rows = -(-rows // 64) * 64
        page = pack_layout(RowFormat.KV_FP8, D, ROPE).page
        data = torch.zeros(rows // 64, page, dtype=torch.uint8, device=DEVICE)
        pool = PackedRows(RowFormat.KV_FP8, data, D, ROPE, rows)
        write_rows(pool, torch.arange(rows - 200, rows, device=DEVICE), randn(200, D))
        near = packed(randn(200, D), ROPE)
    index = torch.arange(W, device=DEVICE).expand(4, W)
    q, sink = randn(4, H, D, dtype=torch.bfloat16), randn(H)
    wanted = sparse_attention(q, near, index, None, None, sink, SCALE, backend="triton")
    assert torch.equal(sparse_attention(q, pool, index + rows - 200, None, None, sink, SCALE, backend="triton"), wanted)


def test_prefill_at_production_size():
    args = csa(1024, ("bf16", "bf16"))
    close(sparse_attention(*args, backend="triton").float(), exactly(sparse_attention, args), 4e-3)
    args = hca(1, 1024, 64, ("bf16", "bf16"), seen=(torch.arange(7000, 8024, device=DEVICE) // 128)[None])
    close(hca_attention(*args, backend="triton").float(), exactly(hca_attention, args), 4e-3)
