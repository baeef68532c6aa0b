"""Rounds of speculative decoding on a device: what each size costs, and how fast each policy really is.

Costs do not depend on what is accepted, so a model with random weights can be timed with the acceptance of another's
text: kernels, bytes and launches are real, only the judgement of the drafts is replaced by a trace (`Traced`).
"""

import time
from collections.abc import Callable, Sequence
from statistics import median

import numpy as np
import torch

from dsv4.cache.cache import Cache
from dsv4.model.deepseek_v4 import Model
from dsv4.runtime.graph import DecodeGraph, captured_graph
from dsv4.speculation import (
    MAX_DRAFTS,
    Adaptive,
    CostAware,
    CostTable,
    Oracle,
    Policy,
    Run,
    Static,
    Trace,
    on_device,
    simulate,
)
from dsv4.speculation.accept import Accepted
from dsv4.speculation.choosing import Choice
from dsv4.speculation.costs import BatchCost
from dsv4.speculation.device_drafters import CATCH_UP_WIDTHS, MTPDrafts, primed
from dsv4.speculation.host_loop import AHEAD
from dsv4.speculation.policy_device import DevicePolicy
from dsv4.speculation.rounds import Rounds
from dsv4.speculation.trace import Request
from scripts.bench.speculation_journal import SpeculationJournal, Timed, name_of
from scripts.bench.waits import counted_syncs

REPLAYS, SPARE = 12, 16  # timed rounds of each size; tokens of room beyond what they can write
ROOM = 1024  # tokens; caches of rounds have a multiple of them
REWIND = max(MAX_DRAFTS, CATCH_UP_WIDTHS[-1] - 1)  # tokens; of those caches


class Traced(Choice):
    """A trace says how many drafts are right: accepted int64 [B, T], by tokens written so far, the first at position
    `begun` of every row.

    The text is random: a model with random weights soon says one token again and again, and the same experts come back,
    whose weights are then faster to read than those of any real text."""

    def __init__(self, accepted: torch.Tensor, begun: int, vocab: int):
        self.accepted, self.begun = accepted, begun
        g = torch.Generator(accepted.device).manual_seed(2)
        self.text = torch.randint(
            vocab, (len(accepted), accepted.shape[1] + MAX_DRAFTS + 1), generator=g, device=accepted.device
        )

    def own(self, logits, at):
        """Tokens of the text in place of those that the model says, which are still waited for."""
        return self._instead(logits.argmax(-1), at)

    def _instead(self, said, at):
        place = (at - self.begun).unsqueeze(1) + torch.arange(said.shape[1], device=said.device)
        return self.text.gather(1, place.clamp(0, self.text.shape[1] - 1)) + 0 * said

    def draft(self, logits, at):
        return self._instead(logits.argmax(-1).unsqueeze(1), at).squeeze(1), None

    def accept(self, logits, drafts, q, sizes, at):
        right = self.accepted.gather(1, (at - self.begun).clamp(0, self.accepted.shape[1] - 1).unsqueeze(1)).squeeze(1)
        return Accepted(torch.minimum(right, sizes), self.own(logits, at))


