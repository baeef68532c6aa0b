"""An inventory reads what is asked for and no more, and takes nothing for what it is not."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from dsv4 import load_model
from dsv4.loaders.errors import CheckpointError
from dsv4.loaders.files import Files
from dsv4.loaders.load import Inventory
from tests import checkpoints, oracle
from tests.checkpoints import SMALL, edit_config


@pytest.fixture
def single(tmp_path):
    """An official checkpoint in one file."""
    return checkpoints.write_official(tmp_path / "single", max_shard_bytes=1 << 30)


def rewrite(path, change):
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")


def test_opening_reads_no_tensor(single, monkeypatch):
    monkeypatch.setattr(Files, "read", lambda *a: pytest.fail("a tensor was read"))
    inventory = Inventory.open(single)
    assert inventory.layout.name == "official" and inventory.mtp_blocks == 1 and not inventory.has_dspark


def test_stacked_experts_are_read_one_matrix_at_a_time(tmp_path, monkeypatch):
    config = oracle.TINY
    path = oracle.save_in_memory_names(oracle.randomised(config), config, tmp_path / "stacked")
    sizes, read = {}, Files.read

    def recorded(self, tensor, start=0, nbytes=None):
        sizes.setdefault(tensor.key, []).append(nbytes)
        return read(self, tensor, start, nbytes)

    monkeypatch.setattr(Files, "read", recorded)
    load_model(path, numerics="fp32")
    one, E = config["moe_intermediate_size"] * config["hidden_size"] * 4, config["n_routed_experts"]
    assert sizes["model.layers.3.mlp.experts.gate_up_proj"] == [one] * (2 * E)
    assert sizes["model.layers.3.mlp.experts.down_proj"] == [one] * E


@pytest.mark.parametrize("numerics", ["fp32", "native"])
def test_scales_in_finer_blocks_than_the_config_says_do_not_load(tmp_path, numerics):
    quantised = SMALL["quantization_config"]
    path = checkpoints.write_official(
        tmp_path / "fine", {**SMALL, "quantization_config": {**quantised, "weight_block_size": [64, 64]}}
    )
    edit_config(path, quantization_config=quantised)
    with pytest.raises(CheckpointError, match=r"scale has shape \[\d, \d\]; the config asks for"):
        load_model(path, numerics=numerics)


@pytest.mark.parametrize("leaf", ["e_proj.weight", "enorm.weight", "hc_head_fn", "attn.wkv.scale"])
def test_an_mtp_block_that_lacks_a_tensor_is_no_other_kind_of_block(single, leaf):
    rewrite(single, lambda t: t.pop(f"mtp.0.{leaf}"))
    with pytest.raises(CheckpointError, match=f"mtp.0.{leaf}|mtp.0.attn.wkv has weight F8_E4M3 with no scales"):
        load_model(single)


def test_an_mtp_tensor_nobody_knows_is_an_error_in_every_layout(tmp_path):
    config = oracle.TINY
    path = oracle.save_in_memory_names(oracle.randomised(config), config, tmp_path / "stacked")
    rewrite(path, lambda t: t.update({"mtp.0.enorm.wieght": torch.ones(64)}))
    with pytest.raises(CheckpointError, match="no layout knows.*mtp.0.enorm.wieght"):
        Inventory.open(path)


@pytest.mark.parametrize(
    "name,change,match",
    [
        ("layers.2.attn.wkv.weight", lambda t: t.view(torch.uint8).view(-1)[7].fill_(0xFF), "wkv.weight holds 1 NaN"),
        ("layers.2.attn.wkv.scale", lambda t: t.view(torch.uint8).fill_(0xFF), "wkv.scale holds 1 NaN"),
        ("layers.2.ffn.gate.bias", lambda t: t[:2].fill_(float("nan")), "gate.bias holds 2 NaN"),
        ("layers.0.ffn.gate.tid2eid", lambda t: t[5].fill_(-1), "tid2eid holds 2 negative indices"),
    ],
    ids=["an FP8 weight", "an E8M0 scale", "an fp32 bias", "a table"],
)
def test_a_value_no_checkpoint_holds_names_its_tensor(single, name, change, match):
    rewrite(single, lambda t: change(t[name]))
    with pytest.raises(CheckpointError, match=match):
        Inventory.open(single).read(name)


@pytest.mark.parametrize("which", ["in_memory", "save_pretrained"])
def test_every_value_of_transformers_own_files_arrives(tmp_path, which):
    config, model = oracle.TINY, oracle.randomised(oracle.TINY)
    in_memory = Inventory.open(oracle.save_in_memory_names(model, config, tmp_path / "in_memory"))
    model.save_pretrained(tmp_path / "save_pretrained")
    inventory = Inventory.open(tmp_path / which)
    assert set(inventory.sources) == set(in_memory.sources)
    values = model.state_dict()
    for name, source in in_memory.sources.items():
        wanted = (
            values[source.tensor.key]
            .contiguous()
            .view(torch.uint8)
            .view(-1)[source.start : source.start + source.nbytes]
        )
        assert torch.equal(inventory.read(name).contiguous().view(torch.uint8).view(-1), wanted), name
    assert sum(s.nbytes for s in inventory.sources.values()) == sum(v.nbytes for v in values.values())
