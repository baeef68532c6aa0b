"""Conversions keep every value, write nothing half, and say what they did."""

import errno
import io
import json
import re

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from dsv4 import load_model
from dsv4.commands import tables
from dsv4.loaders import write
from dsv4.loaders.config_files import nvfp4_quantization
from dsv4.loaders.convert import convert
from dsv4.loaders.errors import CheckpointError, WriteError
from dsv4.loaders.load import Inventory
from dsv4.model.config import ModelConfig
from tests import checkpoints

CONFIG = ModelConfig.from_official(checkpoints.SMALL)


def same_bytes(a, b) -> list[str]:
    """Official names whose bytes differ."""
    x, y = Inventory.open(a), Inventory.open(b)
    assert set(x.sources) == set(y.sources)
    return [
        n for n in x.sources if not torch.equal(x.files.read(x.sources[n].tensor), y.files.read(y.sources[n].tensor))
    ]


def values(path) -> dict[str, torch.Tensor]:
    inventory = Inventory.open(path)
    return {base: inventory.read_matrix(base, (128, 128)) for base in inventory.formats}


def test_official_to_nvfp4_and_back_is_the_same_bytes(official, tmp_path):
    summary = convert(official, tmp_path / "nv", "nvfp4", CONFIG)
    assert not summary.rounded and summary.actions["mxfp4 → nvfp4"] == 3 * 6 * 5
    convert(tmp_path / "nv", tmp_path / "back", "official", CONFIG)
    assert same_bytes(official, tmp_path / "back") == []


def test_copying_official_to_official_is_the_same_bytes(official, tmp_path):
    convert(official, tmp_path / "copy", "official", CONFIG, max_shard_bytes=50_000)
    assert same_bytes(official, tmp_path / "copy") == []


@pytest.mark.parametrize("via", ["transformers", "bf16"])
def test_dense_layouts_hold_the_same_values_and_come_back(official, tmp_path, via):
    convert(official, tmp_path / "dense", via, CONFIG)
    summary = convert(tmp_path / "dense", tmp_path / "back", "official", CONFIG)
    wanted = values(official)
    for path in (tmp_path / "dense", tmp_path / "back"):
        got = values(path)
        assert set(got) == set(wanted) and all(torch.equal(got[n], wanted[n]) for n in wanted), path
    assert not any("rounded" in action for action in summary.actions)


def test_transformers_loads_what_we_write(official, tmp_path):
    from transformers import DeepseekV4ForCausalLM

    convert(official, tmp_path / "hf", "transformers", CONFIG)
    ids = torch.randint(0, 320, (1, 290), generator=torch.Generator().manual_seed(0))
    theirs = DeepseekV4ForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    with torch.inference_mode():
        wanted = theirs(ids).logits
    for path in (official, tmp_path / "hf"):
        assert (load_model(path, numerics="fp32")(ids) - wanted).abs().max() < 2e-4


def test_a_dense_source_is_quantised_in_the_official_way(tmp_path):
    dense = checkpoints.write_dense(tmp_path / "dense", dtype="F32")
    official = checkpoints.write_official(tmp_path / "official")
    summary = convert(dense, tmp_path / "made", "official", CONFIG, allow_rounding=True)
    assert summary.actions["dense → mxfp4, rounded"] > 0
    differing = same_bytes(official, tmp_path / "made")
    assert differing == []


def test_rounding_to_bf16_is_counted(tmp_path):
    dense = checkpoints.write_dense(tmp_path / "dense", dtype="F32")
    with pytest.raises(CheckpointError, match="values of embed.weight have no exact bfloat16 form; pass --allow-round"):
        convert(dense, tmp_path / "made", "bf16", CONFIG)
    summary = convert(dense, tmp_path / "made", "bf16", CONFIG, allow_rounding=True)
    assert len(summary.rounded_tensors) > 50 and summary.rounded["head.weight"][1] == 320 * 128
    assert summary.actions["dense → dense, rounded"] > 50 and summary.rounded_values > 100_000


def test_fp8_experts_do_not_become_fp4_silently(tmp_path):
    raw = {**checkpoints.SMALL, "moe_intermediate_size": 128}
    path = checkpoints.write_official(tmp_path / "fp8", raw, "FP8")
    with pytest.raises(CheckpointError, match=r"values of layers\.0\.ffn\.\S+ have no exact mxfp4 form"):
        convert(path, tmp_path / "made", "official", ModelConfig.from_official(raw))
    assert not (tmp_path / "made").exists()


