"""Recall of the indexer: figures by hand, on sound models, under planted faults, from other subjects; needles."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from dsv4.model.tokenizer import Tokenizer
from dsv4.probes.catalogue.index_oracle import IndexOracle, indexed
from dsv4.probes.compare import oracle_of
from dsv4.probes.measure.base.mass import mask
from dsv4.probes.measure.base.models import reach
from dsv4.probes.measure.base.text import read_text, rows_of
from dsv4.probes.measure.recall import measure, needles
from dsv4.probes.measure.recall.figures import row, tally
from dsv4.probes.measure.recall.observe import Oracles, Seen, observe_model
from dsv4.probes.measure.recall.oracle import GrowingOracle
from dsv4.probes.measure.recall.settings import Settings
from dsv4.probes.result import Status
from dsv4.probes.subjects.dump import DumpSubject, write_dump
from dsv4.probes.subjects.ours import OurSubject
from tests.checkpoints import SMALL, write_dense
from tests.dsv4.test_cli import ROOT, demo, run  # noqa: F401  (fixtures: a checkpoint with a tokenizer, the command line)
from tests.texts import PROSE_FILE

INF = float("inf")
CSA = [i for i, r in enumerate(SMALL["compress_ratios"][:5]) if r == 4]
SETTINGS = Settings(contexts=(192, 232), ks=(6,), queries=40, rows=2, needles=0, seed=0)
QUIET = dict(say=lambda text: None, advance=lambda tokens: None)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_dense(tmp_path_factory.mktemp("recall") / "dense")


@pytest.fixture(scope="module")
def subject(path):
    return OurSubject(path, "fp32")


@pytest.fixture(scope="module")
def text(path):
    return read_text(None, path, SMALL["vocab_size"], 1000, seed=0)


def figures(subject, text, settings=SETTINGS) -> dict[tuple, dict]:
    """(layer, context, k) → row."""
    return {(r["layer"], r["context"], r["k"]): r for r in measure.indexer(subject, settings, text, **QUIET)}


# ---- by hand ------------------------------------------------------------------------------


def three_entries() -> Seen:
    """Queries at 11 and 12, which see three entries that end at 3, 7 and 11. One pick each: entry 0, then entry 2."""
    return Seen(
        layer=1,
        context=13,
        positions=torch.tensor([11, 12]),
        scores=torch.tensor([[3.0, 2, 1], [1, 2, 3]]),
        selection=torch.tensor([[0], [2]]),
        mass=torch.tensor([[0.2, 0.1, 0.0], [0.1, 0.3, 0.2]]),
        exact=torch.tensor([[3.0, 2, 1], [1, 3, 2]]).double(),
        matched=torch.tensor([[3.0, 2, 1], [1, 3, 2.99]]).double(),
    )


def test_figures_by_hand():
    found = row(tally(three_entries(), k=1, topk=1, margin=0.01, window=4), window=4)
    by_distance = found.pop("by_distance")
    assert found == pytest.approx(
        {
            "queries": 2,
            "nan_queries": 0,
            "chance": 1 / 3,
            "recall_fp32": 1 / 2,  # best are 0 and 1
            "recall_matched": 1.0,
            "clear_share": 1 / 2,  # of the second query, 3 and 2.99 are a tie
            "clearly_wrong": 0.0,
            "score_mass_kept": (2 + 1) / (2 + 2),
            "score_mass_chance": (3 / 3 + 3 / 3) / 4,
            "attention_mass_kept": 0.4 / 0.9,
            "attention_mass_chance": 1 / 3,
            "attention_mass_best": 0.5 / 0.9,
            "attention_mass_of_entries": 0.9 / 2,
            "overlap": 0.0,
            "score_scale": (14 + 1 + 6 + 8.97) / (14 + 1 + 9 + 8.9401),
        },
        abs=1e-6,
    )
    assert [(d["from"], d["to"], d["entries"], d["wanted"], d["recall_fp32"]) for d in by_distance] == [
        (0, 3, 2, 0, None),
        (4, 7, 2, 1, 0.0),
        (8, 15, 2, 1, 1.0),
    ]
    assert [d["attention_mass_share"] for d in by_distance] == pytest.approx(
        [0.2 / 0.9, 0.4 / 0.9, 0.3 / 0.9], abs=1e-6
    )
    assert [d["attention_mass_kept"] for d in by_distance] == pytest.approx([1.0, 0.0, 0.2 / 0.3], abs=1e-6)


def test_another_k_is_chosen_from_the_subject_s_own_scores():
    found = row(tally(three_entries(), k=2, topk=1, margin=0.01, window=4), window=4)
    assert found["recall_fp32"] == 1.0 and found["attention_mass_kept"] == pytest.approx(0.8 / 0.9, abs=1e-6)
    assert found["overlap"] == 1 / 2 and found["chance"] == pytest.approx(2 / 3)


def test_a_pick_that_is_clearly_wrong_is_not_excused_by_ties():
    wrong = replace(three_entries(), selection=torch.tensor([[2], [0]]))
    found = row(tally(wrong, k=1, topk=1, margin=0.01, window=4), window=4)
    assert found["recall_matched"] == 0.0 and found["clearly_wrong"] == 1.0


def test_nan_is_counted_and_never_a_figure():
    found = row(tally(replace(three_entries(), mass=torch.full((2, 3), float("nan"))), 1, 1, 0.01, 4), window=4)
    assert found["nan_queries"] == 2 and found["attention_mass_kept"] is None and found["recall_fp32"] == 1 / 2


# ---- oracles ------------------------------------------------------------------------------


@pytest.mark.parametrize("numerics", ["native", "qat"])
def test_the_oracle_does_not_depend_on_the_steps(official, numerics):
    """Keys of a context that grows in uneven steps, against those of index_oracle in one step."""
    subject = type(
        "Named",
        (),
        {
            "numerics": numerics,
            "config": OurSubject(official, numerics).config,
            "files": OurSubject(official, numerics).files,
        },
    )
    exact, matched = oracle_of(subject, matched=False).layer(1), oracle_of(subject).layer(1)
    x = torch.randn(103, SMALL["hidden_size"], generator=torch.Generator().manual_seed(0)).bfloat16()
    growing = GrowingOracle(exact, matched)
    for part in x.split([1, 2, 30, 3, 4, 1, 62]):
        growing.extend(part)
    found = growing.scores(x[80:], torch.arange(80, 103))
    for layer, scores in zip((exact, matched), found):
        assert torch.allclose(scores, indexed(layer, x.unsqueeze(0))["index_scores"][0, 80:], rtol=1e-9, atol=1e-12)


# ---- on a model ---------------------------------------------------------------------------


def test_a_sound_model(subject, text):
    found = figures(subject, text)
    assert list(found) == [(layer, context, 6) for context in (192, 232) for layer in [*CSA, None]]
    for r in found.values():
        assert (
            r["recall_fp32"] > 0.999 and r["recall_matched"] == 1.0 and r["score_scale"] == pytest.approx(1, abs=1e-4)
        )
        assert r["score_mass_kept"] == pytest.approx(1, abs=1e-4) and r["score_mass_chance"] < 0.9
        assert 0 < r["attention_mass_kept"] <= r["attention_mass_best"] + 1e-6 < 1 and r["status"] == "MEASURED"
        assert r["chance"] == pytest.approx(6 / (r["context"] / 4 - 5), rel=0.02) and r["clear_share"] > 0.9
        assert 0 < r["overlap"] < 1 and sum(d["wanted"] for d in r["by_distance"]) == 6 * r["queries"]
    assert found[None, 192, 6]["queries"] == 2 * 40 * len(CSA) == len(CSA) * found[CSA[0], 192, 6]["queries"]


def test_the_selection_is_the_one_that_was_attended_to(subject, text):
    seen = []
    ids = rows_of(text, 192, 1, bos=0)[0]
    observe_model(subject.model, Oracles(subject), ids, [192], 40, 64, seen.append)
    whole = subject.run(ids.unsqueeze(0), want=("selection", "index_scores"))
    for s in seen:
        assert torch.equal(mask(s.selection, 48), mask(whole.points[s.layer, "selection"][0, 152:], 48))
        assert torch.allclose(s.scores, whole.points[s.layer, "index_scores"][0, 152:], atol=1e-5)


def planted(monkeypatch, subject, change):
    """Every layer's index_scores(q, weights, keys, visible) replaced by change(real)."""
    for op in {id(block.attn.op): block.attn.op for block in subject.model.layers}.values():
        monkeypatch.setattr(op, "index_scores", change(op.index_scores))


