"""config.json in three forms means the same model."""

import copy

import pytest

from dsv4.errors import ConfigError
from dsv4.kernels.errors import Dsv4Error
from dsv4.loaders.config_files import INFERENCE_NAMES, nvfp4_quantization, to_official, to_transformers
from dsv4.loaders.errors import CheckpointError
from dsv4.loaders.expected import preset
from dsv4.model.config import ModelConfig
from tests import oracle

YARN = oracle.TINY["rope_scaling"]


def effective(raw) -> ModelConfig:
    return ModelConfig.from_official(to_official(raw)[0])


@pytest.mark.parametrize("name", ["flash", "pro"])
def test_published_configs_are_the_spec_s(name):
    config = effective(preset(name))
    assert config.index_topk == {"flash": 512, "pro": 1024}[name]
    assert len(config.compress_ratios) == {"flash": 43, "pro": 61}[name] and config.mtp_compress_ratios == (0,)
    assert (config.rope_theta, config.compress_rope_theta, config.yarn.factor) == (10000, 160000, 16)
    assert config.compress_ratios.count(4) == {"flash": 21, "pro": 30}[name]


@pytest.mark.parametrize("name", ["flash", "pro"])
def test_transformers_form_means_the_same(name):
    official = preset(name)
    back, notes = to_official(to_transformers(official))
    assert notes["compress_ratios"] == "from layer_types and compress_rates"
    assert ModelConfig.from_official(back) == effective(official)


def test_transformers_form_without_leftover_official_keys():
    saved = to_transformers(preset("flash"))
    for key in ("rope_theta", "compress_rope_theta", "topk_method"):
        saved.pop(key)
    assert effective(saved) == effective(preset("flash"))


def test_transformers_own_config_class_agrees(tmp_path):
    from transformers import DeepseekV4Config

    DeepseekV4Config(**copy.deepcopy(oracle.TINY)).save_pretrained(tmp_path)
    import json

    assert effective(json.loads((tmp_path / "config.json").read_text())) == effective(
        {**oracle.TINY, "compress_ratios": [*oracle.TINY["compress_ratios"]]}
    )


def test_inference_form_means_the_same():
    official = preset("flash")
    inverse = {v: k for k, v in INFERENCE_NAMES.items()}
    raw = {
        inverse.get(k, k): v
        for k, v in official.items()
        if k
        in (
            "hidden_size",
            "moe_intermediate_size",
            "num_hidden_layers",
            "num_hash_layers",
            "num_attention_heads",
            "num_experts_per_tok",
            "scoring_func",
            "routed_scaling_factor",
            "qk_rope_head_dim",
            "sliding_window",
            "vocab_size",
            "n_routed_experts",
            "q_lora_rank",
            "o_groups",
            "index_topk",
            "compress_ratios",
        )
    }
    raw |= {"dtype": "fp8", "scale_fmt": "ue8m0", "expert_dtype": "fp4", "original_seq_len": 65536, "rope_factor": 16}
    out, notes = to_official(raw)
    assert ModelConfig.from_official(out) == effective(official)
    assert notes["hidden_size"] == "stated as dim" and "default" in notes["hc_mult"]


