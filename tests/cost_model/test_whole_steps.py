"""Whole decode steps: their fit on made-up machines, the map by it, and both against what was measured."""

import copy
import json
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from dsv4.cost_model import session, steps_report
from dsv4.cost_model.fit import CostModel, fit_steps, non_negative
from dsv4.cost_model.gqa import host_way
from dsv4.cost_model.regime import Hardware, Way
from dsv4.cost_model.report import markdown
from dsv4.cost_model.steps import HELD_OUT, left_out, ratios, residuals, steps_of
from dsv4.cost_model.tier import tier_of
from dsv4.cost_model.whole import Whole, best, check, expect_close, said
from dsv4.errors import InputError, MapMismatch

AUDITS = Path(__file__).resolve().parents[2] / "audits"
STEPS = AUDITS / "decode" / "qwen2.5-7b" / "h100" / "bench_decode_gqa_h100.json"
FLASH = AUDITS / "decode" / "flash" / "h100" / "bench_decode_h100.json"
REPORT = AUDITS / "regime" / "gqa" / "h100" / "regime_h100.json"
TIER = AUDITS / "host_tier" / "qwen2.5-7b" / "h100" / "host_tier_h100.json"
FLASH_TIER = AUDITS / "host_tier" / "flash" / "h100" / "host_tier_csa_h100.json"
BETA, C0, C1, EACH, LISTED, ROW = 3.1e12, 40e-6, 6e-6, 0.1e-9, 0.2e-9, 1.5e-6
MEASURED = ("qwen2.5-7b", "llama-8b", "qwen3-8b")


def read(path):
    return json.loads(path.read_text())


def few():
    """Four of the measured steps: dense and 32 blocks, batch 1, at 128K and 1M tokens."""
    document = read(STEPS)
    points = [p for pair in document["pairs"] for p in (pair["points"][0], pair["points"][-1])]
    kept = [p for p in points if p["batch"] == 1 and p["context"] >= 131072]
    return document | {"pairs": [{"points": kept[:2]}, {"points": kept[2:]}]}


def at(rows, batch, context, blocks=32):
    """The row of a shape, of that many blocks."""
    same = lambda r: (r["batch"], r["context"]) == (batch, context)
    return next(r for r in rows if same(r) and r["policy"].endswith(f" {blocks} blocks"))


def made(each=0.0, listed=0.0, row=0.0, batches=(1, 8), contexts=(8192, 32768, 131072, 1 << 20)):
    """Steps of a machine whose β, c₀ and c₁ are known, as a document; at 1M tokens and 8 rows of fewer layers."""
    document = read(STEPS)
    dense, *_, sparse = document["pairs"][0]["points"]
    pairs = []
    for batch in batches:
        for context in contexts:
            layers = 4 if batch * context > 1 << 20 else 28
            where = {"batch": batch, "context": context, "layers": layers}
            pairs.append({"points": [p | where | {"step_ms": 1.0} for p in (dense, sparse)]})
    document["pairs"] = pairs
    found = iter(steps_of(document).steps)
    for p in (p for pair in pairs for p in pair["points"]):
        step = next(found)
        blocks = step.share.searched
        c1 = C1 + each * blocks + listed * blocks / p["batch"] if step.share.finding else 0.0
        p["step_ms"] = 1e3 * (step.bytes / BETA + step.layers * (C0 + row * (p["batch"] - 1) + c1))
    return document


def close(costs, each=0.0, listed=0.0, row=0.0):
    price = costs.finding["bound of 128"]
    return (costs.bandwidth, costs.c0, price.fixed, price.each, price.listed, costs.row) == pytest.approx(
        (BETA, C0, C1, each, listed, row), rel=1e-6, abs=1e-15
    )


def test_the_fit_recovers_a_machine_whose_numbers_are_known():
    assert close(steps_of(made()).fit())
    wrong = steps_of(made(EACH, LISTED, ROW))
    assert close(wrong.fit(constant=False), EACH, LISTED, ROW)
    assert residuals(wrong, True)["quality"]["fitted"]["worst_error"] > 0.01  # one number cannot say it
    assert residuals(wrong, False)["quality"]["fitted"]["worst_error"] < 1e-9


