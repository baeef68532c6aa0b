"""Checkpoints of GQA models, as transformers writes them: the names of their classes and of their tensors."""

from dsv4.loaders.layouts import Layout, compiled

# model_type → architecture
DECODERS = {
    "qwen2": "Qwen2ForCausalLM",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}

_LEAVES = "|".join(
    (
        r"self_attn\.[qkvo]_proj\.(?:weight|bias)",
        r"self_attn\.[qk]_norm\.weight",
        r"mlp\.(?:gate|up|down)_proj\.(?:weight|bias)",
        r"(?:input|post_attention)_layernorm\.weight",
        r"self_attn\.rotary_emb\.inv_freq",
    )
)
# the names of the file are the names of the model
DECODER = Layout(
    "transformers",
    compiled(
        [
            (r"((?:model\.embed_tokens|model\.norm|lm_head)\.weight)", r"\1"),
            (rf"(model\.layers\.\d+\.(?:{_LEAVES}))", r"\1"),
        ]
    ),
)
