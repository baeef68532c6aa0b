"""The report of decode steps: goals, and the bytes that a step reads."""

import json

import pytest
import torch

from scripts.bench import decode, decode_report, report
from tests.scripts.bench_rows import ABOUT, MACHINE, SETUP, point


def test_decode_goals_are_judged():
    points = [point(kernels=288), point(context=1 << 20, step_ms=3.0, kernels=288)]
    said = {r["what"]: r["verdict"] for r in decode_report.verdicts(points, {"layer_ms": 10.0})}
    assert said["ms a layer, batch 1 at 8K"] == "met" and said["ms a layer, batch 1 at 1M"] == "MISSED"
    assert said["kernels a layer, batch 1 at 8K"] == "met" and said["1M over 8K, batch 1"] == "MISSED"
    assert said["times faster a layer than transformers eager, batch 1"] == "met"
    assert said["compiles after warm-up, all points"] == "met"
    assert (
        not decode_report.red(points) and decode_report.red([point(compiles=1)]) and decode_report.red([point(syncs=2)])
    )
    theirs = {"version": "5", "layers": 5, "experts": 16, "context": 8192, "step_ms": 50.0, "layer_ms": 10.0}
    text = decode_report.markdown(points, MACHINE, ABOUT, SETUP, theirs, ["batch 8 at 1M: out of memory"])
    assert "| 1 | 1M | 3.000 |" in text and "MISSED" in text and "out of memory" in text
    json.dumps(report.finite(decode_report.document(points, MACHINE, ABOUT, SETUP, theirs, [])), allow_nan=False)
    assert decode_report.svg(points, ABOUT, theirs).startswith("<?xml")


def test_bytes_of_a_flash_step():
    """perf.md §2: 11.21 GB of weights at batch 1; the caches add 0.004, 0.023 and 0.16 ms at 3.0 TB/s."""
    from dsv4.cache.cache import Cache
    from dsv4.cache.layout import LatentLayout
    from dsv4.loaders.expected import preset
    from dsv4.model.config import ModelConfig
    from dsv4.model.numerics import numerics_named
    from dsv4.model.official import published_model

    raw = preset("flash")
    config = ModelConfig.from_official(
        raw | {"num_nextn_predict_layers": 0, "compress_ratios": raw["compress_ratios"][:43]}
    )
    numerics = numerics_named("native").with_caches("fp8", "fp4")
    model = published_model(config, numerics, "reference", mtp=False)
    assert decode.weight_bytes(model, 1) == pytest.approx(11.21e9, rel=1e-3)
    cache = Cache(LatentLayout(config, numerics, False), 1, 8192, 128, [torch.device("meta")] * 43)
    for context, ms in ((8192, 0.004), (131072, 0.023), (1 << 20, 0.16)):
        assert decode.cache_bytes(model, cache, 1, context) / 3.0e9 == pytest.approx(ms, rel=0.1)
