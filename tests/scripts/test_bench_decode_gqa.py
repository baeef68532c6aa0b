"""What the benchmark of GQA decode steps counts and writes."""

import json
from dataclasses import asdict
from types import SimpleNamespace

import pytest
import torch

from dsv4.cost_model.steps import steps_of
from dsv4.model.dummy import fill_cache, load_dummy
from dsv4.model.gqa import dummy as geometries
from dsv4.model.gqa.choice import attention_named
from scripts import bench_decode
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
    token, ends = 2 * 8 * 2, 2 * 3 * 2 * 64 * 2  # two heads of eight numbers in bf16; queries and outputs of two rows
    dense = decode_gqa.step_bytes(model, 2, 10_000)
    assert sum(dense.values()) == weights + 2 * 3 * 2 * 10_000 * token + ends
    model.attention = attention_named("block-bound", 1024)
    # the newest block holds 16 tokens at 10,000; of 79 blocks a sink and two local ones are not scored
    found = decode_gqa.step_bytes(model, 2, 10_000)
    assert found["block summaries"] == 2 * 3 * 2 * 76 * token and found["keys"] == 2 * 3 * (7 * 128 + 16) * token
    assert sum(found.values()) == weights + 2 * 3 * (2 * (7 * 128 + 16) + 2 * 76) * token + ends
    model.attention = attention_named("block-mean", 1024)
    assert decode_gqa.step_bytes(model, 1, 10_000)["block summaries"] == 3 * 76 * token


def test_a_shape_that_does_not_fit_is_measured_with_fewer_layers():
    """Llama-8B at 1M tokens: 4 GiB of keys and values a layer, and 32 MiB of summaries."""
    policy = attention_named("block-bound", 4096).policy
    layer = (4 << 30) + (32 << 20)
    weights = 2 * (4096 * (2 * 4096 + 2 * 1024 + 3 * 14336) + 2 * 4096)
    rest = 2 * (2 * 128256 * 4096 + 4096)
    fits = lambda room, batch=1: decode_gqa.layers_that_fit("llama-8b", 32, batch, 1 << 20, policy, room)
    assert fits(rest + 32 * (layer + weights)) == (32, "")
    fit, why = fits(rest + 15 * (layer + weights))
    assert fit == 15 and "measured with 15 layers" in why and f"32 × {layer:,} of caches" in why
    assert f"32 layers take {rest + 32 * (layer + weights):,} B" in why
    assert fits(rest + 15 * (layer + weights) - 1)[0] == 14 and fits(rest + 8 * layer + weights, 8)[0] == 1
    fit, why = fits(rest)
    assert fit == 0 and "not even one fits" in why


def pairs_of(ways, times):
    """A pair at 1M tokens, dense first; times in ms."""
    points = [
        Point(
            *(1, 1 << 20, 28, ms, ms, 0.0, ms / 2, 1, 1, 10**9, 0.0),
            attention=way.policy.name,
            policy=None if way.policy.dense else asdict(way.policy),
            parts={"output head": 2 * 10**9, "keys": 10**9, "values": 10**9, "block summaries": 5 * 10**8},
        )
        for way, ms in zip(ways, times)
    ]
    return [decode_gqa.Pair(points)]


def reported(ways, times, failed=()):
    """(JSON, markdown) of a report of these ways."""
    setup = {
        "geometry": "qwen2.5-7b",
        "layers": 28,
        "numerics": "native",
        "backend": "triton",
        "weight_bytes": 15231233024,
        "attention": ways[-1].document(),
        "ways": [way.document() for way in ways],
        "reduced": ["batch 8 at 1M: measured with 4 layers"],
    }
    about = dict.fromkeys(("command", "device", "torch", "triton", "commit"), "x")
    machine = Machine(
        **{name: "none" if kind in ("str", str) else 1e12 for name, kind in Machine.__annotations__.items()}
    )
    given = about, setup, machine, pairs_of(ways, times), failed
    return report.finite(decode_gqa.document(*given)), decode_gqa.markdown(*given)


def test_the_table_has_all_ways_and_their_ratios():
    ways = [attention_named("dense"), *(attention_named("block-bound", n) for n in (1024, 4096))]
    document, text = reported(ways, (30.0, 10.0, 12.0), ["batch 8 at 1M: no room"])
    assert (
        "| 1 | 1M | 28 | block-128 bound, 32 blocks | 12.000 |" in text and "| 2.50 | 2.000 | 2.000 | 0.500 |" in text
    )
    assert "block-128 bound, 8 blocks | 10.000" in text and "| 3.00 |" in text and "1024, 4096 tokens" in text
    assert "failed: batch 8" in text and "measured with 4 layers" in text
    (pair,) = document["pairs"]
    assert pair["dense_over_sparse"] == 2.5 and [p["dense_over_it"] for p in pair["points"]] == [1, 3, 2.5]


