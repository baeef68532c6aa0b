"""Waits of the host are counted, written, and red where they grow with the response; on a CPU there is nothing to wait
for, and that is said."""

import json
from itertools import product

import pytest
import torch

from dsv4.speculation.rounds import Rounds
from scripts import measure_host_waits
from scripts.bench import waits
from scripts.bench.waits import counted_syncs


@pytest.fixture
def run(monkeypatch, tmp_path):
    def call(*more):
        monkeypatch.setattr(
            "sys.argv",
            [
                "measure_host_waits.py",
                "--numerics",
                "fp32",
                "--tokens",
                "5,18",
                "--device",
                "cpu",
                "--out",
                str(tmp_path),
                *more,
            ],
        )
        code = measure_host_waits.main()
        return (
            code,
            json.loads((tmp_path / "host_waits_cpu.json").read_text()),
            (tmp_path / "host_waits_cpu.md").read_text(),
        )

    return call


@pytest.mark.few(drafters=[("mtp",), ("lookup",)])
@pytest.mark.parametrize(
    "drafters, policies, temperatures",
    [(("mtp",), ("3",), (0,)), (("lookup",), ("adaptive",), (0.8,)), (("mtp", "lookup"), ("3", "adaptive"), (0, 0.8))],
)
def test_what_is_counted_on_a_cpu(run, drafters, policies, temperatures):
    """Both drafters and policies, greedily and sampled."""
    named = ("--speculate", ",".join(drafters), "--draft-tokens", *policies)
    code, found, text = run(*named, "--temperatures", ",".join(map(str, temperatures)))
    rows = found["rows"]
    ways = [(r["drafter"], r["policy"], r["temperature"], r["tokens"]) for r in rows]
    assert code == 0 and ways == list(product(drafters, policies, temperatures, (5, 18)))
    assert all(a["rounds"] < b["rounds"] <= 18 for a, b in zip(rows[::2], rows[1::2]))
    assert "mtp" not in drafters or rows[1]["rounds"] < 18
    bytes_of = {"3": 4 * 8 * 8, "adaptive": 4 * 13 * 8}  # 4 rounds of 4 numbers and as many tokens as a round can give
    assert all(r["synchronisations"] == r["polls"] == 0 and r["bytes_a_round"] == bytes_of[r["policy"]] for r in rows)
    assert rows[0]["bytes_at_the_end"] < rows[1]["bytes_at_the_end"] and rows[1]["seconds"] > 0
    assert not found["setup"]["captured"] and "say nothing of a GPU" in text and "| 18 |" in text


def test_waits_that_grow_with_the_response_are_red(run, monkeypatch, capsys):
    """A round that waits, and a poll that is counted."""
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    real = Rounds._launch

    def launch(self, D):
        torch.cuda.synchronize()
        real(self, D)

    monkeypatch.setattr(Rounds, "_launch", launch)
    code, found, _ = run("--speculate", "lookup", "--temperatures", "0.8", "--draft-tokens", "3")
    assert code == 1 and all(
        r["synchronisations"] == r["rounds"] == r["synchronisations_of_the_request"] for r in found["rows"]
    )
    assert (
        found["rows"][0]["why"] == ["torch.cuda.synchronize"]
        and "loop host, lookup, 3, at temperature 0.8, synchronisations:" in capsys.readouterr().out
    )


def test_counts_end_with_the_block(monkeypatch):
    class Thing:
        def synchronize(self):
            return 5

    class Part(Thing):
        pass

    monkeypatch.setattr(waits, "CALLS", ((Part, "synchronize"), (Thing, "synchronize")))
    with pytest.raises(ValueError), counted_syncs() as seen:
        assert Thing().synchronize() == 5
        raise ValueError
    assert Part().synchronize() == 5 and seen == ["Thing.synchronize"] and "synchronize" not in vars(Part)
