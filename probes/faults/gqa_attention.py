"""Section 1.14, GQA models: rotary variants, query groups, scales, masks and windows."""

from collections.abc import Callable
from dataclasses import replace

import torch

from dsv4.kernels.rope import rotation
from dsv4.model.gqa import config as configs
from dsv4.model.gqa import model as models
from dsv4.model.gqa import rope as ropes
from dsv4.model.gqa.config import GQAConfig
from dsv4.model.gqa.rope import Rope
from dsv4.model.step import Step
from dsv4.probes.faults import Site, mutation

SECTION = "1.14", "GQA models"

ROTATED = ("rotation of queries", "RoPE")


def rope_read_as(site: Site, change: Callable[[Rope], Rope]) -> None:
    """Frequencies are those of change(what config.json says)."""
    real = site.patch(models, "frequencies", lambda rope, dims: real(change(rope), dims))


def attention(site: Site, change: Callable) -> None:
    """change(real, q, keys, values, start, window, scale, *rest) instead of dense attention."""
    site.kernel("grouped_attention", lambda real: lambda *given: change(real, *given))


def rotating(site: Site, change: Callable) -> None:
    """change(real, q, k, v, biases, cis, keys, values, start) instead of the rotation and the write to the cache."""
    site.kernel("rotary_rows", lambda real: lambda *given: change(real, *given))


# ---- rotation -----------------------------------------------------------------------------


@mutation("1.14", bugs=(), parts=ROTATED, probes=("rope",), profile="qwen2")
def base_of_another_release(site: Site) -> None:
    """The rotary base is the default, 10000, instead of that of config.json."""
    rope_read_as(site, lambda rope: replace(rope, theta=10000.0))


@mutation("1.14", bugs=(), parts=ROTATED, probes=("rope",), profile="llama3")
def rotary_scaling_ignored(site: Site) -> None:
    """rope_scaling is read and not applied: plain frequencies in a llama3 model."""
    rope_read_as(site, lambda rope: Rope("default", rope.theta))


@mutation("1.14", bugs=(), parts=ROTATED, probes=("rope",), profile="llama3")
def llama3_scaling_taken_for_linear(site: Site) -> None:
    """Every frequency is divided by the factor, not only the low ones."""
    rope_read_as(site, lambda rope: replace(rope, kind="linear"))


@mutation("1.14", bugs=(), parts=ROTATED, probes=("rope",), profile="llama3")
def llama3_ramp_turned_round(site: Site) -> None:
    """The ramp between stretched and kept frequencies weighs them the other way round."""
    real = site.patch(ropes, "llama3", lambda f, factor, *ends: f / factor + f - real(f, factor, *ends))


@mutation("1.14", bugs=(), parts=ROTATED, probes=("rope",), profile="yarn")
def yarn_ramp_not_truncated_in_gqa(site: Site) -> None:
    """YaRN's ramp does not begin and end at whole pairs."""
    rope_read_as(site, lambda rope: replace(rope, truncate=False))


@mutation("1.14", bugs=(), parts=("scale of scores",), probes=("decoder",), profile="yarn")
def attention_factor_of_yarn_lost(site: Site) -> None:
    """YaRN's factor of cos and sin is left out of the scores."""
    site.patch(GQAConfig, "softmax_scale", property(lambda config: config.head_dim**-0.5))


@mutation("1.14", bugs=(), parts=("rotation of queries",), probes=("rope",), profile="qwen2")
def interleaved_pairs_in_gqa(site: Site) -> None:
    """Neighbouring dims are rotated as a pair, instead of dims i and i + D/2."""

    def change(real, q, k, v, biases, cis, keys, values, start):
        D = keys.shape[-1]
        order = torch.arange(D, device=q.device).view(-1, 2).T.flatten()  # evens, then odds
        mixed = lambda x: x.unflatten(-1, (-1, D))[..., order].flatten(-2)
        out = real(
            mixed(q), mixed(k), v, biases and (mixed(biases[0]), mixed(biases[1]), biases[2]), cis, keys, values, start
        )
        return out[..., order.argsort()]

    rotating(site, change)


@mutation("1.14", bugs=(), parts=("rotation of keys",), probes=("rope",), profile="mistral")
def keys_cached_before_rotation(site: Site) -> None:
    """Keys are stored as they were before the rotation; queries are rotated."""

    def change(real, q, k, v, biases, cis, keys, values, start):
        real(q, k, v, biases, torch.ones_like(cis), keys, values, start)
        spare = torch.empty_like(keys), torch.empty_like(values)
        return real(q, k, v, biases, cis, *spare, start)

    rotating(site, change)


@mutation("1.14", bugs=(), parts=ROTATED, probes=("rope",), profile="qwen2")
def gqa_frequencies_in_bf16(site: Site) -> None:
    """Rotary frequencies are rounded to bf16."""
    real = site.patch(models, "frequencies", lambda rope, dims: real(rope, dims).bfloat16().float())


@mutation("1.14", bugs=(), parts=("rotation of queries",), probes=("rope",), profile="llama3")
def positions_start_anew_in_each_chunk(site: Site) -> None:
    """Rotations count positions from the first token of a step."""
    site.patch(
        Step, "cis", lambda step, base: rotation((step.pos - step.start.unsqueeze(1)).flatten(), step.frequencies[base])
    )


