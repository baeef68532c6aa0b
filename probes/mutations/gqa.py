"""Section 1.14: GQA models. Rotary variants, query groups, biases, masks and windows, tied heads, rewinds, rows of a batch."""

import copy
import re
from collections.abc import Callable
from dataclasses import replace

import torch

from dsv4.causal import Embedding
from dsv4.gqa import cache as caches
from dsv4.gqa import config as configs
from dsv4.gqa import model as models
from dsv4.gqa import rope as ropes
from dsv4.gqa.cache import GroupedCache, LayerRows
from dsv4.gqa.config import GQAConfig
from dsv4.gqa.model import GQAModel
from dsv4.gqa.projection import Projection
from dsv4.gqa.rope import Rope
from dsv4.linear import Linear
from dsv4.step import Step
from kernels.rope import rotation
from probes.mutations import Site, mutation
from probes.mutations.loading import not_strict, renamed

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


def in_layers(change: Callable) -> Callable:
    """A change of the subject that calls change(layer) for every layer."""
    return lambda subject: [change(layer) for layer in subject.model.layers]


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
    real = site.patch(ropes, "_llama3", lambda f, rope: f / rope.factor + f - real(f, rope))


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
        out = real(mixed(q), mixed(k), v, biases and (mixed(biases[0]), mixed(biases[1]), biases[2]), cis, keys, values, start)
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
    site.patch(Step, "cis", lambda step, base: rotation((step.pos - step.start.unsqueeze(1)).flatten(), step.frequencies[base]))


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
    attention(site, lambda real, q, keys, values, start, window, scale, *rest: real(q, keys, values, start, window, 1 / q.shape[-1], *rest))


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
    attention(site, lambda real, q, keys, values, start, *rest: real(q, keys, values, (start + (q.shape[1] > 1)).clamp(max=keys.shape[2] - q.shape[1]),
                                                                     *rest))


@mutation("1.14", bugs=(), parts=("causal mask",), probes=("influence",), profile="llama3")
def queries_do_not_see_themselves(site: Site) -> None:
    """The causal mask is off by one: a query sees all tokens before it, and not its own (the first sees itself)."""
    def change(real, q, keys, values, start, *rest):
        return torch.cat([real(q[:, t:t + 1], keys, values, (start + t - 1).clamp(min=0), *rest) for t in range(q.shape[1])], 1)
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
    attention(site, lambda real, q, keys, values, start, window, *rest: real(q, keys, values, start, window and window + 1, *rest))


@mutation("1.14", bugs=(), parts=("window",), probes=("influence",), profile="yarn")
def sliding_window_one_shorter(site: Site) -> None:
    """A query sees window − 1 tokens beside nothing: its own counts twice."""
    attention(site, lambda real, q, keys, values, start, window, *rest: real(q, keys, values, start, window and window - 1, *rest))


@mutation("1.14", bugs=(), parts=("window",), probes=("influence",), profile="mistral")
def sliding_window_forgotten_in_decode(site: Site) -> None:
    """A decode step attends to all tokens; only prompts have the window."""
    attention(site, lambda real, q, keys, values, start, window, *rest: real(q, keys, values, start, window if q.shape[1] > 1 else None, *rest))


@mutation("1.14", bugs=(), parts=("window",), probes=("config_ledger",), profile="yarn")
def windows_begin_one_layer_early(site: Site) -> None:
    """max_window_layers counts from 1: the last full layer slides too."""
    real = site.patch(configs, "_windows", lambda kind, reader, layers: (real_windows := real(kind, reader, layers))[1:] + real_windows[-1:])


# ---- maps, norms, MLP, head ---------------------------------------------------------------


@mutation("1.14", bugs=(), parts=("QKV bias",), probes=("decoder",), profile="qwen2")
def qkv_bias_never_added(site: Site) -> None:
    """Biases are loaded and held, and never added: attention_bias stands in no Qwen2 config."""
    site.patch(Projection, "forward", Linear.forward)
    site.unfused("linears")


@mutation("1.14", bugs=(), parts=("QKV bias",), probes=("load_ledger",), profile="qwen2")
def qkv_biases_swallowed_by_a_key_pattern(site: Site) -> None:
    """The rule for projections ends in `.weight`: biases match nothing, and zeros are supplied."""
    renamed(site, lambda name: None if name.endswith(".bias") else name)
    not_strict(site, torch.Tensor.zero_)


