"""The files of VLLM_DSV4_DUMP_DIR: one pass of a rank as it lies, ranks and passes by folders."""

import shutil

import pytest
import torch

from dsv4.probes.result import Status
from dsv4.probes.subjects.dump import DumpSubject
from tests.probes.engine_dumps.written import POSITIONS, VLLM, as_vllm, formula


@pytest.fixture
def dumped(live, tmp_path):
    _, ids, capture = live
    return as_vllm(tmp_path / "dump", capture, ids)


def test_what_the_forks_function_wrote_is_what_the_model_had(run, samples, tmp_path):
    out = tmp_path / "run.safetensors"
    code, said = run("import", "vllm", samples / "vllm", "--config", samples / "config.json", "--out", out)
    found = DumpSubject(out, samples / "config.json")
    assert code == 0 and found.recorded() == dict.fromkeys(VLLM, (0, 1))
    assert torch.equal(found.ids[0], (POSITIONS * 3 + 1) % 64) and found.schedule == ()
    for layer in (0, 1):
        assert all(torch.equal(value, formula(layer, point)) for point, value in found.layer(layer).items())
    assert "model.layers.{layer}.attn.attn.output (2)" in said and "model.post_decoder_stack (1)" in said


def test_one_pass_is_the_recorded_run(imported, judged, live, official, dumped):
    _, ids, capture = live
    code, said, file = imported("vllm", dumped)
    assert code == 0 and "not in the dump: q_after_rope, kv_window" in said
    found = DumpSubject(file, official).run(ids, (), tuple(VLLM)).points
    assert found.keys() == {key for key in capture.points if key[1] in VLLM}
    assert all(torch.equal(value, capture.points[key]) for key, value in found.items())
    statuses = {c.status for c in judged(file)}
    assert statuses == {Status.PASS, Status.VACUOUS}


def test_other_tokens_than_were_asked_for_are_refused(refused, dumped, tmp_path, live):
    """The first pass of an engine may be one of its own, on tokens that nobody sent."""
    (tmp_path / "ids.txt").write_text("1, 2, 3")
    assert "the steps ran 0 of the 3 tokens of --ids" in refused("vllm", dumped, None, "--ids", tmp_path / "ids.txt")
    (tmp_path / "ids.txt").write_text("[1, 2")
    assert "cannot be read" in refused("vllm", dumped, None, "--ids", tmp_path / "ids.txt")
    (tmp_path / "ids.txt").write_text("[1.5, 2]")
    assert "cannot be read (fractions)" in refused("vllm", dumped, None, "--ids", tmp_path / "ids.txt")
    (tmp_path / "ids.txt").write_text("[[1, 2], [3, 4]]")
    assert "shape [2, 2]; expected one row" in refused("vllm", dumped, None, "--ids", tmp_path / "ids.txt")


def test_ranks_and_passes_are_folders(imported, refused, live, dumped, official):
    _, ids, capture = live
    pairs = {(0, 0): (0, 170), (1, 0): (170, 300), (0, 1): (0, 170), (1, 1): (170, 300)}
    for (step, rank), (start, end) in pairs.items():
        folder = dumped / f"step{step}" / f"rank{rank}"
        folder.mkdir(parents=True)
        for file in dumped.glob("*.pt"):
            value = torch.load(file, weights_only=True)
            torch.save(value[start:end].clone(), folder / file.name)
        q = capture.points[0, "q_after_rope"][0, start:end].chunk(2, 1)[rank].clone()
        torch.save(q, folder / "00099__model.layers.0.attn.q_rotated.pt")
    for file in dumped.glob("*.pt"):
        file.unlink()
    table = '[names]\n"model.layers.{layer}.attn.q_rotated" = { point = "q_after_rope", dims = "t h[tp] d" }\n'
    code, said, file = imported("vllm", dumped, table)
    assert code == 0 and "300 tokens in 2 steps" in said and "joined over tp" in said
    found = DumpSubject(file, official)
    assert found.schedule == (170, 130)
    assert torch.equal(found.layer(0)["q_after_rope"], capture.points[0, "q_after_rope"])
    assert torch.equal(found.layer(4)["streams"], capture.points[4, "streams"])
    shutil.rmtree(dumped / "step0")
    assert "step 1 begins at position 170, and positions 0 to 169 are of no step" in refused("vllm", dumped, table)


def test_a_folder_of_another_layout_is_refused(refused, tmp_path, dumped):
    folder = tmp_path / "other"
    folder.mkdir()
    torch.save(torch.zeros(2), folder / "attn_out.pt")
    assert "holds no files NNNNN__TAG.pt" in refused("vllm", folder)
    assert "holds no files of SGLang's dumper" in refused("sglang", dumped)
