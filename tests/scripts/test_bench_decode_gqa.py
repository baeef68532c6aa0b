"""What the benchmark of GQA decode steps counts and writes."""

import pytest
import torch

from dsv4.model.dummy import load_dummy
from dsv4.model.gqa import dummy as geometries
from dsv4.model.gqa.choice import attention_named
from scripts.bench import decode_gqa, report
from scripts.bench.decode import Point
from scripts.bench.timing import Machine


@pytest.fixture
def model(monkeypatch):
    thin = dict(hidden_size=64, intermediate_size=96, vocab_size=300, num_attention_heads=8, num_key_value_heads=2)
    monkeypatch.setitem(geometries.GEOMETRIES, "qwen2.5-7b", geometries.GEOMETRIES["qwen2.5-7b"] | thin)
    return load_dummy("qwen2.5-7b", layers=3, backend="reference")


def test_bytes_of_a_step(model):
    weights = model.nbytes - 300 * 64 * 2 + 2 * 64 * 2  # two rows of the embedding
    token = 2 * 8 * 2  # two heads of eight numbers in bf16
    dense = decode_gqa.step_bytes(model, 2, 10_000)
    assert dense == pytest.approx(weights + 2 * 3 * 2 * 10_000 * token)
    model.attention = attention_named("block-bound", 1024)
    # the newest block holds 16 tokens at 10,000
    assert decode_gqa.step_bytes(model, 2, 10_000) == pytest.approx(
        weights + 2 * 3 * (2 * (7 * 128 + 16) + 2 * 79) * token
    )
    model.attention = attention_named("block-mean", 1024)
    assert decode_gqa.step_bytes(model, 1, 10_000) == pytest.approx(
        weights - 128 + 3 * (2 * (7 * 128 + 16) + 79) * token
    )


def test_the_table_has_both_ways_and_their_ratio():
    points = [
        Point(1, 1 << 20, 28, ms, ms, 0.0, ms / 2, 1, 1, 10**9, 0.0, attention=name)
        for name, ms in (("dense", 30.0), ("block-128 bound", 12.0))
    ]
    pair = decode_gqa.Pair(points)
    setup = {
        "geometry": "qwen2.5-7b",
        "layers": 28,
        "numerics": "native",
        "backend": "triton",
        "weight_bytes": 1,
        "attention": attention_named("block-bound").document(),
    }
    about = dict.fromkeys(("command", "device", "torch", "triton", "commit"), "x")
    machine = Machine(
        **{name: "none" if kind in ("str", str) else 1e12 for name, kind in Machine.__annotations__.items()}
    )
    text = decode_gqa.markdown(about, setup, machine, [pair], ["batch 8 at 1M: no room"])
    assert "| 1 | 1M | block-128 bound | 12.000 |" in text and "| 2.50 |" in text and "failed: batch 8" in text
    assert report.finite(decode_gqa.document(about, setup, machine, [pair], []))["pairs"][0]["dense_over_sparse"] == 2.5


@pytest.mark.gpu
def test_a_pair_is_measured_cleanly():
    from scripts.bench.timing import Clock, measure_machine

    model = load_dummy("qwen2.5-7b", layers=2, device="cuda", backend="triton")
    ways = [attention_named("dense"), attention_named("block-bound")]
    pair = decode_gqa.measure_pair(model, 2, 1 << 16, measure_machine(Clock()), ways, 16)
    assert [p.attention for p in pair.points] == ["dense", "block-128 bound"]
    assert all(p.finite and not p.syncs and not p.compiles and not p.allocations and p.step_ms > 0 for p in pair.points)
    torch.cuda.empty_cache()
