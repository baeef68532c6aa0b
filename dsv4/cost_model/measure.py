"""Times of rows. Layers run in turn, so that each finds a cold cache of the chip; policies of one shape alternate."""

import time
from collections.abc import Mapping, Sequence
from statistics import median

import torch

from dsv4.cost_model.rows import Measured, Row, Run, Source
from dsv4.runtime.memory import free_bytes
from dsv4.runtime.timing import FLUSH_BYTES, Clock, capture
from dsv4.units import format_bytes

LAYERS = 8  # calls of one replay: the time of a launch in a chain, not that of a replay
SHARE = 0.7  # share of the free memory that inputs may take
COLD_BYTES = 4 * FLUSH_BYTES  # caches of at least this total size are cold again when another layer reads them


def layers_that_fit(one: int, free: int) -> int:
    """The number of layers with different inputs of `one` bytes to make: as many as are needed to be cold, if they fit;
    0: not even one fits."""
    wanted = min(LAYERS, max(1, -(-COLD_BYTES // max(1, one))))
    return min(wanted, int(free * SHARE) // max(1, one))


class Timer:
    """Measures the rows of one shape together. rounds: how often each runs."""

    def __init__(self, device: torch.device, rounds: int = 30):
        self.device, self.rounds = device, rounds
        if device.type == "cuda":
            torch.cuda.set_device(device.index or 0)
        self.clock = Clock() if device.type == "cuda" else None

    def shape(self, source: Source, batch: int, context: int, held_out: bool) -> tuple[list[Measured], str]:
        """Measured rows, and a reason if there are none."""
        need, free = source.cache_bytes(batch, context), free_bytes(self.device)
        distinct = layers_that_fit(need, free)
        if not distinct:
            return (
                [],
                f"B{batch} {context}: one layer's cache takes {format_bytes(need)}, "
                f"{format_bytes(int(free * SHARE))} may be used",
            )
        rows, inputs = source.rows(batch, context), source.inputs(batch, context, LAYERS, distinct)
        try:
            made = [(row, dict(row.make(inputs))) for row in rows]
            times = self._in_turn([run for _, runs in made for run in runs.values()])
        finally:
            del inputs
            if self.clock:
                torch.cuda.empty_cache()
        return _fastest(made, times, held_out), ""

    def _in_turn(self, runs: Sequence[Run]) -> list[float | str]:
        """Seconds of one layer of each, or why it does not run."""
        prepared = [self._prepare(run) for run in runs]
        live = [p for p in prepared if not isinstance(p, str)]
        if self.clock:
            found = iter(
                [t.cold_us * 1e-6 / LAYERS for t in self.clock.in_turn([[graph] for graph in live], self.rounds)]
                if live
                else []
            )
        else:
            rounds = [[_seconds(run) for run in live] for _ in range(self.rounds)]
            found = iter([median(times) / LAYERS for times in zip(*rounds)])
        return [p if isinstance(p, str) else next(found) for p in prepared]

    def _prepare(self, run: Run):
        """A graph of all layers (on a CPU: a function), or the error of an implementation that does not take the
        shape."""

        def layers():
            return [run(layer) for layer in range(LAYERS)]

        try:
            if self.clock:
                return capture(layers)
            layers()
            return layers
        # this implementation does not take the shape: the table gives the reason, and the others are measured
        except Exception as failure:
            if self.clock:
                torch.cuda.synchronize()  # a lost device ends the run here
            return f"{type(failure).__name__}: {' '.join(str(failure).split())}"[:200]


def _seconds(run) -> float:
    begun = time.perf_counter()
    run()
    return time.perf_counter() - begun


def _fastest(
    made: Sequence[tuple[Row, Mapping[str, Run]]], times: Sequence[float | str], held_out: bool
) -> list[Measured]:
    found, times = [], iter(times)
    for row, runs in made:
        seen = {name: next(times) for name in runs}
        timed = {name: t for name, t in seen.items() if not isinstance(t, str)}
        if timed:
            best = min(timed, key=timed.get)
            found.append(Measured.of(row, held_out, timed[best], best, {k: v for k, v in seen.items() if k != best}))
        else:
            found.append(Measured.of(row, held_out, float("nan"), "nothing ran", seen))
    return found
