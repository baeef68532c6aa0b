"""`dsv4 batch` with speculation, seen from outside: documents, the report's files, refusals in one line."""

import json
import xml.etree.ElementTree as ElementTree
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from dsv4.cache.paging import PagePool
from dsv4.commands.generate import speculation_notes
from dsv4.engine.plots import committed, svg
from dsv4.engine.report import markdown
from dsv4.engine.state import percentiles
from dsv4.engine.watch import POINTS, Watch
from tests.engine.conftest import random_ids

LINES = [
    {"id": "greedy", "token_ids": [5, 6, 7] * 4, "max_tokens": 20},
    {"id": "sampled", "token_ids": [9, 8], "max_tokens": 9, "temperature": 0.8},
    {"id": "too long", "token_ids": [1] * 5000},
]


@pytest.fixture
def requests(tmp_path):
    file = tmp_path / "two kinds.jsonl"
    file.write_text("\n".join(map(json.dumps, LINES)) + "\nnot JSON\n")
    return file


@pytest.fixture
def run(command_line, brief_golden):
    return partial(command_line, "batch", "--checkpoint", brief_golden, "--numerics", "fp32", "--rows", "2", "-q")


def documents(out: str) -> dict[str, dict]:
    return {d.get("id", "figures"): d for d in map(json.loads, out.splitlines())}


@pytest.mark.parametrize("method", ["mtp", "lookup"])
@pytest.mark.parametrize("draft_tokens", ["4", "adaptive"])
def test_the_command_line_drafts_and_gives_the_tokens_of_plain_decoding(run, requests, method, draft_tokens):
    code, out, err = run(requests, "--speculate", method, "--draft-tokens", draft_tokens)
    plain, found = documents(run(requests)[1]), documents(out)
    assert (
        code == 1
        and len(found) == 5
        and [found[name]["error"]["type"] for name in ("too long", "line 4")] == ["ContextOverrun", "InputError"]
    )
    for name in ("greedy", "sampled"):
        d = found[name]
        assert (
            d["token_ids"] == plain[name]["token_ids"]
            and d["speculation"] == method
            and plain[name]["speculation"] == "off"
        )
        assert (
            len(d["token_ids"]) == 1 + len(d["block_size_history"]) + d["accepted"]
            and sum(d["block_size_history"]) == d["drafted"]
        )
        assert (
            len(d["inter_token_seconds"])
            == len(d["token_ids"]) - 1
            == d["inter_token_seconds"].count(0.0) + len(d["block_size_history"])
        )
        assert d["inter_token_percentiles_seconds"]["p99"] > 0 and d["time_to_first_token_seconds"] > 0
        assert (
            plain[name]["block_size_history"] == [0] * (len(d["token_ids"]) - 1) and plain[name]["acceptance"] is None
        )
    assert max(found["greedy"]["block_size_history"]) == {"4": 4, "adaptive": 8}[draft_tokens] or method == "lookup"
    assert found["figures"]["figures"]["notes"] == []


