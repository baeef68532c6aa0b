"""Section 1.14, GQA models: maps and their biases, norms, the MLP's gate, embedding and head."""

import copy
import re
from dataclasses import replace

import torch

from dsv4.model.gqa.config import GQAConfig
from dsv4.model.gqa.projection import Projection
from dsv4.model.linear import Linear
from dsv4.model.vocabulary import Embedding
from dsv4.probes.faults import Site, mutation
from dsv4.probes.faults.loading import not_strict, renamed


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
        stale._parameters = {
            "weight": torch.nn.Parameter(torch.randn_like(subject.model.embed.weight) * 0.4, requires_grad=False)
        }
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
