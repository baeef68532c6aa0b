"""A GQA model over real GPUs, host memory and disk is the whole model on one GPU."""

import pytest
import torch

from dsv4 import load_model
from tests.gqa import oracle
from tests.gqa.placed import READINGS, run

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
TOLERANCE = 1e-4  # fp32: the same operations on the same numbers, on cards that may differ


@pytest.mark.parametrize("name", READINGS)
@pytest.mark.parametrize("places", [(0, 1), (0, "cpu", "disk"), (1, "disk", 0, "cpu")], ids=str)
@pytest.mark.parametrize("kind", ["qwen2, bias and tied head", "qwen3, biases, yarn and some sliding layers"])
def test_a_spread_gqa_model_is_the_whole_one(tmp_path, kind, places, name):
    if torch.cuda.device_count() < len({0, 1} & set(places)):
        pytest.skip("needs 2 CUDA devices")
    folder = oracle.save(oracle.randomised(oracle.CONFIGS[kind]), oracle.CONFIGS[kind], tmp_path / "c")
    whole = load_model(folder, numerics="fp32", backend="reference", device="cuda:0")
    where = {unit: places[i % len(places)] for i, unit in enumerate(whole.units)}
    model = load_model(folder, numerics="fp32", device="cuda:0", device_map=where)
    assert model.backend == "reference" and set(model.placement.values()) == {
        f"cuda:{place}" if isinstance(place, int) else place for place in places
    }
    for found, wanted in zip(run(model, READINGS[name]), run(whole, READINGS[name]), strict=True):
        assert (found - wanted).nan_to_num().abs().max() < TOLERANCE and found.isnan().equal(wanted.isnan())


def test_auto_fills_the_gpus_in_turn(tmp_path):
    """'cuda' without a number is the current GPU, also where the embedding is on another."""
    config = oracle.CONFIGS["llama, llama3 rope and biases"]
    folder = oracle.save(oracle.randomised(config), config, tmp_path / "c")
    whole = load_model(folder, numerics="fp32", backend="reference", device="cuda:0")
    largest = max(sum(p.nbytes for p in unit.parameters()) for unit in whole.units.values())
    limits = {i: int(3.2 * largest) for i in range(torch.cuda.device_count())} | {"cpu": int(1.2 * largest)}
    model = load_model(folder, numerics="fp32", device="cuda", device_map="auto", max_memory=limits)
    assert len(set(model.placement.values())) > 1 and all(d.index is not None for d in model.layer_devices)
    for found, wanted in zip(run(model, READINGS["dense"]), run(whole, READINGS["dense"]), strict=True):
        assert (found - wanted).nan_to_num().abs().max() < TOLERANCE
