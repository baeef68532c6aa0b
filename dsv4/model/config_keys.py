"""Keys of config.json that change nothing here, each with the reason. Any other key that nothing reads is an error.

An unknown key may change what the model computes, and a model that ignores it would be silently wrong. So the list
names keys that are known to be harmless, not keys that are known to matter.
"""

NUMERICS = "dtypes are those of the tensors and of the numerics chosen"
TRAINING = "training only"
FOREIGN = "names code of another library"
ORIGIN = "says who wrote the file"
SAMPLING = "sampling is chosen by the caller"
OUTPUTS = "what transformers returns beside the logits"
LABELS = "of classifiers, which this is none of"
CALLER = "the caller's choice"
DSPARK = "DSpark draft stages are not run"
BY_TENSORS = "formats are read off the tensors"
LIMITS = "sizes of caches are chosen by the caller"

HARMLESS = {
    "architectures": FOREIGN,
    "auto_map": FOREIGN,
    "tokenizer_class": FOREIGN,
    "attn_implementation": FOREIGN,
    "_attn_implementation": FOREIGN,
    "_attn_implementation_autoset": FOREIGN,
    "torch_dtype": NUMERICS,
    "dtype": NUMERICS,
    "use_bfloat16": NUMERICS,
    "scale_fmt": BY_TENSORS,
    "scale_dtype": BY_TENSORS,
    "use_cache": "there is always a cache",
    "pad_token_id": "rows have lengths, nothing is padded",
    "sep_token_id": "nothing separates",
    "chunk_size_feed_forward": "splits a product by rows, which changes no row",
    "pretraining_tp": "splits products as training did, which changes their rounding only",
    "is_decoder": "these models are decoders",
    "is_llama_config": ORIGIN,
    "max_batch_size": CALLER,
    "max_seq_len": LIMITS,
    **dict.fromkeys(("transformers_version", "_name_or_path", "name_or_path", "transformers.js_config"), ORIGIN),
    **dict.fromkeys(("unsloth_version", "unsloth_fixed", "model_name", "_commit_hash"), ORIGIN),
    **dict.fromkeys(
        (
            "initializer_range",
            "attention_dropout",
            "hidden_dropout",
            "dropout",
            "router_aux_loss_coef",
            "router_jitter_noise",
            "aux_loss_alpha",
            "seq_aux",
            "neftune_noise_alpha",
            "gradient_checkpointing",
        ),
        TRAINING,
    ),
    **dict.fromkeys(
        ("output_router_logits", "output_hidden_states", "output_attentions", "return_dict", "torchscript"), OUTPUTS
    ),
    **dict.fromkeys(("id2label", "label2id", "problem_type", "finetuning_task", "task_specific_params"), LABELS),
    **dict.fromkeys(
        (
            "do_sample",
            "temperature",
            "top_k",
            "top_p",
            "typical_p",
            "min_length",
            "max_length",
            "max_new_tokens",
            "num_beams",
            "num_return_sequences",
            "repetition_penalty",
            "length_penalty",
            "no_repeat_ngram_size",
            "early_stopping",
        ),
        SAMPLING,
    ),
    **{
        f"dspark_{key}": DSPARK
        for key in ("block_size", "noise_token_id", "target_layer_ids", "markov_rank", "n_experts", "topk")
    },
}
IN_QUANTIZATION = {  # below quantization_config, beside weight_block_size and expert_dtype, which are read
    "activation_scheme": "activations are quantised by the numerics chosen",
    **dict.fromkeys(("kv_cache_scheme", "kv_cache_quant_algo"), "formats of caches are chosen by the caller"),
    "producer": ORIGIN,
    **dict.fromkeys(
        (
            "quant_method",
            "fmt",
            "scale_fmt",
            "quant_algo",
            "moe_quant_algo",
            "group_size",
            "ignore",
            "exclude_modules",
            "modules_to_not_convert",
            "quantized_layers",
            "dequantize",
        ),
        BY_TENSORS,
    ),
}
# Keys of other models: only the value that changes nothing here is accepted.
FIXED = {
    "hidden_act": "silu",
    "num_key_value_heads": 1,
    "attention_bias": False,
    "mlp_bias": False,
    "is_encoder_decoder": False,
    "add_cross_attention": False,
    "first_k_dense_replace": 0,
    "moe_layer_freq": 1,
    "n_group": None,
    "topk_group": None,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
}
NO_ORACLE = (  # keys that transformers has and never reads
    "transformers 5.17 to 5.24 never reads it, so that no implementation could confirm another value"
)
