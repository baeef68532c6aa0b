"""The benchmark of the time to the first token: what it counts, how it reads, and what it writes."""

import json

import pytest
import torch

from dsv4.kernels.chunked_prefill import Chunking
from dsv4.model.dummy import load_dummy
from dsv4.model.gqa import dummy as geometries
from dsv4.model.gqa.config import GQAConfig
from dsv4.probes.measure.sparse_prefill.reading import WrongCount
from scripts import bench_first_token
from scripts.bench import first_token, first_token_counts, first_token_report
from scripts.bench.first_token import Bench, Row, Way, read, reading, ways
from scripts.bench.first_token_counts import H100, Widths, bound, causal_pairs, least_tokens, own_pairs, predicted
from scripts.bench.rows_prefill_chunked import kept_pairs

CUT = Chunking(16, 4, 6)
THIN = dict(hidden_size=64, intermediate_size=96, vocab_size=300, num_attention_heads=8, num_key_value_heads=2)


def published(name: str) -> Widths:
    return Widths.of(GQAConfig.from_dict(geometries.GEOMETRIES[name] | {"max_position_embeddings": 1 << 20}))


@pytest.fixture
def model(monkeypatch):
    monkeypatch.setitem(geometries.GEOMETRIES, "llama-8b", geometries.GEOMETRIES["llama-8b"] | THIN)
    return load_dummy("llama-8b", layers=2, numerics="fp32", backend="reference")


