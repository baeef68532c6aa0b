"""config.json of GQA models: both spellings read alike, and what changes the computation is refused by name."""

import pytest
import torch

from dsv4.errors import ConfigError
from dsv4.loaders.config_files import family_of
from dsv4.loaders.errors import CheckpointError
from dsv4.model.gqa.config import GQAConfig
from dsv4.model.gqa.rope import frequencies
from tests.gqa.oracle import CONFIGS, TINY, randomised

QWEN, QWEN3, LLAMA, MISTRAL = (
    dict(TINY, model_type=kind, **more)
    for kind, more in (("qwen2", {}), ("qwen3", {"head_dim": 16}), ("llama", {}), ("mistral", {"sliding_window": 8}))
)
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=128)
LLAMA3 = dict(
    rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
)


@pytest.mark.parametrize("name", CONFIGS)
def test_frequencies_and_windows_are_those_of_transformers(name):
    ours, theirs = GQAConfig.from_dict(CONFIGS[name]), randomised(CONFIGS[name])
    rotary = theirs.model.rotary_emb
    assert (
        torch.equal(frequencies(ours.rope, ours.head_dim), rotary.inv_freq)
        and ours.rope.attention == rotary.attention_scaling
    )
    for window, layer in zip(ours.windows, theirs.model.layers, strict=True):
        held = layer.self_attn
        wanted = theirs.config.sliding_window if ours.model_type == "mistral" else getattr(held, "sliding_window", None)
        assert window == wanted and hasattr(held, "q_norm") == hasattr(held, "k_norm") == ours.head_norms
        assert (held.q_proj.bias is not None, held.o_proj.bias is not None, layer.mlp.up_proj.bias is not None) == (
            ours.qkv_bias,
            ours.output_bias,
            ours.mlp_bias,
        )


@pytest.mark.parametrize(
    "scaling",
    [
        {},
        dict(rope_type="linear", factor=3.0),
        LLAMA3,
        YARN,
        YARN | dict(beta_fast=16, beta_slow=2),
        YARN | dict(truncate=False),
        YARN | dict(mscale=0.7, mscale_all_dim=1.2),
        YARN | dict(attention_factor=1.3),
        YARN | dict(factor=1.0),
        dict(rope_type="yarn", factor=2.0),
    ],
    ids=str,
)
@pytest.mark.parametrize("theta", [100.0, 1e6])
def test_every_spelling_of_a_variant_is_that_of_transformers(scaling, theta):
    base = dict(LLAMA, head_dim=64, max_position_embeddings=256)
    theirs = randomised(base | dict(rope_theta=theta, rope_scaling=scaling or None)).model.rotary_emb
    old_type = {("type" if k == "rope_type" else k): v for k, v in scaling.items()}
    for raw in (
        dict(rope_theta=theta, rope_scaling=scaling or None),
        dict(rope_theta=theta, rope_scaling=old_type or None),
        dict(rope_parameters=dict(scaling, rope_theta=theta)),
        dict(rope_theta=theta, rope_parameters=scaling),
    ):
        found = GQAConfig.from_dict(base | raw)
        assert (frequencies(found.rope, 64) - theirs.inv_freq).abs().max() <= 1e-7 * theirs.inv_freq.max()
        assert found.rope.attention == pytest.approx(theirs.attention_scaling, abs=1e-12)


def test_what_is_not_stated_is_what_transformers_takes():
    found = GQAConfig.from_dict(
        {k: v for k, v in LLAMA.items() if k not in ("num_key_value_heads", "tie_word_embeddings", "eos_token_id")}
    )
    assert (
        found.num_key_value_heads == found.num_attention_heads
        and found.rope.theta == 1e4
        and not found.tie_word_embeddings
    )
    assert found.head_dim == 8 and found.eos_token_id == () and found.windows == (None,) * 3
    assert GQAConfig.from_dict(LLAMA | dict(eos_token_id=[3, 4])).eos_token_id == (3, 4)


def test_yarn_stretches_the_context():
    assert (
        GQAConfig.from_dict(QWEN | dict(rope_scaling=YARN, max_position_embeddings=128)).max_position_embeddings == 512
    )
    assert (
        GQAConfig.from_dict(QWEN | dict(rope_scaling=LLAMA3, max_position_embeddings=128)).max_position_embeddings
        == 128
    )


@pytest.mark.parametrize("base", [QWEN, QWEN3], ids=["qwen2", "qwen3"])
def test_windows_of_qwen(base):
    window = dict(use_sliding_window=True, sliding_window=16)
    of = lambda **raw: GQAConfig.from_dict(base | raw).windows
    assert of(sliding_window=16, max_window_layers=0) == (None,) * 3
    assert of(**window, max_window_layers=1) == (None, 16, 16)
    assert of(**window, max_window_layers=9) == (None,) * 3
    assert of(**window, layer_types=["sliding_attention", "full_attention", "sliding_attention"]) == (16, None, 16)