class Recording(Rounds):
    """Rounds that commit one token each and keep how many drafts were right: `seen` int64 [B, room]."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.seen = torch.zeros_like(self.out)

    def _accept(self, logits, drafts, proposed):
        count, chosen = super()._accept(logits, drafts, torch.full_like(proposed, drafts.tokens.shape[1]))
        at = torch.where(self.done, self.room, self.written).unsqueeze(1)
        self.seen.scatter_(1, at, count.unsqueeze(1))
        return Accepted(torch.zeros_like(count), chosen)


class Scheduled(DevicePolicy):
    """Sizes int64 [passes, B] that were decided beforehand: how the oracle runs on a device."""

    def __init__(self, sizes: torch.Tensor):
        self.sizes, self.at = sizes, torch.zeros((), dtype=torch.int64, device=sizes.device)

    def observe(self, accepted, proposed) -> None:
        pass

    def choose(self, pressure, live=None):
        sizes = self.sizes.index_select(0, self.at.clamp(max=len(self.sizes) - 1).view(1)).squeeze(0)
        self.at += 1
        return sizes if live is None else torch.where(live, sizes, 0)

    def reset(self, fresh) -> None:
        self.at.zero_()


def room(model: Model, needed: int) -> int:
    """Tokens of a cache: in steps, because kernels are compiled for what its length is divisible by, and runs of
    several lengths are timed."""
    return max(needed, min(-(-needed // ROOM) * ROOM, model.config.max_position_embeddings))


def traced(
    model: Model, batch: int, context: int, tokens: int, policy: DevicePolicy, widths: Sequence[int] | None = None
) -> Rounds:
    """Rows at `context` tokens of a cache full of plausible numbers, each to write `tokens`."""
    from dsv4.model.dummy import fill_cache

    g = torch.Generator(model.device).manual_seed(1)
    cache = model.new_cache(batch, room(model, context + tokens + MAX_DRAFTS + SPARE), max_rewind=REWIND)
    fill_cache(cache, context)
    ids = lambda: torch.randint(model.config.vocab_size, (batch,), generator=g, device=model.device)
    n, d = model.config.hc_mult, model.config.hidden_size
    streams = torch.randn(batch, n, d, generator=g, device=model.device).to(model.numerics.activation)
    features = torch.zeros(batch, d, device=model.device, dtype=model.numerics.activation)
    choice = Traced(
        torch.zeros(batch, tokens, dtype=torch.int64, device=model.device), context + 1, model.config.vocab_size
    )
    most = MAX_DRAFTS if widths is None else max(widths)
    return Rounds(
        model,
        cache,
        most,
        ids(),
        MTPDrafts(model, cache, features, streams, choice),
        [tokens] * batch,
        (),
        policy,
        widths,
        choice=choice,
    )


def again(rounds: Rounds, context: int, accepted: np.ndarray) -> None:
    """Puts the rows back to `context` and gives them another trace."""
    for held in (rounds.cache._main, rounds.cache._mtp):
        held.now = [context] * rounds.cache.batch  # what lies there is random, and as good as before
    rounds.choice.accepted.copy_(torch.from_numpy(accepted))
    rounds.restart(rounds.token, rounds.drafter, [accepted.shape[1]] * rounds.cache.batch)


def measure_costs(
    model: Model,
    batches: Sequence[int],
    context: int,
    name: str,
    about: dict,
    said: Callable[[str], None],
    journal: SpeculationJournal | None = None,
) -> CostTable:
    """Whole rounds of every size, one step of the MTP block, the block's following of rounds without drafts, and a step
    of plain decoding, as medians of graph replays. journal: its batches are not measured again."""
    journal = journal or SpeculationJournal()
    found = {batch: journal.costs[batch] for batch in batches if batch in journal.costs}
    for batch in batches:
        if batch in found:
            continue
        rounds = traced(
            model, batch, context, 4 * REPLAYS * (MAX_DRAFTS + 2), on_device(Static(MAX_DRAFTS), batch, model.device)
        )
        whole = [_median(rounds, k) for k in range(MAX_DRAFTS + 1)]
        draft = (_drafting(rounds, 5) - _drafting(rounds, 1)) / 4
        # the host did not launch the rounds without drafts that were timed, and does not know of them
        rounds.drafter.caught_up()
        rounds.prepare()
        steps = DecodeGraph(model, rounds.cache)
        rounds.drafter.kept_streams.normal_()
        for ids in (rounds.drafter.kept_ids, steps.ids):
            ids.random_(model.config.vocab_size)  # tokens that are all alike would share their experts
        following, plain = tuple((n, _replays(graph)) for n, graph in rounds.catching_up.items()), _replays(steps.graph)
        found[batch] = BatchCost(
            draft, tuple(t - k * draft for k, t in enumerate(whole)), (True,) * (MAX_DRAFTS + 1), following, plain
        )
        journal.cost(batch, found[batch])
        said(
            f"batch {batch}: "
            + ", ".join(f"{k}: {t * 1e3:.3f}" for k, t in enumerate(whole))
            + f" ms a round; {draft * 1e3:.3f} ms a draft; "
            + ", ".join(f"{n}: {t * 1e3:.3f}" for n, t in following)
            + f" ms to follow rounds without drafts; {plain * 1e3:.3f} ms a plain step"
        )
        del rounds
    return CostTable(name, 1.0, found, {"kind": "measured", "context": context, **about})


def _median(rounds: Rounds, size: int) -> float:
    """Seconds."""
    rounds.capture(size)
    return _replays(rounds.graphs[size])


def _replays(graph) -> float:
    times, marks = [], [torch.cuda.Event(enable_timing=True) for _ in range(REPLAYS + 3)]
    for mark in marks:
        graph.replay()
        mark.record()
    torch.cuda.synchronize()
    times = [a.elapsed_time(b) for a, b in zip(marks[1:], marks[2:])]
    return median(times) / 1e3


def _drafting(rounds: Rounds, size: int) -> float:
    """Seconds of `size` − 1 chained steps of the block."""
    with torch.inference_mode():
        return _replays(captured_graph(lambda: rounds._drafts(size), rounds.pool))


def best_oracle(trace: Trace, costs: CostTable, batch: int) -> Run:
    widths = [None] if batch == 1 else [None, *range(MAX_DRAFTS + 1)]
    return max(
        (simulate(Oracle(costs, batch, w), trace, costs, batch) for w in widths), key=lambda r: r.tokens_per_second
    )


def part(trace: Trace, batch: int, tokens: int) -> Trace:
    """Rows of `tokens` tokens each, cut from the trace one after another."""
    whole = np.concatenate([r.accepted for r in trace.requests])
    rows = [
        Request(f"row {b}", np.resize(whole[b * tokens :] if b * tokens < len(whole) else whole, tokens))
        for b in range(batch)
    ]
    return Trace(trace.name, tuple(rows), trace.provenance)


def racers(costs: CostTable, batch: int, statics: Sequence[int]) -> list[tuple[Policy | None, list[int]]]:
    """(policy, sizes that it may take): static ones, ASBS, cost-aware, and None, the oracle."""
    return [
        *((Static(k), [k]) for k in statics),
        *((p, list(p.sizes)) for p in (Adaptive(), CostAware(costs, batch))),
        (None, list(range(MAX_DRAFTS + 1))),
    ]


def driver(policy: Policy | None, tokens: int, batch: int, device: torch.device) -> DevicePolicy:
    """The policy on the device; for the oracle room for its plan."""
    return (
        Scheduled(torch.zeros(tokens + 1, batch, dtype=torch.int64, device=device))
        if policy is None
        else on_device(policy, batch, device)
    )


def planned_for(policy: Policy | None, trace: Trace, costs: CostTable, batch: int, on: DevicePolicy) -> Run:
    """What the simulation makes of a trace; the oracle's sizes go to `on`, for rounds that begin after this."""
    if policy is not None:
        return simulate(policy, trace, costs, batch, ahead=AHEAD)
    planned = best_oracle(trace, costs, batch)
    plan = torch.tensor(list(planned.block_size_history.values())).T
    on.sizes.zero_()
    on.sizes[: len(plan)].copy_(plan)
    return planned


