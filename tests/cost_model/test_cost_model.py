"""The cost model on made-up machines: what a fit may look at, what it must recover, and what is said when it does not
hold."""

import json
import random
from dataclasses import asdict, replace

import pytest
import torch

from dsv4.cost_model import csa, session
from dsv4.cost_model.defaults import assumed
from dsv4.cost_model.fit import CostModel, Price, Quality, fit, least_squares, r_squared
from dsv4.cost_model.gqa import GQA, POLICIES, Geometry, Inputs, attend
from dsv4.cost_model.measure import LAYERS, Timer, layers_that_fit
from dsv4.cost_model.regime import Hardware, Way, crossover, measured_crossover, regime_map
from dsv4.cost_model.report import _cell, markdown, priced, times, verdict
from dsv4.cost_model.rows import Measured
from dsv4.errors import InputError
from dsv4.kernels.block_choice import block_scores
from dsv4.runtime import planning

TRUTH = CostModel(3.0e12, 5e-6, {"bound of 128": Price(14e-6), "bound of 16": Price(6e-6, 0.4e-9, 1.5e-6)})
SMALL = Geometry(4, 2, 16, 4)
HARDWARE = Hardware("made up", 80 << 30, 28, 14 << 30)
CPU = torch.device("cpu")


def source(names=("sink+window", "block-128 bound"), geometry=Geometry(), tokens=4096):
    return GQA(geometry, {n: POLICIES[n](tokens) for n in names}, CPU)


class MadeUp:
    """A timer of a machine that keeps to a cost model, with noise; `seen` is what stood on disk when a shape was
    measured."""

    def __init__(self, truth=TRUTH, noise=0.01, path=None):
        self.truth, self.noise, self.path, self.seen, self.random = truth, noise, path, [], random.Random(1)

    def shape(self, of, batch, context, held_out):
        self.seen.append(
            ((batch, context), held_out, self.path is not None and self.path.exists() and self.path.read_text())
        )
        return [
            Measured.of(
                r, held_out, self.truth.predict(r) * self.random.uniform(1 - self.noise, 1 + self.noise), "made up"
            )
            for r in of.rows(batch, context)
        ], ""


def rows(truth=TRUTH, noise=0.0, held_out=False, contexts=(8192, 32768, 131072, 1 << 20), batches=(1, 8)):
    timer = MadeUp(truth, noise)
    of = source(("sink+window", "block-128 bound", "page-16 bound"))
    return [r for b in batches for c in contexts for r in timer.shape(of, b, c, held_out)[0]]


def test_the_fit_recovers_a_machine_that_keeps_to_the_bill():
    exact, noisy = fit(rows()), fit(rows(noise=0.02))
    assert exact.bandwidth == pytest.approx(3e12) and exact.c0 == pytest.approx(5e-6)
    close = lambda found, **more: all(
        found.finding[n].fixed == pytest.approx(p.fixed, **more)
        and found.finding[n].each == pytest.approx(p.each, abs=5e-12)
        and found.finding[n].row == pytest.approx(p.row, abs=1e-12 + more.get("abs", 0))
        for n, p in TRUTH.finding.items()
    )
    assert close(exact)
    assert noisy.bandwidth == pytest.approx(3e12, rel=0.02) and noisy.c0 == pytest.approx(5e-6, abs=1e-6)
    assert close(noisy, abs=2e-6)
    quality = Quality.of(rows(noise=0.02), [noisy.predict(r) for r in rows(noise=0.02)])
    assert quality.r_squared > 0.998 and quality.worst_error < 0.06


def test_rows_that_are_held_out_are_never_fitted():
    wrong = CostModel(1e11, 1e-3, {"bound of 128": Price(1.0), "bound of 16": Price(1.0)})
    assert fit(rows(noise=0.02) + rows(wrong, held_out=True)) == fit(rows(noise=0.02))
    with pytest.raises(InputError, match="at least two"):
        fit(rows(held_out=True))


