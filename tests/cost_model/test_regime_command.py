"""`dsv4 regime`: what it writes, and errors of one line."""

import dataclasses
import json
import platform
import re
import shutil
from pathlib import Path

import pytest
import torch

from dsv4.commands.regime_inputs import dumped
from dsv4.cost_model import measure
from dsv4.probes.report import provenance
from tests.commands import exit_code

AUDITS = Path(__file__).resolve().parents[2] / "audits"
SMALL = (
    "regime",
    "measure",
    "--device",
    "cpu",
    "--contexts",
    "1K,2K,4K",
    "--batches",
    "1,2",
    "--heads",
    "4,2,16",
    "--budget",
    "512",
    "--rounds",
    "3",
    "--layers",
    "4",
    "--weights",
    "1M",
    "--capacity",
    "1G",
)


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """A run on this processor: (exit code, folder). Everything runs; the clock is one of a cost model, since that of a
    busy processor is noise."""

    folder, real = tmp_path_factory.mktemp("regime"), measure._fastest

    def by_bill(made, times, held_out):
        return [
            dataclasses.replace(m, seconds=1e-5 + m.bytes / 1e10 + 1e-8 * m.searched)
            for m in real(made, times, held_out)
        ]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure, "_fastest", by_bill)
        return exit_code(*SMALL, "--out", folder), folder


def test_it_measures_fits_predicts_and_draws(measured):
    code, folder = measured
    report = json.loads((folder / "regime_cpu.json").read_text())
    text, svg = ((folder / f"regime_cpu.{kind}").read_text() for kind in ("md", "svg"))
    failed = [g for g in report["quality"]["goals"] if g["verdict"] == "FAILED"]
    assert code == int(bool(failed) or "FAILED" in text)
    assert report["bill"]["bandwidth"] == pytest.approx(1e10) and set(report["bill"]["finding"]) == {
        "bound of 128",
        "bound of 16",
    }
    policies = ("sink+window", "block-128 bound", "page-16 bound")
    assert {(r["policy"], r["by"]) for r in report["rows"]} == {
        ("dense", "SDPA"),
        *((p, "reference") for p in policies),
    }
    assert "host processor" in text and "FAILED" in text if failed else True
    assert (
        svg.startswith("<?xml")
        and "hatched" in svg
        and json.loads((folder / "regime_cpu.predictions.json").read_text())["rows"]
    )
    from dsv4.cost_model.plot import svg as draw

    assert draw(report) == svg == draw(report)


def test_a_report_says_where_it_comes_from(measured):
    _, folder = measured
    about = json.loads((folder / "regime_cpu.json").read_text())["about"]
    text = (folder / "regime_cpu.md").read_text()
    found = provenance.commit()
    assert (
        about["commit"] == found["commit"]
        and about["torch"] == torch.__version__
        and about["python"] == platform.python_version()
    )
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", about["date"]) and {"triton", "dirty"} <= set(about)
    assert about["command"].startswith("dsv4 regime measure --device cpu") and str(folder) not in about["command"]
    assert (
        f"    {about['command']}\n" in text and f"commit {found['commit']}" in text and f"date {about['date']}" in text
    )


def test_the_map_of_other_hardware_says_that_nothing_was_measured_there(measured, command_line, tmp_path):
    _, folder = measured
    code, out, _ = command_line(
        "regime",
        "map",
        folder / "regime_cpu.json",
        "--name",
        "Big One",
        "--bandwidth",
        "4.8T",
        "--capacity",
        "2M",
        "--layers",
        9,
        "--weights",
        "1K",
        "--out",
        tmp_path,
    )
    report = json.loads((tmp_path / "regime_big_one.json").read_text())
    assert (
        code == 0
        and report["bill"]["bandwidth"] == 4.8e12
        and "Not measured on Big One" in out
        and report["hardware"]["layers"] == 9
    )
    assert not any(c["fits"] for c in report["map"] if c["context"] > 2048)
    assert (
        out.startswith("# Regime: when gqa 4,2,16 decode should read sparsely on Big One\n")
        and (tmp_path / "regime_big_one.svg").exists()
    )
    assert "| policy | batch | predicted |\n" in out and "measured between" not in out and "| not measured |" not in out


