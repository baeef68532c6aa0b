"""Faults planted in dumps of SGLang's layout: refused in one line, or red in the audit of the imported run."""

import re
import shutil
from pathlib import Path

import pytest
import torch

from dsv4.probes.result import Status, worst
from tests.probes.engine_dumps.written import as_sglang, sglang_file


@pytest.fixture
def dumped(live, tmp_path):
    """Function: a dump of two ranks and three steps, with `change`."""
    subject, ids, capture = live
    return lambda change=None, ranks=2: as_sglang(
        tmp_path / "dump", capture, ids, subject.config, (150, 149, 1), ranks, change
    )


def test_files_whose_ranks_were_swapped_are_refused(dumped, refused):
    folder = dumped()
    zero = next(folder.glob("step=1___rank=0___*name=q_after_rope*layer_id=2.pt"))
    one = next(folder.glob("step=1___rank=1___*name=q_after_rope*layer_id=2.pt"))
    swap = zero.with_name("swap")
    zero.rename(swap), one.rename(zero), swap.rename(one)
    assert re.search(r"was written as \w+ \d+; its name has been changed", refused("sglang", folder))


def test_ranks_that_were_swapped_in_the_engine_are_red_in_the_audit(dumped, imported, judged):
    """Files that agree with themselves, of an engine whose ranks took each other's heads in one layer."""
    folder = dumped()
    for step in range(3):
        files = [next(folder.glob(f"step={step}___rank={r}___*name=q_after_rope*layer_id=2.pt")) for r in (0, 1)]
        zero, one = (torch.load(file, weights_only=True) for file in files)
        torch.save(zero | {"value": one["value"]}, files[0])
        torch.save(one | {"value": zero["value"]}, files[1])
    code, said, file = imported("sglang", folder)
    failed = [c for c in judged(file) if c.status is Status.FAIL]
    assert code == 0 and failed[0].name.startswith("q_after_rope") and {c.where for c in failed} == {"layer 2"}


@pytest.mark.parametrize(
    "change, said",
    [
        (lambda k, v, r, s: None if s == 1 else v, "step 1 .* is in no file|positions 150 to 298"),
        (
            lambda k, v, r, s: None if (k, s) == ((3, "attn_out"), 1) else v,
            "attn_out of layer 3 in step 1 .* is in no file",
        ),
        (lambda k, v, r, s: None if (k, s, r) == ((3, "attn_out"), 1, 1) else v, "no file of attn_tp rank 1 of 2"),
        (lambda k, v, r, s: None if (k, s, r) == ((3, "q_after_rope"), 0, 1) else v, "no part of attn_tp rank 1 of 2"),
        (
            lambda k, v, r, s: v * (0.75 - r / 2) if k == (1, "attn_out") else v,
            "attn_out of layer 1 in step 0 differs between",
        ),
        (
            lambda k, v, r, s: v.bfloat16() if (k, r) == ((1, "attn_out"), 1) else v,
            "bfloat16 and float32 on different ranks",
        ),
        (
            lambda k, v, r, s: v.bfloat16() if (k[1], s) == ("streams", 2) else v,
            "streams of layer 0 in step 2 is bfloat16, and float32",
        ),
        (lambda k, v, r, s: v[:-1] if (k, s) == ((1, "index_keys"), 0) else v, ""),
    ],
    ids=[
        "a chunk",
        "a layer's chunk",
        "a rank",
        "a rank's heads",
        "partial sums",
        "dtypes of ranks",
        "dtypes of steps",
        "entries",
    ],
)
def test_what_is_missing_or_does_not_fit_is_refused(dumped, refused, imported, change, said):
    folder = dumped(change)
    if said:
        assert re.search(said, refused("sglang", folder))
    else:  # a line of the default table that does not fit is left out, and said to be
        code, told, file = imported("sglang", folder)
        assert code == 0 and "left out, index_keys of layer … in step … has shape" in told


def test_a_whole_step_that_is_missing_is_refused(dumped, refused):
    folder = dumped()
    for file in folder.glob("step=1___*"):
        file.unlink()
    assert "step 2 begins at position 299, and positions 150 to 298 are of no step" in refused("sglang", folder)