def test_beta_and_c0_come_from_dense_rows_only_and_prices_from_rows_that_search():
    found = rows(noise=0.02)
    slow = [r if r.dense else replace(r, seconds=9 * r.seconds) for r in found]
    assert (fit(slow).bandwidth, fit(slow).c0) == (fit(found).bandwidth, fit(found).c0) and fit(slow).finding != fit(
        found
    ).finding
    idle = [replace(r, seconds=9 * r.seconds) if not r.dense and r.finding is None else r for r in found]
    assert fit(idle) == fit(found)  # sink + window searches nothing: it is predicted, and nothing is fitted on it
    assert {r.fitted for r in found if r.policy == "sink+window"} == {False}
    other = [replace(r, seconds=9 * r.seconds) if r.finding == "bound of 16" else r for r in found]
    assert fit(other).finding["bound of 128"] == fit(found).finding["bound of 128"]


@pytest.mark.parametrize(
    "change,message",
    [(lambda r: 1 / r.bytes, "time falls"), (lambda r: r.seconds, "at least two")],
    ids=["falls", "one context"],
)
def test_what_no_bill_describes_is_an_error(change, message):
    contexts = (8192,) if message == "at least two" else (8192, 65536)
    with pytest.raises(InputError, match=message):
        fit([replace(r, seconds=change(r)) for r in rows(contexts=contexts, batches=(1,))])
    with pytest.raises(InputError, match="never measured|not fitted"):
        fit(rows()).seconds(1e6, "mean of 128")


def test_r_squared_is_that_of_the_textbooks():
    assert r_squared([1.0, 2.0, 3.0], [1.1, 1.9, 3.0]) == pytest.approx(1 - 0.02 / 2)
    assert r_squared([1.0, 2.0, 3.0], [2.0, 2.0, 2.0]) == 0 and r_squared([1.0, 1.0], [1.0, 1.0]) != r_squared(
        [1.0, 1.0], [1.0, 1.0]
    )


def test_quality_counts_errors_of_either_sign():
    some = [replace(r, seconds=s) for r, s in zip(rows(), (1.0, 2.0, 4.0))]
    quality = Quality.of(some, [0.5, 2.2, 4.0])
    assert (quality.rows, quality.worst_error, quality.worst) == (
        3,
        0.5,
        "dense B1 8192",
    ) and quality.median_error == pytest.approx(0.1)


def test_the_crossover_is_where_the_two_lines_meet():
    g, policy = Geometry(), POLICIES["block-128 bound"]()
    dense, (_, way) = source().ways()
    for batch in (1, 4):
        at = crossover(TRUTH, dense, way, batch)
        # dense bytes of the tokens beyond those kept, less the summaries (two vectors a block: 1/128 of keys and
        # values), pay for c₁
        wanted = (
            policy.tokens + TRUTH.finding["bound of 128"].fixed * 3e12 / (batch * 2 * g.kv_heads * g.head_dim * 2)
        ) / (1 - 1 / 128)
        assert abs(at - wanted) <= 128
        lead = [dense.seconds(TRUTH, batch, context) - way.seconds(TRUTH, batch, context) for context in (at - 1, at)]
        assert lead[0] < 0 <= lead[1]


def test_a_crossover_that_does_not_exist_is_said_so():
    dense, (free, way) = source().ways()
    never = CostModel(3e12, 5e-6, {"bound of 128": Price(10.0)})
    assert crossover(never, dense, way, 1) is None and crossover(TRUTH, dense, free, 1) == 4096  # from its budget on
    assert "never pays" in markdown(report(never), "x.svg")
    assert crossover(TRUTH, dense, Way("twice", lambda b, c: 2 * dense.bytes(b, c)), 1) is None