@pytest.mark.parametrize(
    "change,message",
    [
        ({"compress_ratios": [0, 4, 7, 0]}, "layer 2 has compress_ratio 7"),
        ({"compress_ratios": [0, 4]}, "compress_ratios has 2 entries"),
        ({"scoring_func": "sigmoid"}, "scoring_func = 'sigmoid'"),
        ({"hidden_size": "64"}, "hidden_size = '64'"),
        ({"hidden_size": 64.5}, "whole number"),
        ({"q_lora_rank": None}, "q_lora_rank"),
        ({"num_attention_heads": 5}, "not divisible by o_groups"),
        ({"num_experts_per_tok": 99}, "exceeds n_routed_experts"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2}}, "rope_scaling type is 'dynamic'"),
        ({"rope_scaling": {"type": "yarn", "factor": 2}}, "has no 'original_max_position_embeddings'"),
        ({"rope_scaling": {"type": "linear", "factor": 2, "beta_fast": 1}}, "has 'beta_fast', which it does not use"),
        ({"rope_scaling": {"type": "linear", "factor": 0}}, "factor = 0.0; expected a positive"),
        ({"rope_scaling": {**YARN, "attention_factor": 1.3}}, "attention_factor = 1.3; V4 scales neither"),
        ({"rope_scaling": {**YARN, "mscale": 0.7}}, "mscale = 0.7; V4 scales neither"),
        ({"rope_scaling": {**YARN, "truncate": False}}, "truncate = False; V4"),
        ({"rope_scaling": {**YARN, "extrapolation": 2}}, "has 'extrapolation', which it does not use"),
        ({"rope_scaling": {**YARN, "rope_theta": 77}}, "has 'rope_theta', which it does not use"),
        ({"rope_scaling": {**YARN, "rope_type": "linear"}}, "type 'yarn' and rope_type 'linear'"),
        ({"q_head_norm": False}, "config.json has 'q_head_norm', which nothing here reads"),
        ({"quantization_config": {"rotation": "hadamard"}}, "quantization_config has 'rotation', which nothing"),
        ({"norm_topk_prob": False}, r"norm_topk_prob = False; expected True \(transformers 5.17 to 5.24 never reads"),
        ({"n_shared_experts": 2}, r"n_shared_experts is 2; expected 1 \(transformers 5.17 to 5.24 never reads"),
        ({"vocab_size": 10**12}, "vocab_size = 1000000000000; expected a number below 1e\\+12"),
        ({"index_head_dim": 24}, "not a power of two"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings = 1; expected true or false"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_a_config_that_contradicts_the_model_names_the_key(change, message):
    raw = {**oracle.TINY, "num_hidden_layers": 4, "compress_ratios": [0, 4, 128, 0], **change}
    with pytest.raises(ConfigError, match=message):
        effective({**raw, "model_type": "deepseek_v4"})


@pytest.mark.parametrize(
    "raw,message",
    [
        ({"model_type": "deepseek_v41"}, "model_type 'deepseek_v41'"),
        ({"hidden_size": 1}, "no known form"),
        ({"layer_types": ["linear_attention"], "head_dim": 8}, "layer 0 has layer type 'linear_attention'"),
        (
            {
                "layer_types": ["compressed_sparse_attention"],
                "compress_rates": {"compressed_sparse_attention": 8},
                "head_dim": 8,
            },
            "gives 8",
        ),
        ({"layer_types": [], "mlp_layer_types": ["moe", "dense"], "head_dim": 8}, "mlp_layer_types names 'dense'"),
        ({"layer_types": [], "compress_rates": {"x": 2}, "head_dim": 8}, "compress_rates has 'x'"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_an_unknown_form_or_layer_type_is_an_error(raw, message):
    with pytest.raises(CheckpointError, match=message):
        to_official(raw)


def test_every_key_is_read_or_known_to_be_harmless():
    config = effective({**preset("flash"), "use_cache": False, "dspark_block_size": 5})
    assert {"use_cache", "dspark_block_size"} <= set(config.never_read) and "index_topk" not in config.never_read


@pytest.mark.parametrize(
    "where,change,message",
    [
        ("main", {"rope_type": "linear", "factor": 2}, "has 'factor' in 'main'; window layers are not stretched"),
        ("main", {"rope_type": "linear"}, "type 'linear' in 'main'"),
        ("compress", {"attention_factor": 1.4}, "attention_factor = 1.4"),
        ("compress", {"attention_factor": None}, "attention_factor = None|no attention_factor"),
        ("compress", {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 in 'compress'"),
        ("compress", {"made_up": 1}, "has 'made_up', which it does not use"),
        ("else", {"rope_theta": 1}, "has 'else' beside"),
    ],
)
def test_no_key_of_rope_parameters_is_silent(where, change, message):
    raw = to_transformers(preset("flash"))
    part = raw["rope_parameters"].get(where, {}) | change
    part = {k: v for k, v in part.items() if v is not None}
    with pytest.raises(Dsv4Error, match=message):
        effective(raw | {"rope_parameters": raw["rope_parameters"] | {where: part}})


def test_hash_layers_that_are_not_the_first_survive_both_forms():
    saved = to_transformers(preset("flash"))
    kinds = ["moe"] * 40 + ["hash_moe"] * 3
    official, _ = to_official(saved | {"mlp_layer_types": kinds})
    config = ModelConfig.from_official(official)
    assert [i for i in range(43) if config.hashed(i)] == [40, 41, 42] and config.num_hash_layers == 3
    assert to_transformers(official)["mlp_layer_types"] == kinds


def test_an_expert_dtype_within_the_quantisation_is_read_as_one_beside_it():
    raw = preset("flash")
    raw["quantization_config"] = raw["quantization_config"] | {"expert_dtype": raw.pop("expert_dtype")}
    assert to_official(raw)[0]["expert_dtype"] == "fp4"
    with pytest.raises(CheckpointError, match="expert_dtype"):
        to_official(raw | {"expert_dtype": "fp8"})


def test_nvfp4_quantization_in_both_spellings():
    config, exporter = nvfp4_quantization(preset("flash"))
    assert config["moe_quant_algo"] == "NVFP4" and config["group_size"] == 16 and config["quant_method"] == "fp8"
    assert (
        "layers.42.ffn.experts" in config["quantized_layers"]
        and config["ignore"] == exporter["quantization"]["exclude_modules"]
    )
    assert issubclass(CheckpointError, Dsv4Error)


JUNK = [None, "x", "1", -1, 0, 1.5, True, [], {}, [None], [[1]], {"a": 1}, float("nan"), float("inf"), 1e300, 10**30]


def inference_form() -> dict:
    inverse = {v: k for k, v in INFERENCE_NAMES.items()}
    kept = {
        k: v for k, v in preset("flash").items() if k not in ("rope_scaling", "architectures", "quantization_config")
    }
    return {inverse.get(k, k): v for k, v in kept.items()} | {"rope_factor": 16}


def damaged(raw: dict):
    """`raw` with one value, at any depth, absent or replaced by junk."""
    for key, value in raw.items():
        yield key, {k: v for k, v in raw.items() if k != key}
        for junk in JUNK:
            yield f"{key}={junk!r}", raw | {key: junk}
        if isinstance(value, dict):
            yield from ((f"{key}.{where}", raw | {key: inner}) for where, inner in damaged(value))


@pytest.mark.parametrize("form", ["official", "transformers", "inference"])
def test_a_damaged_config_never_raises_anything_but_one_typed_line(form):
    raw = {
        "official": preset("flash"),
        "transformers": to_transformers(preset("flash")),
        "inference": inference_form(),
    }[form]
    assert effective(raw) == effective(preset("flash"))
    refused = 0
    for where, bad in damaged(raw):
        try:
            effective(bad)
        except Dsv4Error as error:
            refused += 1
            assert "\n" not in str(error) and len(str(error)) < 300, where
        except Exception as error:
            pytest.fail(f"{where}: {type(error).__name__}: {error}")
    assert refused > 300


@pytest.mark.parametrize(
    "change,message",
    [
        ({"compress_ratios": [4] * 44}, "compress_ratios = .* but its layer_types means"),
        ({"num_hash_layers": 7}, "num_hash_layers = 7, but its mlp_layer_types means 3"),
        ({"qk_rope_head_dim": 32}, "qk_rope_head_dim = 32, but its partial_rotary_factor means 64"),
        ({"num_hidden_layers": 44}, "layer_types has 43 entries for num_hidden_layers 44"),
    ],
)
def test_a_transformers_form_that_contradicts_itself_is_an_error(change, message):
    with pytest.raises(CheckpointError, match=message):
        effective(to_transformers(preset("flash")) | change)