def test_shifted_index_keys_lose_recall(subject, text, monkeypatch):
    planted(monkeypatch, subject, lambda real: lambda q, w, keys, visible: real(q, w, keys.roll(1, 1), visible))
    for r in figures(subject, text).values():
        assert r["recall_matched"] < 2 * r["chance"] + 0.1 and r["recall_fp32"] < 2 * r["chance"] + 0.1
        assert r["clearly_wrong"] > 0.5 and r["score_mass_kept"] < 0.8


def test_a_wrong_temperature_shows_in_the_scale_alone(subject, text, monkeypatch):
    """The known blind spot of recall; index_oracle fails."""
    planted(monkeypatch, subject, lambda real: lambda *given: 90.5 * real(*given))
    for r in figures(subject, text).values():
        assert (
            r["recall_fp32"] > 0.999
            and r["recall_matched"] == 1.0
            and r["score_scale"] == pytest.approx(90.5, rel=1e-3)
        )
    assert {c.part for c in IndexOracle().run(subject) if c.status is Status.FAIL} == {"indexer weights"}


def test_the_demo_keeps_the_attention_that_matters_until_its_keys_are_shifted(monkeypatch):
    """Of 128 entries the best 16 of the model's own scores: a what-if, since its own 64 would be vacuous."""
    shipped = OurSubject(ROOT / "demo", "native")
    text = read_text(PROSE_FILE, ROOT / "demo", shipped.config.vocab_size, 0, seed=0)  # help topics take 3 s to encode
    settings = Settings(contexts=(512,), ks=(16,), queries=64, rows=1, needles=0, seed=0)
    sound = figures(shipped, text, settings)[None, 512, 16]
    assert sound["what_if"] and sound["recall_matched"] > 0.999 and sound["recall_fp32"] > 0.98
    assert sound["attention_mass_kept"] > 0.7 > 5 * sound["attention_mass_chance"]
    planted(monkeypatch, shipped, lambda real: lambda q, w, keys, visible: real(q, w, keys.roll(1, 1), visible))
    broken = figures(shipped, text, settings)[None, 512, 16]
    assert broken["recall_matched"] < 0.6 and broken["attention_mass_kept"] < sound["attention_mass_kept"] - 0.2


