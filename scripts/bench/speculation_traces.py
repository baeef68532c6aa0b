"""Acceptance traces of a checkpoint's own text: recorded here, replayed where the checkpoint's model would be too small
to time."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

from dsv4.errors import InputError
from dsv4.speculation import MAX_DRAFTS, Request, Trace, read_trace, write_trace
from dsv4.speculation.trace import mixed, stationary

FOLDER = Path(__file__).parent / "speculation_traces"
ROOT = Path(__file__).resolve().parents[2]
# tokens of a prompt, of its continuation; requests of a kind; of a mixed one's turns
PROMPT, TOKENS, ROWS, SEGMENT = 96, 192, 32, 64
KINDS = {"code": "*.py", "prose": "*.md"}


def default_traces() -> list[tuple[str, Trace]]:
    """(kind, trace): the recorded ones, and synthetic ones of high, low and changing acceptance. Raises InputError when
    none was recorded."""
    size = {"requests": 64, "tokens": 1024, "seed": 1}
    return [
        *recorded(),
        *(("stationary", stationary(f"{name} {rate}", rate, **size)) for name, rate in (("high", 0.95), ("low", 0.35))),
        ("mixed", mixed("mixed 0.95/0.35", 0.95, 0.35, 128, **size)),
    ]


def recorded() -> list[tuple[str, Trace]]:
    """(kind, trace): recorded code, prose, and both by turns. Raises InputError when none was recorded."""
    found = [("stationary", read_trace(FOLDER / f"{name}.json")) for name in KINDS]
    return [*found, ("mixed", by_turns(*(t for _, t in found)))]


def by_turns(a: Trace, b: Trace, segment: int = SEGMENT) -> Trace:
    """Requests that go from one kind of text to the other and back, cut from two recorded traces: twice as long."""
    rows = []
    for i, (x, y) in enumerate(zip(a.requests, b.requests)):
        x, y = (x, y) if i % 2 == 0 else (y, x)
        pieces = [r.accepted[at : at + segment] for at in range(0, min(len(x), len(y)), segment) for r in (x, y)]
        rows.append(Request(f"turns {i}", np.concatenate(pieces)))
    return Trace(
        f"{a.name} and {b.name} by turns", tuple(rows), {"kind": "recorded", "segment": segment, "of": [a.name, b.name]}
    )


def prompts(pattern: str, encode: Callable[[str], list[int]]) -> Iterator[list[int]]:
    """PROMPT tokens at a time from this project's files of that kind, longest files first; first of each its beginning,
    then further in."""
    files = sorted(
        (
            p
            for folder in ("dsv4", "kernels", "probes", "loaders", "scripts", "demo")
            for p in (ROOT / folder).rglob(pattern)
        ),
        key=lambda p: (-p.stat().st_size, p),
    )
    texts = [encode(path.read_text()) for path in files]
    for begin in range(0, max(map(len, texts)), 4 * PROMPT):
        yield from (ids[begin : begin + PROMPT] for ids in texts if len(ids) >= begin + PROMPT)


def record_all(checkpoint: Path, out: Path, said: Callable[[str], None]) -> list[Path]:
    """One trace for each kind of text. Raises CheckpointError, InputError."""
    from dsv4 import load_model
    from dsv4.model.tokenizer import Tokenizer
    from scripts.bench import report
    from scripts.bench.speculation_gpu import record

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = load_model(
        checkpoint, numerics="fp32", mtp=True, device=device, backend="cpu" if device == "cpu" else "triton"
    )
    tokenizer, written = Tokenizer(checkpoint, model.config.vocab_size), []
    out.mkdir(parents=True, exist_ok=True)
    for name, pattern in KINDS.items():
        ids = [row for row, _ in zip(prompts(pattern, tokenizer.encode), range(ROWS))]
        if len(ids) < ROWS:
            raise InputError(
                f"files {pattern} have {len(ids)} times {PROMPT} tokens; expected {ROWS}: run this in a whole checkout"
            )
        seen = record(
            model, model.new_cache(ROWS, PROMPT + TOKENS + 2 * MAX_DRAFTS, max_rewind=MAX_DRAFTS), ids, TOKENS
        )
        requests = tuple(Request(f"{name} {i}", row) for i, row in enumerate(seen))
        about = {
            "kind": "recorded",
            "checkpoint": checkpoint.name,
            "numerics": "fp32",
            "drafts": "MTP block, chained",
            "prompt_tokens": PROMPT,
            "mean_accepted_of_8": round(float(seen.mean()), 3),
            **report.provenance("scripts/bench_speculation.py"),
        }
        said(
            f"{name}: {seen.mean():.2f} of {MAX_DRAFTS} drafts accepted on average; first draft {(seen > 0).mean():.0%}"
        )
        written.append(out / f"{name}.json")
        write_trace(Trace(f"{checkpoint.name}, {name}", requests, about), written[-1])
    return written
