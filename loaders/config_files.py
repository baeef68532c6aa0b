"""config.json in its published forms, to and from the official dictionary.

GQA models (`dsv4.loaders.decoders`) have one form only, that of transformers, which is taken as it is.

Official: the field names of the DeepSeek-V4 releases. Inference: `inference/config.json` of the same releases,
which uses other names. Transformers: what `DeepseekV4Config` saves (layer_types, compress_rates, rope_parameters).
"""

from collections.abc import Mapping
from pathlib import Path

from dsv4.loaders.decoders import DECODERS
from dsv4.loaders.errors import CheckpointError
from dsv4.loaders.files import read_json

INFERENCE_NAMES = {
    "dim": "hidden_size",
    "moe_inter_dim": "moe_intermediate_size",
    "n_layers": "num_hidden_layers",
    "n_hash_layers": "num_hash_layers",
    "n_heads": "num_attention_heads",
    "n_activated_experts": "num_experts_per_tok",
    "score_func": "scoring_func",
    "route_scale": "routed_scaling_factor",
    "rope_head_dim": "qk_rope_head_dim",
    "window_size": "sliding_window",
    "norm_eps": "rms_norm_eps",
    "n_mtp_layers": "num_nextn_predict_layers",
}
LAYER_RATIO_KEY = {
    "sliding_attention": None,
    "compressed_sparse_attention": "compressed_sparse_attention",
    "heavily_compressed_attention": "heavily_compressed_attention",
}
# Stated for every release of the family; the inference form leaves them out.
V4_DEFAULTS = {
    "rms_norm_eps": 1e-6,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "max_position_embeddings": 1048576,
    "num_nextn_predict_layers": 1,
    "n_shared_experts": 1,
    "index_n_heads": 64,
    "index_head_dim": 128,
    "swiglu_limit": 10.0,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "o_lora_rank": 1024,
    "head_dim": 512,
    "sliding_window": 128,
    "qk_rope_head_dim": 64,
}
V4_ROPE = {"rope_factor": 16, "beta_fast": 32, "beta_slow": 1, "original_seq_len": 65536}


def family_of(raw: Mapping) -> str:
    """'gqa' for a config of `DECODERS`, else 'deepseek_v4'; by model_type, or by architectures where there is none.

    Raises CheckpointError for another model, and where the two contradict each other.
    """
    kind, stated = raw.get("model_type"), raw.get("architectures") or []
    known = "deepseek_v4", *DECODERS
    if kind is not None and kind not in known:
        raise CheckpointError(f"config.json is of model_type {kind!r:.60}; this loads {', '.join(known)}")
    if not isinstance(stated, list) or any(not isinstance(a, str) for a in stated):
        raise CheckpointError(f"config.json has architectures = {stated!r:.60}; expected a list of names")
    by_name = {name: kind for kind, name in DECODERS.items()} | {"DeepseekV4ForCausalLM": "deepseek_v4"}
    strange = [a for a in stated if by_name.get(a, kind) != (kind or by_name.get(a)) or a not in by_name]
    if strange:
        raise CheckpointError(
            f"config.json is of model_type {kind!r}, and its architectures name {strange[0]!r:.60}; expected "
            f"{' or '.join(name for name, k in by_name.items() if kind in (None, k))}"
        )
    return "gqa" if kind in DECODERS or kind is None and stated and by_name[stated[0]] in DECODERS else "deepseek_v4"


def config_form(raw: Mapping) -> str:
    """'official', 'inference' or 'transformers', by the keys. Raises CheckpointError for another model."""
    if raw.get("model_type", "deepseek_v4") != "deepseek_v4":
        raise CheckpointError(f"config.json is of model_type {raw['model_type']!r}; this takes 'deepseek_v4' only")
    if "layer_types" in raw or "rope_parameters" in raw:
        return "transformers"
    if "dim" in raw and "n_layers" in raw:
        return "inference"
    if "compress_ratios" in raw and "hidden_size" in raw:
        return "official"
    raise CheckpointError(
        "config.json is in no known form: it has neither compress_ratios (official), layer_types "
        "(transformers), nor dim and n_layers (inference)"
    )


