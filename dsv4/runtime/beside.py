"""The cache of DeepSeek-V3.2 beside that of a DeepSeek-V4 model, in `dsv4 plan`.

V3.2 keeps one row a token and layer: an MLA latent (`kv_lora_rank` 512) with its rotated part (`qk_rope_head_dim` 64),
and a key of the indexer (`index_head_dim` 128), in `num_hidden_layers` 61, as its published config.json says. Formats:
bf16, or the 656 bytes that FlashMLA publishes for it (FP8 latent, an fp32 scale for each 128 numbers, rotated part in
bf16); keys of the indexer are FP8 with an fp32 scale for each 128 numbers in both, as its inference code stores them.
The layer of multi-token prediction is not counted.
"""

LAYERS, LATENT, ROTATED, INDEX, BLOCK = 61, 512, 64, 128, 128
KEY = INDEX + 4 * INDEX // BLOCK
KEY_FORMULA = f"{INDEX} + 4 × {INDEX // BLOCK}"
V32 = {  # format of the latent → bytes a token and layer, and their formula
    "FP8": (
        LATENT + 4 * LATENT // BLOCK + 2 * ROTATED + KEY,
        f"{LATENT} + 4 × {LATENT // BLOCK} + 2 × {ROTATED} + {KEY_FORMULA}",
    ),
    "bf16": (2 * (LATENT + ROTATED) + KEY, f"2 × ({LATENT} + {ROTATED}) + {KEY_FORMULA}"),
}


def cache_beside(own_bytes: int, batch: int, context: int) -> list[dict]:
    """Rows of bytes, as JSON values: this model's cache of `own_bytes` for `batch` rows of `context` tokens, and V3.2's
    for the same. bytes_per_token: a mean over the context, since what V4 keeps grows by windows and entries; times:
    bytes over this model's."""
    tokens = batch * context
    found = [("this model", own_bytes, "all rows of cache above")]
    for form, (each, formula) in V32.items():
        total = tokens * LAYERS * each
        found.append(
            (f"DeepSeek-V3.2, {form}", total, f"{batch} rows × {context} tokens × {LAYERS} layers × ({formula}) B")
        )
    return [
        {
            "name": name,
            "nbytes": nbytes,
            "bytes_per_token": nbytes / tokens,
            "times": nbytes / own_bytes,
            "formula": formula,
        }
        for name, nbytes, formula in found
    ]
