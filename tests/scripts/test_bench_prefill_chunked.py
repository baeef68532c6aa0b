"""Peers of chunked prefill that are put together from parts, with plain attention for the kernels that only a GPU
has."""

import torch
from torch.nn.attention import SDPBackend

from scripts.bench import rows_prefill_chunked as bench


def plain(q, k, v, causal: bool):
    """What `with_lse` says it returns."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1).float() for x in (k, v))
    s = q.float() @ k.mT * q.shape[-1] ** -0.5
    if causal:
        s = s.masked_fill(~torch.ones(s.shape[-2:], dtype=torch.bool).tril(), float("-inf"))
    return (s.softmax(-1) @ v).to(q.dtype), s.logsumexp(-1, keepdim=True)


def test_merged_chunks_are_dense_attention(monkeypatch):
    monkeypatch.setattr(bench, "DENSE_CHUNK", 96)
    monkeypatch.setattr(bench, "with_lse", plain)
    whole = bench._whole
    monkeypatch.setattr(bench, "_whole", lambda T, _, *rest: whole(T, SDPBackend.MATH, *rest))
    error, tolerance = bench._merged_chunks(300, "cpu", 0)[1]()
    assert error < tolerance
    monkeypatch.setattr(bench, "with_lse", lambda *given: (plain(*given)[0], torch.zeros(1, bench.H, 1, 1)))
    error, tolerance = bench._merged_chunks(300, "cpu", 0)[1]()
    assert error > 10 * tolerance


def test_it_asks_cudnn_for_what_it_takes():
    """Shapes and arguments by the operator's own schema, without a device: keys of fewer heads, and a log-sum-exp per
    query."""
    q, k = (
        torch.empty(1, heads, n, bench.D, dtype=torch.bfloat16, device="meta")
        for heads, n in ((bench.H, 40), (bench.KV, 24))
    )
    out, lse = bench.with_lse(q, k, k, False)
    assert out.shape == q.shape and lse.shape == (1, bench.H, 40, 1) and lse.dtype is torch.float32