# ---- attention ----------------------------------------------------------------------------


def of_heads(site: Site, group_of: Callable[[int, int, int], int]) -> None:
    """Query head h reads KV head group_of(h, H, KV)."""

    def change(real, q, keys, values, *rest):
        H, KV = q.shape[2], keys.shape[1]
        heads = torch.tensor([group_of(h, H, KV) for h in range(H)], device=q.device)
        return real(q, keys[:, heads].contiguous(), values[:, heads].contiguous(), *rest)

    attention(site, change)


@mutation("1.14", bugs=(), parts=("query groups",), probes=("decoder",), profile="qwen2")
def kv_heads_dealt_out_in_turn(site: Site) -> None:
    """Query head h reads KV head h mod KV instead of h // (H / KV)."""
    of_heads(site, lambda h, H, KV: h % KV)


@mutation("1.14", bugs=(), parts=("query groups",), probes=("decoder",), profile="llama3")
def all_query_heads_read_one_kv_head(site: Site) -> None:
    """Keys and values are broadcast from KV head 0, as in a multi-query model."""
    of_heads(site, lambda h, H, KV: 0)


@mutation("1.14", bugs=(), parts=("scale of scores",), probes=("decoder",), profile="mistral")
def scores_over_the_head_dimension(site: Site) -> None:
    """Scores are divided by D instead of √D."""
    attention(
        site,
        lambda real, q, keys, values, start, window, scale, *rest: real(
            q, keys, values, start, window, 1 / q.shape[-1], *rest
        ),
    )


@mutation("1.14", bugs=(), parts=("scale of scores",), probes=("decoder",), profile="llama3")
def scores_scaled_by_the_hidden_size(site: Site) -> None:
    """The scale is 1/√(hidden size / heads), where head_dim is stated and another."""

    def change(subject):
        for layer in subject.model.layers:
            layer.self_attn.scale = (subject.config.hidden_size / subject.config.num_attention_heads) ** -0.5

    site.after_load(change)


@mutation("1.14", bugs=(), parts=("causal mask",), probes=("influence",), profile="qwen2")
def queries_see_the_next_token(site: Site) -> None:
    """The causal mask is off by one: a query sees the token after it, where that stands in the same step."""

    def change(real, q, keys, values, start, *rest):
        late = (start + (q.shape[1] > 1)).clamp(max=keys.shape[2] - q.shape[1])
        return real(q, keys, values, late, *rest)

    attention(site, change)


@mutation("1.14", bugs=(), parts=("causal mask",), probes=("influence",), profile="llama3")
def queries_do_not_see_themselves(site: Site) -> None:
    """The causal mask is off by one: a query sees all tokens before it, and not its own (the first sees itself)."""

    def change(real, q, keys, values, start, *rest):
        return torch.cat(
            [real(q[:, t : t + 1], keys, values, (start + t - 1).clamp(min=0), *rest) for t in range(q.shape[1])], 1
        )

    attention(site, change)


@mutation("1.14", bugs=(), parts=("causal mask", "unwritten slots"), probes=("influence",), profile="qwen2")
def decode_reads_the_whole_buffer(site: Site) -> None:
    """A single token attends to every slot of its block, also to those that nobody has written."""

    def change(real, q, keys, values, start, *rest):
        end = (start // 16 * 16 + 15).clamp(max=keys.shape[2] - 1)
        return real(q, keys, values, end if q.shape[1] == 1 else start, *rest)

    attention(site, change)


@mutation("1.14", bugs=(), parts=("window",), probes=("influence",), profile="mistral")
def sliding_window_one_longer(site: Site) -> None:
    """A query sees window + 1 tokens: the comparison is ≤ instead of <."""
    attention(
        site,
        lambda real, q, keys, values, start, window, *rest: real(q, keys, values, start, window and window + 1, *rest),
    )


@mutation("1.14", bugs=(), parts=("window",), probes=("influence",), profile="yarn")
def sliding_window_one_shorter(site: Site) -> None:
    """A query sees window − 1 tokens beside nothing: its own counts twice."""
    attention(
        site,
        lambda real, q, keys, values, start, window, *rest: real(q, keys, values, start, window and window - 1, *rest),
    )


@mutation("1.14", bugs=(), parts=("window",), probes=("influence",), profile="mistral")
def sliding_window_forgotten_in_decode(site: Site) -> None:
    """A decode step attends to all tokens; only prompts have the window."""

    def change(real, q, keys, values, start, window, *rest):
        return real(q, keys, values, start, window if q.shape[1] > 1 else None, *rest)

    attention(site, change)


@mutation("1.14", bugs=(), parts=("window",), probes=("config_ledger",), profile="yarn")
def windows_begin_one_layer_early(site: Site) -> None:
    """max_window_layers counts from 1: the last full layer slides too."""

    def windows(kind, reader, layers):
        found = real(kind, reader, layers)
        return found[1:] + found[-1:]

    real = site.patch(configs, "_windows", windows)
