"""Time of a token against batch: what is predicted, that every row's path runs on a host, and what a killed run
keeps."""

import argparse
import json
import time
from dataclasses import replace

import pytest

from dsv4.errors import CapacityError
from dsv4.model.dummy import load_dummy
from dsv4.model.gqa import dummy as geometries
from scripts import bench_decode
from scripts.bench import decode_sweep, decode_sweep_report, report
from scripts.bench.decode_sweep import ATTENTIONS, FAILED, MEASURED, NO_ROOM, NO_TIME, PENDING, RULE

EAGER = "tau=1e9,phi=2,patience=1"
THIN = dict(hidden_size=64, intermediate_size=96, vocab_size=300, num_attention_heads=8, num_key_value_heads=2)
KV, D, LAYERS, C = 2, 64, 2, 1024


@pytest.fixture(autouse=True)
def thin(monkeypatch):
    monkeypatch.setitem(geometries.GEOMETRIES, "llama-8b", geometries.GEOMETRIES["llama-8b"] | THIN | dict(head_dim=D))


def model(backend="cpu"):
    return load_dummy("llama-8b", layers=LAYERS, backend=backend)


def arguments(tmp_path, **more) -> argparse.Namespace:
    given = dict(
        dummy_weights="llama-8b", layers=LAYERS, numerics="native", backend="cpu", device="cpu", out=tmp_path, steps=2,
        batch=[2, 1], context=[C], retention=[0.5], rule=[RULE, EAGER], seconds=1e6,
    )  # fmt: skip
    return argparse.Namespace(**given | more)


def about() -> dict:
    return dict.fromkeys(("command", "device", "torch", "triton", "commit"), "x")


def test_rows_are_predicted_by_their_bytes():
    m = model()
    rows = decode_sweep.planned(m, ATTENTIONS, [0.8, 0.2], [RULE], [(3, C)])
    assert len(rows) == (1 + 2 * 5) * 2 and {r.status for r in rows} == {PENDING}
    of = {(r.attention, r.retention): r for r in rows if r.rule is None}
    weights = m.nbytes - m.embed.weight.nbytes * (1 - 3 / 300)
    weights += LAYERS * 2 * 3 * 8 * D * 2  # beside them queries and outputs of eight heads
    row = 2 * KV * D * 2  # a token's keys and values in bf16
    assert of["dense", None].bytes == pytest.approx(weights + 3 * LAYERS * C * row, abs=1)
    kept = round(0.2 * C)
    assert of["snapkv", 0.2].bytes == pytest.approx(weights + 3 * LAYERS * kept * (row + 4 * KV), abs=1)
    assert of["pyramidkv", 0.2].tokens == pytest.approx(kept, abs=1)
    scored = C // 128 - 3  # neither the sink nor the two local blocks
    assert of["block-bound", 0.8].bytes == pytest.approx(
        weights + 3 * LAYERS * KV * D * 2 * (2 * 6 * 128 + 2 * scored), abs=1
    )
    assert of["page-bound", 0.2].tokens == 13 * 16 and of["block-bound", 0.2].tokens == 4 * 128  # its least
    assert all(r.predicted_ms == r.bytes / 3e12 * 1e3 for r in rows) and m.attention.plain


# Over 5 s on a busy machine: a step of every policy, with and without each rule.
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_every_row_runs_on_a_host(tmp_path, monkeypatch, backend, capsys):
    """Predictions are written before anything is measured; what stops is told from what does not."""
    first, write = [], report.write
    monkeypatch.setattr(report, "write", lambda *given: first.append(given[2]) or write(*given))
    code = bench_decode.sweep(arguments(tmp_path, backend=backend, batch=[1]), None, about(), time.monotonic())
    assert code == 0
    assert {r["status"] for r in first[0]["rows"]} == {PENDING} and all(r["predicted_ms"] for r in first[0]["rows"])
    found = json.loads((tmp_path / "bench_decode_sweep_cpu.json").read_text())["rows"]
    assert len(found) == 6 * 3 and all(r["status"] == MEASURED and r["finite"] and r["step_ms"] > 0 for r in found)
    assert [r["predicted_ms"] for r in found] == [r["predicted_ms"] for r in first[0]["rows"]]
    read = {r["rule"]: {x["tiles_read"] for x in found if x["rule"] == r["rule"]} for r in found}
    assert read[None] == {None} and read[RULE] == {1.0} and max(read[EAGER]) < 1
    assert all(r["tokens_per_second"] == pytest.approx(1e3 / r["step_ms"]) for r in found)
    text = (tmp_path / "bench_decode_sweep_cpu.md").read_text()
    assert "18 of 18 rows were measured" in text and "Where nothing stops, asking costs at most" in text
    assert "<svg" in (tmp_path / "bench_decode_sweep_cpu.svg").read_text()
    assert "predictions of 18 rows" in capsys.readouterr().out


