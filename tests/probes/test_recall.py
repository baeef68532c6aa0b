"""Recall of the indexer: figures by hand, against planted faults, from other subjects; refusals, the gate, the report."""

import json
from dataclasses import replace

import pytest
import torch

from probes.index_oracle import IndexOracle, indexed
from probes.measure import oracle_of
from probes.recall import document, measure, plots
from probes.recall.figures import mask, row, tally
from probes.recall.observe import Oracles, Seen, observe_model
from probes.recall.oracle import GrowingOracle
from probes.recall.settings import Settings, VacuousSetting, settle
from probes.recall.text import Text, read_text, rows_of
from probes.result import Status
from probes.subjects.dump import DumpSubject, write_dump
from probes.subjects.ours import OurSubject
from tests.checkpoints import SMALL, write_dense
from tests.dsv4.test_cli import ROOT, demo, run  # noqa: F401  (fixtures: a checkpoint with a tokenizer, the command line)

INF = float("inf")
CSA = [i for i, r in enumerate(SMALL["compress_ratios"][:5]) if r == 4]
SETTINGS = Settings(contexts=(192, 232), ks=(6,), queries=40, rows=2, needles=0, seed=0)
QUIET = dict(say=lambda text: None, advance=lambda tokens: None)


@pytest.fixture(autouse=True, scope="module")
def one_thread(two_threads):
    torch.set_num_threads(1)  # matrices this small only wait for a second thread
    yield
    torch.set_num_threads(2)


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
    return Seen(layer=1, context=13, positions=torch.tensor([11, 12]), scores=torch.tensor([[3.0, 2, 1], [1, 2, 3]]),
                selection=torch.tensor([[0], [2]]), mass=torch.tensor([[0.2, 0.1, 0.0], [0.1, 0.3, 0.2]]),
                exact=torch.tensor([[3.0, 2, 1], [1, 3, 2]]).double(),
                matched=torch.tensor([[3.0, 2, 1], [1, 3, 2.99]]).double())


def test_figures_by_hand():
    found = row(tally(three_entries(), k=1, topk=1, margin=0.01, window=4), window=4)
    by_distance = found.pop("by_distance")
    assert found == pytest.approx({
        "queries": 2, "nan_queries": 0, "chance": 1 / 3,
        "recall_fp32": 1 / 2,                               # best are 0 and 1
        "recall_matched": 1.0, "clear_share": 1 / 2,        # of the second query, 3 and 2.99 are a tie
        "clearly_wrong": 0.0,
        "score_mass_kept": (2 + 1) / (2 + 2), "score_mass_chance": (3 / 3 + 3 / 3) / 4,
        "attention_mass_kept": 0.4 / 0.9, "attention_mass_chance": 1 / 3, "attention_mass_best": 0.5 / 0.9,
        "attention_mass_of_entries": 0.9 / 2, "overlap": 0.0,
        "score_scale": (14 + 1 + 6 + 8.97) / (14 + 1 + 9 + 8.9401)}, abs=1e-6)
    assert [(d["from"], d["to"], d["entries"], d["wanted"], d["recall_fp32"]) for d in by_distance] == [
        (0, 3, 2, 0, None), (4, 7, 2, 1, 0.0), (8, 15, 2, 1, 1.0)]
    assert [d["attention_mass_share"] for d in by_distance] == pytest.approx([0.2 / 0.9, 0.4 / 0.9, 0.3 / 0.9], abs=1e-6)
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
    subject = type("Named", (), {"numerics": numerics, "config": OurSubject(official, numerics).config,
                                 "files": OurSubject(official, numerics).files})
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
        assert r["recall_fp32"] > 0.999 and r["recall_matched"] == 1.0 and r["score_scale"] == pytest.approx(1, abs=1e-4)
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
        assert r["recall_fp32"] > 0.999 and r["recall_matched"] == 1.0 and r["score_scale"] == pytest.approx(90.5, rel=1e-3)
    assert {c.part for c in IndexOracle().run(subject) if c.status is Status.FAIL} == {"indexer weights"}


def test_the_demo_keeps_the_attention_that_matters_until_its_keys_are_shifted(monkeypatch):
    """Of 128 entries the best 16 of the model's own scores: a what-if, since its own 64 would be vacuous."""
    shipped = OurSubject(ROOT / "demo", "native")
    text = read_text(None, ROOT / "demo", shipped.config.vocab_size, 0, seed=0)
    settings = Settings(contexts=(512,), ks=(16,), queries=64, rows=1, needles=0, seed=0)
    sound = figures(shipped, text, settings)[None, 512, 16]
    assert sound["what_if"] and sound["recall_matched"] > 0.999 and sound["recall_fp32"] > 0.98
    assert sound["attention_mass_kept"] > 0.7 > 5 * sound["attention_mass_chance"]
    planted(monkeypatch, shipped, lambda real: lambda q, w, keys, visible: real(q, w, keys.roll(1, 1), visible))
    broken = figures(shipped, text, settings)[None, 512, 16]
    assert broken["recall_matched"] < 0.6 and broken["attention_mass_kept"] < sound["attention_mass_kept"] - 0.2


