"""The self-test: planted faults are named, what is not is a gap, nothing stays behind. All of it:
scripts/selftest.sh."""

import json
import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import wait
from dataclasses import replace
from pathlib import Path

import pytest

from dsv4.commands import cli
from dsv4.errors import Dsv4Error, InputError
from dsv4.kernels.fusions import COMPOSITIONS
from dsv4.kernels.operations import OPERATIONS
from dsv4.model.attention import WindowAttention
from dsv4.model.load import load_model
from dsv4.probes.faults import Mutation, Site, catalogue, profile, sections
from dsv4.probes.report import schema
from dsv4.probes.result import Check, Status
from dsv4.probes.selftest import detection
from dsv4.probes.selftest import run as selftest
from dsv4.probes.selftest.detection import Matrix, document, markdown, select
from dsv4.probes.selftest.run import Bench, Clean, Found, Outcome, audit_clean, look, named, run_all, settings

FAST: tuple[str, ...] = (  # one or two of each section whose first probe is quick
    "hc head dropped",
    "compress ratios off by one",
    "nibbles swapped",
    "sinks written in bf16",
    "mscale in the softmax",
    "half split rotation",
    "compressed buffers of the raw length",
    "relu missing",
    "ties go to the highest entry",
    "at most 512 picks",
    "attention in bf16",
    "comb transposed",
    "bias weighs",
    "every token routes as id 0",
    "entry offsets in 32 bits",
    "compressor state survives the request",
    "writes go to the first row",
    "vocabulary shards in another order",
    "second stage without ids",
    "nibbles of packed keys swapped",
    "scales beside each row",
    "byte offsets of packed rows in 32 bits",
    "resting rows advance in replays",
    "fused linears without their norm",
    "graft of one block fewer",
    "weights of the mean exchanged on the device",
    "rotary scaling ignored",
    "kv heads dealt out in turn",
    "sliding window one longer",
    "qkv bias never added",
    "rewind forgets one too few",
    "sink block lost",
    "termination ignores direction",
    "fusion without scaling",
    "slot table not updated on eviction",
    "hca counted at the ratio of csa",
)
# whole probes that take seconds: `make test` sees each red in a file of its own
SLOW = {
    "speculation",
    "grafting",
    "index_oracle",
    "termination",
    "host_tier",
    "sparse_reading",
    "rope",
    "captured",
    "cost_model",
}
BY_NAME = {m.name: m for m in catalogue()}
# of a section that none of these is of, the first
FAST += tuple(m.name for m in select(fast=True) if m.section not in {BY_NAME[name].section for name in FAST})
QUICK = [name for name in FAST if BY_NAME[name].probes[0] not in SLOW]
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    folder = tmp_path_factory.mktemp("profiles")
    for name in profile.NAMES:
        profile.write(folder / name, name)
    return Bench(folder, "cpu")


def planted(plant, parts=("sink",), probes=()) -> Mutation:
    return Mutation("a planted fault", "1.7", (105,), "Something is wrong.", parts, plant, probes)


def nothing(site) -> None:
    """No fault at all."""


def dies(site) -> None:
    os._exit(3)


def dies_of_an_assertion(site) -> None:
    """As a kernel's assertion on a device ends its process: what it says is written by no Python."""
    os.write(2, b"a warning\nIndexing.cu:1515: Assertion `srcIndex < srcSelectDimSize` failed.\nterminate called\n")
    os._exit(3)


def mixes_devices(site) -> None:
    """Written where every tensor is on one device: on another, whatever it touches crashes."""

    def crash(*args):
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!"
        )

    site.patch(WindowAttention, "queries", crash)


def one_entry_late(site) -> None:
    late = lambda seen: (seen - 1).clamp(min=0)
    site.kernel("hca_attention", lambda real: lambda q, w, wi, e, seen, *rest: real(q, w, wi, e, late(seen), *rest))


# ---- the catalogue ------------------------------------------------------------------------


def test_the_catalogue_covers_every_section():
    assert len(BY_NAME) >= 80 and {m.section for m in catalogue()} == set(sections())
    assert {m.profile for m in catalogue()} <= set(profile.NAMES)
    assert all(m.parts and m.what for m in catalogue())
    assert {m.section for m in (BY_NAME[name] for name in FAST)} == set(sections())


@pytest.mark.few(name=QUICK, each=lambda p: BY_NAME[p["name"]].probes[:1])
@pytest.mark.parametrize("name", FAST)
def test_a_planted_fault_is_named(bench, name):
    outcome = look(BY_NAME[name], bench)
    assert outcome.found.caught and outcome.found.word in BY_NAME[name].parts, outcome.found
    assert not outcome.left