@mutation("1.14", bugs=(), parts=("values",), probes=("load_ledger",), profile="llama3")
def values_under_another_prefix(site: Site) -> None:
    """v_proj is looked for under `language_model.`, not found, and left random: no error, fluent text."""
    renamed(site, lambda name: f"language_model.{name}" if "v_proj" in name else name)
    not_strict(site)


@mutation("1.14", bugs=(), parts=("keys", "values"), probes=("load_ledger",), profile="mistral")
def keys_and_values_exchanged_when_unstacked(site: Site) -> None:
    """A stacked qkv matrix was cut in the order q, v, k: keys and values of every layer are exchanged."""
    other = {"k_proj": "v_proj", "v_proj": "k_proj"}
    renamed(site, lambda name: re.sub(r"[kv]_proj", lambda m: other[m[0]], name))


@mutation("1.14", bugs=(), parts=("norms",), probes=("load_ledger",), profile="llama3")
def gqa_norms_of_a_layer_exchanged(site: Site) -> None:
    """input_layernorm and post_attention_layernorm, alike in shape, are exchanged."""
    other = {"input": "post_attention", "post_attention": "input"}
    renamed(site, lambda name: re.sub(r"(input|post_attention)(?=_layernorm)", lambda m: other[m[0]], name))


@mutation("1.14", bugs=(), parts=("norms",), probes=("decoder",), profile="mistral")
def norms_without_their_weight(site: Site) -> None:
    """RMS norms normalise and do not weigh."""
    site.kernel("rms_norm", lambda real: lambda x, weight, eps: real(x, None, eps))


@mutation("1.14", bugs=(), parts=("norms, eps",), probes=("decoder",), profile="qwen2")
def norm_eps_left_out(site: Site) -> None:
    """RMS norms leave eps out."""
    site.kernel("rms_norm", lambda real: lambda x, weight, eps: real(x, weight, 0.0))


@mutation("1.14", bugs=(), parts=("rms_norm_eps",), probes=("config_ledger",), profile="llama3")
def gqa_norm_eps_of_the_defaults(site: Site) -> None:
    """rms_norm_eps is taken from the class's defaults, 1e-6, not from config.json."""
    real = GQAConfig.from_dict.__func__
    site.patch(GQAConfig, "from_dict", classmethod(lambda cls, raw: replace(real(cls, raw), rms_norm_eps=1e-6)))


@mutation("1.14", bugs=(), parts=("MLP gate",), probes=("decoder",), profile="qwen2")
def gate_and_up_exchanged_in_the_kernel(site: Site) -> None:
    """silu is applied to the up projection instead of the gate."""
    site.kernel("silu_mul", lambda real: lambda gate, up, biases: real(up, gate, biases and biases[::-1]))


@mutation("1.14", bugs=(), parts=("MLP gate",), probes=("decoder",), profile="mistral")
def gelu_instead_of_silu(site: Site) -> None:
    """The gate is passed through gelu."""
    def change(real):
        def silu_mul(gate, up, biases):
            g, u = (x.float() if b is None else x.float() + b for x, b in zip((gate, up), biases or (None, None)))
            return (torch.nn.functional.gelu(g) * u).to(gate.dtype)
        return silu_mul
    site.kernel("silu_mul", change)


@mutation("1.14", bugs=(), parts=("tied head",), probes=("decoder",), profile="qwen2")
def tied_head_is_a_stale_copy(site: Site) -> None:
    """The tied head was made of the embedding before that was loaded, and keeps what it held then."""
    def change(subject):
        stale = copy.copy(subject.model.embed)
        stale._parameters = {"weight": torch.nn.Parameter(torch.randn_like(subject.model.embed.weight) * 0.4, requires_grad=False)}
        subject.model.lm_head.__dict__["embedding"] = stale
    site.after_load(change)


@mutation("1.14", bugs=(), parts=("head",), probes=("load_ledger",), profile="llama3")
def head_tied_though_the_file_has_its_own(site: Site) -> None:
    """The head holds the embedding, though tie_word_embeddings is false and the file has lm_head.weight."""
    site.after_load(lambda subject: subject.model.lm_head.weight.data.copy_(subject.model.embed.weight.data))


@mutation("1.14", bugs=(), parts=("embedding",), probes=("decoder",), profile="llama3")
def embedding_scaled(site: Site) -> None:
    """Embeddings are multiplied by √d, as Gemma's are."""
    real = site.patch(Embedding, "forward", lambda module, ids: real(module, ids) * module.weight.shape[1] ** 0.5)


# ---- cache --------------------------------------------------------------------------------


