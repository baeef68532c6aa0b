"""What the tests of the probes share."""

import runpy
import sys
import warnings

import pytest


@pytest.fixture
def run(command_line):
    """Function: `dsv4 audit` with these words → (exit code, what it said)."""
    return lambda *words: command_line("audit", *words)[::2]


@pytest.fixture
def by_itself(monkeypatch, capsys):
    """Function: `python -m dsv4.probes.NAME` with these words, in this process → (exit code, stdout, stderr)."""

    def call(name: str, *args):
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *map(str, args)])
        with pytest.raises(SystemExit) as stop, warnings.catch_warnings():
            warnings.filterwarnings("ignore", "'dsv4.probes", RuntimeWarning)  # other tests have imported it
            runpy.run_module(f"dsv4.probes.catalogue.{name}", run_name="__main__")
        return stop.value.code or 0, *capsys.readouterr()

    return call


@pytest.fixture
def quick(monkeypatch):
    """A self-test of only the probes that take no time."""
    from dsv4.probes.selftest import run as selftest

    monkeypatch.setattr(selftest, "available", lambda: ["edges", "memory_map"])