def test_measured_crossovers_and_their_verdicts():
    made = lambda times: [
        replace(rows()[0], batch=1, context=c, seconds=s, dense=d, policy="dense" if d else "p")
        for c, a, b in times
        for s, d in ((a, True), (b, False))
    ]
    assert measured_crossover(made([(1, 1.0, 2.0), (2, 2.0, 2.5), (4, 4.0, 2.6)]), "p", 1) == (2, 4)
    assert measured_crossover(made([(1, 1.0, 2.0)]), "p", 1) == (1, None) and measured_crossover(
        made([(1, 2.0, 1.0)]), "p", 1
    ) == (None, 1)
    assert measured_crossover([], "p", 1) == (None, None)
    told = lambda at, between: verdict({"predicted": at, "measured_between": between})
    assert told(3, (2, 4)) == told(8, (2, 4)) == told(1, (2, 4)) == told(None, (4, None)) == told(1, (None, 2)) == "met"
    assert (
        told(9, (2, 4))
        == told(None, (2, 4))
        == told(0.9, (2, 4))
        == told(5, (None, 2))
        == told(1, (4, None))
        == "FAILED"
    )
    assert told(None, (None, None)) == "not measured"


def report(truth=TRUTH, noise=0.01, folder=None, timer=None, names=("sink+window", "block-128 bound"), stem="regime_x"):
    import tempfile
    from pathlib import Path

    folder = folder or Path(tempfile.mkdtemp())
    plan = session.Plan.of((1, 8), (8192, 16384, 32768, 65536, 131072, 1 << 20))
    return session.run(
        source(names),
        timer or MadeUp(truth, noise),
        plan,
        HARDWARE,
        (8192, 65536, 1 << 20),
        (1, 8, 64),
        folder,
        stem,
        {"model": "gqa", "device": "made up"},
        lambda line: None,
    )


def test_predictions_are_on_disk_before_a_held_out_row_runs_and_are_what_is_judged(tmp_path):
    path = tmp_path / "regime_x.predictions.json"
    timer = MadeUp(noise=0.02, path=path)
    found = report(folder=tmp_path, timer=timer)
    before, after = [s for s in timer.seen if not s[1]], [s for s in timer.seen if s[1]]
    assert before and after and timer.seen == before + after and not any(text for *_, text in before)
    assert {text for *_, text in after} == {path.read_text()}
    said = {(r["policy"], r["batch"], r["context"]): r["seconds"] for r in json.loads(path.read_text())["rows"]}
    held = [r for r in found["rows"] if r["held_out"]]
    assert {(r["batch"], r["context"]) for r in held} == {shape for shape, *_ in after} and len(said) == len(held)
    assert all(r["predicted"] == said[r["policy"], r["batch"], r["context"]] for r in held)
    assert found["quality"]["held out"]["rows"] == len(held) and all(
        g["verdict"] != "not measured" for g in found["quality"]["goals"]
    )


def test_a_row_that_nobody_predicted_is_not_judged():
    with pytest.raises(InputError, match="not predicted before"):
        session.judge(replace(rows()[0], held_out=True), TRUTH, {})


def test_a_price_that_no_fitted_row_has_is_an_error_before_anything_is_held_out():
    timer = MadeUp()
    plan = session.Plan(((1, 1024), (1, 2048)), ((1, 8192),))
    with pytest.raises(InputError, match="price is unknown"):
        session.run(source(), timer, plan, HARDWARE, (8192,), (1,), None, "x", {}, lambda line: None)
    assert not any(held for _, held, _ in timer.seen)


def test_failures_are_printed_as_failures(tmp_path):
    good, bad = report(noise=0.005), report(noise=0.6)
    assert [g["verdict"] for g in good["quality"]["goals"]] == ["met"] * 4
    assert "FAILED" in [g["verdict"] for g in bad["quality"]["goals"]]
    assert "FAILED" in markdown(bad, "x.svg") and "FAILED" not in markdown(good, "x.svg")
    below = report(CostModel(3e12, -5e-6, TRUTH.finding), 0.0)
    assert "less than nothing" in markdown(below, "x.svg")


def test_what_is_held_out_lies_inside():
    plan = session.Plan.of((1, 2, 4), (1024, 2048, 4096, 8192))
    assert set(plan.fitted) | set(plan.held_out) == {(b, c) for b in (1, 2, 4) for c in (1024, 2048, 4096, 8192)}
    assert (
        not set(plan.fitted) & set(plan.held_out)
        and len(plan.held_out) == 4
        and {(1, 1024), (4, 8192)} <= set(plan.fitted)
    )


