"""Rotary frequencies of every form of rope_scaling against transformers' own functions, over random configs."""

import copy
import math
import random

import pytest
import torch

from dsv4.model.config import ModelConfig
from dsv4.model.rope import frequencies
from dsv4.probes.oracle.attention import frequencies as in_float64
from dsv4.probes.oracle.config import OracleConfig
from tests import oracle


def drawn(kind: str, seed: int) -> dict:
    """A config whose ramp may begin before the first pair, end beyond the last, or run backwards."""
    r = random.Random(seed)
    scaling = {"type": kind, "factor": r.choice([1, 2, 16, 40.5])}
    if kind != "linear":
        scaling["original_max_position_embeddings"] = int(10 ** r.uniform(0.5, 10))
    if kind == "llama3":
        scaling |= {"low_freq_factor": r.choice([1, 2.5]), "high_freq_factor": r.choice([4, 32])}
    if kind == "yarn" and r.random() < 0.7:
        scaling |= {"beta_fast": r.choice([2, 32, 500]), "beta_slow": r.choice([0.01, 1, 1.5])}
    dims = r.choice([4, 8, 32])
    theta = r.choice([50.0, 10000.0, 160000.0, 1e6])
    changes = {"qk_rope_head_dim": dims, "index_head_dim": 32, "compress_rope_theta": theta, "rope_scaling": scaling}
    return oracle.TINY | changes


@pytest.mark.parametrize("kind", ["yarn", "linear", "llama3"])
def test_frequencies_are_those_of_transformers(kind):
    from transformers import DeepseekV4Config
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    theirs = DeepseekV4Config(**copy.deepcopy(oracle.TINY))
    backwards = 0
    for seed in range(100):
        raw = drawn(kind, seed)
        share = raw["qk_rope_head_dim"] / raw["head_dim"]
        part = {**raw["rope_scaling"], "rope_type": kind, "rope_theta": raw["compress_rope_theta"]}
        theirs.rope_parameters = {
            "main": theirs.rope_parameters["main"],
            "compress": part | {"partial_rotary_factor": share, "attention_factor": 1.0},
        }
        wanted, factor = ROPE_INIT_FUNCTIONS[kind](theirs, None, layer_type="compress")
        config = ModelConfig.from_official({**raw, "model_type": "deepseek_v4"})
        found = frequencies(config)["compress"]
        torch.testing.assert_close(found, wanted, rtol=3e-6, atol=0, msg=lambda text: f"{raw['rope_scaling']}: {text}")
        own = OracleConfig.of({**raw, "model_type": "deepseek_v4"})  # the audit's own reading of config.json
        torch.testing.assert_close(found.double(), in_float64(own, True), rtol=3e-6, atol=0)
        assert factor == 1.0
        if kind == "yarn" and config.yarn.factor > 1:  # pair 0 turns L/2π times, and the ramp is to keep fast pairs
            fast = config.yarn.original_max_position_embeddings / (2 * math.pi) > config.yarn.beta_fast
            backwards += fast and found[0] < 0.9
    assert backwards > 0 or kind != "yarn"  # ramps that run backwards were among them
