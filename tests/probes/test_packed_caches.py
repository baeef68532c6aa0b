"""Audits of packed caches: every probe that looks at caches is green on sound ones and red on others; what is
refused."""

import dataclasses
import json
from types import SimpleNamespace

import pytest
import torch

from dsv4.cache import layout, streams
from dsv4.cache.cache import DEFAULT_MAX_REWIND
from dsv4.cache.rows import Ring, Tokens
from dsv4.errors import InputError
from dsv4.kernels.cache_rows import PackedRows, RowFormat, pack_layout
from dsv4.model.config import ModelConfig
from dsv4.probes.audit import open_subject
from dsv4.probes.catalogue.memory_map import formula, per_token
from dsv4.probes.catalogue.poison import Poison
from dsv4.probes.compare import tokens
from dsv4.probes.faults.profile import DEFAULT
from dsv4.probes.probe import execute, probe_named
from dsv4.probes.report import json_report
from dsv4.probes.result import Status
from dsv4.probes.scenes.buffers import buffers, poison
from dsv4.probes.scenes.layouts import fp8_rows, keys_named, packed_streams
from dsv4.probes.subjects.ours import OurSubject

FORMATS = [("fp8", "fp4"), ("fp8", "fp8"), ("auto", "fp4"), ("fp8", "auto")]


@pytest.fixture(scope="module")
def subject(official):
    return OurSubject(official, "qat", cache="fp8", index_cache="fp4")


def checks_of(name, subject):
    return execute(probe_named(name)(effort=0.2) if name == "poison" else probe_named(name)(), subject)[0]


def red(name, subject):
    return [c for c in checks_of(name, subject) if c.status in (Status.FAIL, Status.ERROR)]


# ---- green --------------------------------------------------------------------------------


@pytest.mark.few(name=["index_oracle", "isolation", "poison", "backend_matrix"])
@pytest.mark.parametrize(
    "name", ["index_oracle", "influence", "rope", "rollback", "isolation", "poison", "backend_matrix"]
)
def test_packed_caches_lose_nothing_in_qat_numerics(subject, name):
    found = checks_of(name, subject)
    assert {c.status for c in found} == {Status.PASS}, [c for c in found if c.status is not Status.PASS][:2]


def test_packed_caches_change_no_bit_however_a_run_is_cut(official, subject):
    plain, ids = OurSubject(official, "qat"), tokens(subject, 150, 0)
    for schedule in ((), (131, 8, 8, 3), (64, 64, 22), (140, *[1] * 10)):
        assert torch.equal(subject.run(ids, schedule).logits, plain.run(ids, schedule).logits), schedule


@pytest.mark.sweep
def test_packed_caches_change_no_schedule(official, subject):
    """In qat numerics to the last bit: how far steps of 8 tokens are from one step is a matter of products, which
    processors round otherwise."""
    measured = lambda of: [(c.where, c.measured) for c in checks_of("schedules", of)]
    found = measured(subject)
    assert (
        found == measured(OurSubject(official, "qat")) and len(found) > 10 and any(value == 0 for _, value in found[2:])
    )


@pytest.mark.parametrize("formats", FORMATS, ids="+".join)
@pytest.mark.parametrize("name", ["dtype_ledger", "memory_map", "captured"])
def test_every_format_is_known(brief_official, name, formats):
    """`captured` takes 3 s: four scenarios run step by step, captured and through `append`."""
    found = checks_of(name, OurSubject(brief_official, "qat", "reference", "cpu", *formats))
    assert {c.status for c in found} == {Status.PASS}, [c for c in found if c.status is not Status.PASS][:2]


@pytest.mark.parametrize("tokens", [1, 40, 200])
def test_a_step_of_any_length_reads_rows_of_the_rings_kind(subject, tokens, monkeypatch):
    """Else its sums run in another order than where the same rows lie in pages or in the ring (P19 on a GPU)."""
    ids, room, seen, real = (
        torch.arange(tokens).remainder(subject.config.vocab_size).view(1, -1),
        tokens + 8,
        [],
        Tokens.extend,
    )
    monkeypatch.setattr(
        Tokens,
        "extend",
        lambda ring, step, values: seen.append((type(ring.flat), real(ring, step, values))) or seen[-1][1],
    )
    subject.model.append(ids, subject.model.new_cache(1, room, 16))
    assert len(seen) >= subject.config.num_hidden_layers and any(kind is PackedRows for kind, _ in seen)
    assert all(isinstance(pool, kind) for kind, pool in seen)