@pytest.mark.parametrize(
    "raw, said",
    [
        (QWEN | dict(rope_scaling=dict(type="dynamic", factor=2.0)), "'dynamic' (it follows the length"),
        (QWEN | dict(rope_scaling=dict(type="longrope", factor=2.0)), "'longrope' (it follows the length"),
        (QWEN | dict(rope_scaling=dict(type="mrope", mrope_section=[1, 2])), "rope_type 'mrope'"),
        (QWEN | dict(rope_scaling=dict(type="linear", factor=2.0, beta_fast=3)), "beta_fast"),
        (
            QWEN | dict(rope_scaling=dict(type="linear", rope_type="yarn", factor=2.0)),
            "rope_type 'yarn' and type 'linear'",
        ),
        (
            QWEN
            | dict(rope_scaling=dict(type="linear", factor=2.0), rope_parameters=dict(rope_type="linear", factor=3.0)),
            "they differ",
        ),
        (QWEN | dict(rope_theta=1e4, rope_parameters=dict(rope_theta=1e5)), "rope_theta"),
        (QWEN | dict(rope_scaling=dict(type="linear")), "no 'factor'"),
        (QWEN | dict(rope_scaling=dict(type="linear", factor=0.5)), "factor = 0.5"),
        (QWEN | dict(rope_scaling=LLAMA3 | dict(high_freq_factor=1.0)), "high_freq_factor"),
        (QWEN | dict(rope_parameters=dict(full_attention=dict(rope_theta=1e4))), "full_attention"),
        (QWEN | dict(rope_parameters=dict(partial_rotary_factor=0.5)), "partial_rotary_factor"),
        (QWEN | dict(rope_scaling=YARN, original_max_position_embeddings=64), "original_max_position_embeddings"),
        (QWEN | dict(rope_scaling=[1]), "rope_scaling"),
        (QWEN | dict(hidden_act="gelu"), "hidden_act"),
        (QWEN | dict(quantization_config=dict(quant_method="awq")), "quantization_config"),
        (QWEN | dict(attention_bias=False), "attention_bias"),
        (QWEN | dict(use_sliding_window=True), "sliding_window"),
        (QWEN | dict(layer_types=["full_attention"]), "expected 3 of"),
        (QWEN | dict(layer_types=["sliding_attention"] * 3), "layer_types"),
        (QWEN | dict(num_key_value_heads=4), "not a multiple"),
        (QWEN | dict(num_attention_heads=7), "head_dim"),
        (QWEN | dict(head_dim=9), "even number"),
        (QWEN | dict(vocab_size="x"), "vocab_size"),
        (QWEN | dict(tie_word_embeddings=1), "true or false"),
        (QWEN | dict(dual_chunk_attention_config={}), "dual_chunk"),
        (QWEN3 | dict(mlp_bias=True), "mlp_bias"),
        (QWEN3 | dict(qk_norm=True), "qk_norm"),
        (QWEN3 | dict(layer_types=["sliding_attention"] * 3), "layer_types"),
        ({k: v for k, v in QWEN3.items() if k != "head_dim"}, "head_dim"),
        (MISTRAL | dict(attention_bias=True), "attention_bias"),
        (MISTRAL | dict(sliding_window=0), "sliding_window is 0"),
        (MISTRAL | dict(layer_types=["full_attention"] * 3), "layer_types"),
        (LLAMA | dict(sliding_window=8), "sliding_window"),
        ({k: v for k, v in MISTRAL.items() if k != "sliding_window"}, "sliding_window"),
        ({k: v for k, v in QWEN.items() if k != "num_key_value_heads"}, "num_key_value_heads"),
        ({k: v for k, v in QWEN.items() if k != "rms_norm_eps"}, "rms_norm_eps"),
    ],
)
def test_what_would_change_the_computation_is_refused(raw, said):
    with pytest.raises(ConfigError) as caught:
        GQAConfig.from_dict(raw)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_keys_that_change_nothing_are_listed():
    assert GQAConfig.from_dict(QWEN | dict(torch_dtype="bfloat16", use_cache=True)).never_read == (
        "torch_dtype",
        "use_cache",
    )


@pytest.mark.parametrize(
    "raw, family",
    [
        (dict(model_type="qwen2"), "gqa"),
        (dict(architectures=["Qwen3ForCausalLM"]), "gqa"),
        (dict(architectures=["LlamaForCausalLM"]), "gqa"),
        (dict(model_type="deepseek_v4"), "deepseek_v4"),
        (dict(model_type="mistral", architectures=["MistralForCausalLM"]), "gqa"),
        (dict(dim=3), "deepseek_v4"),
    ],
)
def test_family(raw, family):
    assert family_of(raw) == family


@pytest.mark.parametrize(
    "raw",
    [
        dict(model_type="qwen3_moe"),
        dict(model_type="qwen3", architectures=["Qwen3MoeForCausalLM"]),
        dict(model_type="llama", architectures=["Qwen2ForCausalLM"]),
        dict(architectures=["GemmaForCausalLM"]),
        dict(model_type="llama", architectures=["LlamaForSequenceClassification"]),
        dict(model_type="llama", architectures="x"),
    ],
)
def test_another_model_is_refused(raw):
    with pytest.raises(CheckpointError, match="config.json"):
        family_of(raw)
