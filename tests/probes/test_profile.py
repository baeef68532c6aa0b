"""The synthetic profiles have what planted faults need to be seen: measured, as section 3 of the known bugs lists
it."""

import hashlib
from dataclasses import replace

import pytest
import torch

from dsv4.model.config import ModelConfig
from dsv4.model.rope import frequencies
from dsv4.probes.compare import tokens
from dsv4.probes.faults import profile
from dsv4.probes.oracle.blocks import hyper_pre
from dsv4.probes.oracle.model import Oracle
from dsv4.probes.subjects.ours import OurSubject

T = 264  # what the probes run at least
SIZES = (
    "vocab_size",
    "hidden_size",
    "moe_intermediate_size",
    "num_attention_heads",
    "head_dim",
    "qk_rope_head_dim",
    "q_lora_rank",
    "o_groups",
    "o_lora_rank",
    "sliding_window",
    "index_n_heads",
    "index_head_dim",
    "index_topk",
    "n_routed_experts",
    "num_experts_per_tok",
)


@pytest.fixture(scope="module", params=list(profile.PROFILES))
def run(request, tmp_path_factory):
    """(subject, oracle, ids [1, T], {layer: ffn input [T, d]}, streams before each layer) of a profile."""
    path = profile.write(tmp_path_factory.mktemp("profile") / request.param, request.param)
    subject, inputs = OurSubject(path), {}
    hooks = [
        block.ffn.register_forward_pre_hook(lambda _, args, i=i: inputs.__setitem__(i, args[0]))
        for i, block in enumerate(subject.model.layers)
    ]
    ids = tokens(subject, T, 0)
    seen = subject.run(ids, want=("streams", "index_keys"))
    for hook in hooks:
        hook.remove()
    return subject, Oracle.open(path), ids, inputs, seen.points


def test_schedule_and_sizes(run):
    config = run[0].config
    default = config.compress_ratios == (0, 4, 128, 4, 128)
    assert default or (config.compress_ratios[1] > 0 and 0 not in config.compress_ratios), (
        "the second: no layer is window only"
    )
    assert config.mtp_compress_ratios == (0,) and 0 < config.num_hash_layers < config.num_hidden_layers
    assert (
        4 in config.compress_ratios[config.num_hash_layers :]
        and 128 in config.compress_ratios[config.num_hash_layers :]
    )
    sizes = [getattr(config, name) for name in SIZES]
    assert len({*sizes, 4, 128, T}) == len(sizes) + 3, "no size is taken for another, for a ratio or for the length"
    assert config.sliding_window == 8 and config.max_position_embeddings // 4 >= 8 * config.index_topk
    assert config.rope_theta != config.compress_rope_theta


def test_profiles_differ_in_theta_k_and_layer_1():
    first, second = (ModelConfig.from_official(profile.PROFILES[name]) for name in ("default", "layer1"))
    for name in ("rope_theta", "compress_rope_theta", "index_topk", "yarn", "routed_scaling_factor"):
        assert getattr(first, name) != getattr(second, name), name
    assert first.compress_ratios[1] != second.compress_ratios[1]


def test_yarn_ramp_lies_within_the_tested_range(run):
    config = run[0].config
    plain, ramped = (frequencies(c)["compress"] for c in (replace(config, yarn=None), config))
    share = (plain - ramped) / (plain - plain / config.yarn.factor)
    inside = (share > 0.01) & (share < 0.99)
    assert inside.any() and ((plain - ramped) * T)[inside].max() > 0.1, "a dim of the ramp turns visibly otherwise"


def test_position_biases_and_sinks(run):
    subject = run[0]
    names = [n for n in subject.files.sources if n.endswith(".ape")]
    assert names
    for name in names:
        ape = subject.weight(name)
        assert ape.std() > 0.3 and (ape - ape.flip(0)).abs().mean() > 0.1 and (ape - ape.roll(1, 0)).abs().mean() > 0.1
    for name in (n for n in subject.files.sources if n.endswith("attn_sink")):
        sink = subject.weight(name)
        assert sink.min() <= -8 and sink.max() >= 8 and len(sink.unique()) == len(sink)


def test_comb_is_not_symmetric(run):
    subject, oracle, ids, _, points = run
    for i in range(1, subject.config.num_hidden_layers):
        C = hyper_pre(oracle.layer(i), points[i - 1, "streams"].double(), "hc_attn")[2]
        assert (C - C.mT).abs().flatten(2).max(-1).values.median() > 0.1


def test_bias_changes_the_selection_and_logits_reach_minus_17(run):
    subject, _, ids, inputs, _ = run
    k, lowest = subject.config.num_experts_per_tok, []
    for i, block in enumerate(subject.model.layers):
        logits = inputs[i].float() @ block.ffn.gate.weight.float().T
        if block.spec.hashed:
            lowest.append(logits.gather(1, block.ffn.gate.tid2eid[ids[0]]).max(1).values)
            continue
        scores = torch.nn.functional.softplus(logits).sqrt()
        biased, plain = ((s.topk(k).indices.sort().values) for s in (scores + block.ffn.gate.bias, scores))
        assert 0.1 < (biased != plain).any(1).float().mean() < 1, f"layer {i}"
    assert (torch.cat(lowest) < -17).any(), "a token of which every chosen expert's logit is below −17"


def test_activations_cross_both_clamps(run):
    subject, _, _, inputs, _ = run
    limit = subject.config.swiglu_limit
    for i in range(subject.config.num_hidden_layers):
        for base in (f"layers.{i}.ffn.shared_experts", f"layers.{i}.ffn.experts.0"):
            gate, up = (inputs[i].float() @ subject.weight(f"{base}.{leaf}.weight").T for leaf in ("w1", "w3"))
            assert (gate > limit).any() and (up > limit).any() and (up < -limit).any(), base
            assert (up.abs() < limit).float().mean() > 0.5, base


def test_index_keys_have_heavy_tails(run):
    for (i, point), keys in run[4].items():
        if point == "index_keys":
            size = keys[0].square().mean(0).sqrt()
            assert size.max() > 2.5 * size.median(), f"layer {i}"


def test_every_tensor_and_expert_is_unique(run):
    subject = run[0]
    matrices = [n for n in subject.files.sources if not n.endswith((".scale", "_scale"))]
    digest = lambda name: hashlib.sha256(subject.weight(name).contiguous().numpy().tobytes()).digest()
    assert len({digest(name) for name in matrices}) == len(matrices)


def test_scales_differ_from_block_to_block(run):
    """Or a scale that is read for its neighbour would not show."""
    files = run[0].files
    of = lambda name: files.read(name).view(torch.uint8)
    expert = of("layers.0.ffn.experts.0.w1.scale")
    assert (expert[:, 1:] != expert[:, :-1]).float().mean() > 0.3 and (expert[1:] != expert[:-1]).float().mean() > 0.3
    dense = [
        of(n) for n in files.sources if n.endswith(".scale") and ".experts." not in n and files.sources[n].shape[-1] > 1
    ]
    assert any((scale[:, 1:] != scale[:, :-1]).any() for scale in dense)