def test_select():
    assert {m.section for m in select("1.10")} == {"1.10"} and {m.section for m in select(fast=True)} == set(sections())
    assert [m.name for m in select(name="HC head")] == ["hc head dropped"]
    assert {m.probes[0] for m in select(probe="rope")} == {"rope"} and len(select("1.3", probe="rope")) > 5
    with pytest.raises(InputError, match="1.11"):
        select("2.1")
    with pytest.raises(InputError, match="for rope probe"):
        select("1.19", probe="rope")
    with pytest.raises(Dsv4Error, match="'nonsense' is unknown"):
        select(probe="nonsense")


def test_with_a_probe_no_other_is_asked(bench, monkeypatch):
    fault = planted(one_entry_late, ("HCA attention",), ("edges",))
    assert look(fault, replace(bench, probe="edges")).found.by == "edges"
    assert not look(fault, replace(bench, probe="mhc")).found.caught
    clean = audit_clean(Clean("default", "fp32", "cpu"), replace(bench, probe="mhc"))
    monkeypatch.setattr(selftest, "available", lambda: ["mhc"])
    assert clean.green and clean.texts == audit_clean(Clean("default", "fp32", "cpu"), bench).texts


def test_a_section_has_one_title(monkeypatch):
    assert list(sections())[:2] == ["1.1", "1.2"] and sections()["1.19"] == "The cost model of a decode step"
    from dsv4.probes.faults import masks

    monkeypatch.setattr(masks, "SECTION", ("1.6", "again"), raising=False)
    with pytest.raises(Dsv4Error, match="section 1.6 has a title in two files"):
        sections()


# ---- what counts --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "word,text,found",
    [
        ("sink", "attn_sink", True),
        ("sink", "Sinkhorn", False),
        ("Sink", "the sink of head 3", True),
        ("hc_head", "hc_head_fn", True),
        (".eps", "layers.0.attn_norm.eps", True),
        ("mtp.", "mtp.0.norm", True),
        ("layer 1", "layer 10", False),
        ("MTP", "mtp 0", True),
    ],
)
def test_a_word_is_not_part_of_a_longer_one(word, text, found):
    assert bool(named([word], [text])) is found


def test_no_fault_is_a_gap(bench, quick):
    found = look(planted(nothing), bench).found
    assert not found.caught and found.note == "no probe saw it" and found.seen == ()


def test_red_for_another_reason_is_a_gap(bench, quick):
    assert look(planted(one_entry_late, ("HCA attention",)), bench).found.by == "edges"
    found = look(planted(one_entry_late, ("router",)), bench).found
    assert not found.caught and found.seen == ("edges",) and "not named" in found.note


def test_the_title_of_a_broken_probe_names_nothing():
    texts = lambda title, note: selftest.texts_of(Check(title, Status.ERROR, note=note))
    assert not named(["selection"], texts("attention and selection at their edges", "KeyError: 3"))
    assert named(["selection"], texts("edges", "MissingSelection: no selection"))


@pytest.mark.parametrize(
    "error,caught,status",
    [
        (InputError("tensor layers.0.attn.attn_sink is missing"), True, "FAIL"),
        (InputError("something is off"), False, ""),
        (KeyError("attn_sink"), True, "ERROR"),
        (KeyError("x"), False, ""),
    ],
)
def test_what_fails_while_loading(bench, quick, error, caught, status):
    def refuse(*args, **more):
        raise error

    found = look(
        planted(lambda site: site.patch(sys.modules["dsv4.probes.subjects.ours"], "load_model", refuse)), bench
    ).found
    assert (found.caught, found.status, found.by) == (caught, status, "load" if caught else "")
    assert "while loading" in (found.finding or found.note)


def test_a_mutation_that_cannot_be_planted_is_a_gap(bench, quick):
    for plant in (lambda site: 1 / 0, lambda site: site.after_load(lambda subject: 1 / 0)):
        found = look(planted(plant), bench).found
        assert not found.caught and "could not be planted: ZeroDivisionError" in found.note


def test_every_fault_can_be_planted_before_loading(bench, tmp_path):
    """What a fault replaces may have got another name: found here, not first in a self-test of all faults."""
    failed = []
    for number, one in enumerate(catalogue()):
        site = Site(Path(shutil.copytree(bench.profiles / one.profile, tmp_path / str(number))))
        try:
            one.plant(site)
        except Exception as error:
            failed.append(f"{one.name}: {error}")
        finally:
            site.undo()
            shutil.rmtree(site.checkpoint)
    assert not failed


def test_words_that_match_everything_show_as_chance():
    assert selftest.chance(planted(nothing, ("sink",)), ("sink", "mHC comb", "router", "window")) == 0.25