def test_partial_sums_are_summed_where_the_table_says_so(dumped, imported, refused, judged):
    halves = lambda k, v, r, s: v * (0.75 - r / 2) if k[1] == "attn_out" else v
    folder = dumped(halves)
    table = '[names]\nattn_out = { point = "attn_out", dims = "t d[tp:partial]" }\n'
    code, said, file = imported("sglang", folder, table)
    assert code == 0 and "summed over tp" in said and worst(judged(file)) is Status.PASS
    table = '[names]\n"ffn_out" = { point = "ffn_out", dims = "t d[tp:partial]" }\n' + table.split("\n", 1)[1]
    assert "ffn_out of layer 0 in step 0 is the same on all 2 ranks of tp" in refused("sglang", folder, table)


def test_a_wrong_name_is_refused_and_a_wrong_point_is_red(dumped, imported, refused, judged):
    folder = dumped(ranks=1)
    said = refused("sglang", folder, '[names]\n"attn_uot" = "attn_out"\n')
    assert "'attn_uot', which no file is called" in said and "'attn_out'" in said
    said = refused("sglang", folder, '[names]\n"attn_out" = "attention"\n')
    assert "expected one of attn_in," in said
    said = refused("sglang", folder, '[names]\n"attn_out" = "streams"\n"streams" = false\n')
    assert "streams of layer 0 in step 0 has shape [150, 128]" in said
    code, said, file = imported("sglang", folder, '[names]\nattn_out = "ffn_out"\nffn_out = "attn_out"\n')
    assert code == 0 and worst(judged(file)) is Status.FAIL


def test_files_that_would_run_code_or_are_cut_off_are_refused(dumped, refused):
    folder = dumped(ranks=1)
    file = next(folder.glob("*name=attn_out*layer_id=3.pt"))
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    assert "is no file of torch.save that can be read" in refused("sglang", folder)
    torch.save({"value": Path("anything"), "meta": {}}, file)
    assert "loading it would run code" in refused("sglang", folder)


def test_values_that_are_no_plain_tensors_are_refused(dumped, refused):
    folder = dumped(lambda k, v, r, s: v.to(torch.float8_e4m3fn) if k == (3, "attn_out") else v, ranks=1)
    assert "holds float8_e4m3fn without its scales" in refused("sglang", folder)
    file = next(folder.glob("*name=attn_out*layer_id=1.pt"))
    torch.save(torch.load(file, weights_only=True) | {"value": ["a", "list"]}, file)
    assert "holds a list; expected a tensor" in refused("sglang", folder)


def test_what_is_dumped_twice_is_refused(dumped, refused, imported):
    folder = dumped(ranks=1)
    sglang_file(folder, "other_name", torch.zeros(150, 128), layer=0)
    table = '[names]\nother_name = "attn_out"\n'
    assert "dumped twice by rank 0, as attn_out and other_name" in refused("sglang", folder, table)
    table += "attn_out = false\n"
    assert "attn_out of layer 0 in step 1 (positions 150 to 298) is in no file" in refused("sglang", folder, table)
    table = '[names]\nother_name = false\nattn_in = { point = "attn_in", dims = "t d" }\n'
    code, said, file = imported("sglang", folder, table)
    assert code == 0 and "left out by the renaming table: other_name (1)" in said


def test_gradients_parameters_and_other_layers_are_left_out(dumped, imported, refused):
    folder = dumped(ranks=1)
    sglang_file(folder, "grad__attn_out", torch.zeros(150, 128), layer=0)
    sglang_file(folder, "param__model.layers.0.wq.weight", torch.zeros(2, 2))
    sglang_file(folder, "attn_out", torch.zeros(150, 128), layer=5)
    sglang_file(folder, "selection", torch.zeros(150, 6), layer=0)
    sglang_file(folder, "attn_in", torch.zeros(150, 128))
    code, said, file = imported("sglang", folder)
    assert code == 0
    for why in (
        "a gradient: grad__attn_out (1)",
        "a parameter: ",
        "layer 5 is not one of the 5",
        "layer 0 has no selection",
    ):
        assert f"left out, {why}" in said
    assert "neither its name nor a tag says its layer: attn_in (1)" in said
    assert "neither its name nor a tag says its layer" in refused("sglang", folder, '[names]\nattn_in = "attn_in"\n')