# ---- other subjects -----------------------------------------------------------------------


def test_a_recorded_run_gives_the_figures_of_the_run(subject, path, text, tmp_path, run):  # noqa: F811
    """Captured whole rather than query by query: another way to each figure, attention mass included."""
    ids = rows_of(text, 232, 2, bos=0)
    capture = subject.run(ids, want=("attn_in", "q_after_rope", "kv_window", "compressed_kv", "index_scores", "selection"))
    dump = DumpSubject(write_dump(capture, ids, tmp_path / "run.safetensors", {"numerics": "fp32"}), path)
    dump.files = subject.files
    ours, theirs = figures(subject, text), figures(dump, None)
    for key, r in ours.items():
        for name in ("recall_fp32", "recall_matched", "attention_mass_kept", "attention_mass_best", "overlap", "score_scale"):
            assert theirs[key][name] == pytest.approx(r[name], abs=1e-4), (key, name)
    code, out, err = run("recall", path, "--dump", tmp_path / "run.safetensors", "--queries", 40, "--json")
    found = json.loads(out)
    assert code == 0 and found["settings"]["contexts"] == [232] and found["text"]["name"] == "the recorded ids", err
    assert found["rows"][0]["attention_mass_kept"] == pytest.approx(ours[CSA[0], 232, 6]["attention_mass_kept"], abs=1e-4)


def test_a_dump_without_the_points_says_which(subject, path, text, tmp_path):
    ids = rows_of(text, 200, 1, bos=0)
    dump = DumpSubject(write_dump(subject.run(ids, want=("selection",)), ids, tmp_path / "run.safetensors", {}), path)
    dump.files = subject.files
    with pytest.raises(Exception, match="gives no attn_in, q_after_rope, kv_window, compressed_kv, index_scores of layer 1"):
        figures(dump, None, replace(SETTINGS, contexts=(192,)))


# ---- refusals and the gate ----------------------------------------------------------------


def test_vacuous_settings_are_refused(subject):
    with pytest.raises(VacuousSetting, match="n_comp = 47 entries, fewer than 8 · k = 48.*use --context 192 or more, or --vac"):
        settle(subject.config, [188], None, 40, 2, 0, 0, vacuous=False)
    with pytest.raises(VacuousSetting, match="chance alone recalls 100%; use --k 128 or less"):
        settle(subject.config, [400], [2000], 40, 2, 0, 0, vacuous=False)
    assert settle(subject.config, None, None, 128, 2, 0, 0, vacuous=False).contexts == (192, 384)
    assert settle(subject.config, [188], None, 40, 2, 0, 0, vacuous=True).is_vacuous(188, 6)


def test_vacuous_rows_say_so(subject, text):
    """Nothing is left out when every visible entry is selected: recall is 1, and so is chance."""
    found = figures(subject, text, replace(SETTINGS, contexts=(24,), queries=8))
    assert {r["status"] for r in found.values()} == {"VACUOUS"}
    assert found[None, 24, 6]["recall_fp32"] == found[None, 24, 6]["chance"] == found[None, 24, 6]["recall_matched"] == 1.0


def gate_row(n_comp: int, recall: float, k: int = 512) -> dict:
    return {"layer": 2, "context": 4 * n_comp, "n_comp": n_comp, "k": k, "what_if": False, "queries": 10, "recall_fp32": recall,
            "chance": k / n_comp, "status": "VACUOUS" if n_comp < 8 * k else "MEASURED"}


@pytest.mark.parametrize("rows, status", [
    ([gate_row(4096, 0.995)], "PASS"), ([gate_row(4096, 0.985)], "FAIL"), ([gate_row(1024, 0.995)], "VACUOUS"),
    ([gate_row(1024, 0.985)], "FAIL"), ([gate_row(4096, 0.995), gate_row(4096, 0.5)], "FAIL"),
    ([gate_row(1000, 1.0)], "VACUOUS"), ([gate_row(8192, 1.0, k=64)], "VACUOUS")],
    ids=["good", "bad", "good at twice k", "bad at twice k", "one bad layer", "too few entries", "another k"])
