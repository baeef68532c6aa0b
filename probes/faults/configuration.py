"""Section 1.1, configuration: keys that nobody reads, and values that are changed on the way."""

import json
from dataclasses import replace

from dsv4.loaders import load as reading
from dsv4.model import config as configuration
from dsv4.model.config import ModelConfig
from dsv4.probes.faults import Site, mutation


def effective(site: Site, **others) -> None:
    """The ModelConfig has these values whatever config.json says; a function is given the value that was stated."""
    real = ModelConfig.from_official.__func__

    def from_official(cls, raw):
        config = real(cls, raw)
        return replace(config, **{k: v(getattr(config, k)) if callable(v) else v for k, v in others.items()})

    site.patch(ModelConfig, "from_official", classmethod(from_official))


def stated(site: Site, **changes) -> None:
    """config.json of the checkpoint with these keys."""
    file = site.checkpoint / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@mutation("1.1", bugs=(14,), parts=("rope_scaling", "base compress"), probes=("config_ledger",))
def rope_scaling_ignored(site: Site) -> None:
    """rope_scaling is never read: no YaRN anywhere, drift at long context."""
    site.patch(configuration, "_rope_scaling", lambda reader: reader.optional("rope_scaling", None) and None)


@mutation("1.1", bugs=(40,), parts=("compress_rope_theta",), probes=("config_ledger",))
def compress_rope_theta_never_read(site: Site) -> None:
    """compress_rope_theta is never read: compressing layers rotate with rope_theta."""
    effective(site, compress_rope_theta=10000.0)


@mutation("1.1", bugs=(16,), parts=("compress_ratios", "compressor"), probes=("config_ledger",))
def compress_ratios_off_by_one(site: Site) -> None:
    """compress_ratios is read from its second entry on: each layer has the kind of the next."""
    real = configuration.Reader.get
    site.patch(
        configuration.Reader,
        "get",
        lambda reader, key: [*real(reader, key)[1:], 0] if key == "compress_ratios" else real(reader, key),
    )


@mutation("1.1", bugs=(4, 16), parts=("MTP",), probes=("config_ledger",))
def mtp_ratio_of_the_last_layer(site: Site) -> None:
    """The MTP block takes the layer type of the last backbone layer, since the extra entry of compress_ratios is cut
    off."""
    real = configuration.Reader.get

    def get(reader, key):
        value = real(reader, key)
        layers = reader.raw["num_hidden_layers"]
        return [*value[:layers], value[layers - 1]] if key == "compress_ratios" else value

    site.patch(configuration.Reader, "get", get)


@mutation("1.1", bugs=(13,), parts=("routed_scaling_factor",), probes=("config_ledger",))
def routed_scaling_factor_never_read(site: Site) -> None:
    """routed_scaling_factor is declared and read by nothing: routed experts count 1.0 times."""
    effective(site, routed_scaling_factor=1.0)


@mutation("1.1", bugs=(13,), parts=("swiglu_limit", "experts.limit"), probes=("config_ledger",))
def swiglu_limit_not_passed_on(site: Site) -> None:
    """swiglu_limit is read and never reaches the experts."""

    def change(subject):
        for block in subject.model.layers:
            block.ffn.experts.limit = block.ffn.shared_experts.limit = float("inf")

    site.after_load(change)


@mutation("1.1", bugs=(13,), parts=("num_experts_per_tok", "gate.topk"), probes=("config_ledger",))
def experts_per_token_hard_coded(site: Site) -> None:
    """The router selects one expert a token whatever num_experts_per_tok says."""

    def change(subject):
        for block in subject.model.layers:
            block.ffn.gate.topk = 1

    site.after_load(change)


@mutation("1.1", bugs=(13,), parts=("hc_sinkhorn_iters",), probes=("config_ledger",))
def sinkhorn_iterations_hard_coded(site: Site) -> None:
    """Three Sinkhorn iterations, whatever hc_sinkhorn_iters says."""
    effective(site, hc_sinkhorn_iters=3)


@mutation("1.1", bugs=(13,), parts=("rms_norm_eps", ".eps"), probes=("config_ledger",))
def norm_eps_of_another_model(site: Site) -> None:
    """Every norm has the default eps of 1e-5 instead of rms_norm_eps."""

    def change(subject):
        for module in subject.model.modules():
            if type(module).__name__ == "RMSNorm":
                module.eps = 1e-5

    site.after_load(change)


@mutation("1.1", bugs=(13,), parts=("norm_topk_prob",), probes=("config_ledger",))
def a_stated_option_that_nothing_obeys(site: Site) -> None:
    """config.json says norm_topk_prob false; the key is read, not obeyed, and not refused."""
    stated(site, norm_topk_prob=False)
    site.patch(configuration.Reader, "expect", lambda reader, key, wanted, why="": reader.optional(key, wanted))


@mutation("1.1", bugs=(147,), parts=("index_topk",), probes=("config_ledger",))
def index_topk_clamped_while_reading(site: Site) -> None:
    """Reading config.json clamps index_topk to 4, before anything could compare it with what was asked for."""

    def read(root):
        raw, notes = real(root)
        return raw | {"index_topk": min(raw["index_topk"], 4)}, notes

    real = site.patch(reading, "read_config", read)


@mutation("1.1", bugs=(147,), parts=("index_topk", "layer kind", "indexer.topk"), probes=("config_ledger",))
def index_topk_clamped_in_the_indexer(site: Site) -> None:
    """The indexer's buffer allows 5 picks; index_topk is clamped to that without a word."""

    def change(subject):
        for block in subject.model.layers:
            if hasattr(block.attn, "indexer"):
                block.attn.indexer.topk = min(block.attn.indexer.topk, 5)

    site.after_load(change)


@mutation("1.1", bugs=(16,), parts=("max_position_embeddings",), probes=("config_ledger",))
def max_context_clamped(site: Site) -> None:
    """max_position_embeddings is clamped to 1024, as nano-vllm does with max_model_len."""
    effective(site, max_position_embeddings=lambda stated: min(stated, 1024))


@mutation("1.1", bugs=(16,), parts=("num_hash_layers", "tid2eid", "gate.bias"), probes=("config_ledger",))
def hash_layers_counted_from_one(site: Site) -> None:
    """One hash layer too few: `>` where `>=` was meant."""
    effective(site, num_hash_layers=lambda stated: stated - 1)


@mutation("1.1", bugs=(11,), parts=("sliding_window", "attn.W"), probes=("config_ledger",))
def window_of_a_renamed_key(site: Site) -> None:
    """The attention looks for the window under a key's older name and takes its own default of 4."""

    def change(subject):
        for block in subject.model.layers:
            block.attn.W = 4

    site.after_load(change)