def test_quantisation_costs_recall_against_the_exact_oracle_alone(official, text):
    for r in figures(OurSubject(official, "qat:fp32"), text, replace(SETTINGS, contexts=(192,), rows=1)).values():
        assert r["recall_matched"] > 0.999 > 0.97 > r["recall_fp32"] and r["score_mass_kept"] < 0.999


def test_needles_and_their_control(demo, monkeypatch):
    """Trials run with and without the compressed branches. A trial counts as found here if they are in play."""
    model, tokenizer = OurSubject(demo, "fp32").model, Tokenizer(demo, 320).backend
    ids = torch.arange(60).unsqueeze(0)
    whole = model(ids)

    def asked_of(model, asked, limits, say):
        return [torch.equal(model(ids), whole)] * len(asked)

    monkeypatch.setattr(needles, "answered", asked_of)
    rows = needles.found(
        model, tokenizer, np.arange(400) % 300, [120, 200], 5, needles.Limits(1000, 64), lambda text: None
    )
    assert [(r["haystack"], r["context"], r["hits"], r["at_least"] > 0.47) for r in rows] == [
        (name, context, hits, hits == 5)
        for name, hits in (("prose", 5), ("looped filler", 5), ("prose, window only", 0))
        for context in (120, 200)
    ]
    assert all(d["depth"] * r["context"] + reach(model) < r["context"] for r in rows for d in r["depths"])


# ---- other subjects -----------------------------------------------------------------------


def test_a_recorded_run_gives_the_figures_of_the_run(subject, path, text, tmp_path, run):
    """Captured whole rather than query by query: another way to each figure, attention mass included."""
    ids = rows_of(text, 232, 2, bos=0)
    capture = subject.run(
        ids, want=("attn_in", "q_after_rope", "kv_window", "compressed_kv", "index_scores", "selection")
    )
    dump = DumpSubject(write_dump(capture, ids, tmp_path / "run.safetensors", {"numerics": "fp32"}), path)
    dump.files = subject.files
    ours, theirs = figures(subject, text), figures(dump, None)
    for key, r in ours.items():
        for name in (
            "recall_fp32",
            "recall_matched",
            "attention_mass_kept",
            "attention_mass_best",
            "overlap",
            "score_scale",
        ):
            assert theirs[key][name] == pytest.approx(r[name], abs=1e-4), (key, name)
    code, out, err = run("recall", path, "--dump", tmp_path / "run.safetensors", "--queries", 40, "--json")
    found = json.loads(out)
    assert code == 0 and found["settings"]["contexts"] == [232] and found["text"]["name"] == "the recorded ids", err
    assert found["rows"][0]["attention_mass_kept"] == pytest.approx(
        ours[CSA[0], 232, 6]["attention_mass_kept"], abs=1e-4
    )


def test_a_dump_without_the_points_says_which(subject, path, text, tmp_path):
    ids = rows_of(text, 200, 1, bos=0)
    dump = DumpSubject(write_dump(subject.run(ids, want=("selection",)), ids, tmp_path / "run.safetensors", {}), path)
    dump.files = subject.files
    with pytest.raises(
        Exception, match="gives no attn_in, q_after_rope, kv_window, compressed_kv, index_scores of layer 1"
    ):
        figures(dump, None, replace(SETTINGS, contexts=(192,)))
