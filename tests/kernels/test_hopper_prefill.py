"""Attention of many queries on Hopper, emulated: any order of copies, products and warps that a GPU may have."""

import pytest
import torch

from dsv4.kernels.attention import hopper_prefill, reference, triton
from tests.gluon import SEEDS, OnCPU
from tests.kernels.products import CUDA, randn
from tests.kernels.test_triton_attention import as_pool

D, SCALE = 512, 512**-0.5
HOPPER = CUDA and torch.cuda.get_device_capability()[0] == 9


def on_cpu(monkeypatch, seed: int, programs: int) -> None:
    """`attend_many` as a GPU of so many multiprocessors runs it."""
    for name, value in (("capability", (9, 0)), ("processors", programs), ("dependent_launch", True)):
        monkeypatch.setattr(triton, name, lambda device, value=value: value)
    monkeypatch.setattr(triton, "dot_in_fp32", lambda x: False)
    monkeypatch.setattr(triton, "require_device", lambda name, *tensors: None)
    monkeypatch.setattr(triton, "FEW", 0)  # otherwise these would be the queries of a step
    monkeypatch.setattr(hopper_prefill, "attend_many", OnCPU(hopper_prefill.attend_many, seed))


def rows(n: int, seed: int) -> torch.Tensor:
    """bf16 [n, 512]."""
    return randn(n, D, seed=seed).cpu().bfloat16()


def listed(N: int, width: int, of: int, seed: int) -> torch.Tensor:
    """int64 [N, width]: rows below `of`, some of them −1, one query with none at all."""
    g = torch.Generator().manual_seed(seed)
    index = torch.randint(-of // 4, of, (N, width), generator=g).clamp(min=-1)
    index[N // 2] = -1
    return index


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("N, H, W, K", [(5, 64, 128, 200), (3, 128, 70, 0), (4, 64, 1, 300)])
def test_listed_rows(N, H, W, K, seed, monkeypatch):
    q, window, entries = rows(N * H, 1).view(N, H, D) * 3, rows(200, 2), rows(400, 3)
    wi, ei, sink = listed(N, W, 199, 4), listed(N, K, 399, 5) if K else None, randn(H, seed=6).cpu()
    entries = entries if K else None
    right = reference.sparse_attention(q, window, wi, entries, ei, sink, SCALE)
    window[199], q_before = float("nan"), q.clone()
    if K:
        entries[399] = float("nan")
    on_cpu(monkeypatch, seed, 2)
    out = triton.sparse_attention(q, window, wi, entries, ei, sink, SCALE)
    assert torch.equal(q, q_before)
    close(out, right)


@pytest.mark.parametrize("seed", SEEDS[:2])
@pytest.mark.parametrize("K", [200, 0])
def test_packed_rows(K, seed, monkeypatch):
    """They are unpacked first, with the values that `hopper.attend` multiplies."""
    q, wi, sink = rows(3 * 64, 1).view(3, 64, D) * 3, listed(3, 70, 130, 4), randn(64, seed=6).cpu()
    window, entries = as_pool(rows(130, 2), "fp8", 64), as_pool(rows(300, 3), "fp8", 64) if K else None
    ei = listed(3, K, 300, 5) if K else None
    right = reference.sparse_attention(q, window, wi, entries, ei, sink, SCALE)
    on_cpu(monkeypatch, seed, 2)
    close(triton.sparse_attention(q, window, wi, entries, ei, sink, SCALE), right)
    runs, seen = (
        as_pool(rows(2 * 200, 3).view(2, 200, D), "fp8", 64, batch=2),
        torch.tensor([[0, 65, 199], [3, 200, 1]]),
    )
    q, wi = rows(6 * 64, 1).view(2, 3, 64, D) * 3, listed(6, 70, 130, 4)
    right = reference.hca_attention(q, window, wi, runs, seen, sink, SCALE)
    close(triton.hca_attention(q, window, wi, runs, seen, sink, SCALE), right)
    monkeypatch.setattr(triton, "UNPACKED_BYTES", 1)
    with pytest.raises(RuntimeError, match="active driver"):  # `hopper.attend`, which is not emulated here
        triton.hca_attention(q, window, wi, runs, seen, sink, SCALE)


@pytest.mark.parametrize("seed", SEEDS)
def test_visible_entries(seed, monkeypatch):
    """Queries of two rows that see different numbers of entries, from none on."""
    B, T, H, W = 2, 3, 64, 64
    q, window, entries = rows(B * T * H, 1).view(B, T, H, D) * 3, rows(100, 2), rows(B * 300, 3).view(B, 300, D)
    wi, sink = listed(B * T, W, 99, 4), randn(H, seed=6).cpu()
    visible = torch.tensor([[0, 1, 64], [65, 200, 300]])
    right = reference.hca_attention(q, window, wi, entries, visible, sink, SCALE)
    on_cpu(monkeypatch, seed, 2)
    close(triton.hca_attention(q, window, wi, entries, visible, sink, SCALE), right)


@pytest.mark.gpu
@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("N, H", [(200, 64), (150, 128), (1024, 64)])
def test_on_the_gpu(N, H, monkeypatch):
    """Beside `hopper.attend`, three times, whose results are equal bit for bit."""
    q, window, entries = (t.cuda() for t in (rows(N * H, 1).view(N, H, D) * 3, rows(N + 128, 2), rows(2048, 3)))
    wi, ei, sink = listed(N, 128, N, 4).cuda(), listed(N, 512, 2047, 5).cuda(), randn(H, seed=6)
    seen = torch.randint(0, 2048, (1, N), device="cuda")
    runs = (
        lambda: triton.sparse_attention(q, window, wi, entries, ei, sink, SCALE),
        lambda: triton.hca_attention(q[None], window, wi, entries[None], seen, sink, SCALE),
    )
    for run in runs:
        with monkeypatch.context() as patched:
            patched.setattr(triton, "_many", lambda *given: False)
            right = run()
        outs = [run() for _ in range(3)]
        assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2])
        close(outs[0], right)


def close(out: torch.Tensor, right: torch.Tensor) -> None:
    """Weights and results are rounded to bf16."""
    off = (out.float() - right.float()).abs().max() / right.float().abs().max()
    assert float(off) < 1e-2, float(off)
