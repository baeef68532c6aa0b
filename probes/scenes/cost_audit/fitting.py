"""The fit of the cost model on rows of made-up machines whose costs are known: what it recovers, and which rows it must
ignore."""

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch

from dsv4.cost_model import fit as fits
from dsv4.cost_model import session
from dsv4.cost_model.fit import CostModel, Price
from dsv4.cost_model.gqa import GQA, POLICIES, Geometry
from dsv4.cost_model.regime import Hardware
from dsv4.cost_model.rows import Measured
from dsv4.probes.result import Check, compare

BANDWIDTH, LAUNCH = 3.0e12, 5e-6  # β in bytes/s, c₀ in s a layer
# c₁: s a layer, a scored block, a row of the batch
PRICES = {"bound of 128": (14e-6, 0.3e-9, 0.7e-6), "bound of 16": (6e-6, 0.4e-9, 1.5e-6)}
CLOSE = 1e-6  # relative: rows are exact, least squares are in float64
WHERE = "made-up machine"
SHAPES = [(b, s) for b in (1, 2, 8) for s in (8192, 32768, 131072, 1 << 20)]
SOURCE = "rows of a machine whose β, c₀ and c₁ are known"
UNMOVED = "the cost model of the same rows without them, in every bit"


def made(shapes=SHAPES, held_out: bool = False, factor: float = 1.0) -> list[Measured]:
    """Rows of dense attention, of two policies that search and of one that does not; times by bytes / β + c₀ + c₁, ×
    factor."""
    rows = []
    for batch, context in shapes:
        sizes = {"dense": (batch * context * 2048, None, 0), "sink+window": (batch * (8 << 20), None, 0)}
        for block in (128, 16):
            searched = batch * 4 * (context // block - 3)
            sizes[f"{block} bound"] = batch * (8 << 20) + searched * 512, f"bound of {block}", searched
        rows += [
            Measured(
                policy,
                batch,
                context,
                nbytes,
                policy == "dense",
                finding,
                searched,
                held_out,
                factor * seconds(nbytes, finding, searched, batch),
            )
            for policy, (nbytes, finding, searched) in sizes.items()
        ]
    return rows


def seconds(nbytes: int, finding: str | None, searched: int, batch: int) -> float:
    """By the formula, written out here."""
    fixed, each, row = PRICES[finding] if finding else (0.0, 0.0, 0.0)
    return nbytes / BANDWIDTH + LAUNCH + fixed + each * searched + row * batch


def fitted() -> Iterator[Check]:
    """The fit of sound rows, with outliers among rows that it must ignore, and in a whole session."""
    found, rows = fits.fit(made()), made()
    off = lambda value, true: abs(value / true - 1)
    yield _close("β", off(found.bandwidth, BANDWIDTH), len(SHAPES), "bandwidth")
    yield _close("c₀", off(found.c0, LAUNCH), len(SHAPES), "launch")
    for name, true in PRICES.items():
        price = found.finding.get(name, Price(0.0))
        for what, value, wanted in zip(
            ("of a layer", "of a scored block", "of a row of the batch"), (price.fixed, price.each, price.row), true
        ):
            yield _close(f"c₁ {what}", off(value, wanted), len(SHAPES), f"price of {name}")
    yield _close("seconds of a row", max(off(found.predict(r), r.seconds) for r in rows), len(rows), "prediction")
    yield _unmoved("held-out rows", found, fits.fit(rows + made([(4, 65536)], held_out=True, factor=9)), lambda b: b)
    dear = lambda which: fits.fit([replace(r, seconds=9 * r.seconds) if which(r) else r for r in rows])
    yield _unmoved("β and c₀, sparse rows", found, dear(lambda r: not r.dense), lambda b: (b.bandwidth, b.c0))
    yield _unmoved("rows that search nothing", found, dear(lambda r: not r.dense and r.finding is None), lambda b: b)
    one = dear(lambda r: r.finding == "bound of 16")
    yield _unmoved("c₁, rows of another policy", found, one, lambda b: b.finding.get("bound of 128"))
    yield from _session()


def _close(what: str, error: float, rows: int, part: str) -> Check:
    return compare(
        f"relative error of {what}",
        error,
        "<=",
        CLOSE,
        SOURCE,
        rows,
        where=WHERE,
        part=f"cost model, fit, {what}, {part}",
    )


def _unmoved(part: str, found: CostModel, other: CostModel, of: Callable[[CostModel], object]) -> Check:
    return compare(
        "fits that move with rows which are none of theirs",
        int(of(found) != of(other)),
        "==",
        0,
        UNMOVED,
        len(SHAPES),
        where=WHERE,
        part=f"cost model, fit, {part}",
    )


class Machine:
    """The timer of a made-up machine on which held-out shapes take nine times as long."""

    def __init__(self, predictions: Path):
        self.predictions, self.early = predictions, 0

    def shape(self, source, batch: int, context: int, held_out: bool) -> tuple[list[Measured], str]:
        self.early += held_out and not self.predictions.exists()
        rows = source.rows(batch, context)
        return [
            Measured.of(r, held_out, (9 if held_out else 1) * seconds(r.bytes, r.finding, r.searched, r.batch))
            for r in rows
        ], ""


def _session() -> Iterator[Check]:
    """A whole session: its cost model is fitted to the shapes that are not held out, and predictions are on disk before
    a held-out shape runs."""
    source = GQA(Geometry(), {n: POLICIES[n]() for n in ("block-128 bound", "page-16 bound")}, torch.device("cpu"))
    plan = session.Plan.of((1, 2, 8), (8192, 32768, 131072, 1 << 20))
    both = set(plan.fitted) & set(plan.held_out)
    yield compare(
        "shapes that are both fitted and held out",
        len(both),
        "==",
        0,
        "a plan shares them out",
        len(SHAPES),
        where="plan",
        part="cost model, fit, held-out rows",
    )
    with tempfile.TemporaryDirectory(prefix="dsv4-cost-model-") as folder:
        machine = Machine(Path(folder) / "made_up.predictions.json")
        report = session.run(
            source,
            machine,
            plan,
            Hardware("made up", 80 << 30),
            (8192,),
            (1,),
            Path(folder),
            "made_up",
            {"model": "gqa", "device": "made up"},
            lambda line: None,
        )
    costs, held = CostModel.from_document(report["bill"]), [r for r in report["rows"] if r["held_out"]]
    about = dict(where="session", part="cost model, fit, held-out rows")
    off = max(abs(costs.bandwidth / BANDWIDTH - 1), abs(costs.c0 / LAUNCH - 1))
    yield compare(
        "relative error of β and c₀ where held-out rows take nine times as long",
        off,
        "<=",
        CLOSE,
        SOURCE,
        len(report["rows"]),
        **about,
    )
    error = max((abs((1 + r["error"]) * 9 - 1) for r in held), default=None)
    yield compare(
        "what the errors of held-out rows are off by, relative",
        error,
        "<=",
        CLOSE,
        "a ninth of what is measured is predicted",
        len(held),
        **about,
    )
    yield compare(
        "held-out shapes that ran before they were predicted",
        machine.early,
        "==",
        0,
        "predictions stand on disk first",
        len(plan.held_out),
        **about,
    )