def read_config(root: Path) -> tuple[dict, dict]:
    """(official dictionary, {official key: why} for values the file does not state) of a checkpoint directory."""
    raw = read_json(Path(root) / "config.json")
    return to_official(raw)


def to_official(raw: Mapping) -> tuple[dict, dict]:
    """Any form → (official dictionary, {official key: where a derived or default value came from})."""
    out: dict
    notes: dict
    match config_form(raw):
        case "official":
            out, notes = dict(raw), {}
        case "inference":
            out, notes = _from_inference(raw)
        case _:
            out, notes = _from_transformers(raw)
    quantization = out.get("quantization_config")
    if isinstance(quantization, Mapping) and "expert_dtype" in quantization:  # where transformers 5.24 keeps it
        _agree(out, "expert_dtype", "quantization_config", quantization["expert_dtype"], out.get("expert_dtype"))
        out["expert_dtype"], notes["expert_dtype"] = quantization["expert_dtype"], "from quantization_config"
    return out, notes


def _from_inference(raw: Mapping) -> tuple[dict, dict]:
    out, notes = {}, {}
    for key, value in raw.items():
        name = INFERENCE_NAMES.get(key, key)
        out[name] = value
        if name != key:
            notes[name] = f"stated as {key}"
    rope = {k: out.pop(k, V4_ROPE[k]) for k in V4_ROPE}
    out["rope_scaling"] = {
        "type": "yarn",
        "factor": rope["rope_factor"],
        "beta_fast": rope["beta_fast"],
        "beta_slow": rope["beta_slow"],
        "original_max_position_embeddings": rope["original_seq_len"],
    }
    notes["rope_scaling"] = "from rope_factor, beta_fast, beta_slow, original_seq_len, else the V4 default"
    for key, value in V4_DEFAULTS.items():
        if key not in out:
            out[key], notes[key] = value, "not stated; the default of the V4 releases"
    out.setdefault("model_type", "deepseek_v4")
    return out, notes


def _from_transformers(raw: Mapping) -> tuple[dict, dict]:
    out = {
        k: v
        for k, v in raw.items()
        if k not in ("layer_types", "compress_rates", "mlp_layer_types", "rope_parameters", "partial_rotary_factor")
    }
    notes = {}
    if "layer_types" in raw:
        ratios = _ratios(_per_layer(raw, "layer_types"), _object(raw, "compress_rates"))
        leftover = raw.get("compress_ratios", ratios)
        _agree(
            raw,
            "compress_ratios",
            "layer_types",
            ratios,
            leftover[: len(ratios)] if isinstance(leftover, list) else leftover,
        )
        out["compress_ratios"] = ratios  # MTP blocks have no entry: they are window layers
        notes["compress_ratios"] = "from layer_types and compress_rates"
    if "mlp_layer_types" in raw:
        kinds = _per_layer(raw, "mlp_layer_types")
        out["num_hash_layers"] = _count_hash_layers(kinds)
        _agree(raw, "num_hash_layers", "mlp_layer_types", out["num_hash_layers"], raw.get("num_hash_layers"))
        notes["num_hash_layers"] = "from mlp_layer_types"
        if "moe" in kinds[: out["num_hash_layers"]]:
            out["mlp_layer_types"] = kinds  # the official form has no word for hash layers that are not the first
    _rope_from_transformers(raw, out, notes)
    if raw.get("partial_rotary_factor") is not None:
        out["qk_rope_head_dim"] = round(_number(raw, "head_dim") * _number(raw, "partial_rotary_factor"))
        _agree(raw, "qk_rope_head_dim", "partial_rotary_factor", out["qk_rope_head_dim"], raw.get("qk_rope_head_dim"))
        notes["qk_rope_head_dim"] = "head_dim × partial_rotary_factor"
    for key, value in (("topk_method", "noaux_tc"),):
        if key not in out:
            out[key], notes[key] = value, "not stated; the only method of V4"
    return out, notes


