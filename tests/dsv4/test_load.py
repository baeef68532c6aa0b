"""Loading is strict both ways, and bad input is one clear line."""

import json
import struct

import pytest
import torch
from safetensors.torch import load_file, save_file

from dsv4 import load_model
from dsv4.errors import InputError
from dsv4.kernels.errors import Dsv4Error
from dsv4.kernels.quantize import WeightFormat
from dsv4.loaders.errors import CheckpointError
from dsv4.loaders.ledger import poison, poisoned
from dsv4.loaders.load import Inventory
from dsv4.model.families import pieces_of, plan_model
from dsv4.model.load import resolve_backend
from dsv4.model.numerics import NUMERICS
from dsv4.model.parameters import write_parameters
from tests import checkpoints
from tests.checkpoints import edit_config


@pytest.fixture
def single(tmp_path):
    """A dense checkpoint in one file, to be damaged."""
    return checkpoints.write_dense(tmp_path / "single")


def rewrite(path, change):
    """Apply change(dict of tensors) to a single-file checkpoint."""
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")
    return path


def load(path, **kwargs):
    return load_model(path, **{"numerics": "fp32", **kwargs})


def one_line(path, match, **kwargs):
    with pytest.raises(Dsv4Error, match=match) as caught:
        load(path, **kwargs)
    assert "\n" not in str(caught.value)


def test_every_tensor_and_parameter_is_accounted_for(official):
    model = load(official, numerics="native")
    totals = model.ledger.totals()
    assert model.ledger.problems() == [] and totals["listed"] == 0
    assert totals["consumed"] == totals["file_tensors"] == len(model.inventory.files.tensors)
    assert all(model.ledger.written[n] == p.numel() for n, p in model.named_parameters())
    assert not any(poisoned(p) for p in model.parameters())


def test_parameters_equal_the_file(official):
    inventory = Inventory.open(official)
    model = load(official)
    parameters = dict(model.named_parameters())
    for leaf, rows in (("wkv", slice(0, 64)), ("wgate", slice(64, 128))):
        assert torch.equal(
            parameters["layers.1.attn.indexer.compressor.wkv_gate.weight"][rows],
            inventory.read(f"layers.1.attn.indexer.compressor.{leaf}.weight").float(),
        )
    for e in range(6):
        for w, rows in (("w1", slice(0, 96)), ("w3", slice(96, 192))):
            assert torch.equal(
                parameters["layers.3.ffn.experts.w13.weight"][e, rows],
                inventory.read_matrix(f"layers.3.ffn.experts.{e}.{w}", (128, 128)),
            )
    assert torch.equal(parameters["layers.4.hc_ffn.scale"], inventory.read("layers.4.hc_ffn_scale"))


def test_quantised_weights_stay_quantised_in_native(official):
    model = load(official, numerics="native")
    wq_b, w13 = model.layers[1].attn.wq_b, model.layers[1].ffn.experts.w13
    assert (wq_b.weight.dtype, wq_b.scale.dtype) == (torch.float8_e4m3fn, torch.float8_e8m0fnu)
    assert w13.storage.format is WeightFormat.MXFP4 and w13.weight.dtype is torch.uint8
    stored = sum(t.nbytes for t in model.inventory.files.tensors.values())
    assert model.nbytes == stored


@pytest.mark.parametrize("numerics", list(NUMERICS))
def test_islands_are_fp32_whatever_the_numerics(official, numerics):
    for name, p in load(official, numerics=numerics).named_parameters():
        if any(part in name for part in ("attn_sink", ".ape", "hc_", "gate.bias")):
            assert p.dtype is torch.float32, name


@pytest.mark.parametrize(
    "tensor",
    [
        "layers.1.attn.indexer.compressor.wkv.weight",
        "layers.0.attn.attn_sink",
        "hc_head_base",
        "layers.2.ffn.gate.bias",
        "layers.3.ffn.experts.5.w2.weight",
    ],
)
def test_a_missing_tensor_is_an_error_that_names_it(single, tensor):
    rewrite(single, lambda t: t.pop(tensor))
    one_line(single, f"tensor {tensor} is not in the file")


def test_a_tensor_nobody_takes_is_an_error(single):
    # layer 0 has no compressor
    rewrite(single, lambda t: t.update({"layers.0.attn.compressor.ape": torch.zeros(4, 64)}))
    one_line(single, "layers.0.attn.compressor.ape.*nothing takes it")


