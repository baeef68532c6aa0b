"""P29: operations that go by tiles are right in every tile, and read no scratch that nobody wrote. See tiles.md."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import ClassVar

import torch

from dsv4.probes import families
from dsv4.probes.compare import agreeing, token_errors, tokens, window_of
from dsv4.probes.probe import Probe
from dsv4.probes.result import Check, compare, vacuous
from dsv4.probes.scenes.control import attempted_all, chance_of
from dsv4.probes.scenes.patching import replaced
from dsv4.probes.scenes.tile_cases import EVERYWHERE, Limits, TileCase
from dsv4.probes.subject import Subject

LIMIT, WHY = 1e-5, "fp32 sums in another order, against the definition in float64"
GARBAGE = 0x7F  # of each byte of numbers that are no floats: an index beyond every buffer
RUNS = "tiles run"
NAMES = {
    "index_scores": "index scores",
    "sparse_attention": "sparse attention",
    "hca_attention": "HCA attention",
    "linear": "linear maps",
    "grouped_linear": "grouped linear maps",
    "grouped_attention": "grouped attention",
}


@dataclass(frozen=True)
class Tiles(Probe):
    """Each operation with scratch memory for the smallest tiles, and a whole model with it, in memory full of NaN."""

    name: ClassVar[str] = "tiles"
    title: ClassVar[str] = "every tile is computed, and the last one too"
    needs: ClassVar[frozenset[str]] = frozenset({"run", "kernels"})

    def run(self, subject: Subject) -> list[Check]:
        checks = []
        for case in families.of(subject).tile_cases(self.seed):
            part = f"tiles of {NAMES[case.operation]}"
            checks += attempted_all(RUNS, case.label, part, lambda: one(subject, case))
        return [*checks, *attempted_all(RUNS, "a whole model", "tiles, model", lambda: whole(subject, self.seed))]


@contextmanager
def small(limits: Limits) -> Iterator[None]:
    """These limits on scratch memory, and new memory of torch full of NaN."""
    with ExitStack() as stack:
        for (module, name), value in limits.items():
            stack.enter_context(replaced([module], name, value))
        stack.enter_context(unwritten())
        yield


@contextmanager
def unwritten() -> Iterator[None]:
    """`torch.empty` and `torch.empty_like` give NaN, or bytes of GARBAGE where there is none."""

    def filled(real):
        def make(*args, **more):
            made = real(*args, **more)
            if made.device.type == "meta" or more.get("out") is not None:
                return made
            if made.is_floating_point() and made.element_size() > 1 or made.is_complex():
                return made.fill_(float("nan"))
            if made.dtype is not torch.bool and made.is_contiguous():
                made.view(torch.uint8).fill_(GARBAGE)
            return made

        return make

    with replaced([torch], "empty", filled(torch.empty)), replaced([torch], "empty_like", filled(torch.empty_like)):
        yield


def one(subject: Subject, case: TileCase) -> Iterator[Check]:
    """One operation by tiles against its definition."""
    if case.operation not in subject.operations:
        yield vacuous("an operation by tiles equals its definition", "the backend lacks it", part=case.operation)
        return
    with small(case.limits):
        found = subject.operations[case.operation](*case.arguments).double()
    error, part, note = blame(found, case)
    yield compare(
        "an operation by tiles equals its definition",
        error,
        "<=",
        LIMIT,
        WHY,
        case.wanted.numel(),
        where=f"{case.label} by {case.tile} {case.what}",
        part=part,
        note=note,
        chance=1.0,
    )


def blame(found: torch.Tensor, case: TileCase) -> tuple[float, str, str]:
    """(error, part, note): whether what is wrong lies in the last tile alone, in later ones, or everywhere."""
    wanted, part = case.wanted, f"tiles of {NAMES[case.operation]}"
    hidden = torch.isinf(wanted)
    if found.shape != wanted.shape:
        return float("inf"), part, f"the result is {list(found.shape)}, expected {list(wanted.shape)}"
    size = wanted[~hidden].square().mean().sqrt()
    off = torch.nan_to_num((found - wanted).abs() / size, nan=float("inf"))
    off = torch.where(hidden, torch.where(found == wanted, 0.0, float("inf")), off)
    error = off.square().mean().sqrt().item() if torch.isfinite(off).all() else float("inf")
    if error <= LIMIT:
        return error, part, ""
    wrong = (off.movedim(case.axis, 0).flatten(1).amax(1) > 10 * LIMIT).nonzero().flatten().tolist()
    n, first = wanted.shape[case.axis], wrong[0] if wrong else 0
    if first >= n // case.tile * case.tile > 0:
        part = f"last tile of {NAMES[case.operation]}"
    return error, part, f"{len(wrong)} of {n} {case.what} are wrong, the first is {first}"


def whole(subject: Subject, seed: int) -> Iterator[Check]:
    """A prompt in pieces with the smallest tiles everywhere, in memory of NaN, against one step with the usual ones."""
    T = min(2 * window_of(subject.config) + 4 * 64 + 23, subject.config.max_position_embeddings)
    ids = tokens(subject, T, seed)
    wanted = subject.run(ids).logits
    with small(EVERYWHERE):
        for where, schedule in (("one step", ()), ("a last piece of 23 tokens", (T - 23, 23))):
            errors = token_errors(subject.run(ids, schedule).logits, wanted)
            value, source, limit = agreeing(errors, subject.numerics)
            yield compare(
                "logits with the smallest tiles equal those with the usual ones",
                value,
                "<=",
                limit,
                source,
                errors.numel(),
                where=f"{T} tokens, {where}",
                part="tiles, model",
                chance=chance_of(wanted, token_errors),
            )


if __name__ == "__main__":
    from dsv4.probes.main import main

    main(Tiles)
