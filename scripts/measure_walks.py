"""Files and functions of this project that decoding passes through, by room: how far a reader has to walk.

    python scripts/measure_walks.py [CHECKPOINT] [--backend reference] [--list]

Each walk is of a greedy request of CHECKPOINT (default: demo) between its tenth and its twentieth token, so that
windows of every kind complete meanwhile. plain: `generate`. speculative: `generate_speculative` with the MTP block.
paged: two requests of a `BatchEngine`. rounds: `generate_on_device`, whose captured steps run on a CPU as they are.
Lambdas and comprehensions belong to the function that holds them.
"""

import argparse
import cProfile
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

ROOMS = ("dsv4", "kernels")  # everything else of the project is not there when a model decodes
PROMPT, TOKENS, FIRST, LAST = list(range(5, 45)), 24, 10, 20


class Walk:
    """The functions that run between two tokens of a request."""

    def __init__(self):
        self.seen: set[tuple[str, str]] = set()
        self._profile, self._tokens = cProfile.Profile(builtins=False), 0

    def token(self) -> None:
        """The request got a token."""
        self._tokens += 1
        if self._tokens == FIRST:
            self._profile.enable()
        elif self._tokens == LAST:
            self._profile.disable()
            ran = [entry.code for entry in self._profile.getstats() if not isinstance(entry.code, str)]
            found = {(Path(code.co_filename), code.co_name) for code in ran}
            self.seen = {
                (str(path.relative_to(ROOT)), name)
                for path, name in found
                if path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in ROOMS and not name.startswith("<")
            }

    @property
    def files(self) -> Counter:
        """Functions of each file."""
        return Counter(path for path, _ in self.seen)


def walks(checkpoint: str, backend: str) -> dict[str, Walk]:
    """Every kind of decoding that the checkpoint allows."""
    from dsv4 import load_model

    model = load_model(checkpoint, backend=backend, max_context=256)
    kinds: dict[str, Callable] = {"plain": plain, "paged": paged}
    if len(model.mtp):
        kinds |= {"speculative": speculative, "rounds": rounds}
    found = {}
    for name, run in kinds.items():
        found[name] = Walk()
        run(model, found[name])
    return found


def plain(model, walk: Walk) -> None:
    from dsv4.engine.generate import generate

    generate(model, PROMPT, TOKENS, on_token=lambda token: walk.token())


def speculative(model, walk: Walk) -> None:
    from dsv4.engine.generate import generate_speculative
    from dsv4.speculation.draft import MTPDrafter

    generate_speculative(model, [PROMPT], TOKENS, MTPDrafter(), on_token=lambda row, token: walk.token())


def rounds(model, walk: Walk) -> None:
    from dsv4.engine.generate import generate_on_device

    generate_on_device(model, [PROMPT], TOKENS, on_token=lambda row, token: walk.token())


def paged(model, walk: Walk) -> None:
    from dsv4.cache.paged import new_paged_cache
    from dsv4.engine import BatchEngine, Request

    engine = BatchEngine(model, new_paged_cache(model, 2, 256))
    for name in ("one", "other"):
        engine.submit(Request(name, tuple(PROMPT), TOKENS))
    while engine.running or engine.waiting:
        engine.step()
        if engine.running and engine.running[0].result.token_ids:
            walk.token()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkpoint", nargs="?", default=str(ROOT / "demo"))
    parser.add_argument("--backend", default="reference")
    parser.add_argument("--list", action="store_true", help="name every file and its functions")
    args = parser.parse_args()
    found = walks(args.checkpoint, args.backend)
    print("| walk | files | functions | of these in dsv4/ | in kernels/ |\n|---|---:|---:|---:|---:|")
    for name, walk in found.items():
        parts = [
            f"{sum(path.startswith(room) for path in walk.files)} files, "
            f"{sum(n for path, n in walk.files.items() if path.startswith(room))} functions"
            for room in ROOMS
        ]
        print(f"| {name} | {len(walk.files)} | {len(walk.seen)} | {' | '.join(parts)} |")
    for name, walk in found.items() if args.list else ():
        print(f"\n{name}")
        for path in sorted(walk.files):
            print(f"  {path}: {', '.join(sorted(n for p, n in walk.seen if p == path))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