# ---- counting ------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 70, 96])
def test_pairs_are_those_of_masks(tokens):
    """A mask of every query and key: causal, within the chunk, and a memory for each query from the second chunk on."""
    at = torch.arange(tokens)
    causal = at.unsqueeze(1) >= at
    own = causal & (at.unsqueeze(1) // 16 == at // 16)
    memory = 10 * int((at >= 16).sum())
    assert causal_pairs(tokens) == int(causal.sum()) and own_pairs(tokens, CUT) == int(own.sum())
    assert kept_pairs(tokens, CUT) == int(own.sum()) + memory


def test_numbers_of_the_matrices_are_the_model_s(model):
    widths = Widths.of(model.config)
    wanted = sum(p.numel() for name, p in model.layers.named_parameters() if p.dim() == 2)
    assert 2 * widths.matrix == wanted and widths.weight_bytes() == 2 * wanted
    assert widths.linear_flops(10) == 2 * (10 * wanted + 300 * 64)


@pytest.mark.parametrize("name, billions", [("llama-8b", 6.98), ("qwen3-8b", 6.95)])
def test_widths_of_published_models(name, billions):
    widths = published(name)
    assert widths.layers * widths.matrix / 1e9 == pytest.approx(billions, rel=1e-3)


def test_a_bound_is_what_its_parts_say():
    """At rates of which each part can be read off, for one layer of one head of one number."""
    rates = first_token_counts.Rates(1.0, 1e9, 3.0, ((64, 0.5),), 1.0, ((16, 1.0),))
    widths = Widths(1, 1, 1, 1, 1, 1, 1)  # 7 numbers
    found = bound(widths, 64, CUT, rates)
    kept = 4 * 136 + 10 * 48
    assert (found.kept, found.launches) == (kept, 4)
    assert found.linear == pytest.approx(1e3 * 2 * (7 * 64 + 1)) and found.dense == pytest.approx(1e3 * 8 * 2080)
    assert found.least == pytest.approx(1e3 * (4 * kept + 12)) and found.alike == pytest.approx(1e3 * (8 * kept + 12))
    assert found.free == pytest.approx(1 + 8 * 2080 / (2 * 449))
    assert found.whole == pytest.approx((898 + 8 * 2080) / (898 + 4 * kept + 12))
    assert 8 * 2080 / (4 * kept / (found.needed / 1) + 12) == pytest.approx(1.5)


def test_launches_that_take_too_long_leave_no_rate():
    slow = first_token_counts.Rates(dependent=1e3)
    assert bound(published("llama-8b"), 4096, Chunking(1024, 256, 256), slow).needed is None


@pytest.mark.parametrize("name", ["llama-8b", "qwen3-8b"])
def test_a_whole_model_cannot_reach_the_goal_at_4k(name):
    """Counted by hand: at 4K attention is a tenth of the time, so that even none at all gains a tenth."""
    found = bound(published(name), 4096, Chunking(1024, 256, 256))
    assert 1.05 < found.whole < found.free < found.datasheet < 1.2
    assert not found.document()["whole_can_reach_goal"] and found.document()["alone_can_reach_goal"]
    assert "whole model cannot be reached" in found.verdict and "alone is not ruled out" in found.verdict
    longer = bound(published(name), 131072, Chunking(1024, 256, 256))
    assert longer.document()["whole_can_reach_goal"]


def test_the_least_length_is_the_first_that_can():
    widths = published("llama-8b")
    least = least_tokens(widths)
    gain = lambda n: 1 + widths.attention_flops(causal_pairs(n)) / 535e12 / (widths.linear_flops(n) / H100.matmul)
    assert gain(least) >= 1.5 > gain(least - 1)


def test_predictions_follow_the_way():
    widths = published("llama-8b")
    at = lambda **how: predicted(widths, 32768, 1, **how)
    assert at(cut=Chunking(1024, 256, 256)) < at(peer=True) < at()
    assert at(piece=16) > at() == at(piece=4096)  # small pieces read all weights again
    assert predicted(widths, 32768, 2) == pytest.approx(2 * at())


def test_profiled_kernels_come_from_the_committed_benchmark():
    rows = first_token_report.profiled()
    assert len(rows) == 2 and all(0 < r["choosing_us"] < r["us"] and r["times_hidden"] > r["times"] for r in rows)
    assert first_token_report.profiled(first_token_report.PROFILE.with_name("absent.json")) == []


# ---- reading -------------------------------------------------------------------------


@pytest.mark.parametrize("piece", [None, 16, 20])
def test_the_library_s_attention_gives_the_model_s_logits(model, piece):
    ids = torch.randint(0, 300, (2, 50), generator=torch.Generator().manual_seed(0))
    found = {}
    for peer in (False, True):
        way = Way(piece=piece, peer=peer)
        with reading(model, way) as op:
            found[peer] = read(model, model.new_cache(2, 50, 0), ids, way, op)
    assert torch.allclose(found[True], found[False], atol=1e-4)
    assert not isinstance(model.layers[0].self_attn.op, first_token.Sdpa) and model.attention.prefill is None


def test_a_peer_that_forgets_what_came_before_is_seen(model, monkeypatch):
    monkeypatch.setattr(first_token.Sdpa, "at", property(lambda self: 0, lambda self, value: None), raising=False)
    row = measured(model, Way(piece=16, peer=True), first=Way())
    assert "differ" in row.why and row.red


def measured(model, way: Way, first: Way | None = None, tokens: int = 50, **given) -> Row:
    bench = Bench(model, 2, **given)
    for one in (first, way):
        if one is not None:
            row = Row(one, tokens, 2, 1.0)
            bench.measure(row)
    return row


def test_a_row_of_each_way(model):
    for way in ways((CUT, Chunking(16, 4, 6, "memory", "query")), (16,)):
        row = measured(model, way, first=Way())
        assert row.why == "" and row.runs == 2 and row.least <= row.ms <= row.most, row.line()
        assert row.difference < 1e-4 if way.cut is None else row.difference > 1e-3


def test_a_memory_that_was_not_chosen_is_red(model, monkeypatch):
    with pytest.raises(WrongCount):
        cache = model.new_cache(1, 50)
        with reading(model, Way(CUT)):
            read(model, cache, torch.zeros(1, 50, dtype=torch.int64), Way(CUT), None)
        first_token.check(cache, Way(Chunking(32, 4, 6)), 1, 50)


def test_how_often_a_reading_is_timed():
    bench, way = Bench(None, 5), Way()
    enough = lambda *times: bench._enough(list(times), way)
    assert not enough() and not enough(9e9) and not enough(9.0, 9.0) and enough(*[9.0] * 6)
    assert not enough(9.0, 800.0) and enough(9.0, *[800.0] * 3) and enough(9.0, 5000.0)
    bench.warm.add(way.name)
    assert enough(5000.0) and not enough(3000.0)


def test_what_fails_is_a_line_and_the_next_follows(model, monkeypatch):
    monkeypatch.setattr(model, "append", lambda *_, **__: 1 / 0)
    row = measured(model, Way())
    assert row.ms is None and row.why.startswith("ZeroDivisionError") and row.red
    late = measured(model, Way(), deadline=-1.0)
    assert late.why.startswith("not begun") and not late.red


def test_times_are_of_the_fastest_dense():
    row = lambda way, ms, tokens=4096: Row(way, tokens, 1, 1.0, ms=ms, least=ms, most=ms, runs=1)
    rows = [row(Way(), 30.0), row(Way(piece=512), 20.0), row(Way(CUT), 10.0), row(Way(), 5.0, 8192)]
    assert first_token_report.times(rows[2], rows) == 2.0
    assert first_token_report.verdict(rows)["verdict"] == "met"
    assert first_token_report.verdict([row(Way(), 30.0), row(Way(CUT), 21.0)])["verdict"] == "MISSED"
    assert first_token_report.verdict(rows[:2])["verdict"] == "not measured"
    longer = [*rows, row(Way(CUT), 4.0, 8192)]
    assert first_token_report._by_length(longer) == ["- The fastest sparse reading, batch 1: 4K 2.00×, 8K 1.25×."]


# ---- the script ----------------------------------------------------------------------


def run(monkeypatch, *given) -> int:
    monkeypatch.setattr("sys.argv", ["bench_first_token.py", *map(str, given)])
    return bench_first_token.main()


SMALL = ("--dummy-weights", "llama-8b", "--layers", 2, "--device", "cpu", "--numerics", "fp32")
SIZES = ("--tokens", "40,64", "--batch", "1,2", "--most-tokens", 80, "--cuts", "16,4,6", "--pieces", 16, "--runs", 1)


def test_a_run_writes_all_rows(model, monkeypatch, tmp_path, capsys):
    assert run(monkeypatch, *SMALL, *SIZES, "--out", tmp_path) == 0
    found = json.loads((tmp_path / "first_token_cpu.json").read_text())
    at = [(r["batch"], r["tokens"]) for r in found["rows"]]
    # two prompts of 64 are too many; of two prompts no pieces, which come last
    assert at == [(1, 40)] * 3 + [(1, 64)] * 3 + [(2, 40)] * 3 + [(1, 40)] * 2 + [(1, 64)] * 2
    assert [r["piece"] for r in found["rows"]] == [None] * 9 + [16] * 4
    assert all(r["ms"] > 0 and r["predicted"] > 0 and not r["why"] for r in found["rows"])
    assert found["counted"]["bounds"] and found["goal"]["verdict"] == "not measured"
    text = (tmp_path / "first_token_cpu.md").read_text()
    assert "| 2 | 40 | sparse 16: 4 + 6, fused, kv, at once |" in text and "## What counting allows" in text
    assert "<svg" in (tmp_path / "first_token_cpu.svg").read_text() and "predicted" in capsys.readouterr().out


def test_predictions_are_there_before_the_first_row(model, monkeypatch, tmp_path):
    """A run that is killed at its first row leaves them, and says what was not begun."""

    def killed(self, row):
        raise KeyboardInterrupt

    monkeypatch.setattr(Bench, "measure", killed)
    with pytest.raises(KeyboardInterrupt):
        run(monkeypatch, *SMALL, *SIZES, "--out", tmp_path)
    rows = json.loads((tmp_path / "first_token_cpu.json").read_text())["rows"]
    assert len(rows) == 13 and all(r["predicted"] > 0 and r["ms"] is None for r in rows)
    assert {r["why"] for r in rows} == {"not begun"}
    text = (tmp_path / "first_token_cpu.md").read_text()
    assert text.count("not begun") == 3 and "- 1 × 40: 5 rows not begun (predicted " in text


def test_counting_needs_no_model(monkeypatch, tmp_path, capsys):
    assert run(monkeypatch, "--count", "--out", tmp_path) == 0
    found = json.loads((tmp_path / "first_token_counted.json").read_text())
    assert [m["geometry"] for m in found["models"]] == ["llama-8b", "qwen3-8b"]
    out = capsys.readouterr().out
    assert out.count("at 4K **cannot be reached, whoever writes the kernels**") == 2
    assert out.strip() == (tmp_path / "first_token_counted.md").read_text().strip()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_is_one_line(monkeypatch, capsys):
    assert run(monkeypatch, "--dummy-weights", "llama-8b") == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and "CUDA" in err


def test_another_family_is_refused_in_one_line(monkeypatch, tmp_path, capsys):
    assert run(monkeypatch, tmp_path / "absent", "--device", "cpu") == 2
    assert capsys.readouterr().err.count("\n") == 1
