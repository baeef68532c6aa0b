"""The race of block sizes as a report: sizes that did not run take part as expected, and files give the same report
again."""

import dataclasses
import json
import re
import shutil
from pathlib import Path

import pytest

from dsv4 import load_model
from dsv4.speculation import Static, simulate
from dsv4.speculation.trace import mixed, stationary, write_trace
from scripts import bench_speculation
from scripts.bench import report, speculation, speculation_gpu, speculation_traces
from scripts.bench.speculation_costs import moe
from scripts.bench.speculation_gpu import part
from scripts.bench.speculation_race import Race

COSTS = dataclasses.replace(
    moe(), batches={n: moe().of(n) for n in (1, 8)}, provenance={"kind": "modelled", "command": "x"}
)
TRACES = [
    ("stationary", stationary("high", 0.95, requests=8, tokens=64, seed=2)),
    ("mixed", mixed("m", 0.95, 0.3, 12, requests=8, tokens=64, seed=2)),
]
TOKENS = {1: 20, 8: 12}


@pytest.fixture(scope="module")
def model(brief_golden):
    return load_model(brief_golden, numerics="fp32", mtp=True)


@pytest.fixture(scope="module")  # over 5 s: each policy really runs each trace in each batch
def race(model) -> Race:
    """Of sizes 0, 2 and 8, batches 1 and 8. Seconds are those of the costs, so that what is measured is what is
    expected."""
    ran = [
        r
        for batch, tokens in TOKENS.items()
        for r in speculation_gpu.race(model, TRACES, COSTS, batch, 24, tokens, (0, 2, 8), lambda line: None)
    ]
    for r in ran:
        r.seconds = r.tokens / r.expected
    return Race("golden", report.provenance("x"), COSTS, TRACES, TOKENS, ran)


@pytest.fixture(scope="module")
def written(race, tmp_path_factory) -> Path:
    """The folder of its report, not to be written to."""
    folder = tmp_path_factory.mktemp("race")
    race.write(folder, "golden")
    return folder


def test_all_sizes_race_unless_told_otherwise():
    assert bench_speculation.arguments([]).static == list(range(9))


def test_sizes_that_did_not_run_take_part_as_expected(race, written):
    unraced = list(race.unraced())
    assert [(p.trace, p.batch, p.policy) for p in unraced[:6]] == [
        ("high", 1, f"static {k}") for k in (1, 3, 4, 5, 6, 7)
    ] and len(unraced) == 24
    for p in unraced:
        trace = next(t for _, t in TRACES if t.name == p.trace)
        run = simulate(Static(int(p.policy[-1])), part(trace, p.batch, TOKENS[p.batch]), COSTS, p.batch, ahead=2)
        assert p.expected and (p.tokens_per_second, p.passes, p.tokens) == (
            run.tokens_per_second,
            run.passes,
            run.tokens,
        )
    for group in speculation.groups(race.points()).values():
        speeds = {p.policy: p.tokens_per_second for p in group if p.static}
        best, _ = speculation.references(group)
        assert len(speeds) == 9 and best.policy == max(speeds, key=speeds.get)
        assert best.expected == (best.policy not in ("no speculation", "static 2", "static 8"))
    document = json.loads((written / "bench_speculation_golden.json").read_text())
    text = (written / "bench_speculation_golden.md").read_text()
    expected = [v for v in document["goals"] if v["expected"]]
    assert expected and all(v["of"] == "best static size" for v in expected)
    for v in expected:
        aware = next(p for p in document["points"] if all(p[key] == v[key] for key in ("policy", "trace", "batch")))
        best = next(
            p
            for p in document["points"]
            if (p["policy"], p["trace"], p["batch"]) == (v["reference"], v["trace"], v["batch"])
        )
        assert (
            v["measured"] == aware["tokens_per_second"] / best["tokens_per_second"]
            and best["expected"]
            and aware["best_static_expected"]
        )
        assert (
            f"| {v['policy']} | {v['trace']} | {v['batch']} | best static size ({v['reference']}, expected) | "
            f"{v['measured']:.3f} |" in text
        )
        assert f"| {v['trace']} | {v['batch']} | {v['reference']}, expected | {best['tokens_per_second']:.0f} |" in text
        ran = (
            f"| {v['trace']} | {v['batch']} | {v['policy']} | {aware['tokens']} | {aware['passes']} | "
            f"{aware['tokens_per_second']:.0f} | {v['measured']:.3f} |"
        )
        assert ran in text  # as it really ran: of the same best size
    assert "takes part as expected" in text


