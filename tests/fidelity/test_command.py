"""`dsv4 fidelity`: what it writes, what it refuses, with a DeepSeek-V4 checkpoint and with a GQA one."""

import copy
import json
import shutil

import pytest

from dsv4.commands.console import budgets
from dsv4.errors import InputError
from dsv4.probes.measure.base import plots as base_plots
from dsv4.probes.measure.fidelity import document, markdown, plots
from dsv4.probes.measure.fidelity.settings import EFFORTS, settle
from tests.dsv4.test_cli import ROOT, demo  # noqa: F401  (fixture: a checkpoint with a tokenizer)
from tests.texts import PROSE

SMALL = ("--effort", "quick", "--rows", 2, "--tail", 24, "--new-tokens", 6, "--queries", 16)


@pytest.fixture(scope="module")
def prose(tmp_path_factory):
    file = tmp_path_factory.mktemp("prose") / "prose.txt"
    file.write_text(PROSE * 4)
    return file


# Over 5 s: the whole command at two contexts with needles, and each figure drawn twice.
def test_a_report_of_csa(run, demo, prose, tmp_path):
    given = (
        "fidelity",
        demo,
        *SMALL,
        "--text",
        prose,
        "--context",
        "160,240",
        "--topk",
        "2,6,50",
        "--needles",
        1,
        "--numerics",
        "fp32",
    )
    code, out, err = run(*given, "--out", tmp_path)
    assert code == 0, err
    for part in (
        "prose.txt",
        "k = 6 (own)",
        "window only",
        "VACUOUS",
        "greedy continuations",
        "looped filler",
        "0 of 1",
        "97.5 %",
    ):
        assert part in out, part
    found = json.loads((tmp_path / "fidelity_c_csa.json").read_text())
    assert (
        document.valid(found)["family"] == "csa" and [v["name"] for v in found["variants"]][0] == "dense over entries"
    )
    rows = {(r["variant"], r["context"]): r for r in found["rows"]}
    assert [rows["k = 50", n]["status"] for n in (160, 240)] == ["VACUOUS", "MEASURED"] and rows["k = 50", 160][
        "kl"
    ] == 0
    assert rows["k = 50", 160]["agreement"] == 1 and rows["k = 50", 160]["continuations"]["prefixes"] == [6, 6]
    assert rows["k = 2", 240]["kl"] > rows["k = 50", 240]["kl"] and rows["k = 2", 240]["positions"] == 2 * 24
    assert {r["status"] for r in found["findability"] if (r["variant"], r["context"]) == ("k = 50", 160)} == {"VACUOUS"}
    assert (
        len(found["needles"]["rows"]) == 5 * 2 * 2
        and found["needles"]["beyond"] == 40
        and str(tmp_path) not in json.dumps(found)
    )
    shown = (tmp_path / "fidelity_c_csa.md").read_text()
    for part in (
        "## Greedy continuations",
        "## Needles",
        "## What the selector keeps",
        "**VACUOUS**",
        "## Provenance",
        "has no dense mode",
    ):
        assert part in shown, part
    for name in ("by-budget", "findability", "by-layer", "needles"):
        file = f"fidelity_c_csa-{name}.svg"
        assert file in shown and "<svg" in (tmp_path / file).read_text()
    assert (
        set(plots.draw(found).values()) == {f.read_text() for f in tmp_path.glob("*.svg")}
        and sorted(f.suffix for f in tmp_path.iterdir()) == [".json", ".md"] + [".svg"] * 4
    )


def test_a_report_of_policies(run, gqa_path, prose, tmp_path):
    code, out, err = run(
        "fidelity",
        gqa_path,
        *SMALL,
        "--text",
        prose,
        "--context",
        700,
        "--policy",
        "dense,sink-window,block-bound,snapkv",
        "--budget",
        "64,128,0.2",
        "--block",
        16,
        "--needles",
        1,
        "--numerics",
        "fp32",
        "--json",
        "--out",
        tmp_path,
    )
    assert code == 0, err
    found = json.loads(out)
    assert found == json.loads((tmp_path / "fidelity_gqa_gqa.json").read_text()) and found["family"] == "gqa"
    assert [v["name"] for v in found["variants"]] == [
        "dense",
        *(f"{p}, {n} tokens" for p in ("sink+window", "block-16 bound") for n in (64, 128)),
        *(f"snapkv, {n} of the prompt" for n in ("64 tokens", "128 tokens", "20%")),
    ]
    budgets = {r["variant"]: r["budget"] for r in found["rows"]}
    assert budgets["snapkv, 20% of the prompt"] == 140 and budgets["snapkv, 64 tokens of the prompt"] == 64
    assert (
        "Policies act in decoding alone" in found["prefill"]
        and len(found["rows"]) == 7
        and len(found["needles"]["rows"]) == 8 * 2
    )
    kept = {r["variant"]: r for r in found["findability"] if r["layer"] is None}
    some = kept["snapkv, 128 tokens of the prompt"]
    assert some["chance"] < some["mass_kept"] < some["mass_best"] and "snapkv, 20% of the prompt" in kept
    assert kept["sink+window, 128 tokens"]["findability"] == 0 < kept["block-16 bound, 64 tokens"]["findability"]


