"""Values that a captured step derives from its positions, for the probe `captured`: compared with arithmetic on the
host.

The tensor of starts is made once and rewritten for every step, as for a replay.
"""

from collections.abc import Callable, Iterator

import torch

from dsv4.cache.cache import DEFAULT_MAX_REWIND
from dsv4.model.step import CapturedStep
from dsv4.probes.result import Check, Status, compare
from dsv4.probes.subject import Subject

SOURCE = "arithmetic on the positions (specification 3: visibility, compressor, RoPE)"
SIZES = (1, 5)
Pairs = Iterator[tuple[str, torch.Tensor, torch.Tensor]]  # part, found, wanted
ANGLE = 1e-3  # radians of fp32 angles of some hundred positions


def derived(subject: Subject, lengths: list[int], steps: int, pairs: Callable) -> list[Check]:
    """Steps of one and of five tokens at lengths, lengths + 1, …: rows of a batch are at different residues.

    pairs(subject, step, starts, T, cache): of everything that layers use of such a step (part, found, wanted).
    """
    off: dict[str, list[str]] = {
        part: []
        for part in (
            "positions",
            "rotation",
            "visible entries",
            "windows that complete",
            "rotation of entries",
            "window slots",
            "rows of the window",
        )
    }
    counts = dict.fromkeys(off, 0)
    for T in SIZES:
        start = torch.zeros(len(lengths), dtype=torch.int64, device=subject.model.device)
        cache = subject.model.new_cache(len(lengths), max(lengths) + steps + T)
        for k in range(steps):
            starts = [n + k for n in lengths]
            start.copy_(torch.tensor(starts))
            ids = torch.zeros(len(lengths), T, dtype=torch.int64, device=start.device)
            try:
                step = CapturedStep(ids, start, cache.max_context, subject.model.rope_frequencies())
                for part, found, wanted in pairs(subject, step, starts, T, cache):
                    counts[part] += 1
                    if not _equal(found, wanted):
                        off[part].append(f"{T} tokens at {starts}")
            except Exception as error:  # an implementation under audit may raise anything
                note = f"{T} tokens at {starts}: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
                return [
                    Check("a captured step can be derived", Status.ERROR, "", "captured step, positions", note=note)
                ]
    return [
        compare(
            "steps whose positions mean something else than they should",
            len(bad),
            "==",
            0,
            SOURCE,
            counts[part],
            where="",
            part=f"captured step, {part}",
            unit="steps",
            note=f"first: {bad[0]}" if bad else "",
        )
        for part, bad in off.items()
        if counts[part]
    ]


def places(subject: Subject, step: CapturedStep, starts: list[int], T: int, cache) -> Pairs:
    """(part, found, wanted) of positions and rotations."""
    pos = torch.tensor(starts).unsqueeze(1) + torch.arange(T)
    yield "positions", step.pos, pos
    for base, f in subject.model.rope_frequencies().items():
        yield "rotation", step.cis(base), _rotation(pos.flatten(), f)


def windows_and_entries(subject: Subject, step: CapturedStep, starts: list[int], T: int, cache) -> Pairs:
    """`places`, the rotation back, and rows of windows and of entries."""
    config, B = subject.config, len(starts)
    pos = torch.tensor(starts).unsqueeze(1) + torch.arange(T)
    cache.place(step, subject.model.op)  # if the backend computes all of it at once
    yield from places(subject, step, starts, T, cache)
    for base, f in subject.model.rope_frequencies().items():
        yield "rotation", step.inverse_cis(base), _rotation(-pos.flatten(), f)
    W, R = config.sliding_window, config.sliding_window + DEFAULT_MAX_REWIND
    ring, row = cache.layers[0].window, torch.arange(B).unsqueeze(1)
    yield "window slots", ring.slots(step), (pos % R + row * R).flatten()
    near = pos.unsqueeze(-1) + torch.arange(1 - W, 1)
    yield (
        "rows of the window",
        ring.last(step, W),
        torch.where(near < 0, -1, near % R + (row * R).unsqueeze(-1)).flatten(0, 1),
    )
    for ratio in sorted(set(config.compress_ratios) - {0}):
        yield "visible entries", step.visible(ratio), (pos + 1) // ratio
        ends = [(row, w) for row, p in enumerate(starts) for w in range(p // ratio, (p + T) // ratio)]
        new, done = step.new_windows(ratio).cpu(), step.completes(ratio).cpu().view(B, -1)
        found = [(row, int(w)) for row in range(B) for w in new[row][done[row]]]
        yield "windows that complete", torch.tensor(found), torch.tensor(ends)
        turned = step.window_cis(ratio, "compress").cpu().view(*new.shape, -1)
        yield "rotation of entries", turned, _rotation(new * ratio, subject.model.rope_frequencies()["compress"])


def _rotation(positions: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
    angles = positions.double().unsqueeze(-1) * frequencies.cpu().double()
    return torch.polar(torch.ones_like(angles), angles)


def _equal(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Equal shape and values; rotations within the error of fp32 angles."""
    found = found.cpu()
    if found.shape != wanted.shape:
        return False
    return bool((found - wanted).abs().max() <= ANGLE) if wanted.is_complex() else torch.equal(found, wanted)
