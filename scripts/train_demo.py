"""Train the demo model from scratch on one GPU; run it again to resume.

    python -m scripts.training.corpus DATA           # once: text, tokeniser (any machine, no GPU)
    python scripts/train_demo.py DATA STATE [--minutes 9.5]
    python scripts/train_demo.py DATA STATE --export demo  # quantise and write the official checkpoint
    python scripts/train_demo.py DATA OTHER --window-only --steps 1730  # the ablation, for a fraction of the time

STATE holds the parameters (matrices in bf16, at most 60 MB) and log.jsonl. A stretch ends after --minutes, or at the
end of the recipe (scripts/training/recipe.py); the seed, the data's order and the schedule depend on the step alone.
"""

import argparse
import json
import sys
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, IterableDataset

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dsv4.load import resolve_device  # noqa: E402
from kernels.errors import Dsv4Error  # noqa: E402
from scripts.training import recipe, state  # noqa: E402
from scripts.training.architecture import BF16, CONFIG, QAT, WINDOW_ONLY, build, initialise  # noqa: E402
from scripts.training.optimiser import Optimiser  # noqa: E402
from scripts.training.replay import Gradients  # noqa: E402
from scripts.training.trainee import Trainee  # noqa: E402

SEED = 2026
BALANCE = 1e-3  # step of the routing bias


class Batches(IterableDataset):
    """Batches of rows from a step on, up to the end of its stage; each worker makes every n-th."""

    def __init__(self, data: Path, stage: recipe.Stage, first: int, count: int):
        self.data, self.stage, self.first, self.count = data, stage, first, count

    def __iter__(self):
        from scripts.training.rows import Mixture, Rows
        info = torch.utils.data.get_worker_info()
        mixture = Mixture(text=0.85 - self.stage.needles, needles=self.stage.needles)
        rows = Rows(self.data, seed=SEED, length=self.stage.length + 1, mixture=mixture)
        B = recipe.BATCH // self.stage.length
        for step in range(self.first + info.id, self.first + self.count, info.num_workers):
            made = [rows.row(step * B + b) for b in range(B)]
            yield step, torch.stack([torch.from_numpy(ids.astype("int64")) for ids, _ in made]), torch.stack(
                [torch.from_numpy(weight) for _, weight in made])


