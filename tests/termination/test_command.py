"""`dsv4 termination`: what it writes and refuses; its walks of CSA and HCA are what the layers compute."""

import json
from types import SimpleNamespace

import torch

from dsv4.kernels.grouped_attention import Termination
from dsv4.probes.measure.base.mass import watched
from dsv4.probes.measure.base.needles import Asked, Limits, replies_by
from dsv4.probes.measure.base.variants import of_policy
from dsv4.probes.measure.termination import document, markdown, measure, orders, plots
from tests.fidelity.conftest import csa, csa_path, gqa, gqa_path, run, text  # noqa: F401  (fixtures)


def test_walks_of_csa_and_hca_end_at_what_the_layers_compute(csa):
    """Also where fewer entries are visible than are selected, and in tiles that the rows do not fill."""
    ids, seen, outs = torch.randint(0, 300, (1, 300), generator=torch.Generator().manual_seed(0)), [], []

    def kept(attend):
        def run(*held):
            outs.append(attend(*held))
            return outs[-1]

        return run

    def of_csa(layer, attn, *held):  # after the layer attended
        seen.append((orders.entries(attn, *held, 3), len(outs) - 1))

    def of_hca(layer, attn, *held):  # before it does
        seen.append((orders.heavily_compressed(attn, *held, 3), len(outs)))

    for block in csa.layers:
        block.attn.attend = kept(block.attn.attend)
    try:
        for first, last in ((0, 20), (280, 300)):
            cache = csa.new_cache(1, 300)
            if first:
                csa.append(ids[:, :first], cache)
            with watched(csa, of_csa), measure._watched_hca(csa, of_hca):
                csa.append(ids[:, first:last], cache)
    finally:
        for block in csa.layers:
            vars(block.attn).pop("attend", None)
    assert len(seen) == 2 * 4
    for walk, at in seen:
        assert torch.allclose(walk.size.float(), outs[at].float().norm(dim=-1).view_as(walk.size), rtol=1e-4, atol=1e-5)
    assert max(walk.tiles.max() for walk, _ in seen) > 4


SMALL = ("--context", "600,700", "--queries", 2, "--budget", 512, "--tile", 64)


# Over 5 s: the whole command at two contexts with needles, and each figure drawn twice.
def test_a_report_of_policies(run, gqa_path, tmp_path):
    code, out, err = run(
        "termination",
        gqa_path,
        *SMALL,
        "--policy",
        "block-bound",
        "--tau",
        0.1,
        "--phi",
        0.1,
        "--patience",
        1,
        "--needles",
        1,
        "--needle-context",
        700,
        "--looser",
        "10",
        "--numerics",
        "fp32",
        "--json",
        "--out",
        tmp_path,
    )
    assert code == 0, err
    found = json.loads(out)
    assert found == json.loads((tmp_path / "termination_gqa.json").read_text()) and found["family"] == "gqa"
    orders_ = ["dense, newest first", "block-128 bound, 512 tokens"]
    assert list(dict.fromkeys(r["order"] for r in found["rows"])) == orders_
    places = {(o, c, i) for o in orders_ for c in (600, 700) for i in (0, 1, 2, None)}
    assert {(r["order"], r["context"], r["layer"]) for r in found["rows"]} == places
    of = {(r["order"], r["varied"], r["tau"]): r for r in found["varied"] if r["context"] == 700}
    assert of[orders_[0], "tau", 1e-6]["skipped"] == 0 < of[orders_[0], "without scale", 0.1]["skipped_alone"]
    assert all(r["bound_tight"] is None or r["bound_tight"] <= 1 for r in found["varied"])
    assert found["schema_version"] == "1.3"
    assert all(r["by_probe"]["bound_tight"] is None or r["by_probe"]["bound_tight"] <= 1 for r in found["varied"])
    assert any(r["whole"]["agree"] is not None for r in found["rows"])
    rules = [(r["order"], r["tau"]) for r in found["needles"] if r["haystack"] == "prose"]
    assert rules == [(o, t) for o in orders_ for t in (None, 0.1, 10)]
    for r in found["needles"]:
        assert (r["skipped"] is None) == (r["tau"] is None)
        assert r["tau"] is None or (r["skipped"] > 0) == (r["status"] == "MEASURED"), r
    skipped = {(r["order"], r["tau"]): r["skipped"] for r in found["needles"] if r["haystack"] == "prose"}
    assert all(skipped[order, 10] > max(0.5, skipped[order, 0.1]) for order in orders_), skipped
    shown = (tmp_path / "termination_gqa.md").read_text()
    for part in (
        "## The bound by sums",
        "## The bound by the probe",
        "## By layer: probe against the oracle, whole output",
        "## By layer: probe against the oracle, known end",
        "## Ablations",
        "without direction",
        "## Sweeps",
        "## Needles",
        "pay",
        "## Provenance",
        "--looser 10",
    ):
        assert part in shown, part
    for name in ("skipped-by-sweep", "error-by-sweep", "by-layer", "needles"):
        assert (
            f"termination_gqa-{name}.svg" in shown and "<svg" in (tmp_path / f"termination_gqa-{name}.svg").read_text()
        )
    assert set(plots.draw(found).values()) == {f.read_text() for f in tmp_path.glob("*.svg")}
    assert document.valid(found)


