"""What a new process does for `fresh_process`: open the subject, run one text before anything else, and store the
answer. `python -m dsv4.probes.scenes.fresh_child SPECIFICATION.json ANSWER.safetensors`."""

import importlib
import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file

from dsv4.probes import families


def answer(subject, ids: torch.Tensor, schedule: list[int]) -> dict[str, torch.Tensor]:
    """Logits, and the selection of each layer that has one, of one run."""
    capture = subject.run(ids, schedule, families.of(subject).chosen)
    points = {f"layer {layer}": value for (layer, _), value in sorted(capture.points.items())}
    return {"logits": capture.logits.cpu().contiguous()} | {k: v.cpu().contiguous() for k, v in points.items()}


def main() -> None:
    from dsv4.kernels.replacing import replacements_of
    from dsv4.probes.audit import open_subject

    specification = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(specification["threads"])
    prepared = []
    for place, arguments in specification["preparations"]:
        module, _, name = place.partition(":")
        prepared.append(getattr(importlib.import_module(module), name)(*arguments))
    checkpoint, *choices = specification["subject"]
    subject = open_subject(Path(checkpoint), *choices, kernels=replacements_of(specification["kernels"]))
    for change in prepared:
        change(subject)
    ids = torch.tensor(specification["ids"])
    save_file(answer(subject, ids, specification["schedule"]), sys.argv[2])


if __name__ == "__main__":
    main()
