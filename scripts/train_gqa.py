"""Train the small GQA model from scratch on one GPU, by the demo's recipe on the demo's data; run it again to resume.

    python -m scripts.training.corpus DATA           # once: text, tokeniser (any machine, no GPU); the demo's own
    serves python scripts/train_gqa.py DATA STATE [--minutes 9.5]
    python scripts/train_gqa.py DATA STATE --export demo_gqa  # bf16, in the transformers layout

STATE holds the parameters (matrices in bf16, 12 MB) and log.jsonl. A stretch ends after --minutes, or at the end of the
recipe (`GQA` of scripts/training/recipe.py); the seed, the data's order and the schedule depend on the step alone.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.training import gqa, recipe, stretch


class Run(stretch.Run):
    """One stretch of training of the GQA model."""

    def __init__(self, data: Path, where: Path, device: str, workers: int, raw: dict = gqa.CONFIG):
        super().__init__(data, where, device, workers, recipe.GQA, gqa.Trainee(gqa.build(raw, device)))

    def initialise(self) -> None:
        gqa.initialise(self.trainee.model, stretch.SEED)


def main() -> None:
    stretch.carry_out(stretch.command_line(__doc__, recipe.GQA).parse_args(), Run, gqa.export)


if __name__ == "__main__":
    main()