def test_bytes_are_those_of_weights_keys_and_summaries():
    """Of Qwen2.5-7B by hand: 28 layers, 4 KV heads of 128, bf16; the head and one row of the embedding are read."""
    dense, sparse = steps_of(few()).steps[:2]
    parts = dense.parts
    hidden, inner, vocab = 3584, 18944, 152064
    # attention's maps with biases of q, k, v; the MLP; two norms
    layer = 2 * hidden * hidden + 2 * hidden * 512 + hidden + 2 * 512 + 3 * hidden * inner + 2 * hidden
    assert parts["layers and norms"] == 2 * (28 * layer + hidden) and parts["output head"] == 2 * vocab * hidden
    assert parts["keys"] == parts["values"] == 28 * 131072 * 4 * 128 * 2
    assert sparse.parts["keys"] == 28 * 4096 * 4 * 128 * 2
    assert sparse.parts["block summaries"] == 28 * 4 * (1024 - 3) * 2 * 128 * 2
    assert dense.bytes == pytest.approx(few()["pairs"][0]["points"][0]["bytes"], rel=1e-4)


def test_non_negative_least_squares_meets_the_conditions_of_an_optimum():
    """Karush-Kuhn-Tucker: of a variable that is 0 the gradient is not negative, of any other it is 0."""
    random, free = np.random.default_rng(0), 0
    for _ in range(40):
        table, y, whole = random.normal(size=(9, 4)), random.normal(size=9), random.uniform(0.5, 2, 9)
        x = np.array(non_negative(list(table.T), y, whole))
        gradient = (table / whole[:, None]).T @ ((table @ x - y) / whole)
        assert (x >= 0).all() and (gradient > -1e-9).all() and np.abs(gradient[x > 0]).max(initial=0) < 1e-9
        free += (x > 0).sum()
    assert 40 < free < 120  # neither all nor none are 0


def test_the_map_takes_the_form_that_predicts_better():
    assert close(best(steps_of(made(EACH, LISTED, ROW))), EACH, LISTED, ROW) and close(best(steps_of(made())))
    found = steps_of(few())  # four steps: neither form predicts those left out better
    assert best(found) == found.fit()


@pytest.mark.parametrize("geometry", MEASURED)
def test_measured_steps_left_out_are_predicted(geometry):
    """By the form that the map takes within the goal, steps and lengths; by one number each they are not. β is the
    rate of a large read of the same run."""
    found = steps_of(read(AUDITS / "decode" / geometry / "h100" / "bench_decode_gqa_h100.json"))
    assert len(found.steps) == 32
    published, rows = (residuals(found, constant)["quality"] for constant in (True, False))
    assert published["without one step"]["worst_error"] > 2 * HELD_OUT
    assert max(rows[name]["worst_error"] for name in rows) < HELD_OUT and rows["without one length"]["rows"] == 32
    assert best(found) == found.fit(constant=False) and best(found).bandwidth == pytest.approx(found.read, rel=0.01)
    seconds = dict(zip(map(id, found.steps), left_out(found, False, lambda s: s.shape)))  # dense and sparse together
    assert max(abs(r["error"]) for r in ratios(found, lambda s: seconds[id(s)])) < 0.016


def test_linear_layers_of_more_rows_take_longer():
    """c₀ grows with rows in a step of the map too, in the layers that the policy is of and in the others."""
    costs, hardware = CostModel(3e12, 1e-5, row=2e-6), Hardware("made up", 80 << 30, 4, 0, others=3)
    way = Way("dense", lambda batch, context: 0)
    assert [way.step(costs, hardware, b, 4096) for b in (1, 8)] == pytest.approx([7e-5, 7 * (1e-5 + 7 * 2e-6)])
    assert CostModel.from_document(asdict(costs)) == costs
    assert CostModel.from_document({"bandwidth": 1e12, "c0": 1e-5, "finding": {}}).row == 0  # of an older report


def test_what_is_left_out_does_not_enter_its_prediction():
    document = made()
    base = left_out(steps_of(document), True, lambda s: (s.share.policy, s.shape))
    assert all(p == pytest.approx(s.seconds) for p, s in zip(base, steps_of(document).steps))
    document["pairs"][2]["points"][1]["step_ms"] *= 9
    again = left_out(steps_of(document), True, lambda s: (s.share.policy, s.shape))
    assert again[5] == base[5] and again[4] != base[4]
    lengths = left_out(steps_of(document), True, lambda s: s.share.context)
    assert [p == pytest.approx(b) for p, b in zip(lengths, base)] == [
        s.share.context == 131072 for s in steps_of(document).steps
    ]


def test_too_few_steps_determine_nothing():
    found = steps_of(made(batches=(1,), contexts=(131072,)))
    with pytest.raises(InputError, match="measure more contexts"):
        found.fit()
    assert left_out(steps_of(few()), True, lambda s: s.share.context) == [None] * 4
    shares = [s.share for s in steps_of(made()).steps]
    with pytest.raises(InputError, match="does not grow with bytes"):
        fit_steps([replace(s, seconds=1 / s.bytes) for s in shares])


