"""What training resumes from: the parameters (matrices in bf16) and the count of steps, in parts of limited size.

The optimiser's momenta are left behind: they come back within some 20 steps.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from dsv4.errors import InputError

PART_BYTES = 15 << 20


def is_matrix(name: str, p: torch.Tensor) -> bool:
    """Whether a parameter is kept, and computed with, in bf16."""
    return p.dim() > 1 and p.is_floating_point() and not name.endswith((".fn", ".ape"))


def save(directory: Path, parameters: dict[str, torch.Tensor], facts: dict) -> None:
    """Write parts beside the old ones, then the small file that names them: an interrupted save leaves the old
    state."""
    directory.mkdir(parents=True, exist_ok=True)
    parts, size = [{}], 0
    for name, p in parameters.items():
        value = p.detach().cpu()
        value = (value.to(torch.bfloat16) if is_matrix(name, value) else value).contiguous()
        if size + value.nbytes > PART_BYTES and parts[-1]:
            parts.append({})
            size = 0
        parts[-1][name], size = value, size + value.nbytes
    names = [f"state-{facts['step']:06}-{i}.safetensors" for i in range(len(parts))]
    for name, part in zip(names, parts):
        save_file(part, directory / name)
    pending = directory / "state.json.new"
    pending.write_text(json.dumps(facts | {"parts": names}, indent=1))
    pending.rename(directory / "state.json")
    for old in directory.glob("state-*.safetensors"):
        if old.name not in names:
            old.unlink()


def facts_of(directory: Path) -> dict:
    """What state.json says: step, seconds, parts, window_only. Raises InputError if there is none."""
    file = directory / "state.json"
    if not file.is_file():
        raise InputError(
            f"{directory} holds no training state (state.json); expected one written by scripts/train_demo.py "
            "or train_gqa.py"
        )
    return json.loads(file.read_text())


def load(directory: Path, parameters: dict[str, torch.Tensor]) -> dict:
    """Fill `parameters` from a saved state and return its facts. Raises InputError for none, or one of another
    model."""
    facts = facts_of(directory)
    values = {name: v for part in facts["parts"] for name, v in load_file(directory / part).items()}
    if values.keys() != parameters.keys():
        raise InputError(
            f"{directory} is of another model: {len(values.keys() ^ parameters.keys())} parameters differ; "
            "expected a state that this trainer wrote (of the demo, with or without --window-only)"
        )
    with torch.no_grad():
        for name, p in parameters.items():
            p.copy_(values[name])
    return facts