def test_the_classic_gate(rows, status):
    check = measure.gate(rows)
    assert check.status.value == status and check.chance is not None and (check.note or status == "PASS")


# ---- the report ---------------------------------------------------------------------------


def test_the_command_line_writes_a_report(run, demo, tmp_path):  # noqa: F811
    file = tmp_path / "prose.txt"
    file.write_text((ROOT / "README.md").read_text() * 2)
    code, out, err = run("recall", demo, "--text", file, "--needles", 2, "--rows", 1, "--queries", 16, "--context", "192,224",
                         "--out", tmp_path / "report")
    assert code == 0, err
    for part in ("prose.txt", "MEASURED  192 tokens, n_comp 48, k = 6", "all CSA", "VACUOUS  classic gate",
                 "prose, window only", "0 of 2"):
        assert part in out, part
    found = json.loads((tmp_path / "report" / "recall.json").read_text())
    assert document.valid(found)["settings"]["contexts"] == [192, 224] and found["needles"]["beyond"] == 40
    assert found["text"]["name"] == "prose.txt" and len(found["text"]["sha256"]) == 64
    assert str(tmp_path) not in json.dumps(found)
    shown = (tmp_path / "report" / "recall.md").read_text()
    for part in ("attention mass kept **", "## By distance", "## Needles", "97.5 %", "## Provenance", "100 by 96.4 %"):
        assert part in shown, part
    for name in ("by-layer", "by-distance", "needles"):
        assert f"recall-{name}.svg" in shown and "<svg" in (tmp_path / "report" / f"recall-{name}.svg").read_text()


def test_the_command_line_in_other_words(run, demo, tmp_path, monkeypatch):  # noqa: F811
    """JSON on stdout; no plots without matplotlib, and a note; the gate's exit code; a vacuous setting."""
    monkeypatch.setattr(plots, "available", lambda: False)
    given = ("recall", demo, "--rows", 1, "--queries", 8, "--needles", 0, "--json", "--out", tmp_path)
    code, out, err = run(*given, "--context", 192, "--gate")
    found = json.loads(out)
    assert code == 2 and found["gate"]["status"] == "VACUOUS" and plots.MISSING in found["notes"]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["recall.json", "recall.md"]
    code, out, err = run(*given, "--context", 100)
    assert code == 2 and err.startswith("error: a context of 100 tokens has n_comp = 25") and err.count("\n") == 1 and not out
    code, out, err = run(*given, "--context", 100, "--vacuous")
    assert code == 0 and {r["status"] for r in json.loads(out)["rows"]} == {"VACUOUS"}


@pytest.mark.parametrize("options, message", [
    (("--context", "5000"), "exceeds the 4096 tokens"), (("--context", "a"), "a"),
    (("--context", "192,,200"), "separated by commas"), (("--k", "0"), "0"), (("--text", "nowhere.txt"), "nowhere.txt"),
    (("--subject", "files"), "expected ours or transformers"), (("--dump", "nowhere"), "no dump"),
    (("--subject", "transformers", "--numerics", "qat"), "--numerics would change nothing")])
def test_what_cannot_be_measured_is_one_line(run, demo, options, message):  # noqa: F811
    code, out, err = run("recall", demo, "--needles", 0, *options)
    assert code == 2 and err.splitlines()[-1].startswith("error: ") and message in err.splitlines()[-1] and not out


def test_random_ids_without_a_tokenizer(path, text):
    assert text.sha256 is None and "no tokenizer.json" in text.name and text.ids.max() < SMALL["vocab_size"]
    with pytest.raises(Exception, match="cannot be read; copy the model's there"):
        read_text(ROOT / "README.md", path, 320, 10, 0)
    with pytest.raises(Exception, match="a context of 2000 needs 1999"):
        rows_of(text, 2000, 1, bos=0)
    rows = rows_of(Text("t", None, text.ids), 301, 9, bos=7)
    assert rows.shape == (3, 301) and (rows[:, 0] == 7).all() and rows[1, 1:].tolist() == text.ids[333:633].tolist()


def test_the_schema_refuses_what_it_does_not_know(subject, text):
    found = document.measured(subject, replace(SETTINGS, contexts=(192,), rows=1), text, ["dsv4", "recall"])
    assert found["provenance"]["checkpoint"]["name"] == "dense"
    assert found["needles"] is None and "turned off" in found["notes"][0]
    with pytest.raises(Exception, match="extra is unknown"):
        document.valid(found | {"rows": [found["rows"][0] | {"extra": 1}]})
    with pytest.raises(Exception, match="no chance"):
        document.valid(found | {"rows": [{k: v for k, v in found["rows"][0].items() if k != "chance"}]})
