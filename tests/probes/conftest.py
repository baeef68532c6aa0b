"""What the tests of the probes share."""

import sys

import pytest

from dsv4 import cli


@pytest.fixture
def run(monkeypatch, capsys):
    """Function: `dsv4 audit` with these words → (exit code, what it said)."""

    def call(*args):
        monkeypatch.setattr(sys, "argv", ["dsv4", "audit", *map(str, args)])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        return stop.value.code or 0, capsys.readouterr().err

    return call


@pytest.fixture
def quick(monkeypatch):
    """A self-test of only the probes that take no time."""
    from dsv4.probes import selftest

    monkeypatch.setattr(selftest, "available", lambda: ["edges", "memory_map"])