def test_the_report_holds_the_figures_of_the_run(run, requests, tmp_path):
    code, out, err = run(requests, "--speculate", "mtp", "--report", tmp_path / "new" / "reports")
    files = {p.name: p for p in (tmp_path / "new" / "reports").iterdir()}
    assert code == 1 and err == "" and set(files) == {f"batch_two kinds{suffix}" for suffix in (".json", ".md", ".svg")}
    report, found = json.loads(files["batch_two kinds.json"].read_text()), documents(out)
    assert {r["id"]: r for r in report["requests"]} == {name: d for name, d in found.items() if name != "figures"}
    assert report["figures"] == found["figures"]["figures"]
    greedy, sampled = found["greedy"], found["sampled"]
    assert report["totals"] == {
        "requests": 4,
        "failed": 2,
        "tokens": 29,
        "passes": len(greedy["block_size_history"] + sampled["block_size_history"]),
        "drafted": greedy["drafted"] + sampled["drafted"],
        "accepted": greedy["accepted"] + sampled["accepted"],
        "acceptance": (greedy["accepted"] + sampled["accepted"]) / (greedy["drafted"] + sampled["drafted"]),
        "last_token_seconds": max(
            d["time_to_first_token_seconds"] + sum(d["inter_token_seconds"]) for d in (greedy, sampled)
        ),
    }
    assert report["latency_seconds"]["inter_token"] == percentiles(
        greedy["inter_token_seconds"] + sampled["inter_token_seconds"]
    )
    assert (
        report["about"]["speculate"] == "mtp"
        and report["about"]["draft tokens"] == "1"
        and report["about"]["rows"] == 2
    )
    shares = report["figures"]["live_share"]
    assert all(
        len(course) == report["figures"]["steps"] and 0 <= min(course) <= max(course) <= 1 for course in shares.values()
    )
    assert min(shares["window"]) > 0 and max(shares["mtp window"]) > 0
    text = files["batch_two kinds.md"].read_text()
    assert (
        f"{greedy['accepted'] + sampled['accepted']} of {greedy['drafted'] + sampled['drafted']} drafts accepted"
        in text
    )
    assert (
        f"| greedy | max_tokens | 20 | {len(greedy['block_size_history'])} | {greedy['drafted']} |" in text
        and "ContextOverrun" in text
    )
    drawing = files["batch_two kinds.svg"].read_text()
    ElementTree.fromstring(drawing)
    assert all(
        word in drawing
        for word in ("“greedy”", "“sampled”", "pressure, over 85 %", "csa entries", "time to first token, ms")
    )
    assert drawing == svg("two kinds", report), "the same bytes for the same figures"


@pytest.mark.few(pool_tokens=[None])
@pytest.mark.parametrize("pool_tokens", [None, 4000])
def test_pools_of_the_default_size_are_not_under_pressure(command_line, model, long_golden, tmp_path, pool_tokens):
    """Eight rows at their longest: pages of entries span many tokens, so that a row's first one counts as much as a
    full one."""
    file = tmp_path / "r.jsonl"
    lines = [{"token_ids": random_ids(model, 290, seed=i).tolist(), "max_tokens": 10} for i in range(8)]
    file.write_text("\n".join(map(json.dumps, lines)))
    sized = [] if pool_tokens is None else ["--pool-tokens", pool_tokens]
    code, out, err = command_line(
        "batch", file, "--checkpoint", long_golden, "--numerics", "fp32", "--speculate", "mtp", *sized
    )
    figures = documents(out)["figures"]["figures"]
    assert code == 0 and figures["share_of_steps_under_pressure"] == 0 and figures["evictions"] == 0


def test_a_run_without_results_is_reported_too(run, tmp_path):
    file = tmp_path / "none.jsonl"
    file.write_text("not JSON\n")
    code, out, err = run(file, "--report", tmp_path)
    report = json.loads((tmp_path / "batch_none.json").read_text())
    assert code == 1 and report["totals"]["requests"] == 1 == report["totals"]["failed"]
    assert report["latency_seconds"]["inter_token"] is None
    assert "nothing was measured that could be drawn" in (tmp_path / "batch_none.svg").read_text()


def test_hostile_names_do_not_break_a_table_or_a_legend(run, tmp_path):
    file = tmp_path / "r.jsonl"
    file.write_text(
        "\n".join(
            json.dumps({"id": name, "token_ids": [1], "max_tokens": 3})
            for name in ("a|b", "_hidden", "$x^", "<svg>\n", "\udcff")
        )
    )
    code, out, err = run(file, "--report", tmp_path)
    assert code == 0 and err == ""
    ElementTree.fromstring((tmp_path / "batch_r.svg").read_text())
    report = json.loads((tmp_path / "batch_r.json").read_text())
    rows = [line for line in markdown("r", report).splitlines() if " max_tokens |" in line]
    assert len(rows) == 5 and all(line.replace("\\|", "").count("|") == 15 for line in rows)