def test_nvfp4_that_was_not_mxfp4_is_refused(tmp_path):
    dense = checkpoints.write_dense(tmp_path / "dense", dtype="BF16")
    with pytest.raises(CheckpointError, match="have no exact fp8 form; pass --allow-rounding"):
        convert(dense, tmp_path / "nv", "nvfp4", CONFIG)
    convert(dense, tmp_path / "nv", "nvfp4", CONFIG, allow_rounding=True)
    with pytest.raises(CheckpointError, match=r"values of layers.0.ffn.experts.0.w1.weight have no exact mxfp4 form"):
        convert(tmp_path / "nv", tmp_path / "made", "official", CONFIG)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["dense", "nv"]


def test_nvfp4_by_way_of_a_dense_layout_keeps_every_value(official, tmp_path):
    convert(official, tmp_path / "dense", "transformers", CONFIG)
    summary = convert(tmp_path / "dense", tmp_path / "nv", "nvfp4", CONFIG)
    wanted, got = values(official), values(tmp_path / "nv")
    assert set(got) == set(wanted) and all(torch.equal(got[n], wanted[n]) for n in wanted)
    assert summary.actions["dense → nvfp4, exact"] == 90 and not summary.rounded
    inventory = Inventory.open(tmp_path / "nv")  # w1 and w3 share their global scale, as the kernels that read them ask
    for e in range(6):
        first, third = (inventory.read(f"layers.2.ffn.experts.{e}.w{i}.weight_scale_2") for i in (1, 3))
        assert torch.equal(first, third)
    stated = json.loads((tmp_path / "nv" / "config.json").read_text())["quantization_config"]
    assert stated == nvfp4_quantization(checkpoints.SMALL)[0]  # in full, although the dense source states none
    assert stated["weight_block_size"] == [128, 128] and stated["activation_scheme"] == "dynamic"


def test_the_command_line_counts_what_it_did(official, tmp_path, command_line):
    code, out, _ = command_line("convert", official, tmp_path / "nv", "--to", "nvfp4", "--json")
    document = json.loads(out)
    assert code == 0 and document["actions"]["mxfp4 → nvfp4"] == 90 and document["rounded_values"] == 0
    text = io.StringIO()
    tables.conversion(document, Console(file=text, soft_wrap=True))
    assert "\n  90 matrices: mxfp4 → nvfp4\n" in text.getvalue()


def test_rounding_is_refused_or_counted_on_the_command_line(tmp_path, command_line):
    dense = checkpoints.write_dense(tmp_path / "dense", dtype="BF16")
    code, _, err = command_line("convert", dense, tmp_path / "nv", "--to", "nvfp4")
    assert code == 2 and "--allow-rounding" in err and not (tmp_path / "nv").exists()
    code, out, _ = command_line("convert", dense, tmp_path / "nv", "--to", "nvfp4", "--allow-rounding")
    found = re.search(r"(\d+) values of (\d+) tensors were rounded, as --allow-rounding allows; first (\S+)", out)
    assert code == 0 and int(found[1]) > 100_000 and int(found[2]) > 90 and found[3] == "layers.0.attn.wq_a.weight"


@pytest.mark.parametrize("size,message", [("0", "--max-shard is 0; expected a positive"), ("5X", "--max-shard: '5X'")])
def test_a_shard_size_that_is_none_is_refused_before_the_work(tmp_path, command_line, size, message):
    code, _, err = command_line("convert", tmp_path / "no such", tmp_path / "out", "--to", "bf16", "--max-shard", size)
    assert code == 2 and message in err


def test_input_scales_never_saturate(official, tmp_path):
    convert(official, tmp_path / "nv", "nvfp4", CONFIG)
    inventory = Inventory.open(tmp_path / "nv")
    assert inventory.read("layers.2.ffn.experts.0.w2.input_scale").item() * 6 * 448 == pytest.approx(150)
    norm = inventory.read("layers.2.ffn_norm.weight").float().abs().max().item()
    assert inventory.read("layers.2.ffn.experts.0.w1.input_scale").item() * 6 * 448 == pytest.approx(
        norm * 128**0.5, rel=1e-5
    )


