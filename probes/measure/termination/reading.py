"""Tiles that decoding reads and leaves out under a rule, counted while a model runs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from dsv4.model.causal import CausalLM
from dsv4.model.step import Step
from dsv4.probes.scenes.patching import wrapped


class Count:
    """Tiles read, and tiles that were there to be read, summed over tokens, KV heads and layers of decoding steps."""

    def __init__(self) -> None:
        self.read, self.there = 0, 0

    def add(self, model: CausalLM, step: Step) -> None:
        """The last step of a GQA model. Layers that did not decode under a rule count nothing. Waits for the device."""
        for layer in model.layers:
            attn = layer.self_attn
            if attn.tiles is None:
                continue
            size = attn.reading.termination.tile
            ends = [start + t + 1 for start in step.starts for t in range(step.T)]
            self.read += int(attn.tiles.sum(dtype=torch.int64))
            self.there += attn.KV * sum(-(-attn.path_at(end)["tokens"] // size) for end in ends)

    @property
    def skipped(self) -> float | None:
        """Share of the tiles that was left out; None where no step decoded under a rule."""
        return 1 - self.read / self.there if self.there else None


@contextmanager
def counted(model: CausalLM, count: Count) -> Iterator[None]:
    """Adds to `count` what every step of a GQA model reads."""

    def also(_, model: CausalLM, run: Callable) -> Callable:
        def running(step: Step, cache):
            out = run(step, cache)
            count.add(model, step)
            return out

        return running

    with wrapped([(0, model)], "run", also):
        yield