def test_the_failure_that_started_this_a_wrong_prefix(single):
    def rename(t):
        for leaf in ("wkv.weight", "wgate.weight", "ape", "norm.weight"):
            t[f"layers.1.attn.compressor.indexer.{leaf}"] = t.pop(f"layers.1.attn.indexer.compressor.{leaf}")

    rewrite(single, rename)
    one_line(single, "names that no layout knows.*layers.1.attn.compressor.indexer.ape")


def test_a_wrong_shape_names_both_shapes(single):
    rewrite(single, lambda t: t.update({"layers.1.attn.compressor.ape": torch.zeros(4, 64)}))
    one_line(single, r"layers.1.attn.compressor.ape has shape \[4, 64\]; the config asks for \[4, 128\]")


@pytest.mark.parametrize(
    "change,match",
    [
        ({"num_hidden_layers": 4, "compress_ratios": [0, 4, 128, 4, 0]}, "nothing takes it"),
        ({"hidden_size": 64}, "the config asks for"),
        ({"num_hash_layers": 3}, "layers.2.ffn.gate.tid2eid is not in the file"),
        ({"n_routed_experts": 7}, "the config asks for"),
        ({"compress_ratios": [0, 128, 128, 4, 128, 0]}, "the config asks for|is not in the file|nothing takes it"),
        ({"expert_dtype": "fp4"}, "expert_dtype is 'fp4'"),
    ],
    ids=lambda v: next(iter(v)) if isinstance(v, dict) else "",
)
def test_config_and_tensors_that_disagree(single, change, match):
    one_line(edit_config(single, **change), match)


def test_mtp_can_be_left_out_with_a_reason(official):
    model = load(official, mtp=False)
    assert set(model.ledger.listed.values()) == {"MTP is off"} and len(model.mtp) == 0
    with pytest.raises(Dsv4Error, match="loaded with 0"):
        model.mtp_logits(torch.zeros(1, 1, 4, 128), torch.zeros(1, 1, dtype=torch.int64))


def test_mtp_that_is_not_there_cannot_be_asked_for(single):
    rewrite(single, lambda t: [t.pop(k) for k in [k for k in t if k.startswith("mtp.")]])
    assert len(load(single).mtp) == 0
    one_line(single, "MTP was asked for", mtp=True)


def test_dspark_stages_are_listed_not_loaded(single):
    def dspark(t):
        for k in [k for k in t if k.startswith("mtp.0.") and k.split(".")[2] in ("e_proj", "h_proj", "enorm", "hnorm")]:
            t.pop(k)
        t["mtp.0.main_norm.weight"] = torch.ones(128)

    rewrite(single, dspark)
    model = load(single)
    assert set(model.ledger.listed.values()) == {"DSpark draft stage, which this does not run"}


def test_nan_in_a_weight_is_an_error(single):
    rewrite(single, lambda t: t["layers.2.attn.wkv.weight"].view(-1)[5].fill_(float("nan")))
    one_line(single, "layers.2.attn.wkv.weight holds 1 NaN")


@pytest.mark.parametrize("numerics", ["fp32", "native"])
def test_a_nan_scale_byte_is_an_error(official, copy_of, numerics):
    path = copy_of(official)
    tensor = Inventory.open(path).sources["layers.1.ffn.experts.2.w1.scale"].tensor
    with open(tensor.file, "r+b") as f:
        f.seek(tensor.offset + 3)
        f.write(b"\xff")
    one_line(path, r"layers.1.ffn.experts.2.w1.scale holds 1 NaN", numerics=numerics)


def test_a_table_that_names_no_expert_is_an_error(single):
    rewrite(single, lambda t: t["layers.0.ffn.gate.tid2eid"][3].fill_(6))
    one_line(single, "names expert 6; the config has 6 experts")


def test_a_missing_shard_is_named(official, copy_of):
    path = copy_of(official)
    gone = sorted(path.glob("*.safetensors"))[2]
    gone.unlink()
    one_line(path, f"shards are missing: {gone.name}")


@pytest.mark.parametrize("keep", [3, 500, -1], ids=["inside the length", "inside the header", "inside the data"])
def test_a_truncated_file_is_said_to_be(single, keep):
    file = single / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:keep])
    one_line(single, "truncated")


def damage_header(path, change):
    data = path.read_bytes()
    n = struct.unpack("<Q", data[:8])[0]
    text = change(data[8 : 8 + n].decode())
    path.write_bytes(struct.pack("<Q", len(text)) + text.encode() + data[8 + n :])