def known(tmp_path) -> list[str]:
    """Arguments that name the traces."""
    for _, trace in TRACES:
        write_trace(trace, tmp_path / f"{trace.name}.trace.json")
    return [a for kind, trace in TRACES for a in ("--trace", f"{kind}={tmp_path / trace.name}.trace.json")]


def test_a_report_is_drawn_again_from_its_json(written, tmp_path):
    for folder in "bc":
        (tmp_path / folder).mkdir()
    shutil.copytree(written, tmp_path / "a")
    again = lambda source, out, *more: bench_speculation.main(
        [
            "--from",
            *(str(tmp_path / s / "bench_speculation_golden.json") for s in source),
            "--out",
            str(tmp_path / out),
            *more,
        ]
    )
    files = lambda folder: {p.name: p.read_text() for p in (tmp_path / folder).iterdir()}
    assert again("a", "b", *known(tmp_path)) == 0 and files("b") == files("a") and len(files("a")) == 4
    old = json.loads(files("a")["bench_speculation_golden.json"])
    del old["setup"]["tokens"]  # as it was before sizes could be expected
    (tmp_path / "b" / "bench_speculation_golden.json").write_text(json.dumps(old))
    assert again("b", "c", *known(tmp_path)) == 0 and files("c") == files("a")


@pytest.mark.parametrize("more, taken", [([], "on_checkpoint"), (["--trace", "default"], "traces_on_checkpoint")])
def test_a_checkpoint_with_traces_is_judged_by_them(monkeypatch, more, taken):
    called = []
    monkeypatch.setattr(bench_speculation.torch.cuda, "is_available", lambda: True)
    for name in ("on_checkpoint", "traces_on_checkpoint"):
        monkeypatch.setattr(bench_speculation, name, lambda args, name=name: called.append((name, args.tokens)))
    assert bench_speculation.main(["--checkpoint", "demo", *more]) == 0
    assert called == [(taken, [1536, 256, 256] if more else [384] * 3)]
    assert len(bench_speculation.given_traces(bench_speculation.arguments(more))) == 6


def split(race: Race, batch: int) -> Race:
    return dataclasses.replace(
        race,
        tokens={batch: TOKENS[batch]},
        ran=[r for r in race.ran if r.batch == batch],
        costs=dataclasses.replace(COSTS, batches={batch: COSTS.of(batch)}),
    )


