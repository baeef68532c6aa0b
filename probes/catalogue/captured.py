"""P18: a captured decode step computes what `append` does, wherever its rows stand. See captured.md."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar

import torch

from dsv4.cache.cache import Cache
from dsv4.model.config import ModelConfig
from dsv4.probes import families
from dsv4.probes.compare import agreeing, token_errors, tokens
from dsv4.probes.families.cache_rows import Buffer
from dsv4.probes.oracle import kinds
from dsv4.probes.probe import Probe
from dsv4.probes.result import Check, compare, vacuous
from dsv4.probes.scenes.buffers import buffers, poison
from dsv4.probes.scenes.captured_step import Pairs, derived, windows_and_entries
from dsv4.probes.scenes.control import attempted, chance_of
from dsv4.probes.subject import Subject
from dsv4.runtime.graph import DecodeGraph

LOGITS, ROWS = "logits of captured steps equal those of append", "what captured steps write equals what append writes"
PARTS = {
    "window": "window rows",
    "main raw rows": "compressor rows",
    "index raw rows": "the indexer's compressor rows",
    "entries": "entries",
    "index keys": "index keys",
    "keys": "keys",
    "values": "values",
}
SAME = "the same operations on the same numbers in the same order: equal bits, whatever the numerics"
BACK = 3  # most tokens that a scenario rewinds
STEPS = 9


@dataclass(frozen=True)
class Move:
    """One step of a scenario: the rows that advance (None: all), and then how many tokens each row rewinds."""

    active: tuple[bool, ...] | None = None
    forget: tuple[int, ...] = ()


SCENARIOS = {  # name → tokens a step, its moves; of the three rows of `starts_of`
    "one token a step": (1, (Move(),) * STEPS),
    "resting rows": (
        1,
        (Move((False, True, True)), Move((True, False, True)), Move((False, True, False)), Move(), Move()),
    ),
    "after a rewind": (1, (Move(), Move(), Move(forget=(1, BACK, 2)), *(Move(),) * 4)),
    "five tokens a step": (5, (Move(), Move(forget=(2, 0, BACK)), Move())),
}


@dataclass
class Seen:
    """What was found in a scenario. wrong: how many numbers; errors: of logits and rows; off: (step, layer, stream) of
    rows that differ."""

    wrong: dict[str, int] = field(default_factory=lambda: {LOGITS: 0, ROWS: 0})
    numbers: dict[str, int] = field(default_factory=lambda: {LOGITS: 0, ROWS: 0})
    errors: dict[str, list] = field(default_factory=lambda: {LOGITS: [], ROWS: []})
    off: list[tuple[int, int, str]] = field(default_factory=list)
    lengths: list[str] = field(default_factory=list)
    starts: list[str] = field(default_factory=list)
    chance: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Captured(Probe):
    """A ragged batch decoded by `DecodeGraph` and by `append`, from caches that hold NaN wherever no row may read."""

    name: ClassVar[str] = "captured"
    title: ClassVar[str] = "a captured decode step computes what append does"
    needs: ClassVar[frozenset[str]] = frozenset({"run", "cache", "kernels", "rewind", "batch"})

    def run(self, subject: Subject) -> list[Check]:
        if subject.model.layer_devices is not None:
            return [
                vacuous(self.title, "layers are spread over devices, where nothing is captured", part="captured step")
            ]
        lengths = self._starts(subject.config)
        room = max(lengths) + 24  # no multiple of 128 between: both sides see buffers with equally many entries
        if room > subject.config.max_position_embeddings:
            why = f"{room} tokens are needed, the checkpoint allows {subject.config.max_position_embeddings}"
            return [vacuous(self.title, why, part="captured step")]
        ids = tokens(subject, room, self.seed, rows=len(lengths))
        held = subject.model.new_cache(len(lengths), room)
        subject.model.append(ids, held, n_new=lengths, logits="none")
        checks = derived(subject, lengths, STEPS, self._pairs)
        for name, (count, moves) in SCENARIOS.items():
            run = lambda: list(self._scenario(subject, held, name, count, moves))
            found = attempted(LOGITS, name, "captured step", run)
            checks += found if isinstance(found, list) else [found]
        return checks

    @staticmethod
    def _starts(config) -> list[int]:
        return starts_of(config)

    @staticmethod
    def _pairs(*given) -> Pairs:
        """What layers use of a captured step."""
        return windows_and_entries(*given)

    def _scenario(
        self, subject: Subject, held: Cache, name: str, count: int, moves: tuple[Move, ...]
    ) -> Iterator[Check]:
        model, seen = subject.model, Seen()
        eager, captured = twin(subject, held), twin(subject, held)
        poison(subject, captured, captured.lengths, BACK)
        graph, wanted, g = (
            DecodeGraph(model, captured, count),
            list(held.lengths),
            torch.Generator().manual_seed(self.seed),
        )
        for number, move in enumerate(moves):
            new = torch.randint(0, subject.config.vocab_size, (held.batch, count), generator=g)
            active = list(move.active or (True,) * held.batch)
            before, want = list(eager.lengths), model.append(new, eager)
            eager.rewind([0 if moves_on else count for moves_on in active])
            found = graph.step(new, None if move.active is None else active)
            self._compare_logits(seen, found[active].cpu(), want[active].cpu())
            wanted = [n + count * moves_on for n, moves_on in zip(wanted, active)]
            if captured.lengths != wanted:
                seen.lengths.append(f"step {number}: {captured.lengths}, expected {wanted}")
            begins = graph.start.tolist()
            if begins != [n + count for n in before]:
                seen.starts.append(f"step {number}: the next begins at {begins}, this one began at {before}")
            if move.forget:
                for cache in (eager, captured):
                    cache.rewind(list(move.forget))
                wanted = [n - m for n, m in zip(wanted, move.forget)]
            self._compare_rows(seen, subject, number, captured, eager)
        yield from self._checks(
            subject, seen, name, len(moves), "CUDA graph" if graph.graph is not None else "no graph: a CPU"
        )

    def _compare_logits(self, seen: Seen, found: torch.Tensor, want: torch.Tensor) -> None:
        seen.wrong[LOGITS] += int((found != want).sum())  # NaN differs from itself
        seen.numbers[LOGITS] += want.numel()
        seen.errors[LOGITS].append(token_errors(found, want).flatten())
        other = want.flatten(0, 1).unsqueeze(0)
        if other.shape[1] > 1:
            seen.chance.append(chance_of(other, token_errors))

    def _compare_rows(self, seen: Seen, subject: Subject, number: int, captured: Cache, eager: Cache) -> None:
        """Every row that a later step may read."""
        layers = {plan.label: i for i, plan in enumerate(eager.plan)}
        for mine, theirs in zip(buffers(subject, captured, mtp=False), buffers(subject, eager, mtp=False)):
            bad, worst = 0, []
            for row, length in enumerate(eager.lengths):
                slots = theirs.held(length)
                a, b = mine.rows(row, slots), theirs.rows(row, slots)
                wrong = int((a != b).sum())
                seen.numbers[ROWS] += b.numel()
                bad += wrong
                worst.append(torch.zeros(len(slots)) if not wrong else row_errors(mine, a, b))
            errors, (_, _, limit) = torch.cat(worst), agreeing(torch.zeros(1), subject.numerics)
            seen.wrong[ROWS] += bad
            seen.errors[ROWS].append(errors)
            if bad if exactly(subject) else bool((~(errors <= limit)).any()):
                seen.off.append((number, layers[mine.label], mine.stream))

    def _checks(self, subject: Subject, seen: Seen, name: str, steps: int, how: str) -> Iterator[Check]:
        where, part, why = blame(subject, seen)
        chance = min(seen.chance, default=None)
        for what in (LOGITS, ROWS):
            about = dict(
                where=name,
                found=where,
                part=part,
                note="; ".join(filter(None, (how, why))),
                chance=chance if what == LOGITS else None,
            )
            if exactly(subject):
                yield compare(what, seen.wrong[what], "==", 0, SAME, seen.numbers[what], **about | {"chance": None})
                continue
            value, source, limit = agreeing(torch.cat(seen.errors[what]), subject.numerics)
            yield compare(what, value, "<=", limit, source, sum(map(len, seen.errors[what])), **about)
        yield compare(
            "steps after which a row holds another number of tokens",
            len(seen.lengths),
            "==",
            0,
            "a resting row forgets what it ran",
            steps,
            where=name,
            part="captured step, resting rows",
            note="; ".join(seen.lengths[:2]),
            unit="steps",
        )
        yield compare(
            "steps that leave a wrong start",
            len(seen.starts),
            "==",
            0,
            "the next replay follows without the host",
            steps,
            where=name,
            part="captured step, start",
            note="; ".join(seen.starts[:2]),
            unit="steps",
        )


def starts_of(config: ModelConfig) -> list[int]:
    """Three rows: an empty one, one shortly before 128 tokens, one with more entries than are selected.

    The last one does not cross a multiple of 128, so that both sides sum over equally many entries and are equal.
    """
    most = max(
        kinds.CSA * (config.index_topk + 2) if kinds.CSA in config.compress_ratios else 0, config.sliding_window + 2
    )
    return [0, 126, -(-most // 128) * 128 + 21]


def twin(subject: Subject, cache: Cache) -> Cache:
    """A cache with equal contents."""
    made = subject.model.new_cache(cache.batch, cache.max_context, cache.max_rewind)
    for mine, theirs in zip(made.layers, cache.layers):
        for stream, tensor in theirs.tensors.items():
            mine.tensors[stream].copy_(tensor)
    for row, length in enumerate(cache.lengths):
        made._main.advance(slice(row, row + 1), length)
    return made


def exactly(subject: Subject) -> bool:
    """Whether both sides run the same operations in the same order: on a host processor, where nothing is fused."""
    return (
        subject.model.backend in ("reference", "cpu")
        and subject.model.device.type == "cpu"
        and not subject.compositions
    )


def row_errors(buffer: Buffer, found: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """‖found − want‖ / ‖want‖ of rows uint8 [n, bytes], infinite where NaN: [n]."""
    a, b = buffer.values(found), buffer.values(want)
    return torch.nan_to_num((a - b).norm(dim=-1) / b.norm(dim=-1).clamp(min=1e-12), nan=float("inf"))


def blame(subject: Subject, seen: Seen) -> tuple[str, str, str]:
    """(where, part, why) of the first difference. If the input differs, all rows computed from it differ."""
    if not seen.off:
        if not seen.wrong[LOGITS]:
            return "", "captured step", ""
        last = subject.config.num_hidden_layers - 1
        return "", "captured step, layer output", f"no row of any cache differs: layer {last} or the head"
    step = min(number for number, _, _ in seen.off)
    layer = min(i for number, i, _ in seen.off if number == step)
    found = [stream for number, i, stream in seen.off if (number, i) == (step, layer)]
    if layer and families.of(subject).made_of_input(subject.config, layer) <= set(found):
        return (
            f"layer {layer - 1}",
            "captured step, layer output",
            f"step {step}: what layer {layer} was given differs",
        )
    first = next(stream for stream in PARTS if stream in found)
    why = f"step {step}: {', '.join(found)} of layer {layer} differ first"
    return f"layer {layer}", f"captured step, {PARTS[first]}", why


if __name__ == "__main__":
    from dsv4.probes.main import main

    main(Captured)
