"""Every layout maps to official names exactly, and nothing that is nearly right is let through."""

import json

import pytest
import torch

from dsv4.kernels.quantize import WeightFormat
from dsv4.loaders.errors import CheckpointError
from dsv4.loaders.expected import official_tensors, preset
from dsv4.loaders.files import DTYPES, FileTensor, open_checkpoint
from dsv4.loaders.layouts import canonical_sources, detect_layout, matrix_formats
from dsv4.model.config import ModelConfig
from tests import checkpoints, oracle


def fake(names_shapes):
    """File tensors that exist by name only."""
    return {k: FileTensor(k, dtype, tuple(shape), None, 0, 0) for k, (dtype, shape) in names_shapes.items()}


@pytest.mark.parametrize("name", ["flash", "pro"])
def test_published_tensor_counts(name):
    tensors = official_tensors(ModelConfig.from_official(preset(name)))
    assert len(tensors) == {"flash": 69187, "pro": 145116}[name]


def test_published_nvfp4_flash_has_these_tensors_and_bytes():
    tensors = official_tensors(ModelConfig.from_official(preset("flash")), experts="NVFP4")
    size = 0
    for dtype, shape in tensors.values():
        n = DTYPES[dtype].itemsize
        for extent in shape:
            n *= extent
        size += n
    assert (len(tensors), size) == (135235, 168266793544)


@pytest.mark.parametrize("prefix", ["", "model."])
def test_official_names_are_their_own(prefix):
    names = official_tensors(ModelConfig.from_official(checkpoints.SMALL))
    tensors = fake({prefix + k: v for k, v in names.items()})
    sources = canonical_sources(tensors, detect_layout(tensors))
    assert set(sources) == set(names)
    assert all(source.tensor.key == prefix + name for name, source in sources.items())


def transformers_names(config):
    """transformers' own module names of a config, with official names beside them, from the spec's table."""
    return {k: ("F32", tuple(v.shape)) for k, v in oracle.randomised(config).state_dict().items()}


def test_transformers_names_invert_the_nesting_of_compressor_and_indexer():
    tensors = fake(transformers_names(oracle.TINY))
    sources = canonical_sources(tensors, detect_layout(tensors))
    expected = set(official_tensors(ModelConfig.from_official(oracle.TINY), dense="F32", experts="F32"))
    assert set(sources) == expected
    where = {name: source.tensor.key for name, source in sources.items()}
    p = "model.layers.2.self_attn"
    assert where["layers.2.attn.indexer.compressor.wkv.weight"] == f"{p}.compressor.indexer.kv_proj.weight"
    assert where["layers.2.attn.compressor.wkv.weight"] == f"{p}.compressor.kv_proj.weight"
    assert where["layers.2.attn.indexer.compressor.norm.weight"] == f"{p}.compressor.indexer.kv_norm.weight"
    assert where["layers.2.attn.kv_norm.weight"] == f"{p}.kv_norm.weight"
    assert where["layers.2.ffn.shared_experts.w2.weight"] == "model.layers.2.mlp.shared_experts.down_proj.weight"


def test_older_transformers_names_without_scorer():
    names = {k.replace(".scorer.", "."): v for k, v in transformers_names(oracle.TINY).items()}
    sources = canonical_sources(fake(names), detect_layout(fake(names)))
    assert "layers.2.attn.indexer.weights_proj.weight" in sources


def test_gate_rows_come_before_up_rows_in_stacked_experts(tmp_path):
    model = oracle.randomised(oracle.TINY)
    files = open_checkpoint(oracle.save_in_memory_names(model, oracle.TINY, tmp_path / "m"))
    sources = canonical_sources(files.tensors, detect_layout(files.tensors))
    stacked = model.state_dict()["model.layers.3.mlp.experts.gate_up_proj"]
    for w, rows in (("w1", slice(0, 32)), ("w3", slice(32, 64))):
        source = sources[f"layers.3.ffn.experts.5.{w}.weight"]
        got = files.read(source.tensor, source.start, source.nbytes).view(torch.float32).view(source.shape)
        assert torch.equal(got, stacked[5, rows])