def test_a_killed_run_keeps_what_it_has(tmp_path, monkeypatch):
    measured, turns = [], decode_sweep._turns

    def killed(model, cache, group, each):
        if measured:
            raise KeyboardInterrupt
        measured.extend(turns(model, cache, group, each))
        return measured

    monkeypatch.setattr(decode_sweep, "_turns", killed)
    with pytest.raises(KeyboardInterrupt):
        bench_decode.sweep(arguments(tmp_path), None, about(), time.monotonic())
    rows = json.loads((tmp_path / "bench_decode_sweep_cpu.json").read_text())["rows"]
    assert [r["status"] for r in rows if r["step_ms"]] == [MEASURED] * 3 and len(rows) == 36
    assert "3 of 36 rows" in (tmp_path / "bench_decode_sweep_cpu.md").read_text()


def test_no_time_and_failures_are_said(tmp_path, monkeypatch):
    """A failing row costs itself; after the deadline nothing begins."""
    turns = decode_sweep._turns

    def failing(model, cache, group, each):
        if group[0].attention == "snapkv":
            raise RuntimeError("no such kernel")
        return turns(model, cache, group, each)

    monkeypatch.setattr(decode_sweep, "_turns", failing)
    m, done = model(), []
    rows = decode_sweep.planned(m, ("snapkv", "sink-window"), [0.5], [EAGER], [(1, C)])
    decode_sweep.measure_cell(m, rows, 2, done.append)
    assert [r.status for r in done] == [FAILED] * 2 + [MEASURED] * 2 and "no such kernel" in done[0].why
    done.clear()
    decode_sweep.measure_cell(m, rows, 2, done.append, until=time.monotonic() - 1)
    assert [r.status for r in done] == [NO_TIME] * 4
    text = decode_sweep_report.markdown(about(), SETUP, None, done)
    assert text.count("| no time left |") == 4


def test_a_cache_that_does_not_fit_is_no_failure(monkeypatch):
    m, done = model(), []

    def refused(*_, **__):
        raise CapacityError("the cache needs 5 bytes, and there are 4")

    monkeypatch.setattr(m, "new_cache", refused)
    rows = decode_sweep.planned(m, ("dense", "sink-window"), [0.5], [EAGER], [(1, C)])
    decode_sweep.measure_cell(m, rows, 2, done.append)
    assert [r.status for r in done] == [NO_ROOM] * 4
    text = decode_sweep_report.markdown(about(), SETUP, None, done)
    assert text.count("| no room |") == 4 and text.count("- batch 1 at 1K: no room: the cache needs 5 bytes") == 1


SETUP = dict(geometry="x", layers=1, numerics="native", backend="cpu", weight_bytes=1, beta=3e12)


def test_the_table_tells_overhead_from_gain():
    row = decode_sweep.Row(8, 8192, "dense", None, None, 8192, 10**9, 0.3, step_ms=1.0, status=MEASURED)
    idle = replace(row, rule=RULE, step_ms=1.02, tiles_read=1.0)
    gain = replace(row, attention="sink-window", retention=0.2, step_ms=0.5)
    rows = [row, idle, gain, replace(gain, rule=RULE, step_ms=0.4, tiles_read=0.5)]
    text = decode_sweep_report.markdown(about(), SETUP, None, rows)
    assert "asking costs at most +2.0%" in text and "0 of 1 rows are within 1.3%" in text
    assert "best -20.0% of 1 rows" in text and "| 8K | 8 | sink-window | 0.2 | – | 0.300 | 0.500 |" in text
    assert "| 0.500 | – |" in text and "| 0.400 | 0.800 | 50.0% |" in text


@pytest.mark.gpu
def test_a_cell_is_measured_cleanly():
    import torch

    m, done = load_dummy("llama-8b", layers=LAYERS, device="cuda", backend="triton"), []
    rows = decode_sweep.planned(m, ATTENTIONS, [0.5], [RULE], [(2, 8192)])
    decode_sweep.measure_cell(m, rows, 8, done.append)
    assert [r.status for r in done] == [MEASURED] * 12 and all(r.clean for r in done)
    torch.cuda.empty_cache()