def test_tasks_are_asked_by_rule(run, gqa_path, tmp_path):
    """Needles of one haystack and a chain, in the report with what full attention makes of them."""
    small = "--context", 600, "--queries", 1, "--policy", "sink-window", "--budget", 256, "--tile", 64
    asked = "--needles", 2, "--needle-context", 1000, "--numerics", "fp32"
    tasks = "--tasks", "single,tracking", "--needles-a-haystack", 2
    code, out, err = run("termination", gqa_path, *small, *asked, *tasks, "--json", "--out", tmp_path)
    assert code == 0, err
    found = json.loads(out)
    assert (found["settings"]["tasks"], found["settings"]["needles_a_haystack"]) == (["single", "tracking"], 2)
    of = dict.fromkeys((r["task"], r["haystack"], r["answers"], r["solved"]) for r in found["needles"])
    assert list(of) == [
        ("single", "prose", 2, False),
        ("single", "looped filler", 2, False),
        ("tracking", "looped filler", 10, False),
    ]
    assert len(found["needles"]) == 3 * 2 * 2 and document.valid(found)
    shown = (tmp_path / "termination_gqa.md").read_text()
    assert "tracking in looped filler at 1,000 tokens: not solved by full attention" in shown
    assert "recall, generated" in shown and "termination_gqa-tasks.svg" in shown
    code, _, err = run("termination", gqa_path, *small, *asked, "--tasks", "needle")
    assert code == 2 and "--tasks has 'needle'; expected some of single, multi-key" in err


def test_a_report_of_csa_says_what_published_keep_sets_allow(run, csa_path, tmp_path):
    code, out, err = run(
        "termination", csa_path, "--context", 300, "--queries", 4, "--tile", 2, "--numerics", "fp32", "--out", tmp_path
    )
    assert code == 0, err
    found = json.loads((tmp_path / "termination_csa.json").read_text())
    assert {r["order"] for r in found["rows"]} == {"CSA, best first", "HCA, newest first"} and found["needles"] is None
    flash = {g["tile"]: g for g in found["geometries"] if g["name"].startswith("CSA of flash")}
    assert (flash[128]["tiles"], flash[128]["skipped_at_most"]) == (5, 0) and (
        flash[64]["tiles"],
        flash[64]["read_at_least"],
    ) == (10, 6)
    assert "CSA of flash" in out and "published keep-sets" in (tmp_path / "termination_csa.md").read_text()


def test_what_changes_no_figure_is_said():
    """An ablation in which no row differs, and a sweep along which none does; not one that differs in one figure of one
    value."""
    row = lambda order, varied, skipped, phi=1e-3, **more: (
        {
            "order": order,
            "context": 2048,
            "varied": varied,
            "tau": 1e-5,
            "phi": phi,
            "patience": 5,
            "skipped": skipped,
            "error_max": 0.5,
        }
        | more
    )
    rows = [
        row("a", "as it is", 0.1),
        row("a", "without scale", 0.2),
        row("a", "without direction", 0.1),
        row("a", "without patience", 0.1, error_max=0.6),
        row("a", "phi", 0.1, 1e-6),
        row("a", "phi", 0.1, 0.1),
        row("b", "as it is", 0.2),
        row("b", "without direction", 0.2),
        row("b", "phi", 0.1, 1e-6),
        row("b", "phi", 0.2, 0.1),
    ]
    assert document.idle(rows) == [
        {"order": o, "context": 2048, "varied": name}
        for o, name in (("a", "without direction"), ("a", "phi"), ("b", "without direction"))
    ]
    (said,) = markdown.without_effect({"varied": rows})
    assert said.splitlines()[2:] == [
        "- **sweeping φ**: a at 2,048 tokens.",
        "- **without direction**: a; b at 2,048 tokens.",
    ]
    assert markdown.without_effect({"varied": rows[:2]}) == [] and "cannot tell" in said