# ---- nothing stays behind -----------------------------------------------------------------


def test_undoing_restores_and_is_verified(bench, quick):
    before, forward = OPERATIONS["hca_attention"], WindowAttention.forward
    assert look(planted(one_entry_late), bench).left == () and OPERATIONS["hca_attention"] is before
    try:
        left = look(planted(lambda site: setattr(WindowAttention, "forward", lambda *args: forward(*args))), bench).left
    finally:
        WindowAttention.forward = forward
    assert "dsv4.model.attention.WindowAttention.forward" in left


def test_the_profile_itself_is_never_damaged(bench, quick):
    files = {f: f.read_bytes() for f in (bench.profiles / "default").iterdir()}
    look(planted(lambda site: [f.write_bytes(b"") for f in site.checkpoint.glob("*.safetensors")]), bench)
    assert all(f.read_bytes() == content for f, content in files.items())
    load_model(bench.profiles / "default")


def test_a_fault_that_kills_its_process_is_a_gap(bench, capfd):
    """The note has the words in which it died, and all of them are passed on. Processes that import everything: 8 s."""
    found = dict(run_all([planted(dies), planted(dies_of_an_assertion)], bench, jobs=2))
    assert not any(outcome.found.caught for outcome in found.values())
    notes = [found[i].found.note for i in range(2)]
    assert notes[0] == "the process died, without a word of what it died of"
    assert notes[1] == "the process died: Indexing.cu:1515: Assertion `srcIndex < srcSelectDimSize` failed."
    assert "terminate called" in capfd.readouterr().err