def race(
    model: Model,
    traces: Sequence[tuple[str, Trace]],
    costs: CostTable,
    batch: int,
    context: int,
    tokens: int,
    statics: Sequence[int],
    said: Callable[[str], None],
    journal: SpeculationJournal | None = None,
) -> list[Timed]:
    """Every policy on every trace, until the first row has its tokens. One policy's graphs are held at a time. journal:
    what it holds is not run again, nor among the results."""
    journal, found = journal or SpeculationJournal(), []
    parts = [(kind, part(trace, batch, tokens)) for kind, trace in traces]
    for policy, sizes in racers(costs, batch, statics):
        left = journal.left(policy, batch, [t.name for _, t in parts])
        if not left:
            continue
        on = driver(policy, tokens, batch, model.device)
        rounds = traced(model, batch, context, tokens, on, sizes)
        steps = PlainSteps(model, rounds.cache) if without_drafts(policy) else None
        if steps is None:
            rounds.prepare()
        for kind, trace in (p for p in parts if p[1].name in left):
            planned = planned_for(policy, trace, costs, batch, on)
            again(rounds, context, np.stack([r.accepted for r in trace.requests]))
            found.append(
                _run(rounds, kind, trace, planned, name_of(policy))
                if steps is None
                else steps.timed(
                    rounds.token.tolist(),
                    tokens,
                    trace.name,
                    kind,
                    planned.tokens_per_second,
                    rounds.choice.text.tolist(),
                )[0]
            )
            journal.done(found[-1])
            said(
                f"batch {batch}, {trace.name}, {found[-1].policy}: {found[-1].tokens_per_second:.0f} tokens/s, "
                f"{found[-1].expected:.0f} expected"
            )
        del rounds, steps
    return found


