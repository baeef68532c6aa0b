"""Speculative decoding of a checkpoint's own text on a device: its drafts, its acceptance, every policy."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from dsv4.model.deepseek_v4 import Model
from dsv4.speculation import MAX_DRAFTS, CostTable, Request, Trace
from dsv4.speculation.device_drafters import primed
from dsv4.speculation.policy_device import DevicePolicy
from dsv4.speculation.prefill import prefill
from dsv4.speculation.rounds import Rounds
from scripts.bench.speculation_gpu import (
    REWIND,
    PlainSteps,
    Timed,
    UntilOne,
    driver,
    name_of,
    planned_for,
    racers,
    record,
    without_drafts,
)
from scripts.bench.speculation_journal import SpeculationJournal


def race_texts(
    model: Model,
    prompts: Mapping[str, list[list[int]]],
    costs: CostTable,
    tokens: int,
    statics: Sequence[int],
    said: Callable[[str], None],
    journal: SpeculationJournal | None = None,
) -> list[Timed]:
    """Every policy on every kind of text (kind → prompts of equal number, the rows), until the first row has `tokens`
    tokens.

    What the simulation expects is of acceptance recorded from the same text before. One policy's graphs are held at a
    time. journal: what it holds is not timed again, nor among the results.
    """
    journal, batch = journal or SpeculationJournal(), len(next(iter(prompts.values())))
    policies = [
        (policy, sizes, left)
        for policy, sizes in racers(costs, batch, sorted({0, *statics}))
        if (left := journal.left(policy, batch, list(prompts)))
    ]
    if not policies:
        return []
    room = max(len(row) for rows in prompts.values() for row in rows) + tokens + 2 * MAX_DRAFTS
    recorded = {kind: _trace(model, kind, rows, room, tokens) for kind, rows in prompts.items()}
    plain: dict[str, list[list[int]]] = {}
    found = []
    for policy, sizes, left in policies:
        on, rounds = driver(policy, tokens, batch, model.device), None
        for kind, rows in ((kind, prompts[kind]) for kind in left):
            planned = planned_for(policy, recorded[kind], costs, batch, on)
            if without_drafts(policy):
                timed, plain[kind] = _plainly(model, kind, rows, room, tokens, planned.tokens_per_second)
                found.append(replace(timed, same=batch))
            else:
                if kind not in plain:  # it was timed before this run was cut off
                    plain[kind] = _plainly(model, kind, rows, room, tokens, planned.tokens_per_second)[1]
                rounds = _ready(model, rounds, rows, room, tokens, on, sizes)
                found.append(_timed(rounds, kind, name_of(policy), planned.tokens_per_second, plain[kind]))
            journal.done(found[-1])
            said(
                f"batch {batch}, {kind}, {found[-1].policy}: {found[-1].tokens_per_second:.0f} tokens/s, "
                f"{found[-1].expected:.0f} expected, {found[-1].same} of {batch} rows the plain text"
            )
    return found


def _trace(model: Model, kind: str, rows: list[list[int]], room: int, tokens: int) -> Trace:
    seen = record(model, model.new_cache(len(rows), room, max_rewind=MAX_DRAFTS), rows, tokens)
    return Trace(kind, tuple(Request(f"{kind} {i}", row) for i, row in enumerate(seen)), {"kind": "recorded here"})


def _ready(
    model: Model,
    rounds: Rounds | None,
    rows: list[list[int]],
    room: int,
    tokens: int,
    on: DevicePolicy,
    sizes: list[int],
) -> Rounds:
    """Rounds over the prompts: new ones with all their graphs, or those of another text begun again."""
    left = [tokens] * len(rows)
    if rounds is None:
        cache = model.new_cache(len(rows), room, max_rewind=REWIND)
        rounds = Rounds(model, cache, max(sizes), *primed(model, cache, rows), left, (), on, sizes)
        rounds.prepare()
    else:
        rounds.cache.reset()
        rounds.restart(*primed(model, rounds.cache, rows), left)
    return rounds


def _plainly(
    model: Model, kind: str, rows: list[list[int]], room: int, tokens: int, expected: float
) -> tuple[Timed, list[list[int]]]:
    """Without a drafter, as if each row were generated plainly, all in one step."""
    cache = model.new_cache(len(rows), room, max_rewind=REWIND)
    first = prefill(model, cache, rows)[0].argmax(-1).flatten().tolist()
    return PlainSteps(model, cache).timed(first, tokens, kind, "stationary", expected)


def _timed(rounds: Rounds, kind: str, name: str, expected: float, plain: list[list[int]]) -> Timed:
    ran = UntilOne(rounds)
    same = sum(row[: len(other)] == other[: len(row)] for row, other in zip(ran.out, plain))
    return Timed(
        name,
        kind,
        "stationary",
        rounds.cache.batch,
        ran.tokens,
        ran.seconds,
        expected,
        ran.widths,
        ran.sizes,
        rounds.counts.polls,
        ran.synchronisations,
        same,
    )
