"""From process start to the first token: phases are read from what `generate --verbose` says."""

import io

import pytest
from rich.console import Console

from dsv4.commands import tables
from scripts import measure_start

TIMINGS = {"import_torch_seconds": 2.0, "import_seconds": 2.75, "load_seconds": 0.5, "capture_seconds": 0.0}
DOCUMENT = {"timings": TIMINGS, "layout": "official", "host_memory": None, "speculation": None, "placement": {}}


def said(document: dict) -> str:
    console = Console(file=io.StringIO(), width=200)
    tables.generation(document | {"load": None, "layers": [], "dispatch": []}, console)
    return console.file.getvalue() + "prefill 1.0 tokens/s, first token after 0.25 s"


def test_phases_add_up_to_the_first_token():
    found = measure_start.phases(said(DOCUMENT), 4.0)
    assert found == pytest.approx({"torch": 2.0, "dsv4": 0.75, "loading": 0.5, "prompt": 0.25, "other": 0.5})


def test_a_process_that_says_none_has_none():
    assert measure_start.phases("error: out of memory", 4.0) == {}


def test_every_line_of_the_table_has_its_columns():
    row = {"kind": "full", "exit": 0, "seconds": 5.0, "first_token_seconds": 4.0}
    row |= {"phases": measure_start.phases(said(DOCUMENT), 4.0)}
    bare = {"kind": "empty", "exit": 2, "seconds": 1.0, "why": "it said nothing"}
    about = {"device": "d", "torch": "t", "triton": "t", "commit": "c", "command": "x"}
    drawn = [line for line in measure_start.markdown([row, bare], about).splitlines() if line.startswith("|")]
    assert len(drawn) == 4 and len({line.count("|") for line in drawn}) == 1
    assert "| full | 4.0 | 2.00 | 0.75 | 0.50 | 0.25 | 0.50 | 5.0 |" in drawn[2]


def test_processes_have_byte_code_of_their_own_folder(monkeypatch):
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    args = measure_start.arguments([])
    args.byte_code = "there"
    env = measure_start.environment(args, "cache")
    assert env["PYTHONPYCACHEPREFIX"] == "there" and "PYTHONDONTWRITEBYTECODE" not in env