def test_copies_have_what_is_preloaded(tmp_path):
    """All of it can be imported, Triton's key of itself is known then, and no device was asked.

    A process that imports everything: 6 s."""
    code = (
        "import importlib, torch; from dsv4.probes.selftest.run import preloaded; [importlib.import_module(name) "
        "for name in preloaded()]\n"
        "from triton.runtime.cache import triton_key; print(triton_key.cache_info().misses, "
        "torch.cuda.is_initialized())\n"
        "triton_key(); print(triton_key.cache_info().misses)"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert said.stdout.split() == ["1", "False", "1"], said.stderr


# ---- sound subjects, report ---------------------------------------------------------------


def test_sound_subjects_of_all_numerics_are_asked_for():
    asked = settings([BY_NAME["mtp rotates like layer 1"]], "cpu", everything=True)
    assert len([c for c in asked if c.profile == "default"]) == 12 and any(c.profile == "layer1" for c in asked)
    of_gqa = {(name, numerics) for name in profile.GQA_PROFILES for numerics in ("fp32", "native")}
    assert {(c.profile, c.numerics) for c in asked} >= of_gqa


def test_a_fault_of_a_host_backend_is_planted_there_whatever_the_device():
    """On a GPU a pass is one append anyway, so this fault would change nothing there."""
    on_gpu, fault = Bench(Path(), "triton", "cuda"), BY_NAME["verification as one append"]
    assert on_gpu.where(fault.backend) == ("cpu", "cpu")
    assert on_gpu.where(BY_NAME["verified one place late"].backend) == ("triton", "cuda")
    assert any((c.numerics, c.backend) == ("native", "cpu") for c in settings([fault], "triton", everything=False))


def test_ctrl_c_drops_what_waits_and_ends_what_runs():
    with pytest.raises(KeyboardInterrupt), selftest._pool(1, Bench(Path(), "cpu")) as pool:
        waiting = [pool.submit(time.sleep, 60) for _ in range(3)]
        while not waiting[0].running():
            time.sleep(0.05)
        raise KeyboardInterrupt
    assert not wait(waiting, timeout=30).not_done


def test_a_sound_subject_is_green_and_a_fault_in_it_is_not(bench, monkeypatch):
    monkeypatch.setattr(selftest, "available", lambda: ["dtype_ledger", "edges", "mhc"])
    clean = audit_clean(Clean("default", "fp32", "cpu"), bench)
    assert clean.green and clean.texts and not clean.red
    monkeypatch.setattr(WindowAttention, "queries", lambda self, x, step: 1 / 0)
    assert not audit_clean(Clean("default", "fp32", "cpu"), bench).green


def test_a_fault_that_only_crashes_for_mixing_devices_is_not_caught(bench):
    fault = planted(mixes_devices, parts=("batching", "state left behind"), probes=("isolation",))
    assert not look(fault, bench).found.caught and "mixes devices" in look(fault, bench).found.note


def test_what_runs_several_operations_as_one_is_taken_apart_for_a_fault_around_them(tmp_path):
    site, before = Site(tmp_path), {name: c.implementations for name, c in COMPOSITIONS.items()}
    site.unfused("gated_pool")
    site.unfused("place")
    gone = {name for name, c in COMPOSITIONS.items() if before[name] and not c.implementations}
    assert {"pool_entries", "attention_inputs", "place"} == gone
    site.undo()
    assert {name: c.implementations for name, c in COMPOSITIONS.items()} == before


def test_a_matrix_with_a_gap_a_false_alarm_or_a_leftover_is_not_clean():
    fine = Outcome(planted(nothing), Found(True, "edges", "FAIL", "x", "", "sink", "sink"))
    gap, left = Outcome(planted(nothing), Found(note="no probe saw it")), Outcome(fine.mutation, fine.found, 0, ("x",))
    green, red = (Clean("default", "fp32", "cpu", {Status.PASS: 3}, r) for r in ((), ("edges: wrong",)))
    assert Matrix([fine], [green]).exit_code == 0
    assert {Matrix(*rows).exit_code for rows in (([gap], [green]), ([fine], [red]), ([left], []))} == {1}
    text = markdown(Matrix([fine, gap], [green, red]))
    assert "**gap** 1.7 **a planted fault**: no probe saw it" in text
    assert "**false alarm** default, fp32, cpu: edges: wrong" in text
    assert "1 of 2 mutations caught, 1 of 2 sound subjects green" in text


def test_command_line_prints_gaps_and_writes_a_valid_matrix(tmp_path, monkeypatch, capsys, quick):
    rows = [planted(nothing), Mutation("late", "1.7", (90,), "An entry late.", ("HCA attention",), one_entry_late)]
    monkeypatch.setattr(detection, "catalogue", lambda: rows)
    monkeypatch.setattr(
        sys, "argv", ["dsv4", "audit", "selftest", "--out", str(tmp_path), "--jobs", "1", "--name", "a"]
    )
    with pytest.raises(SystemExit) as stop:
        cli.main()
    said = capsys.readouterr().err
    assert stop.value.code == 1 and "GAP    1.7   a planted fault: no probe saw it" in said and "Traceback" not in said
    found = json.loads((tmp_path / "selftest.json").read_text())
    assert schema.problems(found, json.loads(detection.SCHEMA.read_text())) == []
    assert [(m["name"], m["section"], m["caught"], m["by"]) for m in found["mutations"]] == [
        ("a planted fault", "1.7", False, None),
        ("late", "1.7", True, "edges"),
    ]
    assert found["selection"] == "name a" and found["totals"]["gaps"] == 1 and str(tmp_path) not in json.dumps(found)
    assert "Not the whole matrix" in (tmp_path / "selftest.md").read_text()


@pytest.mark.parametrize(
    "backends, name", [(("reference", "cpu", "training"), "selftest.md"), (("triton",), "selftest_triton.md")]
)
def test_the_matrix_of_another_backend_has_its_own_files(backends, name, tmp_path):
    fine = Outcome(planted(nothing), Found(True, "edges", "FAIL", "x", "", "sink", "sink"))
    detection.write(Matrix([fine], [Clean("default", "fp32", b, {Status.PASS: 3}) for b in backends]), tmp_path)
    assert [f.name for f in tmp_path.glob("*.md")] == [name]


def test_the_schema_refuses_what_it_does_not_know():
    value = document(Matrix([Outcome(planted(nothing), Found())], []))
    value["mutations"][0]["passed"] = True
    assert any("passed is unknown" in p for p in schema.problems(value, json.loads(detection.SCHEMA.read_text())))


@pytest.mark.parametrize("arguments", ["--backend reference", "--section 7", "--device tpu"])
def test_what_cannot_run_ends_with_2(monkeypatch, capsys, arguments):
    monkeypatch.setattr(sys, "argv", ["dsv4", "audit", "selftest", *arguments.split()])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    assert stop.value.code == 2 and "error:" in capsys.readouterr().err


@pytest.mark.few(given=["3,5,7"])
@pytest.mark.parametrize("given, names", [(None, {"0", "1"}), ("3,5,7", {"3", "5"})])
def test_processes_are_shared_out_to_the_gpus_that_are_seen(monkeypatch, tmp_path, given, names):
    """Without a GPU: what each process is told, before anything calls CUDA.

    5 s: the server that processes are forked from imports torch first."""
    monkeypatch.setattr(selftest.torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if given:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    monkeypatch.setattr(selftest, "_lives", lambda bench: 1)
    with selftest._pool(1, Bench(tmp_path, device="cuda")) as pool:
        told = {pool.submit(os.getenv, "CUDA_VISIBLE_DEVICES").result() for _ in range(6)}
    assert told == names, told
