"""What a whole decode step of a checkpoint reads: its weights once, and of every layer what its attention reads, by part.

    step time = bytes / β + layers · (c₀ + c₁)
"""

import re
from collections import Counter
from collections.abc import Mapping

from dsv4.bill.gqa import Geometry, dense_parts, policy_parts
from dsv4.bill.latent import LatentGeometry
from dsv4.config import ModelConfig
from dsv4.gqa.config import GQAConfig
from dsv4.numerics import Numerics
from kernels.block_choice import Policy, dense
from loaders.write import tensor_bytes

Tensors = Mapping[str, tuple[str, tuple[int, ...]]]  # official name → (dtype, shape)
GROUPS = (  # first match names the part of the weights a tensor belongs to; None: no plain step reads it
    (r"mtp\..*|.*\.input_scale", None), (r"(model\.embed_tokens|embed)\.weight", "embedding"), (r"(lm_)?head\..*", "output head"),
    (r".*\.ffn\.experts\..*", "routed experts"), (r".*\.tid2eid", "hash tables"), (r".*", "layers and norms"),
)


def weights_read(tensors: Tensors, config: ModelConfig | GQAConfig, rows: int = 1) -> dict[str, int]:
    """Part → bytes of weights that a step of one token each of `rows` rows reads, each once, of tensors as they are held.

    Of the embedding and of tables by token id a row each; of routed experts those of so many tokens, num_experts_per_tok a token and layer:
    for one row exact, for more the most that routing may ask for. A head that is tied to the embedding is the embedding, read whole.
    """
    stored, found = Counter(), Counter()
    for name, (dtype, shape) in tensors.items():
        stored[next(part for pattern, part in GROUPS if re.fullmatch(pattern, name))] += tensor_bytes(dtype, shape)
    found["layers and norms"] = stored["layers and norms"]
    if getattr(config, "tie_word_embeddings", False):
        found["output head"] = stored["embedding"]  # what else the file calls a head is a copy
    else:
        found |= {"output head": stored["output head"], "embedding": rows * stored["embedding"] // config.vocab_size}
    if isinstance(config, ModelConfig):
        E = config.n_routed_experts
        found["routed experts"] = stored["routed experts"] * min(E, rows * config.num_experts_per_tok) // E
        found["hash tables"] = rows * stored["hash tables"] // config.vocab_size
    return dict(found)


def attention_parts(config: ModelConfig | GQAConfig, numerics: Numerics, batch: int, context: int, policy: Policy = dense()) -> list[dict[str, int]]:
    """Of each layer, part → bytes that its attention reads of a cache of `context` tokens a row, the step's own among them, and writes.

    policy: of a GQA model; layers with a window read just that, whatever it says.
    """
    if isinstance(config, GQAConfig):
        g = Geometry.of(config, numerics)
        return [policy_parts(g, policy, batch, context) if window is None else dense_parts(g, batch, min(window, context))
                for window in config.windows]
    g = LatentGeometry.of(config, numerics)
    return [g.parts(config.kind(i), batch, context) for i in range(config.num_hidden_layers)]


def step_parts(config: ModelConfig | GQAConfig, numerics: Numerics, tensors: Tensors, batch: int, context: int,
               policy: Policy = dense()) -> dict[str, int]:
    """Part → bytes of a whole step: those of `weights_read`, and `attention_parts` of all layers."""
    found = Counter(weights_read(tensors, config, batch))
    for parts in attention_parts(config, numerics, batch, context, policy):
        found.update(parts)
    return dict(found)