# ---- the layouts --------------------------------------------------------------------------


def test_public_sizes():
    """Specification 5: 584 B in pages padded to 576 B, 132 B, 68 B; Flash with FP8 keys: 3,850 B a token (known bugs,
    0.9)."""
    main, fp8, fp4 = fp8_rows(512, 64), keys_named("fp8", 128), keys_named("fp4", 128)
    assert (main.payload, main.scales, main.used, main.page) == (576, 8, 7, 65 * 576)
    assert (
        [p.payload + p.scales for p in (main, fp8, fp4)] == [584, 132, 68]
        and fp8.page == 64 * 132
        and fp4.page == 64 * 68
    )
    flash = SimpleNamespace(
        compress_ratios=[0, 0, *(4, 128) * 20, 4], head_dim=512, index_head_dim=128, qk_rope_head_dim=64
    )
    a_token = per_token(flash, 2, packed_streams(flash, ("fp8", "fp8")))
    assert abs(a_token - 3850) < 6  # and a 64th of a page's padding: one byte a row
    assert per_token(flash, 2, {}) == 6880


def test_bytes_of_one_row():
    """By hand: 448 is code 0x7E under the scale 1, 6 is code 7; −0.5 is 0x8 | 1; rotated columns keep their bf16."""
    main = fp8_rows(66, 2).encode(torch.tensor([[448.0, -448.0, *[0.0] * 62, 1.0, -2.0]]).double())[0].tolist()
    assert main[:4] == [0x7E, 0xFE, 0, 0] and main[64:68] == [0x80, 0x3F, 0x00, 0xC0] and main[68:] == [127, *[0] * 7]
    keys = keys_named("fp4", 32).encode(torch.tensor([[6.0, -0.5, *[0.0] * 30]]).double())[0]
    assert keys[:2].tolist() == [0x97, 0] and keys[16:].tolist() == [127]
    keys = keys_named("fp8", 4).encode(torch.tensor([[896.0, 2.0, 0.0, -896.0]]).double())[0]
    assert keys.tolist() == [0x7E, 0x38, 0, 0xFE, 0, 0, 0, 0x40]  # scale 2 as fp32, little end first


def test_rows_of_one_page_interleave():
    """Payloads and scales of neighbouring rows of a batch lie in turns: what belongs to a row is not one range."""
    form = fp8_rows(64, 16)
    mine, other = (set(form.offsets(torch.arange(at, at + 20)).flatten().tolist()) for at in (30, 50))
    assert not mine & other and len(mine) == 20 * (form.payload + form.scales)
    assert max(mine) > min(other)
    spans, bytes_ = form.spans(30, 40), set(form.offsets(torch.arange(30, 70)).flatten().tolist())
    assert len(spans) == 4 and {b for start, stop in spans for b in range(start, stop)} == bytes_


# ---- red ----------------------------------------------------------------------------------


def test_pages_of_another_size_are_red(official, monkeypatch):
    real, layout = streams._entry_stream, pack_layout(RowFormat.KV_FP8, 64, 16)
    short = 64 * layout.row
    assert short < layout.page

    def unpadded(*args):
        stream = real(*args)
        return dataclasses.replace(stream, shape=(*stream.shape[:-1], short)) if stream.name == "entries" else stream

    monkeypatch.setattr(streams, "_entry_stream", unpadded)
    subject = OurSubject(official, "qat", cache="fp8")
    assert {c.part for c in red("memory_map", subject) if c.name == "bytes of the buffer"} == {"entries"}
    assert [c.part for c in red("dtype_ledger", subject)] == ["entries"]


