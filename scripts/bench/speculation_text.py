"""Speculative decoding of a checkpoint's own text on a device: its drafts, its acceptance, every policy."""

import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from dsv4.model import Model
from dsv4.speculation import LARGEST, Adaptive, CostAware, CostTable, Policy, Request, Static, Trace, on_device, simulate
from dsv4.speculation.rounds import Rounds, primed
from scripts.bench.speculation_gpu import Scheduled, Timed, _wait, best_oracle, record


def race_texts(model: Model, prompts: Mapping[str, list[list[int]]], costs: CostTable, tokens: int, statics: Sequence[int],
               said: Callable[[str], None]) -> list[Timed]:
    """Every policy on every kind of text (kind → prompts of equal number, the rows), until the first row has `tokens` tokens.

    What the simulation expects is of acceptance recorded from the same text before. One policy's graphs are held at a time.
    """
    batch = len(next(iter(prompts.values())))
    room = max(len(row) for rows in prompts.values() for row in rows) + tokens + 2 * LARGEST
    recorded = {kind: _trace(model, kind, rows, room, tokens) for kind, rows in prompts.items()}
    plain: dict[str, list[list[int]]] = {}
    found = []
    entries: list[tuple[Policy | None, list[int]]] = [(Static(k), [k]) for k in sorted({0, *statics})]
    entries += [(p, list(p.sizes)) for p in (Adaptive(), CostAware(costs, batch))] + [(None, list(range(LARGEST + 1)))]
    for policy, sizes in entries:
        rounds = None
        for kind, rows in prompts.items():
            trace = recorded[kind]
            planned = best_oracle(trace, costs, batch) if policy is None else simulate(policy, trace, costs, batch)
            rounds = _ready(model, rounds, rows, room, tokens, policy, sizes)
            if policy is None:
                plan = torch.tensor(list(planned.block_size_history.values())).T
                rounds.policy.sizes.zero_()
                rounds.policy.sizes[:len(plan)].copy_(plan)
                rounds.restart(rounds.token, rounds.first, rounds.chained, [tokens] * batch)  # the first size is of the plan too
            found.append(_timed(rounds, kind, "oracle" if policy is None else policy.name, planned.tokens_per_second, plain))
            said(f"batch {batch}, {kind}, {found[-1].policy}: {found[-1].tokens_per_second:.0f} tokens/s, {found[-1].expected:.0f} expected, "
                 f"{found[-1].same} of {batch} rows the plain text")
    return found


def _trace(model: Model, kind: str, rows: list[list[int]], room: int, tokens: int) -> Trace:
    seen = record(model, model.new_cache(len(rows), room, max_rewind=LARGEST), rows, tokens)
    return Trace(kind, tuple(Request(f"{kind} {i}", row) for i, row in enumerate(np.asarray(seen))), {"kind": "recorded here"})


def _ready(model: Model, rounds: Rounds | None, rows: list[list[int]], room: int, tokens: int, policy: Policy | None,
           sizes: list[int]) -> Rounds:
    """Rounds over the prompts: new ones with all their graphs, or those of another text begun again."""
    left = [tokens] * len(rows)
    if rounds is None:
        cache = model.new_cache(len(rows), room, max_rewind=LARGEST)
        on = Scheduled(torch.zeros(tokens + 1, len(rows), dtype=torch.int64, device=model.device)) if policy is None \
            else on_device(policy, len(rows), model.device)
        rounds = Rounds(model, cache, max(sizes), *primed(model, cache, rows), left, (), on, sizes)
        rounds.prepare()
    else:
        rounds.cache.reset()
        rounds.restart(*primed(model, rounds.cache, rows), left)
    return rounds


def _timed(rounds: Rounds, kind: str, name: str, expected: float, plain: dict[str, list[list[int]]]) -> Timed:
    _wait(rounds)
    begun = time.perf_counter()
    out = rounds.run(ahead=1, until=any)
    _wait(rounds)
    seconds, counts = time.perf_counter() - begun, rounds.counts
    wanted = plain.setdefault(kind, out)  # the first policy drafts nothing
    same = sum(row[:len(other)] == other[:len(row)] for row, other in zip(out, wanted))
    return Timed(name, kind, "stationary", rounds.cache.batch, sum(map(len, out)), seconds, expected, counts.rounds, counts.sizes,
                 counts.polls, counts.synchronisations, same)