def without_drafts(policy: Policy | None) -> bool:
    """Whether it never drafts: what it is held against then is decoding without a drafter, not rounds that could
    draft."""
    return policy is not None and not policy.drafts


class PlainSteps:
    """Decoding without a drafter, as `dsv4 generate` does it without --speculate: each step is a graph, and under way
    before the host knows the token before."""

    def __init__(self, model: Model, cache: Cache):
        self.cache, self.graph = cache, DecodeGraph(model, cache)

    def timed(
        self, first: list[int], tokens: int, trace: str, kind: str, expected: float, text: list[list[int]] | None = None
    ) -> tuple[Timed, list[list[int]]]:
        """`tokens` steps behind the token `first` of each row, and what came out. text: rows of tokens that are fed in
        place of those that the model says, which are waited for all the same."""
        fed = None if text is None else torch.tensor(text, device=self.graph.ids.device)
        wait(self.graph)
        said, begun = [], time.perf_counter()
        with counted_syncs() as syncs:
            logits = self.graph.step(torch.tensor(first).unsqueeze(1))
            for at in range(tokens):
                tokens_at, logits = self.graph.greedy(
                    logits, at + 1 < tokens, None if fed is None else fed[:, at : at + 1]
                )
                said.append(tokens_at)
        seconds, batch = time.perf_counter() - begun, self.cache.batch
        return Timed(
            Static(0).name,
            trace,
            kind,
            batch,
            tokens * batch,
            seconds,
            expected,
            [0] * tokens,
            [[0] * batch] * tokens,
            0,
            len(syncs),
        ), [list(row) for row in zip(*said)]


class UntilOne:
    """What ends a race: the first row that has its tokens. seconds, tokens of all rows, rounds: when the host knew of
    it; what was under way then is not counted. synchronisations: of the whole run."""

    def __init__(self, rounds: Rounds):
        wait(rounds)
        begun = time.perf_counter()

        def ended(done) -> bool:
            if any(done):
                self.seconds = time.perf_counter() - begun
                self.written, self.rounds = rounds.known.written, rounds.known.rounds
            return any(done)

        with counted_syncs() as syncs:
            self.out = [row[:n] for row, n in zip(rounds.run(until=ended), self.written)]
        self.tokens, self.synchronisations = sum(self.written), len(syncs)
        self.widths, self.sizes = rounds.counts.rounds[: self.rounds], rounds.counts.sizes[: self.rounds]


def _run(rounds: Rounds, kind: str, trace: Trace, planned: Run, name: str) -> Timed:
    ran, wanted = UntilOne(rounds), planned.widths
    if ran.widths != wanted:
        at = next((i for i, (a, b) in enumerate(zip(ran.widths, wanted)) if a != b), min(len(ran.widths), len(wanted)))
        raise RuntimeError(
            f"{name} on {trace.name}: the device chose other sizes than the specification from round {at} on: "
            f"{ran.widths[at : at + 8]} of {len(ran.widths)}, expected {wanted[at : at + 8]} of "
            f"{len(wanted)}"
        )
    return Timed(
        name,
        trace.name,
        kind,
        rounds.cache.batch,
        ran.tokens,
        ran.seconds,
        planned.tokens_per_second,
        ran.widths,
        ran.sizes,
        rounds.counts.polls,
        ran.synchronisations,
    )


def wait(rounds: Rounds | DecodeGraph) -> None:
    if rounds.model.device.type == "cuda":
        torch.cuda.synchronize()


def record(model: Model, cache: Cache, ids: list[list[int]], tokens: int) -> np.ndarray:
    """Of each of `tokens` greedy tokens after each prompt how many of 8 drafts are right, int64 [B, tokens]."""
    start = primed(model, cache, ids)
    rounds = Recording(
        model, cache, MAX_DRAFTS, *start, [tokens] * len(ids), (), on_device(Static(MAX_DRAFTS), len(ids), model.device)
    )
    for _ in range(tokens):
        rounds._round(MAX_DRAFTS)
    return rounds.seen[:, :tokens].cpu().numpy()