def test_the_safetensors_library_reads_our_files(official):
    inventory = Inventory.open(official)
    for shard in inventory.files.shards:
        for key, tensor in load_file(shard).items():
            assert torch.equal(
                tensor.contiguous().view(-1).view(torch.uint8), inventory.files.read(inventory.files.tensors[key])
            )
    index = json.loads((official / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in inventory.files.tensors.values())


def test_an_existing_destination_is_an_error(official, tmp_path):
    (tmp_path / "there").mkdir()
    with pytest.raises(WriteError, match="exists already"):
        convert(official, tmp_path / "there", "bf16", CONFIG)
    assert list((tmp_path / "there").iterdir()) == []


@pytest.mark.parametrize("after", [0, 30, 400])
def test_a_full_disk_leaves_nothing(official, tmp_path, monkeypatch, after):
    calls = []

    def full(name, value, dtype, shape, real=write._bytes):
        calls.append(name)
        if len(calls) > after:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(name, value, dtype, shape)

    monkeypatch.setattr(write, "_bytes", full)
    with pytest.raises(WriteError, match="the disk is full"):
        convert(official, tmp_path / "out", "nvfp4", CONFIG)
    assert list(tmp_path.iterdir()) == []


def test_an_interrupt_leaves_nothing(official, tmp_path):
    def stop(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(official, tmp_path / "out", "bf16", CONFIG, progress=stop)
    assert list(tmp_path.iterdir()) == []


def test_a_tensor_nobody_asks_for_is_not_dropped_silently(tmp_path):
    from safetensors.torch import save_file

    path = checkpoints.write_dense(tmp_path / "dense")
    tensors = load_file(path / "model.safetensors") | {"layers.9.attn_norm.weight": torch.ones(128)}
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(CheckpointError, match="does not ask for, first layers.9.attn_norm.weight"):
        convert(path, tmp_path / "out", "bf16", CONFIG)


@pytest.mark.parametrize("to", ["official", "bf16", "transformers"])
def test_a_transposed_tensor_is_an_error(tmp_path, to):
    from safetensors.torch import save_file

    path = checkpoints.write_dense(tmp_path / "dense", dtype="BF16")
    tensors = load_file(path / "model.safetensors")
    tensors["layers.1.attn.compressor.wkv.weight"] = (
        tensors["layers.1.attn.compressor.wkv.weight"].view(64, 256).contiguous()
    )
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"layers.1.attn.compressor.wkv.weight has shape \[64, 256\]"):
        convert(path, tmp_path / "out", to, CONFIG)
    assert not (tmp_path / "out").exists()


def rewritten(path, change):
    """The one-file checkpoint at `path` with `change(tensors)` applied."""
    from safetensors.torch import save_file

    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")


@pytest.mark.parametrize("to", ["official", "nvfp4", "bf16", "transformers"])
@pytest.mark.parametrize("name", ["layers.0.attn.wq_a.scale", "layers.1.ffn.experts.2.w1.scale"])
def test_scales_of_another_block_size_are_an_error(tmp_path, to, name):
    path = checkpoints.write_official(tmp_path / "official", max_shard_bytes=1 << 30)

    def double(tensors):
        tensors[name] = tensors[name].view(torch.uint8).repeat_interleave(2, -1).view(torch.float8_e8m0fnu)

    rewritten(path, double)
    with pytest.raises(CheckpointError, match=f"tensor {name} has shape"):
        convert(path, tmp_path / "out", to, CONFIG)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "name,dtype", [("layers.0.ffn.gate.tid2eid", torch.float32), ("layers.0.attn.attn_sink", torch.float64)]
)
def test_a_dtype_that_would_lose_bits_is_an_error(tmp_path, name, dtype):
    path = checkpoints.write_dense(tmp_path / "dense")
    rewritten(path, lambda t: t.update({name: t[name].to(dtype) + 0.3}))
    with pytest.raises(CheckpointError, match=f"tensor {name} is F(32|64) in the file and would have to become"):
        convert(path, tmp_path / "out", "bf16", CONFIG)


def test_infinity_is_not_quantised(tmp_path):
    path = checkpoints.write_dense(tmp_path / "dense", dtype="BF16")

    def damage(tensors):
        tensors["layers.0.attn.wq_a.weight"][0, 0] = float("inf")

    rewritten(path, damage)
    with pytest.raises(CheckpointError, match="layers.0.attn.wq_a.weight holds infinite values"):
        convert(path, tmp_path / "out", "official", CONFIG)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("via", ["transformers", "nvfp4", "bf16"])
def test_the_config_comes_back(official, tmp_path, via):
    convert(official, tmp_path / "there", via, CONFIG)
    convert(tmp_path / "there", tmp_path / "back", "official", CONFIG)
    first, last = (json.loads((p / "config.json").read_text()) for p in (official, tmp_path / "back"))
    assert (
        last["compress_ratios"] == first["compress_ratios"]
        and len(first["compress_ratios"]) > first["num_hidden_layers"]
    )
    assert {k: last.get(k) for k in first} == first