@pytest.mark.parametrize(
    "document",
    [None, {}, {"setup": {}, "machine": {}, "about": {}, "points": []}, read(REPORT), read(STEPS) | {"pairs": [{}]}],
    ids=["nothing", "empty", "no keys", "another report", "no points"],
)
def test_what_are_no_steps_is_an_error(document):
    with pytest.raises(InputError, match="bench_decode"):
        steps_of(document)


# ---- the map and what was measured ----------------------------------------------------------


@pytest.fixture(scope="module")
def report():
    """The committed report, without what it knows of whole steps."""
    return {key: value for key, value in read(REPORT).items() if key not in ("steps", "tier")}


def known(report, factor=1.0, link=1.0):
    """The report with the fit of the committed steps, and β or the link of the tier that many times as fast."""
    whole = Whole.of(report, steps_of(read(STEPS)), tier_of(read(TIER)))
    steps = replace(whole.steps, bandwidth=whole.steps.bandwidth * factor)
    tier = replace(whole.tier, link=whole.tier.link * link)
    return report | replace(whole, steps=steps, tier=tier).document()


def test_the_map_s_ratios_are_the_measured_ones(report):
    rows = check(known(report), steps_of(read(STEPS)), read(TIER))
    expect_close(rows)
    assert len(rows["ratios"]) == 24 and max(abs(r["error"]) for r in rows["ratios"]) < 0.02
    measured = {where: at(rows["ratios"], *where)["measured"] for where in ((1, 131072), (1, 1 << 20), (8, 131072))}
    assert list(measured.values()) == pytest.approx([1.37, 3.89, 3.60], abs=0.006)
    assert [r["way"] for r in rows["tier"]] == ["staged", "dense, streamed"]


def test_attention_alone_is_refuted_by_the_measured_steps(report):
    rows = check(report, steps_of(read(STEPS)))
    with pytest.raises(MapMismatch, match=r"B1 1048576: 4\.70 × where 3\.89 × was measured \(\+20\.7%\)"):
        expect_close(rows)


@pytest.mark.parametrize("planted", [{"factor": 0.6}, {"factor": 1.6}, {"link": 1.3}, {"link": 0.8}], ids=str)
def test_a_wrong_bandwidth_is_refuted(report, planted):
    with pytest.raises(MapMismatch, match="off by more than 5%"):
        expect_close(check(known(report, **planted), steps_of(read(STEPS)), read(TIER)))


def test_nothing_compared_is_no_success(report):
    document = read(STEPS)
    document["pairs"] = [{"points": pair["points"][:1]} for pair in document["pairs"]]
    with pytest.raises(MapMismatch, match="compared with none"):
        expect_close(check(known(report), steps_of(document)))


def test_a_cell_of_the_map_is_the_checked_ratio(report):
    found = steps_of(read(STEPS))
    whole = known(report)
    hardware = Hardware("made up", 80 << 30, 28, found.weights, resident=found.held, host=256 << 30)
    drawn = session.redraw(whole, hardware)
    cell = next(c for c in drawn["map"] if (c["batch"], c["context"]) == (1, 1 << 20))
    row = at(check(whole, found)["ratios"], 1, 1 << 20)
    assert cell["best"] == "block-128 bound" and cell["step_speedup"] == pytest.approx(row["map"], rel=1e-4)
    text = markdown(drawn, "x.svg")
    assert "3.9×)" in text and "measured at batch 1, 8; for other batches a straight line" in text
    assert said(row).startswith("block-128 bound, 32 blocks B1 1048576: 3.92 ×")


def test_steps_of_another_model_are_refused(report):
    other = read(STEPS)
    other["setup"]["geometry"] = "llama-8b"
    for document in (other, read(FLASH)):
        with pytest.raises(InputError, match="steps of the same model"):
            Whole.of(report, steps_of(document))


def test_a_document_is_read_back(report):
    whole = Whole.of(known(report))
    assert whole.document() == {k: known(report)[k] for k in ("steps", "tier")}
    assert Whole.of(report) == Whole() and Whole().document() == {}


def test_steps_of_flash_are_fitted_and_all_have_the_indexer_s_price():
    found = steps_of(read(FLASH))
    assert found.layers == 43 and {s.share.searched for s in found.steps} == {
        n * 7 / 16 for n in (2048, 32768, 262144, 8 * 2048, 8 * 32768, 8 * 262144)
    }
    costs = found.fit()
    assert (
        2e12 < costs.bandwidth < 2.6e12 and residuals(found, True)["quality"]["without one step"]["undetermined"] == 0
    )


