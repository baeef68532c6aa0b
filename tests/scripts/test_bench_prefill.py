"""What the benchmark of whole prompts counts, against perf.md §2, and its report."""

import json

import pytest
import torch

from scripts.bench import decode_prefill, decode_report, report
from scripts.bench.decode_prefill import Prefill, causal
from tests.scripts.bench_rows import ABOUT, MACHINE, SETUP, point


def test_what_queries_see_together():
    for tokens in (1, 3, 4, 50, 129):
        for ratio in (1, 4, 7):
            seen = [(t + 1) // ratio for t in range(tokens)]
            assert causal(tokens, ratio) == sum(seen)
            for most in (1, 5, 8):
                assert causal(tokens, ratio, most) == sum(min(n, most) for n in seen)


@pytest.fixture(scope="module")
def flash():
    """(model, cache) of 16 layers without memory."""
    from dsv4.cache.cache import Cache
    from dsv4.cache.layout import LatentLayout
    from dsv4.loaders.expected import preset
    from dsv4.model.config import ModelConfig
    from dsv4.model.numerics import numerics_named
    from dsv4.model.official import published_model

    raw = preset("flash")
    config = ModelConfig.from_official(
        raw | {"num_nextn_predict_layers": 0, "num_hidden_layers": 16, "compress_ratios": raw["compress_ratios"][:16]}
    )
    numerics = numerics_named("native").with_caches("fp8", "fp4")
    model = published_model(config, numerics, "reference", mtp=False)
    return model, Cache(LatentLayout(config, numerics, False), 1, 1 << 17, 128, [torch.device("meta")] * 16)


@pytest.mark.parametrize("tokens, scores, attention", [(8192, 0.17, 0.86), (1 << 17, 44.0, 13.7)])
def test_floors_of_a_csa_layer(flash, tokens, scores, attention):
    """perf.md §2: ms of a prompt at 800 TFLOPS, from 131072 · 640 · S and 16384 · S · N / 2 FLOPs."""
    model, cache = flash
    i = next(i for i, block in enumerate(model.layers) if block.spec.kind.value == "csa")
    found = {what: flops for what, _, flops in decode_prefill.parts(model, cache, tokens, 2048)}
    assert found[f"layer {i}, scores"] / 800e9 == pytest.approx(scores, rel=0.03)
    early = 0.14 if tokens == 8192 else 0.02  # the first queries see fewer than 640
    assert attention * (1 - early) <= found[f"layer {i}, attention"] / 800e9 <= attention * 1.01


def test_products_of_a_prompt(flash):
    """Each token passes 6 experts of 50.3 MFLOP; weights are read once a chunk, all experts of a layer in a chunk of
    2048."""
    model, cache = flash
    found = {what: (moved, flops) for what, moved, flops in decode_prefill.parts(model, cache, 8192, 2048)}
    moved, flops = found["layer 5, products"]
    routed, weights = 6 * 50.33e6 * 8192, sum(p.nbytes for p in model.layers[5].parameters())
    assert 7 / 6 * routed < flops < 2 * routed
    assert 4 * weights * 0.99 < moved < 4 * weights + 3 * 8192 * 4096 * 2
    whole = decode_prefill.floor(decode_prefill.parts(model, cache, 8192, 2048), MACHINE)
    assert 16 * 8192 * 2 * 6 * 25e6 / 771e12 * 1e3 < whole < 500


def test_the_report_shows_prompts():
    prefills = [
        Prefill(8192, 16, 2048, 200.0, 9000.0, 100.0, 60 * 10**9),
        Prefill(1 << 17, 16, 2048, 8000.0, 8100.0, 4000.0, 60 * 10**9, 1),
    ]
    theirs = {
        "version": "5",
        "layers": 5,
        "experts": 16,
        "context": 8192,
        "step_ms": 50.0,
        "layer_ms": 10.0,
        "prefill": 8192,
        "prefill_ms": 900.0,
    }
    text = decode_report.markdown([point()], MACHINE, ABOUT, SETUP, theirs, [], prefills)
    assert "| 8K | 200.0 | 9000.0 | 40960 | 12.50 | 100.0 | 50% | 0 | 0 | 60.0 |" in text
    assert "8K in 900.0 ms, 180.00 ms a layer" in text
    found = decode_report.document([point()], MACHINE, ABOUT, SETUP, theirs, [], prefills)
    assert json.loads(json.dumps(report.finite(found), allow_nan=False))["prefills"][1]["share_of_floor"] == 0.5
    assert decode_report.svg([point()], ABOUT, theirs, prefills).startswith("<?xml")
    assert decode_report.markdown([point()], MACHINE, ABOUT, SETUP, theirs, []).count("Whole prompts") == 0