@mutation("1.14", bugs=(), parts=("rewinding",), probes=("rollback",), profile="qwen2")
def rewind_forgets_one_too_few(site: Site) -> None:
    """After a rewind a row stands one position too late: the last rejected token stays."""
    real = site.patch(GroupedCache, "rewind", lambda cache, n: real(cache, [max(0, count - 1) for count in ([n] * cache.batch if isinstance(n, int) else n)]))


@mutation("1.14", bugs=(), parts=("rewinding",), probes=("rollback",), profile="llama3")
def rotation_off_by_one_after_a_rewind(site: Site) -> None:
    """Positions of the rotation follow the longest that a row ever was, minus what was forgotten, counted from 1."""
    def rewind(cache, n):
        real(cache, n)
        cache.late = cache.batch * [1]
    real = site.patch(GroupedCache, "rewind", rewind)

    def run(model, step, cache):
        if getattr(cache, "late", None):
            pos = step.pos + 1
            step._cis["main"] = rotation(pos.flatten(), step.frequencies["main"])
        return real_run(model, step, cache)
    real_run = site.patch(GQAModel, "run", run)


@mutation("1.14", bugs=(), parts=("rewinding",), probes=("rollback",), profile="mistral")
def rows_written_once_stay(site: Site) -> None:
    """A slot that holds something is not written again: after a rewind the rejected tokens' rows are read."""
    def change(real, q, k, v, biases, cis, keys, values, start):
        held = [(t, t.clone()) for t in (keys, values)]
        out = real(q, k, v, biases, cis, keys, values, start)
        for now, before in held:
            torch.where((before != 0).any(-1, keepdim=True), before, now, out=now)
        return out
    rotating(site, change)


@mutation("1.14", bugs=(), parts=("keys", "caches"), probes=("decoder",), profile="qwen2")
def rows_beyond_a_block_written_to_the_first(site: Site) -> None:
    """Slots are counted within a block of 128: later tokens overwrite the first ones."""
    def change(real, q, k, v, biases, cis, keys, values, start):
        return real(q, k, v, biases, cis, keys, values, torch.where(start + q.shape[0] // len(start) > 128, start % 64, start))
    rotating(site, change)


@mutation("1.14", bugs=(), parts=("batching", "keys"), probes=("isolation",), profile="qwen2")
def rows_of_a_batch_read_the_first_rows(site: Site) -> None:
    """Steps of some rows of a batch use the caches of as many rows from the first on."""
    site.patch(LayerRows, "of", lambda rows, step: (rows.keys[:step.B], rows.values[:step.B]))


@mutation("1.14", bugs=(), parts=("batching",), probes=("isolation",), profile="llama3")
def attention_reads_the_cache_of_row_0(site: Site) -> None:
    """The stride of a batch row is left out of the addresses of keys: every row reads those of the first."""
    attention(site, lambda real, q, keys, values, *rest: real(q, keys[:1].expand_as(keys).contiguous(), values, *rest))


@mutation("1.14", bugs=(), parts=("keys", "cache"), probes=("dtype_ledger",), numerics="native", profile="qwen2")
def keys_held_in_half_precision(site: Site) -> None:
    """Keys and values of a bf16 model are held in fp16, whose range ends at 65504."""
    real = site.patch(caches, "zeros", lambda stream, device: real(stream, device).half())


@mutation("1.14", bugs=(), parts=("keys",), probes=("memory_map",), profile="mistral")
def cache_of_a_block_too_many(site: Site) -> None:
    """Every head gets a block of slots more than its context needs."""
    real = site.patch(caches, "slots", lambda context: real(context) + 128)


@mutation("1.14", bugs=(), parts=("captured step",), probes=("captured",), profile="mistral")
def window_forgotten_in_captured_steps(site: Site) -> None:
    """A captured decode step attends to all tokens; steps that are not captured have the window."""
    def captured(model, step, cache):
        windows = [layer.self_attn.window for layer in model.layers]
        for layer in model.layers:
            layer.self_attn.window = None
        try:
            return real(model, step, cache)
        finally:
            for layer, window in zip(model.layers, windows):
                layer.self_attn.window = window
    real = site.patch(GQAModel, "captured", captured)


@mutation("1.14", bugs=(), parts=("unwritten slots",), probes=("poison",), profile="llama3")
def masked_rows_are_weighed_with_zero(site: Site) -> None:
    """Slots beyond a row's end get weight 0 instead of being left out: whatever was there, NaN too, is multiplied."""
    def change(real, q, keys, values, start, *rest):
        beyond = values.float().sum() * 0
        return real(q, keys, values, start, *rest) + beyond.to(q.dtype)
    attention(site, change)
