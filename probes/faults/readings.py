"""Section 1.1 again: config.json in other forms than the official one, misread; and what the converter writes of it.

The reader's dictionary is what the model runs by. A probe that took its values from there would run by them too.
"""

import json
from dataclasses import replace

from dsv4.loaders import config_files, convert
from dsv4.model.gqa.config import GQAConfig
from dsv4.probes.faults import Site, mutation

INFERENCE = {  # official key → name in inference/config.json
    "hidden_size": "dim",
    "moe_intermediate_size": "moe_inter_dim",
    "num_hidden_layers": "n_layers",
    "num_hash_layers": "n_hash_layers",
    "num_attention_heads": "n_heads",
    "num_experts_per_tok": "n_activated_experts",
    "scoring_func": "score_func",
    "routed_scaling_factor": "route_scale",
    "qk_rope_head_dim": "rope_head_dim",
    "sliding_window": "window_size",
    "rms_norm_eps": "norm_eps",
    "num_nextn_predict_layers": "n_mtp_layers",
}
KINDS = {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}


def inference_form(raw: dict) -> dict:
    """An official config as `inference/config.json` states it; limits that every release has are left out there."""
    yarn = raw["rope_scaling"]
    rope = {"rope_factor": yarn["factor"], "original_seq_len": yarn["original_max_position_embeddings"]}
    rope |= {key: yarn[key] for key in ("beta_fast", "beta_slow")}
    left = ("rope_scaling", "architectures", "model_type", "swiglu_limit", "topk_method")
    return {INFERENCE.get(key, key): value for key, value in raw.items() if key not in left} | rope


def transformers_form(raw: dict) -> dict:
    """An official config as transformers saves it."""
    layers, part = raw["num_hidden_layers"], raw["qk_rope_head_dim"] / raw["head_dim"]
    yarn = {k: v for k, v in raw["rope_scaling"].items() if k != "type"}
    left = ("compress_ratios", "num_hash_layers", "rope_scaling", "rope_theta", "compress_rope_theta")
    return {k: v for k, v in raw.items() if k not in (*left, "qk_rope_head_dim")} | {
        "layer_types": [KINDS[ratio] for ratio in raw["compress_ratios"][:layers]],
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128},
        "mlp_layer_types": ["hash_moe" if i < raw["num_hash_layers"] else "moe" for i in range(layers)],
        "partial_rotary_factor": part,
        "rope_parameters": {
            "main": {"rope_type": "default", "rope_theta": raw["rope_theta"], "partial_rotary_factor": part},
            "compress": {
                "rope_type": "yarn",
                "attention_factor": 1.0,
                "rope_theta": raw["compress_rope_theta"],
                "partial_rotary_factor": part,
                **yarn,
            },
        },
    }


FORMS = {"inference": inference_form, "transformers": transformers_form}


def misread(site: Site, form: str, **wrong) -> None:
    """config.json in that form, of which the reader makes these official values, with a note as it writes them."""
    file = site.checkpoint / "config.json"
    file.write_text(json.dumps(FORMS[form](json.loads(file.read_text()))))

    def read(raw):
        out, notes = real(raw)
        made = {key: value(out[key]) if callable(value) else value for key, value in wrong.items()}
        return out | made, notes | dict.fromkeys(made, "not stated; the default of the V4 releases")

    real = site.patch(config_files, f"_from_{form}", read)


@mutation("1.1", bugs=(40,), parts=("rope_theta",), probes=("config_ledger",))
def base_of_window_layers_misread(site: Site) -> None:
    """The reader takes the base of window layers from the wrong rotation of a transformers config."""
    misread(site, "transformers", rope_theta=160000.0)


@mutation("1.1", bugs=(40,), parts=("compress_rope_theta",), probes=("config_ledger",))
def base_of_compressing_layers_misread(site: Site) -> None:
    """The reader takes rope_theta for the base of compressing layers of a transformers config."""
    misread(site, "transformers", compress_rope_theta=10000.0)


@mutation("1.1", bugs=(14,), parts=("rope_scaling.factor",), probes=("config_ledger",))
def rope_factor_misread(site: Site) -> None:
    """The reader takes the RoPE factor of DeepSeek-V3, 40, for rope_factor of an inference config."""
    misread(site, "inference", rope_scaling=lambda scaling: scaling | {"factor": 40})


@mutation("1.1", bugs=(13,), parts=("swiglu_limit",), probes=("config_ledger",))
def swiglu_limit_of_another_model(site: Site) -> None:
    """The reader has 7.0 for the SwiGLU limit that an inference config leaves out."""
    misread(site, "inference", swiglu_limit=7.0)


@mutation("1.1", bugs=(147,), parts=("index_topk",), probes=("config_ledger",))
def index_topk_halved_while_reading(site: Site) -> None:
    """The reader halves index_topk of an inference config."""
    misread(site, "inference", index_topk=lambda k: k // 2)


@mutation("1.1", bugs=(11,), parts=("sliding_window",), probes=("config_ledger",))
def window_size_misread(site: Site) -> None:
    """The reader looks for sliding_window in an inference config, which says window_size, and takes a default."""
    misread(site, "inference", sliding_window=lambda window: 2 * window)


@mutation("1.1", bugs=(13,), parts=("rms_norm_eps",), probes=("config_ledger",))
def norm_eps_misread(site: Site) -> None:
    """The reader has 1e-5 for norm_eps of an inference config."""
    misread(site, "inference", rms_norm_eps=1e-5)


@mutation("1.1", bugs=(13,), parts=("routed_scaling_factor",), probes=("config_ledger",))
def route_scale_misread(site: Site) -> None:
    """The reader does not know route_scale of an inference config and takes 1.0."""
    misread(site, "inference", routed_scaling_factor=1.0)


@mutation("1.1", bugs=(40,), parts=("to transformers", "converter"), probes=("config_ledger",))
def converter_writes_one_base_for_both(site: Site) -> None:
    """The converter writes rope_theta as the base of both rotations of a transformers config."""

    def write(official):
        out = real(official)
        parts = out["rope_parameters"]
        return out | {"rope_parameters": parts | {"compress": parts["compress"] | {"rope_theta": 10000}}}

    real = site.patch(convert, "to_transformers", write)


@mutation("1.1", bugs=(13,), parts=("to nvfp4", "converter"), probes=("config_ledger",))
def converter_rounds_the_scaling_factor(site: Site) -> None:
    """The converter writes routed_scaling_factor as a whole number into every config but transformers'."""

    def documents(official, config, to):
        files = real(official, config, to)
        if to != "transformers":
            files["config.json"]["routed_scaling_factor"] = int(official["routed_scaling_factor"])
        return files

    real = site.patch(convert, "_documents", documents)


@mutation("1.1", bugs=(40,), parts=("rope_theta and its scaling",), probes=("config_ledger",), profile="qwen2")
def unstated_base_of_another_model(site: Site) -> None:
    """config.json of a GQA model states no rope_theta; the reader takes 500000, not transformers' 10000."""
    file = site.checkpoint / "config.json"
    raw = json.loads(file.read_text())
    raw.pop("rope_theta")
    file.write_text(json.dumps(raw))
    real = GQAConfig.from_dict.__func__

    def from_dict(cls, raw):
        config = real(cls, raw)
        return replace(config, rope=replace(config.rope, theta=500000.0))

    site.patch(GQAConfig, "from_dict", classmethod(from_dict))
