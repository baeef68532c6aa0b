"""probes/subjects/README.md, followed to the letter: its code is written to files, its commands are run."""

import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest
import torch

from dsv4.probes import subjects
from dsv4.probes.compare import tokens
from dsv4.probes.report import json_report
from dsv4.probes.subject import POINTS
from dsv4.probes.subjects.ours import OurSubject

README = (Path(subjects.__file__).parent / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", README, re.M | re.S)
(EXAMPLE,) = [code for kind, code in BLOCKS if kind == "python" and "class EngineSubject" in code]
(COMMANDS,) = [code.strip().split("\n") for kind, code in BLOCKS if not kind and "my_engine:factory" in code]
(DUMPS,) = [code for kind, code in BLOCKS if kind == "python" and "write_dump(" in code]


@pytest.fixture
def folder(tmp_path, monkeypatch, official):
    """Where the example is saved, beside the implementation that it names."""
    (tmp_path / "my_engine.py").write_text(EXAMPLE)
    shutil.copy(Path(__file__).parent / "engine_x.py", tmp_path)
    shutil.copytree(official, tmp_path / "CHECKPOINT")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    for name in ("my_engine", "engine_x"):
        sys.modules.pop(name, None)


@pytest.fixture
def follow(monkeypatch, capsys):
    """Function: a line of the README → (exit code, stdout, stderr)."""
    from dsv4.commands import cli

    def call(line):
        monkeypatch.setattr(sys, "argv", shlex.split(line))
        with pytest.raises(SystemExit) as stop:
            cli.main()
        return stop.value.code or 0, *capsys.readouterr()

    return call


def test_the_example_and_its_commands_work(folder, follow):
    conform, audit, record, recorded = COMMANDS
    code, said, err = follow(conform)
    assert code == 0, said + err
    lines = dict(re.findall(r"^  (\w+) +(given|missing)", said, re.M))
    shown = {"attn_in", "attn_out", "ffn_out", "streams", "compressed_kv", "logits"}
    assert {name for name, how in lines.items() if how == "given"} == shown
    assert set(POINTS) <= lines.keys() and "selection      missing; would unlock recorded" in said
    code, said, err = follow(f"{audit} --probe mhc --out report")
    assert code == 0, err
    report = json_report.load(next((folder / "report").glob("*.json")))
    statuses = {section["probe"]: section["status"] for section in report["sections"]}
    assert statuses == dict.fromkeys(("mhc",), "PASS")
    code, said, err = follow(record)
    assert code == 0 and (folder / "run.safetensors").is_file()
    code, said, err = follow(f"{recorded} --probe recorded")
    assert code == 0 and "recorded" in err and "FAIL" not in err


def test_the_points_are_those_of_the_model(folder, official):
    sys.path.insert(0, str(folder))
    from my_engine import factory

    ours, theirs = OurSubject(official), factory(official)
    ids = tokens(ours, 140, 0, rows=2)
    wanted = ours.run(ids, (100, 39, 1), tuple(POINTS))
    found = theirs.run(ids, (100, 39, 1), tuple(POINTS))
    assert {point for _, point in found.points} == {"attn_in", "attn_out", "ffn_out", "streams", "compressed_kv"}
    assert all(torch.equal(value, wanted.points[key]) for key, value in found.points.items())
    assert torch.equal(found.logits, wanted.logits)


def test_the_lines_about_dumps_work(tmp_path, monkeypatch, official):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(official, tmp_path / "checkpoint")
    ours = OurSubject(official)
    ids = tokens(ours, 102, 0)
    capture = ours.run(ids, (100, 1, 1), tuple(POINTS))
    exec(compile(DUMPS, "README.md", "exec"), {"capture": capture, "ids": ids})
    assert (tmp_path / "run.safetensors").is_file()


def test_the_page_names_every_point():
    assert all(f"| {point} |" in README for point in POINTS)