def test_terminated_variants_stop_and_are_put_back(gqa):
    """A rule that stops at once loses what is distant; one that never stops changes no bit."""
    ids = torch.randint(0, 300, (400,), generator=torch.Generator().manual_seed(0)).tolist()
    asked, before, dense = [Asked(ids, [1, 2, 3])], gqa.attention, of_policy(measure.Policy("dense", dense=True)).policy
    eager, seen = Termination(tau=1e9, phi=2, patience=1, tile=64), {}
    for name, rule in {"never": Termination(tau=0, tile=64), "at once": eager, "none": None}.items():
        count = measure.Count()
        variant = measure.terminated(dense, rule, count)

        def way(cache, variant=variant):
            return variant.resumed(gqa, cache)

        with variant.on(gqa):
            cache = gqa.new_cache(1, 420)
            gqa.append(torch.tensor([ids[:-1]]), cache, prompt=True)
            seen[name] = gqa.append(torch.tensor([ids[-1:]]), cache)
            tiles = [t for t in gqa.tiles if t is not None]
            assert bool(tiles) == (rule is not None) and (
                not tiles or int(tiles[0].max()) == {"never": 7, "at once": 2}[name]
            )
            # the prompt, which is read whole, is not counted
            assert count.skipped == {"never": 0, "at once": 1 - 2 / 7, "none": None}[name]
        assert replies_by(gqa, asked, Limits(500, 64), {"": way}, decoded=32)[""] and gqa.attention is before
    assert torch.equal(seen["never"], seen["none"]) and not torch.allclose(seen["at once"], seen["none"], atol=1e-2)


def test_needles_are_asked_in_one_traversal(monkeypatch):
    """As many traversals as a GPU makes would each have too few tiles to stop; and counts start anew by row."""
    rules, policy = [], measure.Policy("dense", dense=True)
    real = measure.terminated
    monkeypatch.setattr(measure, "terminated", lambda p, rule, count: rules.append(rule) or real(p, rule, count))

    def found(model, ways, *given, about):
        rows = []
        for skipped in (0, 3):
            for way in ways[1:]:
                way_count = next(r.count for r in readings if r.variant is way)
                way_count.read, way_count.there = 4 - skipped, 4
            rows += [about(way) for way in ways]
        return rows

    readings = []
    made = measure._Reading
    monkeypatch.setattr(measure, "_Reading", lambda *given: readings.append(made(*given)) or readings[-1])
    monkeypatch.setattr(measure.needles, "found", found)
    settings = SimpleNamespace(
        rule=Termination(least=9), looser=(0.5,), seed=0, tasks=(), together=1, asked=(), needles=1
    )
    rows = measure.hidden_needles(None, [policy], None, None, settings, None, None)
    assert [rule and (rule.tau, rule.splits, rule.least) for rule in rules] == [None, (1e-5, 1, None), (0.5, 1, None)]
    assert [(r["tau"], r["skipped"]) for r in rows] == [
        (t, None if t is None else s) for s in (0, 0.75) for t in (None, 1e-5, 0.5)
    ]
    assert [r.get("status") for r in rows] == [None, "VACUOUS", "VACUOUS", None, "MEASURED", "MEASURED"]


def test_a_report_leaves_out_what_says_nothing():
    """Layers in which neither stops, ablations and sweeps that changed no figure; and it says where no rule left out a
    tile of needles."""
    figure = {"skipped": 0.2, "error_p99": 0.5, "decided": 0.0, "whole": {"decided": 0.0}}
    rows = [figure | {"layer": layer, "decided": share} for layer, share in ((0, 0.0), (1, 0.1), (None, 0.0))]
    assert [r["layer"] for r in markdown._decided(rows)] == [1, None]
    verdict = {"context": 700, "order": "a", "skipped": 0.2, "error_p99": 0.5, "pays": False}
    row = {"haystack": "prose", "context": 700, "order": "a", "hits": 3, "trials": 4}
    asked = [row | {"tau": None, "skipped": None}, row | {"tau": 0.1, "skipped": 0.0}]
    said = markdown._reading({"verdicts": [verdict, verdict | {"order": "b", "skipped": 0}], "needles": asked})
    assert said.splitlines() == [
        "- 700 tokens: **pays in none of 2 orders**. Most is skipped of a: 20.00 % of the tiles, 99th percentile of "
        "the relative error 0.5.",
        "- 700 tokens, needles in prose, of 4 found, read to the end and by rule: a: 3; 3 (τ = 0.1, 0.00 % skipped).",
        "- **Needles: no rule left out a tile, so they say nothing about the rules.**",
    ]
    asked[1]["skipped"] = 0.25
    said = markdown._reading({"verdicts": [verdict | {"skipped": 0}], "needles": asked})
    assert "Nothing is skipped." in said and "25.00 % skipped" in said and "nothing about the rules" not in said
