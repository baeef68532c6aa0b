"""Which tokens each of an engine's forward passes ran, and which of the passes make up the run that is wanted."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from dsv4.errors import InputError
from dsv4.probes.subjects.engine_dumps.pieces import EngineDumpError, MissingPieces, RanksDiffer, same_bits


@dataclass(frozen=True)
class Step:
    """A forward pass by its tokens. ids, positions: int64 [n], None where they were not dumped; n: how many."""

    number: int
    n: int
    ids: torch.Tensor | None = None
    positions: torch.Tensor | None = None


@dataclass
class Run:
    """ids int64 [1, T]; parts: (number of the pass, position of its first token, its tokens) in order; left_out: number
    of a pass → why it is not of the run."""

    ids: torch.Tensor
    parts: list[tuple[int, int, int]]
    left_out: dict[int, str] = field(default_factory=dict)

    @property
    def schedule(self) -> list[int]:
        """Tokens a step; negative where the run went back."""
        found, at = [], 0
        for _, start, n in self.parts:
            found += [start - at] * (start < at) + [n]
            at = start + n
        return found


def read_ids(file: Path) -> torch.Tensor:
    """int64 [1, T] of a JSON list, or of numbers between blanks or commas. Raises InputError."""
    try:
        text = file.read_text().strip()
        found = json.loads(text if text.startswith("[") else f"[{','.join(text.replace(',', ' ').split())}]")
        ids = torch.tensor(found)
        if ids.is_floating_point() and ids.numel():
            raise ValueError("fractions")
    except (OSError, ValueError, TypeError, RuntimeError) as error:
        said = (str(error).splitlines() or [""])[0][:60]
        raise InputError(f"--ids {file.name} cannot be read ({said}); expected a JSON list of token ids") from None
    ids = ids.unsqueeze(0) if ids.dim() == 1 else ids
    if ids.dim() != 2 or ids.shape[0] != 1 or not ids.numel():
        raise InputError(f"--ids {file.name} holds ids of shape {list(ids.shape)}; expected one row [T]")
    return ids.long()


def agreed(what: str, values: Iterable[torch.Tensor]) -> torch.Tensor:
    """int64 [n] that all of `values` are. Raises RanksDiffer."""
    values = list(values)
    if any(not same_bits(values[0], v) for v in values[1:]):
        raise RanksDiffer(f"{what} differ between the files of one step; ranks ran other tokens: dump one replica")
    return values[0].flatten().long()


def steps_of_run(steps: Iterable[Step], wanted: torch.Tensor | None) -> Run:
    """The passes that ran `wanted` [1, T], or if it is None the last run that begins at position 0.

    Raises MissingPieces for positions that no pass ran, EngineDumpError for passes of several requests and where
    nothing says which tokens were run.
    """
    tokens: dict[int, int] = {}
    run, gap = Run(torch.empty(1, 0, dtype=torch.int64), []), None
    for step in sorted(steps, key=lambda s: s.number):
        at = run.parts[-1][1] + run.parts[-1][2] if run.parts else 0
        start = _start(step, at)
        ids = _ids(step, wanted, start)
        if wanted is not None and not torch.equal(ids, wanted[0, start : start + step.n]):
            run.left_out[step.number] = "other tokens than --ids"
            continue
        if start == 0 and run.parts:
            run.left_out |= {number: "an earlier run" for number, _, _ in run.parts}
            run.parts, tokens = [], {}
        if start == 0:
            gap = None
        elif start > (at if run.parts else 0):
            gap = gap or (at if run.parts else 0, start, step.number)
            run.left_out[step.number] = f"begins at position {start}, behind a gap"
            continue
        run.parts.append((step.number, start, step.n))
        tokens |= {start + i: int(token) for i, token in enumerate(ids)}
    return _whole(run, tokens, wanted, gap)


def _whole(run: Run, tokens: Mapping[int, int], wanted: torch.Tensor | None, gap: tuple | None) -> Run:
    end = run.parts[-1][1] + run.parts[-1][2] if run.parts else 0
    if gap is not None and (wanted is None or gap[0] < wanted.shape[1]):
        raise MissingPieces(
            f"step {gap[2]} begins at position {gap[1]}, and positions {gap[0]} to {gap[1] - 1} are of no step; dump "
            "every step, with the engine's prefix cache off"
        )
    if not run.parts or wanted is not None and end < wanted.shape[1]:
        asked = "any" if wanted is None else f"the {wanted.shape[1]} tokens of --ids"
        raise MissingPieces(
            f"the steps ran {end} of {asked}: {len(run.left_out)} steps are of other tokens; dump the whole run, or "
            "leave --ids out"
        )
    run.ids = torch.tensor([[tokens[i] for i in range(end)]], dtype=torch.int64)
    return run


def _start(step: Step, at: int) -> int:
    """Position of its first token; where none was dumped, steps are taken to lie end to end."""
    if step.positions is None:
        return at
    first = int(step.positions[0]) if len(step.positions) else at
    if step.positions.tolist() != list(range(first, first + step.n)):
        raise EngineDumpError(
            f"step {step.number} has positions {step.positions[:6].tolist()} …, which do not follow each other: it "
            "runs several requests, or padding; send one request at a time, without CUDA graphs"
        )
    return first


def _ids(step: Step, wanted: torch.Tensor | None, start: int) -> torch.Tensor:
    if step.ids is not None and len(step.ids) != step.n:
        raise EngineDumpError(f"step {step.number} has {len(step.ids)} token ids and {step.n} positions")
    if step.ids is None and wanted is None:
        raise EngineDumpError(f"step {step.number} has no token ids; dump input_ids, or give --ids FILE")
    if step.ids is None and start + step.n > wanted.shape[1]:
        raise EngineDumpError(
            f"step {step.number} runs positions {start} to {start + step.n - 1}, and --ids has {wanted.shape[1]}; "
            "give all tokens that were run"
        )
    return step.ids if step.ids is not None else wanted[0, start : start + step.n]