def test_layers_that_the_map_of_csa_does_not_have_take_their_launches(command_line, tmp_path):
    """V4-Flash has 21 CSA layers among 43: the others take c₀ each."""
    csa = AUDITS / "regime" / "csa" / "h100" / "regime_csa_h100.json"
    given = ("regime", "map", csa, "--steps", FLASH, "--tier", FLASH_TIER, "--name", "H", "--out", tmp_path)
    code, out, err = command_line(*given)
    assert code == 0 and "No dense step was measured" in out, err
    drawn = read(tmp_path / "regime_csa_h.json")
    bill = CostModel.from_document(drawn["steps"]["bill"])
    cell = next(c for c in drawn["map"] if (c["batch"], c["context"]) == (1, 1 << 20))
    latents = (1 << 20) * 1024 + 131072
    assert cell["step_seconds"]["dense"] == pytest.approx(
        (drawn["hardware"]["weights"] + 21 * latents) / bill.bandwidth + 43 * bill.c0
    )
    assert cell["host"]["fetched"] == 21 * 512 * 1024


# ---- caches in host memory ------------------------------------------------------------------


def test_the_bytes_on_the_device_are_the_measured_ones():
    document = read(TIER)
    dense, sparse = steps_of(few()).steps[2:]
    way = host_way(steps_of(read(STEPS)).heads, sparse.policy)
    assert 28 * way.device(1, 1 << 20) == document["grouped"]["device_bytes"]
    assert way.held(1, 1 << 20, 28) == document["decode"]["device_cache_bytes"]
    assert 28 * way.host(1, 1 << 20) == document["decode"]["host_bytes"]
    staged = document["decode"]["rows"][1]
    assert 28 * way.chosen(1, 1 << 20) * (1 - staged["hit_rate"]) == pytest.approx(staged["fetched_a_step"], rel=1e-6)


def test_the_price_of_the_tier_is_recovered():
    document = read(TIER)
    part = document["grouped"]
    for row in part["rows"]:
        extra = 28 * (5e-6 + (3e-6 if row["misses"] else 0)) + row["bytes_a_step"] / 4e10
        row["seconds"] = part["resident_seconds"] + extra
    found = tier_of(document)
    assert (found.link, found.launch, found.latency) == pytest.approx((4e10, 5e-6, 3e-6)) and found.worst < 1e-9
    assert found.extra(28, 0) == pytest.approx(28 * 5e-6) and found.extra(2, 4e9) == pytest.approx(2 * 8e-6 + 0.1)


def test_the_committed_tiers_predict_their_own_steps(report):
    for path, worst in ((TIER, 0.04), (FLASH_TIER, 0.16)):
        assert tier_of(read(path)).worst < worst
    flash = Whole.of(read(AUDITS / "regime" / "csa" / "h100" / "regime_csa_h100.json"), tier=tier_of(read(FLASH_TIER)))
    from dsv4.cost_model.tier import checked

    (row,) = checked(read(FLASH_TIER), flash.tier, None)
    assert row["way"] == "staged" and abs(row["error"]) < 0.05


@pytest.mark.parametrize(
    "change",
    [lambda d: d.clear(), lambda d: d["grouped"]["rows"].clear(), lambda d: d.pop("link")],
    ids=["empty", "no rows", "no link"],
)
def test_what_is_no_tier_is_an_error(change):
    document = copy.deepcopy(read(TIER))
    change(document)
    with pytest.raises(InputError, match="bench_host_tier"):
        tier_of(document)


def test_a_small_card_has_a_number_at_a_million_tokens(report):
    whole = Whole.of(known(report))
    found = steps_of(read(STEPS))
    hardware = Hardware("24 GB", 24 << 30, 28, found.weights, resident=found.held, host=256 << 30, hit=0.5)
    cell = lambda h: next(
        c for c in session.redraw(report, h, whole)["map"] if (c["batch"], c["context"]) == (1, 1 << 20)
    )
    host = cell(hardware)["host"]
    assert not cell(hardware)["fits"] and host["fits"] and host["best"] == "block-128 bound"
    fetched = 28 * 4 * 31 * 65536 * 0.5
    resident = cell(replace(hardware, capacity=80 << 30))["step_seconds"]["block-128 bound"]
    assert host["fetched"] == fetched and host["seconds"] == pytest.approx(
        resident + 28 * (whole.tier.launch + whole.tier.latency) + fetched / whole.tier.link
    )
    assert cell(replace(hardware, hit=1.0))["host"]["seconds"] == pytest.approx(resident + 28 * whole.tier.launch)
    assert not cell(replace(hardware, host=32 << 30))["host"]["fits"]  # 56 GiB of keys and values
    assert not cell(replace(hardware, capacity=19 << 30))["host"]["fits"]  # weights, and 4.9 GiB of caches
    text = markdown(session.redraw(report, hardware, whole), "x.svg")
    assert "| 1, host |" in text and "50% of what a step chooses staged already, 256.00 GiB of host memory" in text