def test_the_map_of_given_hardware():
    dense, ways = source().ways()
    drawn = regime_map(TRUTH, dense, ways, (8192, 1 << 20), (1, 2, 64), HARDWARE)
    cells = {(c["batch"], c["context"]): c for c in drawn}
    cell = cells[1, 1 << 20]
    # 28 × 2 GiB and 14; twice that
    assert cell["best"] == "block-128 bound" and cell["fits"] and not cells[2, 1 << 20]["fits"]
    assert cell["attention_speedup"] == pytest.approx(cell["seconds"]["dense"] / cell["seconds"]["block-128 bound"])
    rest = (14 << 30) / 3e12
    assert cell["step_speedup"] == pytest.approx(
        (rest + 28 * cell["seconds"]["dense"]) / (rest + 28 * cell["seconds"]["block-128 bound"])
    )
    assert cells[1, 8192]["best"] == "dense" and cells[1, 8192]["attention_speedup"] == 1
    fast = regime_map(TRUTH, dense, ways, (8192,), (64,), replace(HARDWARE, bandwidth=3e13))[0]
    assert fast["seconds"]["dense"] == pytest.approx(dense.bytes(64, 8192) / 3e13 + 5e-6)


def test_what_fits_is_asked_of_each_way():
    """1M × 8 of CSA beside dense latents: a layer's latents take 8 GiB, its entries, keys and window a quarter of
    that."""
    of = csa.CSA(CPU, "reference")
    dense, (way,) = of.ways()
    latents, entries = dense.held(8, 1 << 20), way.held(8, 1 << 20)
    assert (
        latents == 8 << 30
        and entries == 8 * (128 * 1024 + (1 << 18) * (1024 + 68))
        and way.held(1, 64) == 64 * 1024 + 16 * 1092
    )
    assert of.cache_bytes(8, 1 << 20) == latents + 8 * (1 << 18) * (1024 + 68)  # what is measured holds both
    costs = CostModel(3e12, 1e-5, {csa.FINDING: Price(4e-6)})
    drawn = lambda capacity: regime_map(
        costs, dense, [way], (1 << 20,), (8,), Hardware("made up", capacity, 2, 1 << 30)
    )[0]
    room = (1 << 30) + 2 * entries
    tight, none, wide = drawn(room), drawn(room - 1), drawn((1 << 30) + 2 * latents)
    assert tight["fits"] and tight["best"] == "csa" and tight["fits_by_policy"] == {"dense": False, "csa": True}
    assert not none["fits"] and wide["fits_by_policy"] == {"dense": True, "csa": True} and wide["best"] == "csa"
    slow, short = CostModel(3e12, 1e-5, {csa.FINDING: Price(1e-3)}), 8 * way.held(1, 4096)
    only = regime_map(slow, dense, [way], (4096,), (8,), Hardware("made up", short, 1))[0]
    # what is faster does not fit
    assert only["best"] == "csa" and only["attention_speedup"] < 1 and not only["fits_by_policy"]["dense"]
    cell = lambda c: _cell(c).replace(f"csa {times(c['attention_speedup'])} ({times(c['step_speedup'])})", "csa")
    assert (cell(tight), cell(none), cell(wide)) == ("csa †", "–", "csa")
    g = source()
    dense, (window, blocks) = g.ways()
    assert (
        dense.held(2, 8192)
        == window.held(2, 8192)
        == g.geometry.cache(2, 8192)
        == blocks.held(2, 8192) - 2 * 2 * 64 * 4 * 128 * 2
    )


def test_what_is_assumed_of_flash_is_its_preset():
    flash, dense = assumed("csa"), assumed("gqa")
    plan = {
        r["name"]: r["nbytes"]
        for r in planning.plan("flash", "4K", 1, 0, "native", "cpu")["rows"]
        if r["group"] == "weights"
    }
    experts = plan.pop("routed experts")
    # of the embedding and of hash tables a row
    rest = sum(plan.values()) - plan["embedding"] - plan["MTP"] - 3 * 129280 * 6 * 8
    assert flash.layers == 21 and flash.weights == rest + 4096 * 2 + 3 * 6 * 8 + experts * 6 // 256
    assert "6 of 256 routed experts" in flash.note and (dense.layers, dense.weights, dense.note) == (28, 14 << 30, "")


