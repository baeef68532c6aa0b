"""Attention with a sink, against a literal softmax over the union in fp64 (tolerance 1e-5: a sink counted twice is
1e-2)."""

import pytest
import torch

from dsv4.kernels.attention import hca_attention, reference, sparse_attention


def literal(q, keys, sink, scale):
    """q [H, D], keys list of [D], one head at a time; no keys at all leaves only the sink: output 0."""
    H, D = q.shape
    out = torch.zeros(H, D, dtype=torch.float64)
    for h in range(H):
        if not keys:
            continue
        K = torch.stack(keys).double()
        logits = K @ q[h].double() * scale
        m = max(logits.max().item(), sink[h].item())
        p = torch.exp(logits - m)
        out[h] = (p / (p.sum() + torch.exp(sink[h].double() - m))) @ K
    return out


def case(N=4, H=3, D=8, R=12, E=20, W=5, K=6, seed=0):
    g = torch.Generator().manual_seed(seed)
    q, window, entries = (torch.randn(*s, generator=g) for s in ((N, H, D), (R, D), (E, D)))
    wi = torch.randint(-1, R, (N, W), generator=g)
    ei = torch.stack([torch.randperm(E, generator=g)[:K] for _ in range(N)])
    ei[0, 0] = ei[1, 3] = -1  # −1 anywhere, also first
    sink = torch.linspace(-8, 8, H)
    return q, window, wi, entries, ei, sink


def union(window, wi, entries=None, ei=None):
    keys = [window[i] for i in wi.tolist() if i >= 0]
    return keys + ([entries[i] for i in ei.tolist() if i >= 0] if entries is not None else [])


@pytest.mark.parametrize("K", [0, 1, 6], ids=lambda k: f"{k} selected")
def test_sparse_equals_one_softmax_over_the_union(K):
    q, window, wi, entries, ei, sink = case()
    ei = ei[:, :K]
    got = sparse_attention(q, window, wi, entries, ei, sink, 0.35)
    for t in range(len(q)):
        wanted = literal(q[t], union(window, wi[t], entries, ei[t]), sink, 0.35)
        assert (got[t] - wanted).abs().max() < 1e-5


def test_window_only_equals_the_literal():
    q, window, wi, _, _, sink = case()
    got = sparse_attention(q, window, wi, None, None, sink, 0.35)
    for t in range(len(q)):
        assert (got[t] - literal(q[t], union(window, wi[t]), sink, 0.35)).abs().max() < 1e-5


def test_a_query_without_any_key_gives_zero():
    q, window, wi, entries, ei, sink = case()
    got = sparse_attention(q, window, torch.full_like(wi, -1), entries, torch.full_like(ei, -1), sink, 0.35)
    assert torch.equal(got, torch.zeros_like(got))


def test_nan_in_rows_nobody_points_to_is_not_seen():
    q, window, wi, entries, ei, sink = case()
    wanted = sparse_attention(q, window, wi.clamp(max=7), entries, ei.clamp(max=9), sink, 0.35)
    window[8:], entries[10:] = float("nan"), float("nan")
    assert torch.equal(sparse_attention(q, window, wi.clamp(max=7), entries, ei.clamp(max=9), sink, 0.35), wanted)
    window[0] = float("nan")  # −1 must not read row 0
    only = torch.tensor([[-1, 3]] * 4)
    assert torch.isfinite(sparse_attention(q, window, only, None, None, sink, 0.35)).all()


@pytest.mark.parametrize("n", [0, 1, 7], ids=lambda n: f"{n} entries")
def test_hca_equals_one_softmax_over_the_union(n):
    B, T, H, D, W = 2, 3, 3, 8, 4
    g = torch.Generator().manual_seed(5)
    q, window, entries = (
        torch.randn(B, T, H, D, generator=g),
        torch.randn(9, D, generator=g),
        torch.randn(B, n, D, generator=g),
    )
    wi = torch.randint(-1, 9, (B * T, W), generator=g)
    visible = torch.randint(0, n + 1, (B, T), generator=g)
    sink = torch.linspace(-8, 8, H)
    dead = visible.amax(1)
    for b in range(B):
        entries[b, dead[b] :] = float("nan")  # slots this row has not written yet
    got = hca_attention(q, window, wi, entries, visible, sink, 0.35)
    for b in range(B):
        for t in range(T):
            keys = union(window, wi[b * T + t]) + list(entries[b, : visible[b, t]])
            assert (got[b, t] - literal(q[b, t], keys, sink, 0.35)).abs().max() < 1e-5


def test_tiling_changes_nothing(monkeypatch):
    q, window, wi, entries, ei, sink = case(N=9)
    shared, visible = entries.view(1, 20, 8).expand(3, 20, 8), torch.tensor([[3, 9, 20]] * 3)
    sparse = sparse_attention(q, window, wi, entries, ei, sink, 0.35)
    dense = hca_attention(q.view(3, 3, 3, 8), window, wi, shared, visible, sink, 0.35)
    monkeypatch.setattr(reference, "SCRATCH_BYTES", 1)
    assert torch.allclose(sparse_attention(q, window, wi, entries, ei, sink, 0.35), sparse, atol=1e-6)
    assert torch.allclose(hca_attention(q.view(3, 3, 3, 8), window, wi, shared, visible, sink, 0.35), dense, atol=1e-6)


def test_bf16_inputs_are_computed_in_fp32():
    q, window, wi, entries, ei, sink = case()
    q, window, entries = q.bfloat16(), window.bfloat16(), entries.bfloat16()
    exact = sparse_attention(q.float(), window.float(), wi, entries.float(), ei, sink, 0.35)
    assert torch.equal(sparse_attention(q, window, wi, entries, ei, sink, 0.35), exact.bfloat16())


@pytest.mark.parametrize("K", [0, 1, 6], ids=lambda k: f"{k} selected")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_host_form_of_one_query_equals_the_reference(K, dtype):
    q, window, wi, entries, ei, sink = case()
    q, window, entries = q[:1].to(dtype), window.to(dtype), entries.to(dtype)
    ei = ei[2:3, :K] if K else None
    args = (q, window, wi[:1].clamp(min=0), entries if K else None, ei, sink, 0.35)
    wanted = sparse_attention(*args)
    assert (sparse_attention(*args, True, backend="cpu") - wanted).abs().max() < (
        1e-6 if dtype is torch.float32 else 2e-2
    )
    holed = (q, window, torch.tensor([[-1, 3, -1, 0, 2]]), *args[3:])  # without the promise, −1 is skipped
    assert torch.equal(sparse_attention(*holed, False, backend="cpu"), sparse_attention(*holed))
    shared = entries[None, :7]
    args = (q[None], window, wi[:1].clamp(min=0), shared, torch.tensor([[7]]), sink, 0.35)
    assert (hca_attention(*args, True, backend="cpu") - hca_attention(*args)).abs().max() < (
        1e-6 if dtype is torch.float32 else 2e-2
    )
    part = (*args[:4], torch.tensor([[4]]), sink, 0.35)  # fewer are visible: the caller does not promise
    assert torch.equal(hca_attention(*part, False, backend="cpu"), hca_attention(*part))