def _rope_from_transformers(raw: Mapping, out: dict, notes: dict) -> None:
    """rope_theta, compress_rope_theta and rope_scaling from rope_parameters, whose every key is taken or refused."""
    rope = _object(raw, "rope_parameters")
    main, compress = _object(rope, "main"), _object(rope, "compress")
    if not (main and compress):
        if rope:
            raise CheckpointError(f"rope_parameters has {sorted(rope)}; expected 'main' and 'compress'")
        return
    if strange := sorted(set(rope) - {"main", "compress"}):
        raise CheckpointError(f"rope_parameters has {strange[0]!r:.60} beside 'main' and 'compress'; remove it")
    rotated = raw.get("partial_rotary_factor")
    for kind, part in (("main", main), ("compress", compress)):
        if "rope_theta" not in part:
            raise CheckpointError(f"rope_parameters has no rope_theta in {kind!r}; expected one")
        if rotated is not None and part.get("partial_rotary_factor", rotated) != rotated:
            raise CheckpointError(
                f"rope_parameters has partial_rotary_factor {part['partial_rotary_factor']!r:.20} in {kind!r}, "
                f"config.json itself {rotated!r:.20}; correct one of them"
            )
    if strange := sorted(set(main) - {"rope_theta", "rope_type", "type", "partial_rotary_factor"}):
        raise CheckpointError(f"rope_parameters has {strange[0]!r:.60} in 'main'; window layers are not stretched")
    if (kind := main.get("rope_type", main.get("type", "default"))) != "default":
        raise CheckpointError(
            f"rope_parameters is of type {kind!r:.40} in 'main'; expected 'default' for window layers"
        )
    out["rope_theta"], out["compress_rope_theta"] = main["rope_theta"], compress["rope_theta"]
    scaling = {k: v for k, v in compress.items() if k not in ("rope_theta", "partial_rotary_factor", "rope_type")}
    kind = compress.get("rope_type", "default")
    if kind == "yarn" and "attention_factor" not in compress:
        raise CheckpointError(
            "rope_parameters has no attention_factor in 'compress', which transformers then derives from the factor; "
            "V4 has 1.0: state it"
        )
    if scaling.get("attention_factor") == 1:
        del scaling["attention_factor"]
    out["rope_scaling"] = {"type": kind, **scaling} if scaling or kind != "default" else None
    # transformers leaves its defaults beside them
    for key in ("rope_theta", "compress_rope_theta", "rope_scaling"):
        unused = f"; the config's own {key} {raw[key]} is not used" if key in raw and raw[key] != out[key] else ""
        notes[key] = f"from rope_parameters{unused}"


def _object(raw: Mapping, key: str) -> Mapping:
    """An object of the config, empty when absent or null."""
    value = raw.get(key)
    if value is not None and not isinstance(value, Mapping):
        raise CheckpointError(f"config.json has {key} = {value!r:.60}; expected an object")
    return value or {}


def _per_layer(raw: Mapping, key: str) -> list:
    """A list with an entry for each layer."""
    value, layers = raw[key], raw.get("num_hidden_layers")
    if not isinstance(value, list):
        raise CheckpointError(f"config.json has {key} = {value!r:.60}; expected a list with one entry per layer")
    if layers is not None and len(value) != layers:
        raise CheckpointError(
            f"{key} has {len(value)} entries for num_hidden_layers {layers!r:.20}; expected one per layer"
        )
    return value


def _number(raw: Mapping, key: str) -> float:
    value = raw.get(key)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < 1e9:
        raise CheckpointError(f"config.json has {key} = {value!r:.60}; expected a number")
    return value


def _agree(raw: Mapping, key: str, other: str, wanted, found) -> None:
    """Raise where an official key left in the config contradicts transformers' own."""
    if raw.get(key) is not None and found != wanted:
        raise CheckpointError(
            f"config.json has {key} = {raw[key]!r:.60}, but its {other} means {wanted!r:.60}; remove one of them"
        )


