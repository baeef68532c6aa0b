"""The comparison of speculative with plain text: green where it is exact, red where a decoder leaves plain decoding."""

import json
from functools import cache
from pathlib import Path

import pytest

from dsv4 import load_model
from dsv4.speculation import verify
from scripts import measure_speculation

DEMO = str(Path(__file__).resolve().parents[2] / "demo")


NUMERICS = pytest.mark.parametrize("numerics", ["fp32", "native"])
ONE = pytest.mark.few(numerics=["fp32"])  # whose steps take a third of the time of native's on a CPU


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Function: the script on two texts, of a few files because each file of a kind is encoded to choose from."""
    monkeypatch.setattr(measure_speculation.speculation_traces, "KINDS", {"code": "rounds*.py", "prose": "MODEL*.md"})
    monkeypatch.setattr(measure_speculation, "load_model", cache(load_model))

    def call(numerics, *more):
        given = ["--numerics", numerics, "--texts", "2", "--tokens", "5", *more, "--out", str(tmp_path)]
        monkeypatch.setattr("sys.argv", ["measure_speculation.py", DEMO, *given])
        return measure_speculation.main(), tmp_path

    return call


# Over 5 s: both drafters, as decoders and in the engine, alone and together, on the shipped checkpoint.
@ONE
@NUMERICS
def test_texts_are_compared_and_written(run, numerics):
    code, folder = run(numerics)
    rows = json.loads((folder / "speculation_identity_cpu.json").read_text())["rows"]
    names = ["mtp", "lookup", "mtp, in the engine", "lookup, in the engine"]
    assert code == 0 and [(r["drafter"], r["same"], r["left_at"]) for r in rows] == [(name, 2, []) for name in names]
    assert all(r["plain_tokens_per_second"] > 0 and r["speed"] > 0 for r in rows)
    assert len({r["plain_tokens_per_second"] for r in rows}) == 2, "of decoding, and in the engine of everything"
    assert f"| {numerics} | mtp | 2 of 2 | – |" in (folder / "speculation_identity_cpu.md").read_text()
    assert (
        run(numerics, "--together", "--tokens", "3", "--rows", "2")[0] == 0
        and (folder / "speculation_identity_cpu_together.md").exists()
    )
    rows = json.loads((folder / "speculation_identity_cpu_together.json").read_text())["rows"]
    assert [r["drafter"] for r in rows] == [
        "mtp",
        "lookup",
        "off, in the engine",
        "mtp, in the engine",
        "lookup, in the engine",
    ]


@ONE
@NUMERICS
def test_a_text_that_leaves_plain_decoding_is_red(run, monkeypatch, numerics):
    """Where it must not: rows together may."""
    for kind in (verify.SingleSteps, verify.Append):

        def wrong(self, ids, counts, want_streams, right=kind.__call__):
            logits, streams = right(self, ids, counts, want_streams)
            return logits.roll(1, -1), streams

        monkeypatch.setattr(kind, "__call__", wrong)
    for more, name, expected in (((), "", 1), (("--together",), "_together", 0)):
        code, folder = run(numerics, "--texts", "1", "--tokens", "3", *more)
        rows = json.loads((folder / f"speculation_identity_cpu{name}.json").read_text())["rows"]
        left = [r for r in rows if "engine" not in r["drafter"]]  # plain decoding of the engine runs passes too
        assert code == expected and len(left) == 2 and all(r["same"] == 0 and r["left_at"] for r in left)