# ---- commands -------------------------------------------------------------------------------


def test_the_fit_as_a_report(command_line, tmp_path):
    (tmp_path / "m.json").write_text(json.dumps(made()))
    code, out, _ = command_line("regime", "steps", tmp_path / "m.json", "--out", tmp_path)
    found = read(tmp_path / "regime_steps_qwen2_5_7b_h100.json")
    assert code == 0 and out.startswith("# Whole decode steps of qwen2.5-7b")
    assert [goal["verdict"] for goal in found["goals"]] == ["met", "met"]
    assert (tmp_path / "regime_steps_qwen2_5_7b_h100.md").read_text() in out and len(found["forms"][0]["rows"]) == 16
    assert found["forms"][0]["bill"]["c0"] == pytest.approx(C0) and found["about"]["command"]
    code, out, _ = command_line("regime", "steps", STEPS, "--out", tmp_path)
    assert code == 1 and "FAILED: worst error of a step left out\n" in out and "| 1.1% | met |" in out
    assert "1.60 µs for each row of the batch after the first" in out and "ns a block of one row" in out
    assert "too long at batch 1 (+2.2%) and too short at batch 8 (-3.0%): more rows take longer" in out
    (tmp_path / "few.json").write_text(json.dumps(few()))
    code, out, _ = command_line("regime", "steps", tmp_path / "few.json", "--out", tmp_path)
    assert code == 1 and "There are two dense steps." in out
    code, out, err = command_line("regime", "steps", REPORT, "--out", tmp_path)
    assert code == 2 and err.count("\n") == 1 and "bench_decode" in err


def test_a_map_with_whole_steps(command_line, tmp_path):
    given = ("regime", "map", REPORT, "--out", tmp_path, "--steps", STEPS, "--tier", TIER)
    code, out, err = command_line(*given, "--name", "24 GB card", "--capacity", "24G", "--check", STEPS)
    assert code == 0, err
    found = read(tmp_path / "regime_24_gb_card.json")
    assert "| 1, host |" in out and "3.92 × where 3.89 × was measured" in out and "staged B1 1048576" in out
    assert found["hardware"]["layers"] == 28 and found["hardware"]["resident"] == 15231233024
    slow = made()
    for pair in slow["pairs"]:
        pair["points"][1]["step_ms"] *= 1.2
    (tmp_path / "slow.json").write_text(json.dumps(slow))
    code, out, _ = command_line(*given, "--name", "24 GB card", "--check", tmp_path / "slow.json")
    assert code == 1 and "FAILED: " in out and "off by more than 5%" in out
    for more, wrong in (
        (("--hit-rate", "1.5"), "--hit-rate 1.5"),
        (("--check", STEPS, "--bandwidth", "1T"), "leave out one"),
        (("--steps", TIER), "bench_decode"),
        (("--tier", STEPS), "bench_host_tier"),
        (("--steps", FLASH), "steps of the same model"),
    ):
        code, out, err = command_line(*given, "--force", *more)
        assert code == 2 and out == "" and err.count("\n") == 1 and wrong in err, err


def test_a_report_is_drawn_again_with_what_is_known_of_steps(command_line, tmp_path):
    code, _, err = command_line(
        "regime", "map", REPORT, "--redraw", "--out", tmp_path, "--steps", STEPS, "--tier", TIER
    )
    assert code == 0, err
    before, after = read(REPORT), read(tmp_path / "regime_h100.json")
    for key in ("rows", "bill", "quality", "crossovers", "about"):
        assert after[key] == before[key]
    assert after["hardware"]["capacity"] == before["hardware"]["capacity"] and after["drawn"]["command"]
    cell = next(c for c in after["map"] if (c["batch"], c["context"]) == (1, 1 << 20))
    assert cell["step_speedup"] == pytest.approx(3.92, abs=0.01)


def test_the_document_is_what_the_fit_says():
    found = steps_of(made())
    document = steps_report.document(found, {"command": "x", "commit": "y"})
    assert CostModel.from_document(document["forms"][0]["bill"]) == found.fit()
    assert ratios(found, lambda s: s.predicted(found.fit()))[0]["error"] == pytest.approx(0, abs=1e-9)
    assert asdict(found.fit()) == document["forms"][0]["bill"] and json.dumps(document, allow_nan=False)