def test_reports_of_several_batches_are_drawn_as_one(race, written, tmp_path):
    paths = [tmp_path / str(batch) / "bench_speculation_golden.json" for batch in TOKENS]
    one, eight = (split(race, batch) for batch in TOKENS)
    slower = dataclasses.replace(COSTS.of(1), draft=1.0)
    # measured, and cut off before it ran
    eight.costs = dataclasses.replace(COSTS, batches={1: slower} | eight.costs.batches)
    eight.tokens = {1: 99} | eight.tokens
    for found, path in zip((one, eight), paths):
        found.write(path.parent, "golden")
    assert bench_speculation.main(["--from", *map(str, paths), "--out", str(tmp_path / "both"), *known(tmp_path)]) == 0
    whole, both = ((folder / "bench_speculation_golden.md").read_text() for folder in (written, tmp_path / "both"))
    # its sizes, and as it ran
    assert both == whole and len(re.findall(r"^\| high \| [18] \| cost-aware", whole, re.M)) == 4


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda d: d["about"].update(commit="other"), "commit differ"),
        (lambda d: d["setup"].update(title="other"), "title differ"),
        (lambda d: None, "expected each in one file"),
        (lambda d: d["setup"].pop("ran"), "expected the JSON of a report"),
        (lambda d: d["about"].pop("torch"), "about has no torch"),
        (
            lambda d: d["setup"]["traces"][0].update(seed=3),
            "trace 'high' judged this race and is not among those given",
        ),
        (lambda d: d["setup"]["costs"]["batches"]["8"].update(draft=1.0), "another trace judged that race"),
        (
            lambda d: (
                d["setup"].pop("tokens"),
                d["setup"].update(ran=[r for r in d["setup"]["ran"] if r["policy"] != "no speculation"]),
            ),
            "neither in setup.tokens nor seen",
        ),
    ],
)
def test_files_that_do_not_belong_together_are_refused(written, tmp_path, capsys, change, message):
    first, second = written / "bench_speculation_golden.json", tmp_path / "second.json"
    document = json.loads(first.read_text())
    change(document)
    second.write_text(json.dumps(document))
    assert (
        bench_speculation.main(["--from", str(first), str(second), "--out", str(tmp_path / "out"), *known(tmp_path)])
        == 2
    )
    assert message in capsys.readouterr().err and not (tmp_path / "out").exists()


MEASURED = speculation_traces.ROOT / "audits" / "speculation"


def test_what_was_committed_of_the_h100_is_drawn_from_its_own_json(tmp_path):
    """Nothing in the tables was written by hand. The timeline is of today's policies."""
    path = MEASURED / "demo" / "h100" / "bench_speculation_demo_h100.json"
    assert bench_speculation.main(["--from", str(path), "--out", str(tmp_path)]) == 0
    drawn, kept = (json.loads(p.read_text()) | {"timeline": None} for p in (tmp_path / path.name, path))
    assert drawn == kept and (tmp_path / f"{path.stem}.md").read_text() == path.with_suffix(".md").read_text()


def test_a_report_without_its_rounds_is_not_drawn_again(tmp_path, capsys):
    path = MEASURED / "flash" / "h100" / "bench_speculation_h100.json"
    assert bench_speculation.main(["--from", str(path), "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "rounds" in error and not (tmp_path / "out").exists()


def test_traces_that_are_shipped_are_those_that_judged():
    """By what setup.traces of the committed report says of each."""
    document = json.loads((MEASURED / "flash" / "h100" / "bench_speculation_h100.json").read_text())
    known = [{"kind": kind, "name": t.name, **t.provenance} for kind, t in speculation_traces.default_traces()]
    assert document["setup"]["traces"] and all(judge in known for judge in document["setup"]["traces"])


def test_traces_judge_the_rounds_of_a_checkpoint(tmp_path, monkeypatch):
    """As on a GPU, with costs of a table: those of a CPU are no matter here."""
    costs = dataclasses.replace(COSTS, batches={1: COSTS.of(1)})
    monkeypatch.setattr(speculation_gpu, "measure_costs", lambda *given: costs)
    args = bench_speculation.arguments(
        [
            "--checkpoint",
            str(speculation_traces.ROOT / "demo"),
            "--numerics",
            "fp32",
            "--batch",
            "1",
            "--tokens",
            "12",
            "--static",
            "1",
            "--context",
            "70",
            "--out",
            str(tmp_path),
            *known(tmp_path),
        ]
    )
    bench_speculation.traces_on_checkpoint(args, "cpu")
    document = json.loads((tmp_path / "bench_speculation_demo_traces_cpu.json").read_text())
    assert [(r["policy"], r["trace"], r["same"]) for r in document["setup"]["ran"]] == [
        (policy, trace.name, None) for policy in ("static 1", "ASBS", "cost-aware", "oracle") for _, trace in TRACES
    ]
    assert {(v["of"], v["trace"]) for v in document["goals"]} == {
        (of, t.name) for of in ("best static size", "oracle") for _, t in TRACES
    }
    assert (
        sum(p["expected"] for p in document["points"]) == 2 * 8
        and (tmp_path / "speculation_costs_demo_traces_cpu.json").exists()
    )