def test_another_format_than_was_asked_for_is_red(official):
    subject = OurSubject(official, "qat", index_cache="fp8")
    subject.caches = ("auto", "fp4")
    found = red("dtype_ledger", subject)
    assert {c.part for c in found} == {"numerics", "index keys"} and "fp4 keys" in found[-1].note
    assert {c.part for c in red("memory_map", subject)} >= {"index keys", "cache"}


def test_a_window_written_into_its_neighbour_is_red(official, monkeypatch):
    """Rows of a batch share pages: the other row's payload lies within the same page."""
    subject = OurSubject(official, "qat", cache="fp8")
    monkeypatch.setattr(Ring, "slots", lambda ring, step, key, numbers: (numbers() % ring.R + 0 * step.row).flatten())
    found = red("memory_map", subject)
    assert ("buffers of the other row that were written", "window") in {(c.name, c.part) for c in found}


@pytest.mark.filterwarnings("ignore:Use of index_put_ on expanded tensors")
def test_packed_rows_in_one_buffer_are_red(official, monkeypatch):
    subject, real = OurSubject(official, "qat", cache="fp8"), layout.zeros

    def shared(stream, device):
        buffer = real(stream, device)
        return buffer[:1].expand(2, -1, -1) if stream.name == "entries" and len(buffer) == 2 else buffer

    monkeypatch.setattr(layout, "zeros", shared)
    assert ("rows that share memory", "entries") in {(c.name, c.part) for c in red("memory_map", subject)}


def test_an_unwritten_packed_row_that_is_read_is_red(subject, monkeypatch):
    def last(tokens, step, window):  # positions before the first one are read too
        return tokens.rows.index(step, step.pos.unsqueeze(-1) + torch.arange(1 - window, 1)).flatten(0, 1)

    monkeypatch.setattr(Tokens, "last", last)
    assert "unwritten slots" in {c.part for c in execute(Poison(effort=0.1), subject)[0] if c.status is Status.FAIL}


def test_poison_spares_what_may_be_read(subject):
    """A cache that holds NaN in all other bytes goes on as before; one byte more is too many."""
    ids = torch.randint(0, subject.config.vocab_size, (2, 60), generator=torch.Generator().manual_seed(0))
    clean, dirty = (subject.model.new_cache(2, 80) for _ in range(2))
    for cache in (clean, dirty):
        subject.model.append(ids, cache, n_new=[60, 37], logits="none")
    poison(subject, dirty, dirty.lengths, back=2)
    for cache in (clean, dirty):
        cache.rewind([2, 1])
    assert torch.equal(subject.model.append(ids[:, :6], clean), subject.model.append(ids[:, :6], dirty))
    for buffer in buffers(subject, dirty):
        buffer.bytes.fill_(255)
    assert not torch.isfinite(subject.model.append(ids[:, :1], dirty)).any()


# ---- names, options, refusals -------------------------------------------------------------


def test_formula_is_that_of_the_planner(subject):
    config = ModelConfig.from_official(DEFAULT)
    wanted = formula(config, 2, 3, 1000, False, packed_streams(config, ("fp8", "fp4")))
    plan = streams.cache_streams(config, 3, 1000, DEFAULT_MAX_REWIND, subject.model.numerics, mtp=False)
    assert wanted == {(layer.label, s.name): s.nbytes for layer in plan for s in layer.streams}


def test_the_formats_are_named(run, official, tmp_path):
    formats = "--numerics", "qat", "--cache", "fp8", "--index-cache", "fp4"
    code, err = run(official, *formats, "--probe", "dtype_ledger", "--out", tmp_path)
    assert code == 0, err
    assert "official_ours_qat_fp8_fp4.json" in {f.name for f in tmp_path.iterdir()}
    report = json_report.load(tmp_path / "official_ours_qat_fp8_fp4.json")
    assert report["title"] == "Audit of ours, qat, fp8 cache, fp4 index cache, backend cpu, cpu"
    assert {k: report["provenance"]["about"][k] for k in ("cache", "index cache")} == {
        "cache": "fp8",
        "index cache": "fp4",
    }