@pytest.mark.parametrize(
    "text,block,wanted",
    [
        ("8b,16b,32b", None, [1024, 2048, 4096]),
        ("8b", 16, [128]),
        ("1K,2b,0.2", None, [1024, 256, 0.2]),
        ("4KB", 16, [4096]),
    ],
)
def test_budgets_in_blocks_are_tokens(text, block, wanted):
    assert budgets(text, block) == wanted


@pytest.mark.parametrize("text", ["0b", "-8b", "1.5b", "8bb", "b"])
def test_no_number_of_blocks_is_an_error(text):
    with pytest.raises(InputError, match="--budget"):
        budgets(text)


# Over 5 s: the whole command twice, with needles.
def test_caches_in_host_memory_change_no_figure(run, gqa_path, prose):
    """Needles found, agreement, perplexity and continuations, to the last bit."""
    given = (
        "fidelity",
        gqa_path,
        *SMALL,
        "--text",
        prose,
        "--context",
        700,
        "--policy",
        "sink-window,block-bound,page-bound",
    )
    given += ("--budget", "4b,8b", "--block", 16, "--needles", 2, "--json")
    found = []
    for where in ("device", "host"):
        code, out, err = run(*given, "--kv-memory", where)
        assert code == 0, err
        found.append(json.loads(out))
    device, host = found
    for part in ("variants", "rows", "findability", "needles"):
        assert host[part] == device[part], part
    assert len(device["needles"]["rows"]) == 2 * 7 and {v["budget"] for v in device["variants"]} == {None, 64, 128}
    fetched = {row["operation"] for row in host["provenance"]["dispatch"]} - {
        row["operation"] for row in device["provenance"]["dispatch"]
    }
    assert fetched == {"fetch", "write_back"} and host["provenance"]["about"]["kv_memory"] == "host"


def test_host_memory_is_refused_where_nothing_is_staged(run, demo, gqa_path, prose):
    for given, said in (
        ((demo, "--topk", 2), "GQA checkpoints"),
        ((gqa_path, "--policy", "block-bound,snapkv"), "--policy snapkv, which keeps single tokens"),
        ((gqa_path, "--kv-memory", "disk"), "disk"),
    ):
        code, out, err = run("fidelity", *given[:1], *SMALL, "--text", prose, "--kv-memory", "host", *given[1:])
        assert code == 2 and out == "" and said in err.strip().splitlines()[-1], err


def test_other_words(run, demo, prose, tmp_path, monkeypatch):
    """No plots without matplotlib, and a note; no needles and no tokens when none are asked for, nor without a
    tokenizer."""
    monkeypatch.setattr(base_plots, "available", lambda: False)
    bare = shutil.copytree(demo, tmp_path / "bare")
    (bare / "tokenizer.json").unlink()
    code, out, err = run(
        "fidelity", bare, *SMALL, "--new-tokens", 0, "--context", 100, "--topk", 2, "--out", tmp_path / "out"
    )
    assert (
        code == 0 and base_plots.MISSING.split(":")[0] in out and "without a tokenizer" in out and "greedy" not in out
    ), err
    assert sorted(f.name for f in (tmp_path / "out").iterdir()) == ["fidelity_bare_csa.json", "fidelity_bare_csa.md"]
    code, out, err = run("fidelity", demo, *SMALL, "--text", prose, "--context", 90, "--topk", 2, "--needles", 2)
    assert code == 0 and "no needles at 90 tokens: they are asked in contexts from 105" in out


def test_settings_of_an_effort(csa):
    found = settle(csa, "standard", None, 3, rows=None, needles=7)
    assert (found.contexts, found.rows, found.needles, found.seed) == ((1024, 2048), EFFORTS["standard"].rows, 7, 3)
    assert settle(csa, "thorough", None, 0).contexts == (1024, 2048) and settle(
        csa, "quick", [300, 200, 300], 0
    ).contexts == (200, 300)


def test_the_schema_refuses_what_it_does_not_know():
    found = json.loads((ROOT / "audits" / "fidelity" / "demo" / "cpu" / "fidelity_demo_csa.json").read_text())
    assert document.valid(found) is found and "## Needles" in markdown.render(found, {})
    for spoil, said in (
        (lambda d: d["rows"][0].update(extra=1), "extra is unknown"),
        (lambda d: d["rows"][0].pop("kl"), "no kl"),
        (lambda d: d["needles"]["rows"][0].pop("chance"), "no chance"),
        (lambda d: d.update(family="other"), "expected one of"),
    ):
        other = copy.deepcopy(found)
        spoil(other)
        with pytest.raises(Exception, match=said):
            document.valid(other)