class Run:
    """One stretch of training."""

    def __init__(self, data: Path, where: Path, device: str, workers: int, raw: dict = CONFIG):
        self.data, self.where, self.device, self.workers, self.raw = data, where, device, workers, raw
        self.trainee = Trainee(build(raw, BF16, device))
        self.parameters = dict(self.trainee.named_parameters())
        if (where / "state.json").is_file():
            facts = state.load(where, self.parameters)
        else:
            initialise(self.trainee.model, SEED)
            facts = {"step": 0, "seconds": 0.0}
        self.step, self.seconds = facts["step"], facts["seconds"]
        self.simulating, self.gradients = False, Gradients(self.trainee, self.parameters, False)
        self.optimiser = Optimiser(self.parameters)
        self.log = open(where / "log.jsonl", "a")

    def simulate(self) -> None:
        """Go over to the model in simulated numerics: same parameters."""
        model = build(self.raw, QAT, self.device)
        held = dict(self.trainee.model.named_parameters())
        for name, _ in list(model.named_parameters()):
            module, leaf = model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]
            setattr(module, leaf, held[name])
        self.trainee, self.simulating = Trainee(model), True
        self.gradients = Gradients(self.trainee, self.parameters, True)

    def stretch(self, minutes: float, steps: int) -> None:
        """Train for so many minutes, up to step `steps`, and save."""
        begun, first = time.time(), self.step
        while self.step < steps and time.time() - begun < 60 * minutes:
            stage = recipe.stage_at(self.step)
            if stage.simulate and not self.simulating:
                self.simulate()
            before = sum(s.steps for s in recipe.STAGES[:recipe.STAGES.index(stage)])
            loader = DataLoader(Batches(self.data, stage, self.step, min(before + stage.steps, steps) - self.step), batch_size=None,
                                num_workers=self.workers, prefetch_factor=4, pin_memory=self.device != "cpu")
            tick, at = time.time(), self.step
            for step, ids, weight in loader:
                out, load = self._update(ids.to(self.device, non_blocking=True), weight.to(self.device, non_blocking=True), stage,
                                         self.step - first)
                self.step += 1
                if self.step % 25 == 0:
                    values = {k: round(v.item(), 4) for k, v in out.items()}
                    speed = (self.step - at) * recipe.BATCH / (time.time() - tick)
                    self._report(stage, values, speed, load)
                    tick, at = time.time(), self.step
                    if not values["total"] < 1e4:
                        raise SystemExit(f"error: the loss is {values['total']} at step {self.step}; the state on disk is from before")
                if time.time() - begun > 60 * minutes:
                    break
            del loader
        self.seconds += time.time() - begun
        state.save(self.where, self.parameters, {"step": self.step, "seconds": round(self.seconds, 1),
                                                    "window_only": self.raw is WINDOW_ONLY})

    def _update(self, ids, weight, stage, since_restart: int):
        chunk, chunks = stage.wanted.chunk, stage.length // stage.wanted.chunk
        at = chunk * (self.step // 2 * 7919 % chunks)  # the indexer's chunk walks through the row,
        if self.step % 2:
            at = chunk * (chunks - 1)  # and is every other time at the end, where the questions are
        out = self.gradients(ids, weight, stage.wanted, at)
        torch.nn.utils.clip_grad_norm_([p for p in self.parameters.values() if p.grad is not None], 1.0, foreach=True)
        self.optimiser.step(recipe.rate(self.step, since_restart))
        return out, self._balance()

    @torch.no_grad()
    def _balance(self) -> torch.Tensor:
        """Move each routing bias against the load of its experts (no auxiliary loss). Returns the worst load over the mean."""
        worst = []
        for name, chosen in self.trainee.chosen:
            bias = self.parameters.get(f"model.{name}.bias")
            if bias is not None:
                load = (chosen.flatten().unsqueeze(1) == torch.arange(bias.numel(), device=bias.device)).sum(0).float()
                bias += BALANCE * torch.sign(load.mean() - load)
                worst.append(load.max() / load.mean())
        return torch.stack(worst).max()

    def _report(self, stage, values: dict, speed: float, load: torch.Tensor) -> None:
        row = {"step": self.step, "tokens": self.step * recipe.BATCH, "stage": stage.name, **values, "tokens_per_s": round(speed),
               "rate": round(recipe.rate(self.step, 1 << 30), 6), "load": round(load.item(), 2)}
        self.log.write(json.dumps(row) + "\n")
        self.log.flush()
        print(f"{self.step:6} {stage.name:14} loss {values['next']:.3f}  draft {values['draft']:.3f}  index KL {values['indexer']:.3f}  "
              f"kept {values['kept']:.3f}  load {load.item():.2f}  {speed / 1e3:.0f}K tokens/s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("state", type=Path)
    parser.add_argument("--minutes", type=float, default=9.5)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--steps", type=int, default=recipe.TOTAL, help="stop at this step")
    parser.add_argument("--window-only", action="store_true", help="train the ablation: window layers only, of the same size")
    parser.add_argument("--export", type=Path, help="write the official checkpoint here instead of training")
    args = parser.parse_args()
    try:
        if args.export is not None:
            from scripts.training.export import export
            export(args.data, args.state, args.export)
        else:
            train(args)
    except (Dsv4Error, FileNotFoundError) as error:
        sys.exit(f"error: {error}")


def train(args: argparse.Namespace) -> None:
    """One stretch. Raises InputError for a device that does not exist, or a state of another model."""
    resolve_device(args.device)
    args.state.mkdir(parents=True, exist_ok=True)
    torch.backends.cuda.matmul.allow_tf32 = True
    run = Run(args.data, args.state, args.device, args.workers, WINDOW_ONLY if args.window_only else CONFIG)
    print(f"{sum(p.numel() for p in run.parameters.values()) / 1e6:.1f}M parameters, step {run.step} of {recipe.TOTAL}", flush=True)
    run.stretch(args.minutes, min(args.steps, recipe.TOTAL))
    print(f"stopped at step {run.step} of {recipe.TOTAL} after {run.seconds / 60:.1f} minutes in all", flush=True)


if __name__ == "__main__":
    main()
