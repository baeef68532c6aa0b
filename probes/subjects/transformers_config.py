"""What transformers' DeepseekV4Config is given of a checkpoint's config.json.

This project's reader takes no part in it.
"""

import json
from pathlib import Path

from dsv4.probes.oracle.config import NUMBERS, RATIOS, RELEASED, OracleConfig, Rotation

NOT_THEIRS = ("architectures", "torch_dtype", "model_type", "quantization_config", "expert_dtype")


def own_values(path: Path) -> dict:
    """What DeepseekV4Config is given of the config.json in a checkpoint directory."""
    raw = json.loads((path / "config.json").read_text())
    if "layer_types" in raw or "rope_parameters" in raw:
        return {k: v for k, v in raw.items() if k not in NOT_THEIRS}
    c = OracleConfig.of(raw)
    kinds = {ratio: kind for kind, ratio in RATIOS.items()}
    turned = {"partial_rotary_factor": c.qk_rope_head_dim / c.head_dim}
    return {
        **{key: getattr(c, key) for key in NUMBERS if key != "qk_rope_head_dim"},
        "max_position_embeddings": raw.get("max_position_embeddings", RELEASED["max_position_embeddings"]),
        "layer_types": [kinds[ratio] for ratio in c.compress_ratios],
        "mlp_layer_types": ["hash_moe" if hashed else "moe" for hashed in c.hashed],
        "rope_parameters": {name: theirs(getattr(c, name)) | turned for name in ("main", "compress")},
        "tie_word_embeddings": c.tied,
        **turned,
    }


def theirs(rotation: Rotation) -> dict:
    """A rotation as transformers states it; V4 scales neither cos nor sin, whatever the variant."""
    found = {"rope_type": rotation.kind, "rope_theta": rotation.theta}
    if rotation.kind == "default":
        return found
    found |= {"factor": rotation.factor}
    if rotation.kind in ("yarn", "llama3"):
        found |= {"original_max_position_embeddings": int(rotation.original)}
    if rotation.kind == "llama3":
        return found | {"low_freq_factor": rotation.low, "high_freq_factor": rotation.high}
    if rotation.kind == "yarn":
        betas = {"beta_fast": rotation.beta_fast, "beta_slow": rotation.beta_slow}
        return found | betas | {"attention_factor": 1.0, "truncate": rotation.truncate}
    return found
