"""Train the demo model from scratch on one GPU; run it again to resume.

    python -m scripts.training.corpus DATA           # once: text, tokeniser (any machine, no GPU)
    python scripts/train_demo.py DATA STATE [--minutes 9.5]
    python scripts/train_demo.py DATA STATE --export demo  # quantise and write the official checkpoint
    python scripts/train_demo.py DATA OTHER --window-only --steps 1730  # the ablation, for a fraction of the time

STATE holds the parameters (matrices in bf16, at most 60 MB) and log.jsonl. A stretch ends after --minutes, or at the
end of the recipe (scripts/training/recipe.py); the seed, the data's order and the schedule depend on the step alone.
"""

import sys
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.training import recipe, stretch
from scripts.training.architecture import BF16, CONFIG, QAT, WINDOW_ONLY, build, initialise
from scripts.training.export import export
from scripts.training.replay import Gradients
from scripts.training.stretch import SEED
from scripts.training.trainee import Trainee

BALANCE = 1e-3  # step of the routing bias


class Run(stretch.Run):
    """One stretch of training of the demo model, or of its ablation."""

    def __init__(self, data: Path, where: Path, device: str, workers: int, raw: dict = CONFIG):
        self.raw, self.simulating = raw, False
        super().__init__(data, where, device, workers, recipe.DEMO, Trainee(build(raw, BF16, device)))

    def initialise(self) -> None:
        initialise(self.trainee.model, SEED)

    def enter(self, stage) -> None:
        """In simulated stages, go over to the model in simulated numerics: same parameters."""
        if self.simulating or not stage.simulate:
            return
        model = build(self.raw, QAT, self.device)
        held = dict(self.trainee.model.named_parameters())
        for name, _ in list(model.named_parameters()):
            module, leaf = model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]
            setattr(module, leaf, held[name])
        self.trainee, self.simulating = Trainee(model), True
        self.gradients = Gradients(self.trainee, self.parameters, True)

    def place(self, stage) -> int:
        """First query of the indexer's chunk: it walks through the row, and is every other time at the end, where the
        questions are."""
        chunk, chunks = stage.wanted.chunk, stage.length // stage.wanted.chunk
        return chunk * (chunks - 1 if self.step % 2 else self.step // 2 * 7919 % chunks)

    @torch.no_grad()
    def stepped(self) -> dict[str, torch.Tensor]:
        """Move each routing bias against the load of its experts (no auxiliary loss). Returns the worst load over the
        mean."""
        worst = []
        for name, chosen in self.trainee.chosen:
            bias = self.parameters.get(f"model.{name}.bias")
            if bias is not None:
                load = (chosen.flatten().unsqueeze(1) == torch.arange(bias.numel(), device=bias.device)).sum(0).float()
                bias += BALANCE * torch.sign(load.mean() - load)
                worst.append(load.max() / load.mean())
        return {"load": torch.stack(worst).max()}

    def facts(self) -> dict:
        return {"window_only": self.raw is WINDOW_ONLY}

    def summary(self, values: dict) -> str:
        return (
            f"loss {values['next']:.3f}  draft {values['draft']:.3f}  index KL {values['indexer']:.3f}  kept "
            f"{values['kept']:.3f}  load {values['load']:.2f}"
        )


def main() -> None:
    parser = stretch.command_line(__doc__, recipe.DEMO)
    parser.add_argument(
        "--window-only", action="store_true", help="train the ablation: window layers only, of the same size"
    )
    args = parser.parse_args()
    stretch.carry_out(args, partial(Run, raw=WINDOW_ONLY if args.window_only else CONFIG), export)


if __name__ == "__main__":
    main()