def test_the_cost_model_reads_what_the_benchmark_writes():
    """Budgets are apart, and bytes are the formula's, of as many layers as were measured."""
    ways = [attention_named("dense"), *(attention_named("block-bound", n) for n in (1024, 4096))]
    document, _ = reported(ways, (30.0, 10.0, 12.0))
    document["pairs"][0]["points"][2]["layers"] = 4
    dense, few, many = steps_of(json.loads(json.dumps(document))).steps
    assert [s.share.policy for s in (dense, few, many)] == [
        "dense",
        "block-128 bound, 8 blocks",
        "block-128 bound, 32 blocks",
    ]
    assert (few.policy.kept, many.policy.kept, dense.policy.dense) == (8, 32, True)
    assert many.layers == 4 and many.seconds == pytest.approx(0.012) and few.parts["keys"] == 28 * 1024 * 4 * 128 * 2
    assert many.parts["keys"] == 4 * 4096 * 4 * 128 * 2
    norm = 2 * 3584  # bytes of the last norm, which no layer has
    assert (many.parts["layers and norms"] - norm) * 7 == few.parts["layers and norms"] - norm


def test_budgets_share_one_cache(model):
    """Summaries serve every budget, so that all ways run over the same keys and values."""
    ways = [attention_named("dense"), *(attention_named("block-bound", 128 * n) for n in (8, 16, 32))]
    model.attention = ways[-1]
    cache = model.new_cache(1, 8192)
    fill_cache(cache, 8000)
    found = []
    for way in ways:
        model.attention = way
        found.append(model.append(torch.tensor([[7]]), cache, prompt=False))
        cache.rewind(1)
    assert all(logits.isfinite().all() for logits in found)
    assert len({tuple(logits.flatten().tolist()) for logits in found}) == 4  # each reads something else


def test_every_shape_is_written_when_it_is_measured(monkeypatch, tmp_path):
    """Shapes that fail or do not fit are said so, and the others stand in the files."""
    ways = [attention_named("dense"), *(attention_named("block-bound", n) for n in (1024, 2048, 4096))]
    asked, seen = [], []

    def measured(model, batch, context, machine, given, steps):
        asked.append((model, batch, context, [w.policy.tokens for w in given[1:]]))
        seen.append(sorted(f.name for f in tmp_path.iterdir()))
        if context == 8192:
            raise RuntimeError("a kernel failed")
        return pairs_of(ways, (30.0, 9.0, 10.0, 12.0))[0]

    monkeypatch.setattr(decode_gqa, "measure_pair", measured)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (80 << 30, 80 << 30))
    monkeypatch.setattr(bench_decode.Models, "of", lambda self, layers: layers)
    monkeypatch.setattr(bench_decode.Models, "sizes", lambda self: (32, 10**9))
    args = SimpleNamespace(
        **dict(dummy_weights="llama-8b", layers=None, attention="block-bound", attention_tokens="32b,8b,16b"),
        **dict(batch=[1, 8], context=[8192, 1 << 20], numerics="native", backend="triton", steps=8, out=tmp_path),
    )
    about = dict.fromkeys(("command", "device", "torch", "triton", "commit"), "x") | {"seconds": None}
    machine = Machine("H100", *(1e12,) * 5)
    assert bench_decode.policies(args, machine, about) == 1  # a shape failed
    assert [a[:3] for a in asked] == [(32, 1, 8192), (16, 1, 1 << 20), (32, 8, 8192), (2, 8, 1 << 20)]
    stem = "bench_decode_gqa_h100"
    assert asked[0][3] == [1024, 2048, 4096] and seen[:2] == [[], [f"{stem}.json", f"{stem}.md"]]
    found = json.loads((tmp_path / f"{stem}.json").read_text())
    assert len(found["pairs"]) == len(found["failed"]) == len(found["setup"]["reduced"]) == 2
    assert found["about"]["seconds"] > 0 and "a kernel failed" in (tmp_path / f"{stem}.md").read_text()


@pytest.mark.gpu
def test_a_pair_is_measured_cleanly():
    from scripts.bench.timing import Clock, measure_machine

    model = load_dummy("qwen2.5-7b", layers=2, device="cuda", backend="triton")
    ways = [attention_named("dense"), attention_named("block-bound", 1024), attention_named("block-bound")]
    pair = decode_gqa.measure_pair(model, 2, 1 << 16, measure_machine(Clock()), ways, 16)
    assert [p.way for p in pair.points] == ["dense", "block-128 bound, 8 blocks", "block-128 bound, 32 blocks"]
    assert all(p.finite and not p.syncs and not p.compiles and not p.allocations and p.step_ms > 0 for p in pair.points)
    torch.cuda.empty_cache()