@pytest.mark.parametrize(
    "options,said",
    [
        (
            ("--numerics", "native", "--cache", "fp8"),
            "an FP8 or FP4 cache is audited in qat numerics, whose oracle rounds as it "
            "does; found --numerics native; pass --numerics qat",
        ),
        (("--index-cache", "fp4"), "found --numerics fp32"),
        (("--numerics", "qat:fp32", "--cache", "fp8"), "found --numerics qat:fp32"),
        (("--numerics", "qat", "--cache", "int8"), "--cache takes auto, bf16 or fp8; got 'int8'"),
        (("--numerics", "qat", "--cache", "fp4"), "--cache takes auto, bf16 or fp8; got 'fp4'"),
        (("--cache", "bf16"), "whose caches are fp32"),
        (("--subject", "files", "--cache", "fp8"), "would change nothing of subject 'files'"),
        (("--subject", "transformers", "--index-cache", "fp8"), "leave them out, or audit ours"),
    ],
)
def test_what_is_refused_is_one_line(run, official, options, said):
    code, err = run(official, *options, "--probe", "dtype_ledger")
    assert code == 2 and said in err and len(err.strip().splitlines()) == 1


def test_recorded_and_bisected(run, official, tmp_path):
    file = tmp_path / "run.safetensors"
    packed = ("--subject", "ours:qat", "--cache", "fp8", "--index-cache", "fp4", "--tokens", 40)
    assert run("record", official, "--out", file, *packed)[0] == 0
    code, err = run("bisect", official, *packed)
    assert code == 0 and "nothing above the noise floor" in err
    assert run("bisect", official, "--subject", file)[0] == 0
    assert "pass --numerics qat (or --subject ours:qat)" in run("record", official, "--out", file, "--cache", "fp8")[1]


def test_recall_of_packed_caches_is_that_of_plain_ones(official):
    from dsv4.probes.measure.recall.observe import Oracles, observe_model

    ids, seen = torch.randint(0, 200, (150,), generator=torch.Generator().manual_seed(1)), []
    for formats in (("auto", "auto"), ("fp8", "fp4")):
        opened, found = open_subject(official, "ours", "qat", "cpu", "cpu", *formats), []
        observe_model(opened.model, Oracles(opened), ids, [120, 150], 8, 32, found.append)
        seen.append(found)
    assert len(seen[0]) == len(seen[1]) > 0
    for plain, packed in zip(*seen):
        assert torch.equal(plain.selection, packed.selection) and torch.equal(plain.scores, packed.scores)
        assert torch.allclose(plain.mass, packed.mass, atol=1e-6)


def test_recall_refuses_them_in_other_numerics(official):
    with pytest.raises(InputError, match="found --numerics native; pass --numerics qat"):
        open_subject(official, "ours", "native", cache="fp8")


def test_a_probe_by_itself_takes_them(official, tmp_path, by_itself):
    formats = "--numerics", "qat", "--cache", "fp8", "--index-cache", "fp8"
    code, _, err = by_itself("memory_map", official, *formats, "--out", tmp_path / "m.md")
    assert code == 0, err
    assert "fp8 index cache" in json.loads((tmp_path / "m.json").read_text())["title"]


# 6 s: a bisection runs each layer of the oracle, rounded and not
@pytest.mark.few(fault=["indexer_compressor"])
@pytest.mark.parametrize("fault", ["kv_norm", "indexer_compressor", "lowest_scores"])
def test_a_fault_behind_packed_caches_is_confirmed_by_a_swap(official, fault):
    """Rows of the oracle are packed where they take the place of the subject's, and its keys are read from bytes."""
    from tests.probes import test_bisect

    subject, plant = OurSubject(official, "qat", cache="fp8", index_cache="fp4"), getattr(test_bisect, fault)
    plant(subject.model.layers)
    layer, point, module, _ = test_bisect.FAULTS[plant]
    _, verdict = test_bisect.bisected(subject)
    assert (verdict.first.layer, verdict.first.point, verdict.module, verdict.confirmed) == (layer, point, module, True)