def test_a_map_replaces_only_a_map_of_the_same(measured, command_line, tmp_path, monkeypatch):
    _, folder = measured
    monkeypatch.chdir(tmp_path)
    draw = lambda file, *args: command_line("regime", "map", file, "--name", "H200", *args)
    assert (
        draw(folder / "regime_cpu.json")[0] == 0
        and (tmp_path / "regime_h200.json").exists()
        and not (tmp_path / "audits").exists()
    )
    assert draw(folder / "regime_cpu.json", "--capacity", "141G")[0] == 0  # the same, drawn again
    for stem in ("a10", "host_processor"):  # measured reports, one of hardware that is called as the map's is
        shutil.copy(folder / "regime_cpu.json", tmp_path / f"regime_{stem}.json")
    (tmp_path / "regime_b200.md").write_text("mine")
    for name in ("A10", "B200", "host processor"):
        code, out, err = command_line("regime", "map", folder / "regime_cpu.json", "--name", name)
        assert (
            code == 2
            and out == ""
            and err.count("\n") == 1
            and "--out or --name" in err
            and f"regime_{name.lower().replace(' ', '_')}." in err
        )
    assert (
        json.loads((tmp_path / "regime_a10.json").read_text())["rows"]
        and (tmp_path / "regime_b200.md").read_text() == "mine"
    )
    assert command_line("regime", "map", folder / "regime_cpu.json", "--name", "A10", "--force")[0] == 0
    assert not json.loads((tmp_path / "regime_a10.json").read_text())["rows"]


def test_a_map_of_csa_has_files_of_its_own(measured, command_line, tmp_path):
    _, folder = measured
    command_line("regime", "map", folder / "regime_cpu.json", "--name", "H200", "--out", tmp_path)
    gqa = (tmp_path / "regime_h200.json").read_text()
    code, out, _ = command_line(
        "regime",
        "map",
        AUDITS / "regime" / "csa" / "h100" / "regime_csa_h100.json",
        "--name",
        "H200",
        "--out",
        tmp_path,
    )
    assert code == 0 and "csa V4-Flash decode should read sparsely on H200" in out
    assert (tmp_path / "regime_h200.json").read_text() == gqa and json.loads(
        (tmp_path / "regime_csa_h200.json").read_text()
    )["map"]
    assert "21 layers" in out and "- Layers are the CSA layers of V4-Flash (21 of 43)" in out and "28 layers" not in out


@pytest.mark.parametrize(
    "args,message",
    [
        (["--heads", "7,2,16"], "divide the query heads"),
        (["--heads", "7"], "three numbers"),
        (["--policies", "quest"], "none of sink+window"),
        (["--budget", "100"], "multiple of 128"),
        (["--contexts", "big"], "not a size"),
        (["--contexts", "1000"], "multiple of 128"),
        (["--contexts", "1K", "--batches", "1"], "at least two"),
        (["--contexts", "128,256"], "price is unknown"),
        (["--device", "cuda:7"], "CUDA"),
        (["--out", "/proc/nowhere"], "cannot be written"),
    ],
    ids=lambda v: " ".join(v).replace("/", "|") if isinstance(v, list) else "",
)
def test_bad_requests_are_one_line_and_exit_2(command_line, tmp_path, args, message):
    code, out, err = command_line(*SMALL, "--out", tmp_path, *args)
    lines = err.strip().splitlines()
    assert (
        code == 2 and out == "" and lines[-1].startswith("error: ") and not any("Traceback" in line for line in lines)
    )
    assert message in lines[-1]


@pytest.mark.parametrize(
    "content,message",
    [
        ("{}", "expected a report"),
        ("no", "is not JSON"),
        ('{"format": "dsv4-regime", "version": 1}', "lacks 'source'"),
        ('{"format": "dsv4-regime", "version": 1, "source": {"kind": "rnn"}}', "of kind 'rnn'; expected"),
        ('{"format": "dsv4-regime", "version": 1, "source": {"kind": "csa", "index": "fp4"}}', "lacks 'bill'"),
    ],
    ids=["empty", "no JSON", "nothing in it", "another kind", "no cost model"],
)
def test_a_report_that_is_none_is_an_error(command_line, tmp_path, content, message):
    (tmp_path / "r.json").write_text(content)
    code, out, err = command_line("regime", "map", tmp_path / "r.json", "--out", tmp_path)
    assert code == 2 and err.count("\n") == 1 and message in err
    code, _, err = command_line("regime", "map", tmp_path / "r.json", "--out", tmp_path, "--bandwidth", "fast")
    assert code == 2 and err.count("\n") == 1


def test_json_has_a_row_a_line_and_loses_nothing():
    for value in (
        {},
        [],
        {"a": [], "b": {}},
        {"rows": [{"x": 1.5e-7, "ü": None, "long": "y" * n} for n in (1, 700, 900)], "z": [[1, [2, "b" * 900]]]},
    ):
        text = dumped(value)
        assert json.loads(text) == value and list(json.loads(text)) == list(value)
    assert len(text.splitlines()) == 20
