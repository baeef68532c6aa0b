"""The bytes that a whole decode step of a checkpoint reads, by part: its weights once, and the attention of every
layer.

    step time = bytes / β + layers · (c₀ + c₁)
"""

from collections import Counter
from collections.abc import Mapping

from dsv4.cost_model import gqa, latent
from dsv4.kernels.block_choice import Policy, dense
from dsv4.loaders.write import tensor_bytes
from dsv4.model.config import ModelConfig
from dsv4.model.gqa.config import GQAConfig
from dsv4.model.numerics import Numerics
from dsv4.runtime.memory import labels

Tensors = Mapping[str, tuple[str, tuple[int, ...]]]  # official name → (dtype, shape)
GROUPS = (  # first match names the part of the weights a tensor belongs to; None: no plain step reads it
    (r"mtp\..*|.*\.input_scale", None),
    (r"(model\.embed_tokens|embed)\.weight", "embedding"),
    (r"(lm_)?head\..*", "output head"),
    (r".*\.ffn\.experts\..*", "routed experts"),
    (r".*\.tid2eid", "hash tables"),
    (r".*", "layers and norms"),
)

LAYER_PARTS = {"deepseek_v4": latent.layer_parts, "gqa": gqa.layer_parts}  # family → its layers, part → bytes
FORMULAS = {  # each part, in words; rows: of the batch
    "layers and norms": "each tensor once",
    "output head": "once",
    "embedding": "a row a token",
    "routed experts": "num_experts_per_tok of n_routed_experts a layer and row, at most all",
    "hash tables": "a row a token and layer",
    "keys": "layers × rows × tokens read × KV heads × head_dim × bytes a number",
    "values": "as keys",
    "block summaries": "layers × scored blocks of all rows and KV heads × vectors × head_dim × bytes a number",
    "token lists": "layers × rows × tokens read × KV heads × 4 B",
    "queries and outputs": "layers × 2 × rows × heads × width × bytes a number",
    "window": "layers × rows × min(window, context) × bytes a cached row",
    "csa entries": "CSA layers × rows × min(topk, ⌊context / 4⌋) × bytes a cached row",
    "hca entries": "HCA layers × rows × ⌊context / 128⌋ × bytes a cached row",
    "index keys": "CSA layers × rows × ⌊context / 4⌋ × bytes a key, where that is more than topk",
    "index scores": "8 B an index key: written and read",
    "index queries": "CSA layers × rows × index heads × index_head_dim × bytes a number",
}


def weights_read(tensors: Tensors, config: ModelConfig | GQAConfig, rows: int = 1) -> dict[str, int]:
    """Part → bytes of weights that a step of one token each of `rows` rows reads, each once, of tensors as they are
    held.

    The embedding and tables by token id count one row a token. Routed experts count num_experts_per_tok a token and
    layer: exact for one row, the maximum for more. A head that is tied to the embedding is the embedding, read whole.
    """
    stored, found = Counter(), Counter()
    for part, (dtype, shape) in zip(labels(tensors, GROUPS), tensors.values()):
        stored[part] += tensor_bytes(dtype, shape)
    found["layers and norms"] = stored["layers and norms"]
    if getattr(config, "tie_word_embeddings", False):
        found["output head"] = stored["embedding"]  # another name for the head in the file is a copy
    else:
        found |= {"output head": stored["output head"], "embedding": rows * stored["embedding"] // config.vocab_size}
    if stored["routed experts"]:
        E = config.n_routed_experts
        found["routed experts"] = stored["routed experts"] * min(E, rows * config.num_experts_per_tok) // E
        found["hash tables"] = rows * stored["hash tables"] // config.vocab_size
    return dict(found)


def attention_parts(
    config: ModelConfig | GQAConfig, numerics: Numerics, batch: int, context: int, policy: Policy = dense()
) -> list[dict[str, int]]:
    """For each layer, part → bytes that its attention reads of a cache of `context` tokens a row, the step's own
    included, and writes. policy: of a GQA model; layers with a window read just that, whatever the policy."""
    return LAYER_PARTS[config.family](config, numerics, batch, context, policy)


def step_parts(
    config: ModelConfig | GQAConfig,
    numerics: Numerics,
    tensors: Tensors,
    batch: int,
    context: int,
    policy: Policy = dense(),
) -> dict[str, int]:
    """Part → bytes of a whole step: `weights_read`, and `attention_parts` of all layers."""
    found = Counter(weights_read(tensors, config, batch))
    for parts in attention_parts(config, numerics, batch, context, policy):
        found.update(parts)
    return dict(found)
