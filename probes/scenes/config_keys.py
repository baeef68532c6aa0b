"""Keys of config.json: those that have an effect, those that have none and why, and where this project's modules keep
them."""

BY_TENSORS, NUMERICS = "formats are read off the tensors", "dtypes are those of the tensors and of the numerics chosen"
TRAINING, DSPARK, FOREIGN = "training only", "DSpark draft stages are not run", "names code of another library"
NO_EFFECT = {  # keys that nothing needs to read, and why
    "architectures": FOREIGN,
    "auto_map": FOREIGN,
    "torch_dtype": NUMERICS,
    "dtype": NUMERICS,
    "transformers_version": "who wrote the file",
    "_name_or_path": "where the file came from",
    "use_cache": "there is always a cache",
    "pad_token_id": "rows have lengths, nothing is padded",
    "max_batch_size": "the caller's choice",
    "max_seq_len": "the caller's choice",
    **dict.fromkeys(
        (
            "initializer_range",
            "attention_dropout",
            "output_router_logits",
            "router_aux_loss_coef",
            "router_jitter_noise",
        ),
        TRAINING,
    ),
    **{f"dspark_{key}": DSPARK for key in ("block_size", "noise_token_id", "target_layer_ids", "markov_rank")},
    "quantization_config.activation_scheme": "activations are quantised by the numerics chosen",
    **{
        f"quantization_config.{key}": BY_TENSORS
        for key in (
            "quant_method",
            "fmt",
            "scale_fmt",
            "quant_algo",
            "moe_quant_algo",
            "group_size",
            "ignore",
            "quantized_layers",
        )
    },
}
FIXED = {
    "model_type": "deepseek_v4",
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "norm_topk_prob": True,
    # all there is
    "hidden_act": "silu",
    "num_key_value_heads": 1,
    "attention_bias": False,
}
YARN = ("factor", "beta_fast", "beta_slow", "original_max_position_embeddings")
YARN_DEFAULTS = {"beta_fast": 32, "beta_slow": 1}  # where a config states none
SPECIFIED = {
    *FIXED,
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
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
    "n_shared_experts",
    "moe_intermediate_size",
    "routed_scaling_factor",
    "compress_ratios",
    "num_hash_layers",
    "swiglu_limit",
    "hc_mult",
    "hc_sinkhorn_iters",
    "hc_eps",
    "rms_norm_eps",
    "rope_theta",
    "compress_rope_theta",
    "rope_scaling",
    *(f"rope_scaling.{key}" for key in ("type", *YARN, "low_freq_factor", "high_freq_factor")),
    "mlp_layer_types",
    "tie_word_embeddings",
    "max_position_embeddings",
    "num_nextn_predict_layers",
    "quantization_config.weight_block_size",
}
WIDTHS = (
    "hidden_size",
    "moe_intermediate_size",
    "head_dim",
    "q_lora_rank",
    "o_lora_rank",
    "index_head_dim",
    "num_attention_heads",
    "index_n_heads",
    "index_topk",
    "sliding_window",
    "n_routed_experts",
    "vocab_size",
)
IN_MODULES = {  # class → attribute → key: values that the modules of this project's model took from the config
    "RMSNorm": {"eps": "rms_norm_eps"},
    "HyperHead": {"eps": "hc_eps", "norm_eps": "rms_norm_eps"},
    "HyperConnection": {"iters": "hc_sinkhorn_iters", "eps": "hc_eps", "norm_eps": "rms_norm_eps"},
    "Gate": {"topk": "num_experts_per_tok", "factor": "routed_scaling_factor"},
    "Experts": {"limit": "swiglu_limit"},
    "SharedExpert": {"limit": "swiglu_limit"},
    "LightningIndexer": {"topk": "index_topk", "H": "index_n_heads", "D": "index_head_dim"},
    **{
        f"{kind}Attention": {
            "W": "sliding_window",
            "D": "head_dim",
            "H": "num_attention_heads",
            "groups": "o_groups",
            "rope": "qk_rope_head_dim",
            "eps": "rms_norm_eps",
        }
        for kind in ("Window", "CSA", "HCA")
    },
}
ATTENTION_SCALE = ("softmax scale", lambda raw: raw["head_dim"] ** -0.5)
SCALES = {
    **{f"{kind}Attention": ATTENTION_SCALE for kind in ("Window", "CSA", "HCA")},  # no mscale (specification 3)
    "LightningIndexer": ("temperature", lambda raw: (raw["index_head_dim"] * raw["index_n_heads"]) ** -0.5),
}
UNREAD = "a key that nothing reads has no effect (Primus 949)"
STATED = (
    "the value that config.json states; a value that is changed on the way needs a recorded reason (known bugs, 0.8)"
)


def other_values(value) -> list:
    """Values of the same type that differ from this one."""
    match value:
        case bool():
            return [not value]
        case int() | float():
            return [value * 2 + 2]
        case str():
            return [value + " changed"]
        case list():
            return [[v * 2 + 2 if isinstance(v, (int, float)) else v for v in value], value[:-1]]
    return ["changed", 1]


def shown(value) -> str:
    """A value as text: 1.0 and 1 are the same number."""
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(shown(v) for v in value) + "]"
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return f"{value:.12g}"
    return str(value)
