"""Attention of many queries on Hopper, emulated: any order of copies, products and warps that a GPU may have."""

import pytest
import torch

from dsv4.kernels.attention import hopper_prefill, reference, triton
from tests.gluon import SEEDS, OnCPU
from tests.kernels.products import randn

D, SCALE = 512, 512**-0.5


def on_cpu(monkeypatch, seed: int, programs: int) -> None:
    """`attend_many` as a GPU of so many multiprocessors runs it."""
    for name, value in (("capability", (9, 0)), ("processors", programs), ("dependent_launch", True)):
        monkeypatch.setattr(triton, name, lambda device, value=value: value)
    monkeypatch.setattr(triton, "dot_in_fp32", lambda x: False)
    monkeypatch.setattr(triton, "require_device", lambda name, *tensors: None)
    monkeypatch.setattr(triton, "MANY", True)
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


def close(out: torch.Tensor, right: torch.Tensor) -> None:
    """Weights and results are rounded to bf16."""
    off = (out.float() - right.float()).abs().max() / right.float().abs().max()
    assert float(off) < 1e-2, float(off)
