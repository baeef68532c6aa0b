"""`rope` on GQA models: queries and keys turn by the variant of config.json, in halves, at their positions."""

from collections.abc import Iterator
from typing import ClassVar

import torch

from dsv4.probes.catalogue.rope import Rope
from dsv4.probes.compare import at_share, far, limit_of, starts_of, steps_of_all_sizes, tokens
from dsv4.probes.oracle import gqa
from dsv4.probes.oracle.gqa import GQAOracle
from dsv4.probes.result import Check, compare, vacuous
from dsv4.probes.subject import Subject

TOKENS = 420  # beyond the original contexts of small models, and into a fourth block of the cache
AS_WRITTEN = "as config.json says"
Variants = dict[str, tuple[torch.Tensor, torch.Tensor, bool]]  # name → frequencies, positions, whether halves are pairs


class GQARope(Rope):
    """Queries and keys of whole runs, against the rotations that implementations took for that of config.json."""

    needs: ClassVar[frozenset[str]] = frozenset({"files", "run"})

    def run(self, subject: Subject) -> list[Check]:
        return list(rope_checks(subject, self.seed))


def rope_checks(subject: Subject, seed: int) -> Iterator[Check]:
    """Two rows where the subject takes a batch: the same text, so that what is right for the first is right for the
    second."""
    oracle, T = gqa.oracle_of(subject), min(TOKENS, subject.config.max_position_embeddings)
    schedule = steps_of_all_sizes(T)
    ids = tokens(subject, T, seed).repeat(2, 1)
    points = subject.run(ids, schedule, ("attn_in", "q_after_rope", "keys")).points
    for i in range(subject.config.num_hidden_layers):
        for part, point, which in (("queries", "q_after_rope", "q"), ("keys", "keys", "k")):
            found, where = points.get((i, point)), f"layer {i}"
            if found is None or (i, "attn_in") not in points:
                yield vacuous(
                    f"{point}: pairs turn by the right angles",
                    "the subject gives none",
                    where=where,
                    part=f"rotation of {part}",
                )
                continue
            plain = oracle.heads(i, which, oracle.normed(i, "input", points[i, "attn_in"]))
            yield from thing(subject, oracle, point, part, plain, found.double(), starts_of(schedule), where)


def variants(oracle: GQAOracle, starts: torch.Tensor) -> Variants:
    """The rotation of config.json, and those that implementations took for it."""
    f, at = oracle.shape.frequencies, torch.arange(len(starts))
    said = gqa.rotary(oracle.raw)
    found = {
        AS_WRITTEN: (f, at, True),
        "neighbours as pairs": (f, at, False),
        "not rotated": (f, 0 * at, True),
        "the other way round": (-f, at, True),
        "one position late": (f, at + 1, True),
        "one position early": (f, at - 1, True),
        "positions counted from the start of the step": (f, at - starts, True),
        "positions counted from 0 in decode": (f, torch.where(starts == at, 0 * at, at), True),
    }
    bases = {f"base {theta:g}": gqa.other_variant(oracle, rope_theta=theta) for theta in (1e4, 5e5, 1e6)}
    if said["rope_type"] != "default":
        bases["without its scaling"] = gqa.other_variant(oracle, rope_type="default")
        bases["scaled linearly"] = gqa.other_variant(oracle, rope_type="linear")
    if said["rope_type"] == "yarn":
        bases["not truncated to whole pairs"] = gqa.other_variant(oracle, truncate=not said.get("truncate", True))
    return found | {name: (g, at, True) for name, g in bases.items()}


def thing(
    subject: Subject,
    oracle: GQAOracle,
    point: str,
    part: str,
    plain: torch.Tensor,
    found: torch.Tensor,
    starts: torch.Tensor,
    where: str,
) -> Iterator[Check]:
    """plain [B, T, heads, D] as computed before rotation, found as the subject shows it."""
    limit, share, source = limit_of(subject)
    kept = oracle.kept if point == "keys" else lambda t: t
    forms = {name: kept(gqa.turn(plain, at, f, halves)) for name, (f, at, halves) in variants(oracle, starts).items()}
    wanted = forms[AS_WRITTEN]
    error, sizes = far(found, wanted), at_share(far(found.norm(dim=-1), wanted.norm(dim=-1)), share)
    angles = angle_errors(found, wanted, error <= at_share(error, share))
    worst, sane = int(angles.argmax()), sizes <= limit
    part_of = f"rotation of {part}" if sane else part
    first = next(iter((error > 3 * limit).nonzero().tolist()), None)
    note = f"worst pair {worst} of {len(angles)}; sizes of heads, which no rotation changes, differ by {sizes:.2g}" + (
        f"; first beyond three limits: row {first[0]}, position {first[1]}" if first else ""
    )
    yield compare(
        f"{point}: pairs turn by the right angles",
        angles[worst].item(),
        "<=",
        2 * limit,
        f"{source}; twice that, as an angle",
        found[..., 0].numel(),
        where=where,
        part=part_of,
        unit="rad",
        note=note,
    )
    yield compare(
        f"{point}: equal the oracle's",
        at_share(error, share),
        "<=",
        limit,
        source,
        error.numel(),
        where=where,
        part=part_of,
        unit="relative",
        note=note,
    )
    errors = {name: at_share(far(found, form), 0.5) for name, form in forms.items()}
    apart = {name: at_share(far(form, wanted), 0.9) for name, form in forms.items()}
    seen = {name: e for name, e in errors.items() if name == AS_WRITTEN or apart[name] > 3 * limit}
    told = "; ".join(f"{name} {e:.2g}" for name, e in sorted(seen.items(), key=lambda pair: pair[1])[:4])
    yield compare(
        f"{point}: the rotation that explains it",
        min(seen, key=seen.get),
        "==",
        AS_WRITTEN,
        "the nearest of the oracle's variants, median error",
        found[..., 0].numel(),
        where=where,
        part=part_of,
        note=told,
    )


def angle_errors(found: torch.Tensor, wanted: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """RMS angle [D/2] between the pairs of `rows` [B, T], weighted by their squares; π where NaN."""
    pair = lambda x: torch.complex(*x[rows].chunk(2, -1)).flatten(0, -2)
    a, b = pair(found), pair(wanted)
    weight = b.abs().square()
    errors = ((a * b.conj()).angle().square() * weight).sum(0) / weight.sum(0).clamp(min=1e-30)
    return torch.nan_to_num(errors.sqrt(), nan=torch.pi)
