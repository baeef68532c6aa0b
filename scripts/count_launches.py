"""Kernels of a decode step by kind of layer, counted without a GPU.

    python scripts/count_launches.py [--model flash] [--layers 16] [--batches 1,8,16,17,32,64] [--numerics native,qat]
    [--caches bf16/bf16,fp8/fp4] [--context 8192] [--names]

A step runs on tensors of the device `meta`, as if on an H100, and its launches of Triton's kernels are kept instead of
run. The table has a row for each choice and batch: kernels of a layer of each kind, the most of alike layers, and all
kernels of the step over its layers. `--names` lists the kernels of each kind.
"""

import argparse
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from dsv4.kernels.launch import GPU
from dsv4.kernels.recording import recorded
from dsv4.model.causal import DEFAULT_MAX_REWIND, captured_capacity
from dsv4.model.dummy import plan_dummy
from dsv4.runtime.graph import DecodeGraph

HOPPER = GPU((9, 0), 132)
META = torch.device("meta")


class Choice(NamedTuple):
    """A model and a step. cache: formats of the window and entries, and of index keys."""

    numerics: str = "native"
    cache: tuple[str, str] = ("fp8", "fp4")
    batch: int = 1
    model: str = "flash"
    layers: int = 16
    context: int = 8192


class Step(NamedTuple):
    """Names of kernels of each layer, and of those before the first layer and after the last; kinds: of each layer, and
    how it routes."""

    kinds: tuple[str, ...]
    layers: tuple[tuple[str, ...], ...]
    others: tuple[str, ...]

    @property
    def most(self) -> dict[str, tuple[str, ...]]:
        """Kind → the kernels of that layer of the kind which has the most."""
        found: dict[str, tuple[str, ...]] = {}
        for kind, names in zip(self.kinds, self.layers):
            found[kind] = max(found.get(kind, ()), names, key=len)
        return found

    @property
    def average(self) -> float:
        """Kernels of the step over its layers."""
        return (sum(map(len, self.layers)) + len(self.others)) / len(self.layers)


@torch.inference_mode()
def step_of(choice: Choice, gpu: GPU = HOPPER) -> Step:
    """What one captured step of one token a row launches."""
    model = plan_dummy(choice.model, choice.layers, choice.numerics, "triton", *choice.cache)
    model.to(META)
    model.device, model.max_context = META, None
    begins: list[int] = []
    with recorded(gpu) as launched:
        cache = model.new_cache(choice.batch, captured_capacity(model, choice.context), DEFAULT_MAX_REWIND)
        marked = partial(_marked, begins=begins, made=launched.made)
        for block in model.layers:
            block.sublayers = marked(block.sublayers)
        model._layers = marked(model._layers, after=True)
        DecodeGraph(model, cache, whole=False)._run()
    names = [launch.kernel.__name__.lstrip("_") for launch in launched.made]
    layers = tuple(tuple(names[a:b]) for a, b in zip(begins, begins[1:]))
    kinds = tuple(f"{b.spec.kind.value}, {'hash' if b.spec.hashed else 'score'}" for b in model.layers)
    return Step(kinds, layers, (*names[: begins[0]], *names[begins[-1] :]))


def _marked(function: Callable, begins: list[int], made: list, after: bool = False) -> Callable:
    """`function`, which also says how many launches were made before it, or before its end."""

    def call(*args):
        if not after:
            begins.append(len(made))
        found = function(*args)
        if after:
            begins.append(len(made))
        return found

    return call


def choices(args: argparse.Namespace) -> Iterator[Choice]:
    """Those of the command line, each with all batches."""
    for numerics in args.numerics.split(","):
        for cache in args.caches.split(","):
            kept, keys = cache.split("/")
            for batch in args.batches.split(","):
                yield Choice(numerics, (kept, keys), int(batch), args.model, args.layers, args.context)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="flash", help="flash or pro")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--batches", default="1,8,16,17,32,64")
    parser.add_argument("--numerics", default="native,qat")
    parser.add_argument("--caches", default="bf16/bf16,fp8/fp4", help="formats of the cache / of index keys")
    parser.add_argument("--context", type=int, default=8192, help="tokens that a row's cache has room for")
    parser.add_argument("--names", action="store_true", help="list the kernels of each kind")
    args = parser.parse_args()
    heads: tuple[str, ...] = ()
    for choice in choices(args):
        step = step_of(choice)
        if heads != tuple(step.most):
            heads = tuple(step.most)
            print("| numerics | cache | batch |", *(f"{kind} |" for kind in heads), "a layer |")
            print("|---|---|---|" + "---|" * len(heads) + "---|")
        counts = " | ".join(str(len(names)) for names in step.most.values())
        cache = "/".join(choice.cache)
        print(f"| {choice.numerics} | {cache} | {choice.batch} | {counts} | {step.average:.1f} |", flush=True)
        if args.names:
            for kind, names in step.most.items():
                print(f"  {kind}: {' '.join(names)}")


if __name__ == "__main__":
    main()