def _ratios(layer_types: list, rates: Mapping) -> list[int]:
    ratios = []
    if strange := sorted(set(rates) - set(LAYER_RATIO_KEY)):
        raise CheckpointError(f"compress_rates has {strange[0]!r:.60}; expected rates of {', '.join(LAYER_RATIO_KEY)}")
    for i, kind in enumerate(layer_types):
        if not isinstance(kind, str) or kind not in LAYER_RATIO_KEY:
            raise CheckpointError(f"layer {i} has layer type {kind!r}; expected one of {', '.join(LAYER_RATIO_KEY)}")
        key = LAYER_RATIO_KEY[kind]
        ratio = 0 if key is None else rates.get(key)
        if ratio is None or (
            key and ratio != {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128}[key]
        ):
            raise CheckpointError(
                f"compress_rates gives {ratio} for {key}; V4 has 4 for compressed_sparse_attention and 128 for "
                "heavily_compressed_attention"
            )
        ratios.append(ratio)
    return ratios


def _count_hash_layers(mlp_layer_types: list) -> int:
    strange = [kind for kind in mlp_layer_types if kind not in ("hash_moe", "moe")]
    if strange:
        raise CheckpointError(f"mlp_layer_types names {strange[0]!r:.60}; expected 'hash_moe' or 'moe' for each layer")
    return mlp_layer_types.count("hash_moe")


def to_transformers(official: Mapping) -> dict:
    """Official dictionary → the form that transformers' DeepseekV4Config saves and loads."""
    kinds = {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}
    L, rotary = official["num_hidden_layers"], official["qk_rope_head_dim"] / official["head_dim"]
    yarn = official.get("rope_scaling")
    dropped = (
        "compress_ratios",
        "rope_scaling",
        "quantization_config",
        "expert_dtype",
        "num_hash_layers",
        "qk_rope_head_dim",
    )
    out = {k: v for k, v in official.items() if k not in dropped}
    compress = {"rope_theta": official["compress_rope_theta"], "partial_rotary_factor": rotary, "rope_type": "default"}
    if yarn:
        kind = yarn.get("type", yarn.get("rope_type", "default"))
        compress |= {"rope_type": kind, **{k: v for k, v in yarn.items() if k not in ("type", "rope_type")}}
        if kind == "yarn":
            compress |= {"attention_factor": 1.0}
    return out | {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "torch_dtype": "bfloat16",
        "layer_types": [kinds[r] for r in official["compress_ratios"][:L]],
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128},
        "mlp_layer_types": official.get("mlp_layer_types")
        or ["hash_moe" if i < official["num_hash_layers"] else "moe" for i in range(L)],
        "partial_rotary_factor": rotary,
        "rope_parameters": {
            "main": {"rope_theta": official["rope_theta"], "partial_rotary_factor": rotary, "rope_type": "default"},
            "compress": compress,
        },
    }


def nvfp4_quantization(official: Mapping) -> tuple[dict, dict]:
    """(quantization_config for config.json, hf_quant_config.json) of an official layout with NVFP4 routed experts."""
    layers = [f"layers.{i}.ffn.experts" for i in range(official["num_hidden_layers"])]
    kept = ["*.attn.*", "*.ffn.shared_experts.*", "head", "mtp.*"]
    detail = {
        "quant_algo": "MIXED_PRECISION",
        "moe_quant_algo": "NVFP4",
        "group_size": 16,
        "quantized_layers": {name: {"quant_algo": "NVFP4", "group_size": 16} for name in layers},
    }
    stated = official.get("quantization_config") or {}  # a dense source states none
    base = official_quantization(official) | dict(stated) | {"quant_method": "fp8"}
    return base | detail | {"ignore": kept}, {
        "producer": {"name": "dsv4"},
        "quantization": detail | {"exclude_modules": kept},
    }


def official_quantization(official: Mapping) -> dict:
    """quantization_config of the official FP8 + MXFP4 release."""
    block = (official.get("quantization_config") or {}).get("weight_block_size", [128, 128])
    return {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "scale_fmt": "ue8m0",
        "weight_block_size": list(block),
    }