def test_a_tensor_twice_in_one_header(single):
    damage_header(single / "model.safetensors", lambda h: h.replace('"hc_head_base"', '"hc_head_scale"', 1))
    one_line(single, "has hc_head_scale twice")


def test_a_tensor_in_two_shards(official, copy_of):
    path = copy_of(official)
    index = json.loads((path / "model.safetensors.index.json").read_text())
    save_file({"norm.weight": torch.ones(128).bfloat16()}, path / "extra.safetensors")
    index["weight_map"]["extra"] = "extra.safetensors"
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    one_line(path, "norm.weight is in two shards")


def test_header_that_is_not_json(single):
    damage_header(single / "model.safetensors", lambda h: h.rstrip()[:-5])
    one_line(single, "not valid JSON")


def test_overlapping_tensors(single):
    header = json.loads(
        (lambda d: d[8 : 8 + struct.unpack("<Q", d[:8])[0]])((single / "model.safetensors").read_bytes())
    )
    a, b = (header[k]["data_offsets"] for k in ("layers.0.attn_norm.weight", "layers.1.attn_norm.weight"))
    damage_header(
        single / "model.safetensors",
        lambda h: h.replace(json.dumps(b, separators=(",", ":")), json.dumps(a, separators=(",", ":"))),
    )
    one_line(single, "overlap")


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
def test_a_missing_file_is_named(single, missing):
    (single / missing).unlink()
    one_line(single, missing)


def test_a_directory_that_does_not_exist(tmp_path):
    one_line(tmp_path / "nowhere", "is not a directory")


def test_bad_choices_are_named(official):
    one_line(official, "numerics 'int3' is unknown", numerics="int3")
    one_line(official, "backend 'turbo' is unknown", backend="turbo")
    one_line(official, "device 'abacus' is unknown", device="abacus")
    one_line(official, "max_context 5000 is not within 1 … 4096", max_context=5000)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there(official):
    one_line(official, "this machine has 0 CUDA devices", device="cuda")


def test_bf16_islands_are_widened_and_noted(single):
    rewrite(single, lambda t: t.update({"layers.0.attn.attn_sink": t["layers.0.attn.attn_sink"].bfloat16()}))
    model = load(single)
    assert any("layers.0.attn.attn_sink is BF16" in note for note in model.ledger.notes)


def test_poison_that_stays_is_found(official):
    inventory = Inventory.open(official)
    model = plan_model(inventory, NUMERICS["native"], "reference", None)
    model.to_empty(device="cpu")
    pieces = pieces_of(model)
    with pytest.raises(
        CheckpointError, match="not covered by what is loaded, first layers.1.attn.indexer.compressor.wkv_gate"
    ):
        write_parameters(
            model, [p for p in pieces if p.parameter != "layers.1.attn.indexer.compressor.wkv_gate.weight"]
        )
    half = [p for p in pieces if not (p.parameter == "layers.1.ffn.experts.w2.scale" and p.index == (3,))]
    with pytest.raises(CheckpointError, match="still hold poison after loading, first layers.1.ffn.experts.w2.scale"):
        write_parameters(model, half)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.int64]
)
def test_poison_shows_in_every_dtype_that_can_show_it(dtype):
    tensor = torch.empty(7, dtype=dtype)
    poison(tensor)
    assert poisoned(tensor) == 7


def test_fp8_experts_load_in_every_numerics(tmp_path):
    raw = {**checkpoints.SMALL, "moe_intermediate_size": 128}
    path = checkpoints.write_official(tmp_path / "fp8", raw, "FP8")
    ids = torch.randint(0, 320, (1, 40))
    exact = load(path)(ids)
    assert load(path, numerics="native").layers[0].ffn.experts.w13.storage.format is WeightFormat.FP8
    kept = load(path, numerics="qat:fp32")
    assert torch.isfinite(kept(ids)).all() and torch.isfinite(exact).all()


@pytest.mark.parametrize(
    "capability, spread, chosen",
    [((9, 0), False, "triton"), ((8, 0), False, "triton"), ((7, 5), False, "reference"), ((9, 0), True, "reference")],
)
def test_auto_takes_kernels_on_one_gpu_that_can_run_them(capability, spread, chosen, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert resolve_backend("auto", torch.device("cuda"), spread) == chosen
    assert resolve_backend("auto", torch.device("cpu"), spread) == "cpu"


def test_kernels_are_refused_where_layers_are_spread():
    with pytest.raises(InputError, match="spread over devices"):
        resolve_backend("triton", torch.device("cuda"), spread=True)
