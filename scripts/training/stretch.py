"""A stretch of training, whatever is trained: batches in the recipe's order, gradients, steps of the optimiser, the
log, the state."""

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.utils.data import DataLoader, IterableDataset

from dsv4.kernels.errors import Dsv4Error
from dsv4.model.load import resolve_device
from scripts.training import state
from scripts.training.optimiser import Optimiser
from scripts.training.recipe import Recipe, Stage
from scripts.training.replay import Gradients

SEED = 2026


class Batches(IterableDataset):
    """Batches of rows from a step on, up to the end of its stage; each worker makes every n-th."""

    def __init__(self, data: Path, stage: Stage, batch: int, first: int, count: int):
        self.data, self.stage, self.batch, self.first, self.count = data, stage, batch, first, count

    def __iter__(self):
        from scripts.training.rows import Mixture, Rows

        info = torch.utils.data.get_worker_info()
        mixture = Mixture(text=0.85 - self.stage.needles, needles=self.stage.needles)
        rows = Rows(self.data, seed=SEED, length=self.stage.length + 1, mixture=mixture)
        B = self.batch // self.stage.length
        for step in range(self.first + info.id, self.first + self.count, info.num_workers):
            made = [rows.row(step * B + b) for b in range(B)]
            yield (
                step,
                torch.stack([torch.from_numpy(ids.astype("int64")) for ids, _ in made]),
                torch.stack([torch.from_numpy(weight) for _, weight in made]),
            )


class Run:
    """One stretch of training. Subclasses say how a fresh model is initialised, and may follow stages and steps."""

    def __init__(self, data: Path, where: Path, device: str, workers: int, recipe: Recipe, trainee):
        self.data, self.where, self.device, self.workers, self.recipe, self.trainee = (
            data,
            where,
            device,
            workers,
            recipe,
            trainee,
        )
        self.parameters = dict(trainee.named_parameters())
        if (where / "state.json").is_file():
            facts = state.load(where, self.parameters)
        else:
            self.initialise()
            facts = {"step": 0, "seconds": 0.0}
        self.step, self.seconds = facts["step"], facts["seconds"]
        self.gradients, self.optimiser = Gradients(trainee, self.parameters, False), Optimiser(self.parameters)
        self.log = open(where / "log.jsonl", "a")

    def initialise(self) -> None:
        """Fill the parameters of a model that no state holds."""
        raise NotImplementedError

    def enter(self, stage: Stage) -> None:
        """Called before the first step of a stage in this stretch."""

    def place(self, stage: Stage) -> int:
        """What the trainee gets as `at`."""
        return 0

    def stepped(self) -> dict[str, torch.Tensor]:
        """Called after each step of the optimiser; returns scalars for the log."""
        return {}

    def facts(self) -> dict:
        """What the state's facts say beside the count of steps."""
        return {}

    def summary(self, values: dict) -> str:
        """A line about a step's losses."""
        return f"loss {values['next']:.3f}"

    def stretch(self, minutes: float, steps: int) -> None:
        """Train for so many minutes, up to step `steps`, and save."""
        begun, first = time.time(), self.step
        while self.step < steps and time.time() - begun < 60 * minutes:
            stage = self.recipe.stage_at(self.step)
            self.enter(stage)
            batches = Batches(
                self.data, stage, self.recipe.batch, self.step, min(self.recipe.end_of(stage), steps) - self.step
            )
            loader = DataLoader(
                batches, batch_size=None, num_workers=self.workers, prefetch_factor=4, pin_memory=self.device != "cpu"
            )
            tick, at = time.time(), self.step
            for _, ids, weight in loader:
                out = self._update(
                    ids.to(self.device, non_blocking=True),
                    weight.to(self.device, non_blocking=True),
                    stage,
                    self.step - first,
                )
                self.step += 1
                if self.step % 25 == 0:
                    values = {k: round(v.item(), 4) for k, v in out.items()}
                    self._report(stage, values, (self.step - at) * self.recipe.batch / (time.time() - tick))
                    tick, at = time.time(), self.step
                    if not values["total"] < 1e4:
                        raise SystemExit(
                            f"error: the loss is {values['total']} at step {self.step}; the state on disk is "
                            "from before"
                        )
                if time.time() - begun > 60 * minutes:
                    break
            del loader
        self.seconds += time.time() - begun
        state.save(self.where, self.parameters, {"step": self.step, "seconds": round(self.seconds, 1)} | self.facts())

    def _update(self, ids, weight, stage: Stage, since_restart: int) -> dict[str, torch.Tensor]:
        out = self.gradients(ids, weight, stage.wanted, self.place(stage))
        torch.nn.utils.clip_grad_norm_([p for p in self.parameters.values() if p.grad is not None], 1.0, foreach=True)
        self.optimiser.step(self.recipe.rate(self.step, since_restart))
        return out | self.stepped()

    def _report(self, stage: Stage, values: dict, speed: float) -> None:
        row = {
            "step": self.step,
            "tokens": self.step * self.recipe.batch,
            "stage": stage.name,
            **values,
            "tokens_per_s": round(speed),
            "rate": round(self.recipe.rate(self.step, 1 << 30), 6),
        }
        self.log.write(json.dumps(row) + "\n")
        self.log.flush()
        print(f"{self.step:6} {stage.name:14} {self.summary(values)}  {speed / 1e3:.0f}K tokens/s", flush=True)


def command_line(about: str | None, recipe: Recipe) -> argparse.ArgumentParser:
    """The arguments that every trainer takes."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("state", type=Path)
    parser.add_argument("--minutes", type=float, default=9.5)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--steps", type=int, default=recipe.total, help="stop at this step")
    parser.add_argument("--export", type=Path, help="write the checkpoint here instead of training")
    return parser


def carry_out(args: argparse.Namespace, make: Callable[..., Run], export: Callable[[Path, Path, Path], None]) -> None:
    """Train a stretch of make(data, state, device, workers), or export its state. Errors are one line on stderr."""
    try:
        if args.export is not None:
            export(args.data, args.state, args.export)
            return
        resolve_device(args.device)
        args.state.mkdir(parents=True, exist_ok=True)
        torch.backends.cuda.matmul.allow_tf32 = True
        run = make(args.data, args.state, args.device, args.workers)
        total = run.recipe.total
        print(
            f"{sum(p.numel() for p in run.parameters.values()) / 1e6:.1f}M parameters, step {run.step} of {total}",
            flush=True,
        )
        run.stretch(args.minutes, min(args.steps, total))
        print(f"stopped at step {run.step} of {total} after {run.seconds / 60:.1f} minutes in all", flush=True)
    except (Dsv4Error, FileNotFoundError) as error:
        sys.exit(f"error: {error}")
