"""What the tests of the probes share."""

import sys

import pytest
import torch

from dsv4 import cli


@pytest.fixture(autouse=True, scope="module")
def one_thread(two_threads):
    torch.set_num_threads(1)  # matrices this small only wait for a second thread
    yield
    torch.set_num_threads(2)


@pytest.fixture
def run(monkeypatch, capsys):
    """Function: `dsv4 audit` with these words → (exit code, what it said)."""
    def call(*args):
        monkeypatch.setattr(sys, "argv", ["dsv4", "audit", *map(str, args)])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        return stop.value.code or 0, capsys.readouterr().err
    return call