@pytest.mark.parametrize(
    "wrong",
    [
        "model.layers.2.self_attn.indexer.compressor.kv_proj.weight",  # leaf-by-leaf rename of the official nesting
        "layers.2.attn.compressor.indexer.wkv.weight",
        "layers.2.attn.indexer.kv_proj.weight",
        "module.layers.2.attn.indexer.compressor.wkv.weight",
        "layers.2.attn.indexer.compressor.wkv.weight.extra",
        "xlayers.2.attn_norm.weight",
    ],
)
def test_a_name_that_is_nearly_right_is_an_error(wrong):
    names = dict(official_tensors(ModelConfig.from_official(checkpoints.SMALL)))
    names[wrong] = ("BF16", (4, 4))
    with pytest.raises(CheckpointError, match="no layout knows.*" + wrong.replace(".", r"\.")):
        detect_layout(fake(names))


@pytest.mark.parametrize(
    "kind,expected",
    [
        ({"weight": "BF16"}, WeightFormat.DENSE),
        ({"weight": "F32"}, WeightFormat.DENSE),
        ({"weight": "F8_E4M3", "scale": "F8_E8M0"}, WeightFormat.FP8),
        ({"weight": "F8_E4M3", "scale": "F32"}, WeightFormat.FP8),
        ({"weight": "I8", "scale": "F8_E8M0"}, WeightFormat.MXFP4),
        ({"weight": "U8", "scale": "F8_E8M0"}, WeightFormat.MXFP4),
        (
            {"weight": "U8", "weight_scale": "F8_E4M3", "weight_scale_2": "F32", "input_scale": "F32"},
            WeightFormat.NVFP4,
        ),
        ({"weight": "F8_E4M3"}, None),
        ({"weight": "BF16", "scale": "F8_E8M0"}, None),
        ({"weight": "I8", "scale": "F8_E4M3"}, None),
        ({"weight": "U8", "weight_scale": "F8_E4M3"}, None),
    ],
    ids=lambda v: "+".join(f"{k} {d}" for k, d in v.items()) if isinstance(v, dict) else None,
)
def test_formats_are_read_off_the_dtypes(kind, expected):
    tensors = fake({f"layers.0.ffn.experts.0.w1.{k}": (d, (2, 2)) for k, d in kind.items()})
    sources = canonical_sources(tensors, detect_layout(tensors))
    if expected is None:
        with pytest.raises(CheckpointError, match="expected BF16"):
            matrix_formats(sources)
    else:
        assert matrix_formats(sources) == {"layers.0.ffn.experts.0.w1": expected}


def test_save_pretrained_writes_what_we_call_its_layout(tmp_path):
    oracle.randomised(oracle.TINY).save_pretrained(tmp_path / "saved")
    files = open_checkpoint(tmp_path / "saved")
    layout = detect_layout(files.tensors)
    assert layout.name == "transformers save_pretrained"
    assert "model.layers.2.attn.norm.weight" in files.tensors
    assert "layers.2.attn.kv_norm.weight" in canonical_sources(files.tensors, layout)
    assert (
        json.loads((tmp_path / "saved" / "config.json").read_text())["layer_types"][2] == "compressed_sparse_attention"
    )


def test_a_model_that_transformers_loaded_from_its_own_names_and_saved_again_loads(official, tmp_path):
    """It renames back only what it had renamed when it loaded: both spellings stand in one file."""
    from transformers import DeepseekV4ForCausalLM

    from dsv4.loaders.convert import convert
    from dsv4.loaders.load import Inventory

    convert(official, tmp_path / "ours", "transformers", ModelConfig.from_official(checkpoints.SMALL))
    DeepseekV4ForCausalLM.from_pretrained(tmp_path / "ours", dtype="auto").save_pretrained(tmp_path / "theirs")
    ours, theirs = (Inventory.open(tmp_path / which) for which in ("ours", "theirs"))
    names = [name for name in ours.sources if not name.startswith("mtp.")]  # which transformers has not
    assert theirs.layout.name == "transformers save_pretrained" and set(theirs.sources) == set(names)
    assert "model.layers.1.attn.compressor.gate_proj.weight" in theirs.files.tensors
    assert all(torch.equal(ours.read(n).float(), theirs.read(n).float()) for n in names)


def test_two_spellings_of_one_tensor_in_one_file_are_an_error():
    names = {f"model.{n}": v for n, v in official_tensors(ModelConfig.from_official(checkpoints.SMALL)).items()}
    names = {n: v for n, v in names.items() if n.startswith("model.layers")} | {"lm_head.weight": ("BF16", (4, 4))}
    names["model.layers.1.attn.compressor.gate_proj.weight"] = ("BF16", (4, 4))
    tensors = fake(names)
    with pytest.raises(CheckpointError, match=r"are both layers\.1\.attn\.compressor\.wgate\.weight"):
        canonical_sources(tensors, detect_layout(tensors))