@pytest.mark.parametrize(
    "options, message",
    [
        (["--draft-tokens", "3"], "add --speculate"),
        (["--speculate", "mtp", "--draft-tokens", "0"], "1 to 8, adaptive or cost-aware"),
        (["--speculate", "lookup", "--draft-tokens", "9"], "expected 1 to 8"),
        (["--speculate", "eagle"], "--speculate takes off, mtp or lookup; got 'eagle'"),
    ],
)
def test_bad_options_are_one_line(run, requests, options, message):
    code, out, err = run(requests, *options)
    assert code == 2 and out == "" and err.count("\n") == 1 and message in err and "Traceback" not in err


def test_a_report_that_cannot_be_written_is_refused_before_the_run(run, requests, tmp_path, monkeypatch):
    code, out, err = run(requests, "--report", requests / "below a file")
    assert code == 2 and out == "" and err.count("\n") == 1 and "--report" in err and "can be made" in err
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    code, out, err = run(requests, "--report", tmp_path)
    assert code == 2 and out == "" and err.count("\n") == 1 and "matplotlib is not installed" in err


def test_a_file_of_the_report_is_written_whole_or_not_at_all(run, requests, tmp_path):
    (tmp_path / "batch_two kinds.md").mkdir()  # in the place of the second file
    code, out, err = run(requests, "--report", tmp_path)
    assert code == 2 and err.count("\n") == 1 and "batch_two kinds.md cannot be written" in err
    assert (
        not list(tmp_path.glob("*.partial"))
        and json.loads((tmp_path / "batch_two kinds.json").read_text())["totals"]["tokens"] == 29
    )


def test_a_checkpoint_without_the_block_is_told_about_lookup(command_line, requests, tmp_path):
    from tests import checkpoints

    raw = {
        **checkpoints.SMALL,
        "num_nextn_predict_layers": 0,
        "compress_ratios": checkpoints.SMALL["compress_ratios"][:-1],
    }
    path = checkpoints.write_official(tmp_path / "c", raw)
    code, out, err = command_line("batch", requests, "--checkpoint", path, "--speculate", "mtp")
    assert code == 2 and out == "" and err.count("\n") == 1 and "use --speculate lookup" in err


def test_where_rounding_may_choose_otherwise_it_is_said(command_line, requests, brief_golden):
    """Where passes are exact it is not: on a host's backends, and where they are captured, while each request runs
    alone."""
    out = command_line("batch", requests, "--checkpoint", brief_golden, "--speculate", "lookup")[1]
    assert documents(out)["figures"]["figures"]["notes"] == []

    def of(numerics: str, backend: str, device: str = "cpu", together: bool = False) -> list[str]:
        return speculation_notes(
            SimpleNamespace(
                numerics=SimpleNamespace(name=numerics), backend=backend, replacements={}, device=torch.device(device)
            ),
            together,
        )

    assert not of("fp32", "triton") and not of("native", "cpu") and not of("native", "triton", "cuda")
    assert all(
        "two tokens are close" in notes[0]
        for notes in (of("native", "triton"), of("qat", "triton", "cuda", True), of("qat", "cpu", together=True))
    )
    out = command_line(
        "batch", requests, "--checkpoint", brief_golden, "--numerics", "native", "--speculate", "lookup", "--together"
    )[1]
    assert len(documents(out)["figures"]["figures"]["notes"]) == 1


def test_committed_tokens_are_those_before_each_pass():
    assert committed({"accepted_history": [3, 0, 1]}) == [1, 5, 6]


def test_a_long_course_is_kept_coarser_and_loses_no_peak():
    class Cache:
        pools = {"pool": PagePool("pool", 10_000)}
        under_pressure = False

        def figures(self):
            return {"pool": {"fragmentation": 0.0}}

    cache = Cache()
    watch, peaks = Watch(cache), []
    for step in range(3 * POINTS):
        cache.pools["pool"].free = [0] * (10_000 - step % 700)
        watch.look()
        watch.step()
        peaks.append(step % 700)
    assert watch.every == 4 and len(watch.live["pool"]) == 3 * POINTS // 4 and max(watch.live["pool"]) == 699
    assert watch.live["pool"] == [max(peaks[i : i + 4]) for i in range(0, len(peaks), 4)]
