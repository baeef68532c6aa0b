"""The rotary frequencies of each layer kind.

Window layers (and MTP blocks) rotate with θ = rope_theta and no YaRN. CSA and HCA layers use
θ = compress_rope_theta with YaRN (or another form of rope_scaling) for every rotation in the layer:
queries, window rows, compressed entries, index queries and keys, and the inverse rotation of the
output.
"""

import torch

from dsv4.kernels.rope import inverse_frequencies
from dsv4.model.config import Linear, Llama3, ModelConfig
from dsv4.model.gqa.rope import llama3


def frequencies(config: ModelConfig) -> dict[str, torch.Tensor]:
    """fp32 [qk_rope_head_dim / 2] for each base that a `LayerSpec.rope` names."""
    d = config.qk_rope_head_dim
    compress = inverse_frequencies(d, config.compress_rope_theta, config.yarn)
    match config.stretch:
        case Linear(factor):
            compress = compress / factor
        case Llama3(factor, low, high, original):
            compress = llama3(compress, factor, low, high, original)
    return {"main": inverse_frequencies(d, config.rope_theta), "compress": compress}
