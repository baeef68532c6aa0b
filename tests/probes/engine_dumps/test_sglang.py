"""Files that SGLang's dumper wrote, and runs in its layout: what is imported, what is refused and why."""

import json
import re

import pytest
import torch

from dsv4.probes.compare import tokens
from dsv4.probes.result import Status, worst
from dsv4.probes.subject import POINTS
from dsv4.probes.subjects.dump import DumpSubject
from dsv4.probes.subjects.ours import OurSubject
from tests.probes.engine_dumps.written import NUMBER, POSITIONS, as_sglang, formula, sglang_file


@pytest.mark.parametrize(
    "version, points",
    [
        ("0.5.5", ["q_after_rope"]),
        ("0.5.9", ["q_after_rope"]),
        ("0.5.10.post1", list(NUMBER)),
        ("0.5.12", list(NUMBER)),
        ("0.5.23", list(NUMBER)),
        ("0.5.23-hook", ["attn_in", "attn_out"]),
    ],
)
def test_what_the_dumper_wrote_is_what_the_model_had(run, samples, tmp_path, version, points):
    out = tmp_path / "run.safetensors"
    code, said = run("import", "sglang", samples / version, "--config", samples / "config.json", "--out", out)
    assert code == 0, said
    found = DumpSubject(out, samples / "config.json")
    assert torch.equal(found.ids[0], (POSITIONS * 3 + 1) % 64) and found.schedule == (5, 3, 1)
    assert found.numerics == "bf16" and found.recorded() == dict.fromkeys(points, (0, 1))
    for layer in (0, 1):
        assert all(torch.equal(value, formula(layer, point)) for point, value in found.layer(layer).items())


SUM = '[names]\nrouted_out = "ffn_out"\n"non_intrusive__model.layers.{layer}.mlp.output" = false\n'


def test_partial_sums_that_the_dumper_wrote_are_summed(run, samples, tmp_path):
    out, table = tmp_path / "run.safetensors", tmp_path / "names.toml"
    table.write_text(SUM)
    where = ("--config", samples / "config.json", "--out", out, "--rename", table)
    code, said = run("import", "sglang", samples / "0.5.23", *where)
    assert code == 0 and re.search("ffn_out .* summed over moe_tp", said)
    assert all(
        torch.equal(DumpSubject(out, samples / "config.json").layer(i)["ffn_out"], formula(i, "ffn_out"))
        for i in (0, 1)
    )
    table.write_text(SUM.replace('"ffn_out"', '{ point = "ffn_out", dims = "t d" }'))
    code, said = run("import", "sglang", samples / "0.5.23", *where)
    assert code == 2 and "ffn_out of layer 0 in step 0 differs between ranks" in said


def test_every_file_is_accounted_for(run, samples, tmp_path):
    account = tmp_path / "account.json"
    where = ("--config", samples / "config.json", "--out", tmp_path / "run.safetensors", "--account", account)
    (extra := samples / "0.5.12" / "notes.txt").write_text("a note")
    code, said = run("import", "sglang", samples / "0.5.12", *where)
    extra.unlink()
    fates = json.loads(account.read_text())
    assert fates.pop("notes.txt") == "not a name that SGLang gives" and "notes.txt" in said
    assert set(fates) == {f"run/{f.name}" for f in (samples / "0.5.12").rglob("*.pt")}
    assert all(fate for names in fates.values() for fate in names.values())


def test_files_of_these_tests_are_like_the_dumpers(samples, tmp_path):
    real = next((samples / "0.5.23").rglob("step=1___rank=1___*name=q_after_rope*layer_id=1.pt"))
    mine = sglang_file(tmp_path, "q_after_rope", torch.zeros(3, 2, 4), 1, 2, 1, 1, "t h[attn_tp] d")
    words = lambda file: re.sub(r"dump_index=\d+", "", file.name)
    assert words(mine) == words(real)
    theirs, ours = (torch.load(file, weights_only=True)["meta"] for file in (real, mine))
    info = theirs.pop("sglang_parallel_info")
    assert ours.pop("sglang_parallel_info").items() <= info.items()
    assert ours | {"dump_index": 0} == theirs | {"dump_index": 0}


# ---- whole runs ----------------------------------------------------------------------------------


def test_a_run_over_ranks_and_chunks_is_the_recorded_run(imported, judged, live, official, tmp_path):
    subject, ids, capture = live
    folder = as_sglang(tmp_path / "dump", capture, ids, subject.config, (130, 168, 1, 1), ranks=2)
    code, said, file = imported("sglang", folder)
    assert code == 0, said
    found = DumpSubject(file, official)
    assert found.schedule == (130, 168, 1, 1) and found.numerics == "fp32"
    for key, value in found.run(ids, found.schedule, tuple(NUMBER)).points.items():
        assert torch.equal(value, capture.points[key]), key
    checks = judged(file)
    assert worst(checks) is Status.PASS and sum(c.name == "path" for c in checks) == 5


def test_the_last_run_of_several_and_the_one_that_is_asked_for(imported, live, ids_file, tmp_path):
    subject, ids, capture = live
    few = lambda ids: type(capture)(
        None, {k: v[:, : ids.shape[1]] for k, v in capture.points.items() if k[1] == "attn_in"}
    )
    other = torch.tensor([[5, 6, 7]])
    folder = tmp_path / "dump"
    as_sglang(folder, few(ids), ids, subject.config, (200, 100))
    for step in (7, 8):  # another request, after a pause
        sglang_file(folder, "input_ids", other[0, 2 * (step == 8) : 2 + (step == 8)].clone(), step=step)
        sglang_file(folder, "positions", torch.arange(3)[2 * (step == 8) : 2 + (step == 8)].clone(), step=step)
        sglang_file(folder, "attn_in", torch.zeros(2 - (step == 8), subject.config.hidden_size), step=step, layer=0)
    code, said, file = imported("sglang", folder)
    assert code == 0 and "3 tokens in 2 steps" in said and "an earlier run" in said
    code, said, file = imported("sglang", folder, None, "--ids", ids_file)
    assert code == 0 and "300 tokens in 2 steps" in said and "other tokens than --ids" in said


def test_a_bf16_run_is_judged_by_what_bf16_explains(imported, judged, official, tmp_path):
    subject = OurSubject(official, "native")
    ids = tokens(subject, 300, 1)
    capture = subject.run(ids, want=tuple(POINTS))
    narrow = {key: v.bfloat16() if v.is_floating_point() else v.int() for key, v in capture.points.items()}
    folder = as_sglang(tmp_path / "dump", type(capture)(None, narrow), ids, subject.config, (299, 1), ranks=4)
    code, said, file = imported("sglang", folder)
    assert (
        code == 0 and DumpSubject(file, official).numerics == "bf16" and "selection      2 layers (1, 3), int32" in said
    )
    checks = judged(file)
    assert worst(checks) is Status.PASS and sum(c.name == "path" for c in checks) == 5