def test_a_map_drawn_again_leaves_what_was_measured():
    found = report()
    again = session.redraw(found, replace(HARDWARE, layers=1))
    assert {k: v for k, v in again.items() if k not in ("map", "hardware")} == {
        k: v for k, v in found.items() if k not in ("map", "hardware")
    }
    assert (
        again["hardware"]["layers"] == 1 and again["map"] != found["map"] and session.redraw(again, HARDWARE) == found
    )


def test_bytes_are_those_of_the_formulas():
    g = source(geometry=Geometry(32, 8, 128, 2))
    dense, (window, way) = g.ways()
    assert dense.bytes(1, 131072) - g.geometry.ends(1) == 131072 * 4096 and g.geometry.ends(2) == 2 * 32 * 128 * 2 * 2
    # a sink and two local blocks are kept unseen
    assert way.bytes(1, 131072) - g.geometry.ends(1) == 4096 * 4096 + (131072 // 128 - 3) * 2 * 2048
    assert (
        way.bytes(1, 131073) == way.bytes(1, 131072) - 127 * 4096 + 2 * 2048
        and way.bytes(1, 200) - g.geometry.ends(1) == 200 * 4096
    )
    assert window.bytes(1, 1 << 20) - g.geometry.ends(1) == 4096 * 4096
    assert csa.dense_bytes(8, 8192) == 8 * (8192 * 1024 + 131072)
    assert csa.csa_bytes(1, 1 << 20) == 640 * 1024 + 131072 + 262144 * 68 + 16384 + 8 * 262144
    assert (
        csa.csa_bytes(1, 1024) == 384 * 1024 + 131072
        and csa.csa_bytes(1, 2051) == csa.csa_bytes(1, 2048) == 640 * 1024 + 131072
    )
    assert (
        csa.csa_bytes(1, 2052) == 640 * 1024 + 131072 + 513 * 68 + 16384 + 8 * 513
        and csa.csa_bytes(1, 64) == 80 * 1024 + 131072
    )


@pytest.mark.parametrize("name", list(POLICIES))
def test_a_policy_that_keeps_everything_is_dense_attention(name):
    of, inputs = GQA(SMALL, {}, CPU), Inputs(SMALL, 2, 1024, 2, 2, CPU, torch.float32)
    whole = attend(*inputs.layer(1)).transpose(1, 2)
    assert torch.allclose(of.read_kept(POLICIES[name](1024), inputs, 1), whole, atol=1e-5)
    part = of.read_kept(POLICIES[name](512), inputs, 1)
    assert part.shape == whole.shape and not torch.allclose(part, whole, atol=1e-3)


def test_summaries_are_those_that_the_selector_reads():
    inputs = Inputs(SMALL, 2, 2048, 1, 1, CPU, torch.float32)
    q, k, _ = inputs.layer(0)
    k[:, :, 700] = 9 * q.unflatten(1, (2, 2))[:, :, 0, 0]
    (low, high, none), policy = inputs.summaries(128, "bound")[0], POLICIES["block-128 bound"](512)
    scores = block_scores(q.transpose(1, 2), low, high, none, inputs.start, policy)
    assert none is None and (scores[:, 0].argmax(-1) == 700 // 128).all()
    near = GQA(SMALL, {}, CPU).read_kept(policy, inputs, 0)
    # heads that look for it find it
    assert torch.allclose(near[:, :, ::2], attend(*inputs.layer(0)).transpose(1, 2)[:, :, ::2], atol=0.1)
    assert inputs.summaries(128, "mean")[0][2].shape == (2, 2, 16, 16) and inputs.summaries(128, None)[0] == (
        None,
        None,
        None,
    )


def test_a_line_is_that_of_the_textbooks():
    import numpy as np

    x, y = [1.0, 2.0, 5.0, 9.0], [2.0, 4.5, 8.0, 20.0]
    found = np.polyfit(x, y, 1, w=[1 / t for t in y])
    assert least_squares([[1.0] * 4, x], y, y) == pytest.approx(found[::-1])
    # what does not vary has no price
    assert least_squares([[1.0, 1.0], [3.0, 3.0]], [1.0, 2.0], [1.0, 1.0]) == pytest.approx([1.5, 0.0])
    # nor what two rows cannot tell
    assert least_squares([[1.0] * 2, [1.0, 2.0], [5.0, 7.0]], [1.0, 2.0], [1.0, 1.0]) == pytest.approx([0.0, 1.0, 0.0])


def test_a_price_that_grows_is_fitted_by_what_is_searched_and_the_report_says_what_a_constant_would_miss():
    growing, constant = fit(rows()), fit(rows(), constant=True)
    assert growing.finding["bound of 16"].each == pytest.approx(0.4e-9) and constant.finding["bound of 16"].each == 0
    searching = [r for r in rows(held_out=True) if r.policy == "page-16 bound"]
    assert all(r.searched == r.batch * 4 * (r.context // 16 - 3) for r in searching)
    worst = lambda costs: Quality.of(searching, [costs.predict(r) for r in searching]).worst_error
    assert worst(growing) < 1e-6 and worst(constant) > 0.1
    assert CostModel.from_document(json.loads(json.dumps(asdict(growing)))) == growing
    falling = [replace(r, seconds=r.seconds * (1e4 / r.searched if r.searched else 1)) for r in rows()]
    assert {p.each for p in fit(falling).finding.values()} == {0.0}  # no time is given back for searching more
    shared = [replace(r, seconds=r.seconds / (r.batch if r.finding else 1)) for r in rows()]
    assert all(p.row == 0 for p in fit(shared).finding.values())


def test_a_row_of_the_batch_has_a_price():
    """Of two batches of one total the larger is dearer, by what its rows cost; the report says so."""
    found, price = fit(rows()), TRUTH.finding["bound of 16"]
    more = found.seconds(1e6, "bound of 16", 4096, 8) - found.seconds(1e6, "bound of 16", 4096, 2)
    assert more == pytest.approx(6 * price.row)
    assert priced(asdict(price)) == "6.00 µs + 1.50 µs a row + 0.400 ns a block"
    one = fit(rows(batches=(1,)))
    assert one.finding["bound of 16"].row == 0 and one.finding["bound of 16"].fixed == pytest.approx(
        price.fixed + price.row
    )


def test_layers_differ_until_their_caches_are_cold_by_themselves():
    assert layers_that_fit(1 << 20, 1 << 34) == LAYERS and layers_that_fit(1 << 30, 1 << 34) == 1
    assert layers_that_fit(200 << 20, 1 << 34) == 3 and layers_that_fit(200 << 20, 300 << 20) == 1
    assert layers_that_fit(1 << 30, 1 << 30) == 0
    inputs = Inputs(SMALL, 1, 128, LAYERS, 3, CPU, torch.float32)
    assert len({t.data_ptr() for i in range(LAYERS) for t in inputs.layer(i)[1:]}) == 6


def test_the_timer_measures_what_runs_and_says_what_does_not():
    class Half(GQA):
        def rows(self, batch, context):
            def broken(i):
                raise RuntimeError("no such kernel")

            one, *others = super().rows(batch, context)
            lost = replace(one, policy="lost", make=lambda _: {"broken": broken})
            return [replace(one, make=lambda inputs: {"broken": broken, **self._dense(inputs)}), *others, lost]

    half = Half(SMALL, {}, CPU)
    (dense, lost), why = Timer(CPU, 3).shape(half, 1, 256, False)
    assert not why and dense.by == "SDPA" and dense.seconds > 0 and "no such kernel" in dense.others["broken"]
    assert lost.by == "nothing ran" and lost.seconds != lost.seconds
    huge = GQA(Geometry(4, 2, 1 << 40, 4), {}, CPU)
    nothing, why = Timer(CPU, 3).shape(huge, 1, 128, False)
    assert nothing == [] and "may be used" in why
