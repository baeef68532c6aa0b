"""The bytes of a cost model that makes one known mistake, to explain a wrong one: part → cause → bytes."""

import re
from collections import Counter

from dsv4.cost_model.step import GROUPS, Tensors
from dsv4.loaders.write import tensor_bytes
from dsv4.model.config import ModelConfig
from dsv4.model.gqa.config import GQAConfig

Mistakes = dict[str, dict[str, int]]


def weight_mistakes(tensors: Tensors, config: ModelConfig | GQAConfig, rows: int) -> Mistakes:
    stored: Counter = Counter()
    for name, (dtype, shape) in tensors.items():
        stored[next(part for pattern, part in GROUPS if re.fullmatch(pattern, name)) or "drafts"] += tensor_bytes(
            dtype, shape
        )
    head = stored["output head"] or stored["embedding"]
    return {
        "embedding": {"not read": 0, "counted whole": stored["embedding"]},
        "output head": {"not read": 0, "counted twice": 2 * head},
        "routed experts": {"not read": 0, "every expert": stored["routed experts"]},
        "hash tables": {"not read": 0, "counted whole": stored["hash tables"]},
        "layers and norms": {"not read": 0, "drafts counted": stored["layers and norms"] + stored["drafts"]},
    }
