"""What the published kernels would take for the parts of a decode step that they have, beside ours on the same parts.

Nobody publishes the whole step for Hopper, so a stack is put together from rows: each part's fastest peer, as often as
a step of 16 Flash layers (2 window, 7 CSA, 7 HCA) runs it. A row's time holds an empty replay; in a step a kernel costs
a dependent launch instead, so that difference comes off, of ours and of theirs alike.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from scripts.bench.measure import Result
from scripts.bench.timing import Machine

LAYERS, CSA, HCA = 16, 7, 7


@dataclass(frozen=True)
class Stack:
    """One step: its name, and (row, how often it is run) of each part."""

    name: str
    parts: tuple[tuple[str, int], ...]


def stack(batch: int, context: str) -> Stack:
    """The parts of a step of `batch` rows at a context of '128K' or '1M' tokens, by the names of their rows."""
    tokens = {"128K": 1 << 17, "1M": 1 << 20}[context]
    return Stack(
        f"batch {batch} at {context}",
        (
            (f"select_entries fp4 {tokens // 4} entries k512 B{batch}", CSA),
            (f"csa_decode B{batch} 128+512 fp8", LAYERS - HCA),
            (f"hca_decode B{batch} 128+{tokens // 128} fp8", HCA),
            (f"experts {batch} tokens", LAYERS),
            (f"linear_fp8 32768x1024, {batch} tokens", LAYERS),
            (f"linear_fp8 4096x8192, {batch} tokens", LAYERS),
            (f"mhc_post_pre_norm T{batch}", 2 * LAYERS),
        ),
    )


STACKS = tuple(stack(batch, context) for batch in (1, 8) for context in ("128K", "1M"))


def sums(chosen: Stack, results: Sequence[Result], machine: Machine) -> tuple[float, float, list[str]] | None:
    """(ours, theirs, names of the peers taken), ms; None unless every part was timed, of both."""
    found = {r.name: r for r in results if not r.red and r.best_peer}
    if any(name not in found for name, _ in chosen.parts):
        return None
    start = machine.empty_us - machine.dependent_us
    ours = sum(count * (found[name].timing.cold_us - start) for name, count in chosen.parts)
    theirs = sum(count * (found[name].best_peer[1] - start) for name, count in chosen.parts)
    return ours / 1e3, theirs / 1e3, sorted({found[name].best_peer[0] for name, _ in chosen.parts})


def markdown(results: Sequence[Result], machine: Machine) -> list[str]:
    """The section, of the stacks whose parts have all been timed; nothing when there is none."""
    rows = [(s, *found) for s in STACKS if (found := sums(s, results, machine))]
    if not rows:
        return []
    lines = [
        "## Parts of a step, beside the fastest published kernel of each",
        "",
        "16 Flash layers: selection, attention (a window layer counted as CSA), routed experts, wq_b, wo_b and mHC; "
        "kernels in a chain. What no peer has is in neither sum.",
        "",
        "| step | ours ms | peers ms | | peers |",
        "|---|---:|---:|---|---|",
    ]
    for s, ours, theirs, names in rows:
        verdict = "ahead" if ours < theirs else "BEHIND"
        lines.append(f"| {s.name} | {ours:.3f} | {theirs:.3f} | {theirs / ours:.2f}× {verdict} | {', '.join(names)} |")
    return [*lines, ""]