def test_ranks_that_say_other_dims_are_refused(dumped, refused):
    folder = dumped()
    file = next(folder.glob("step=1___rank=1___*name=q_after_rope*layer_id=3.pt"))
    found = torch.load(file, weights_only=True)
    found["meta"]["dims"] = "t h d"
    torch.save(found, file)
    assert "q_after_rope of layer 3 in step 1 has dims 't h d' and 't h[attn_tp] d'" in refused("sglang", folder)


def test_entries_and_scores_of_another_width_are_left_out(dumped, imported, refused):
    narrow = lambda k, v, r, s: v[:, :-1].clone() if k in ((1, "index_keys"), (3, "index_scores")) else v
    folder = dumped(narrow, ranks=1)
    code, said, file = imported("sglang", folder)
    assert code == 0 and "index_keys     1 layers (3)" in said and "index_scores   1 layers (1)" in said
    assert "left out, index_keys of layer … ends with shape" in said
    said = refused("sglang", folder, '[names]\nindex_keys = "index_keys"\n')
    assert "index_keys of layer 1 ends with shape [1, 75, 31]; expected [1, 75, 32]" in said


def test_ranks_that_ran_other_tokens_are_refused(dumped, refused):
    folder = dumped()
    file = next(folder.glob("step=1___rank=1___*name=input_ids*"))
    found = torch.load(file, weights_only=True)
    torch.save(found | {"value": found["value"] + 1}, file)
    assert "ids of step 1 differ between the files of one step" in refused("sglang", folder)


def test_tokens_of_another_vocabulary_are_refused(dumped, refused, tmp_path):
    folder = dumped(ranks=1)
    file = next(folder.glob("step=0___rank=0___*name=input_ids*"))
    found = torch.load(file, weights_only=True)
    torch.save(found | {"value": found["value"] + 320}, file)
    assert "and the config a vocabulary of 320; is it of another checkpoint?" in refused("sglang", folder)


def test_two_runs_or_processes_in_one_folder_are_refused(dumped, refused, samples, tmp_path):
    folder = dumped(ranks=1)
    sglang_file(folder / "dump_2", "attn_out", torch.zeros(1, 128), layer=0)
    assert "holds 2 runs (dump, dump_2)" in refused("sglang", folder)
    for number in (1, 2):
        shutil.copytree(samples / "0.5.23-hook" / "TP0_PP0_Rank0_pid1", tmp_path / "two" / f"TP0_PP0_Rank0_pid{number}")
    assert "two folders are of one rank" in refused("sglang", tmp_path / "two")


def test_names_that_say_nothing_of_points_are_refused(refused, tmp_path):
    sglang_file(tmp_path / "dump", "hidden", torch.zeros(3, 128), layer=0)
    assert "none of the 1 names of the dump is of a capture point (hidden" in refused("sglang", tmp_path / "dump")
    sglang_file(tmp_path / "narrow", "attn_in", torch.zeros(3, 64), layer=0)
    sglang_file(tmp_path / "narrow", "input_ids", torch.arange(3))
    assert "nothing of the run is a capture point" in refused("sglang", tmp_path / "narrow")


def test_out_has_a_name_of_its_kind(run, official, tmp_path):
    code, said = run("import", "sglang", tmp_path, "--config", official, "--out", tmp_path / "run.pt")
    assert code == 2 and "expected a name that ends in .safetensors" in said


def test_other_folders_are_refused(refused, tmp_path, samples):
    assert "is no folder" in refused("sglang", tmp_path / "absent")
    (tmp_path / "empty").mkdir()
    assert "holds no files of SGLang's dumper" in refused("sglang", tmp_path / "empty")
    assert "both kinds" in refused("sglang", samples)
    assert "engine 'trt' is unknown" in refused("trt", samples)
