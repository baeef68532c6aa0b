"""A state becomes an official checkpoint that holds, bit for bit, what training in simulated numerics computed with."""

import re
import sys

import pytest
import torch

from dsv4 import load_model
from dsv4.cache.sequence import drafts, whole
from dsv4.commands import cli
from dsv4.errors import InputError
from dsv4.kernels.quantize import WeightFormat
from dsv4.loaders.errors import WriteError
from dsv4.loaders.expected import official_tensors
from dsv4.loaders.files import DTYPES
from dsv4.loaders.load import Inventory
from scripts.training import export as exporting
from scripts.training import state
from scripts.training.architecture import CONFIG, FP32, build, initialise, shipped_forms
from scripts.training.tokenizer import train_tokenizer
from scripts.training.trainee import Trainee, stored

# Many index heads: with few, scores of exactly 0 abound (no head's product is positive), and the `training` operations
# break such ties in an order of their own.
TINY = CONFIG | dict(
    vocab_size=512,
    hidden_size=128,
    num_hidden_layers=3,
    compress_ratios=[0, 4, 128, 0],
    num_hash_layers=1,
    n_routed_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=64,
    q_lora_rank=64,
    o_groups=2,
    o_lora_rank=32,
    num_attention_heads=4,
    head_dim=32,
    qk_rope_head_dim=16,
    index_n_heads=16,
    index_head_dim=32,
    index_topk=16,
    sliding_window=16,
)
EXPERTS = re.compile(r"(.*\.ffn\.experts)\.(\d+)\.(w[123])\.(weight|scale)")


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """(checkpoint, state, data, the trained model with the parameters that the state holds)."""
    root = tmp_path_factory.mktemp("export")
    out, where, data = root / "out", root / "state", root / "data"
    data.mkdir()
    train_tokenizer(["the capital of France is Paris"] * 20, 512).save(str(data / "tokenizer.json"))
    trainee = Trainee(build(TINY, FP32, "cpu"))
    initialise(trainee.model, 0)
    parameters = dict(trainee.named_parameters())
    disturb(parameters)
    state.save(where, parameters, {"step": 7})
    state.load(where, parameters)  # as kept: matrices in bf16
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exporting, "CONFIG", TINY)
        patch.setattr(exporting, "SHARD_BYTES", 100_000)
        exporting.export(data, where, out)
    return out, where, data, trainee


@torch.no_grad()
def disturb(parameters: dict[str, torch.Tensor]) -> None:
    """Distinct values where `initialise` leaves equal ones, and a block of scales far from the others."""
    g = torch.Generator().manual_seed(1)
    for name, p in parameters.items():
        if p.dim() == 1:
            p += 0.1 * torch.randn(p.shape, generator=g)
        if name.endswith(("wo_b.weight", "w13.weight")):
            p[..., :32] *= 1000.0


def as_stored(name: str, p: torch.Tensor, forms: dict[str, WeightFormat]) -> torch.Tensor:
    """What a parameter is after the official layout has rounded it."""
    if forms[name] is not WeightFormat.DENSE:
        return stored(p, forms[name])
    fp32 = not p.is_floating_point() or name.endswith(
        (".fn", ".base", "hc_attn.scale", "hc_ffn.scale", "hc_head.scale", ".ape", "attn_sink", "gate.bias")
    )
    return p if fp32 else p.bfloat16().float()


@pytest.fixture(scope="module")
def loaded(exported):
    return load_model(exported[0], numerics="fp32", mtp=True)


def test_every_parameter_comes_back_as_training_rounded_it(exported, loaded):
    trainee, held = exported[3], dict(loaded.named_parameters())
    forms = shipped_forms(trainee.model)
    trained = dict(trainee.model.named_parameters())
    assert held.keys() == trained.keys() and set(forms.values()) == {
        WeightFormat.DENSE,
        WeightFormat.FP8,
        WeightFormat.MXFP4,
    }
    for name, p in trained.items():
        assert torch.equal(held[name], as_stored(name, p.detach(), forms)), name


def test_the_form_of_every_tensor_and_which_rows_it_holds(exported):
    """Names and places spelled out here, not taken from the loader's plan, which the export shares."""
    out, _, _, trainee = exported
    inventory, parameters = Inventory.open(out), dict(trainee.model.named_parameters())
    planned = official_tensors(trainee.model.config)
    assert {n: (s.dtype, s.shape) for n, s in inventory.sources.items()} == planned
    seen = set()
    for name, (dtype, _) in planned.items():
        if name.endswith(".scale"):
            continue
        part = part_of(name, parameters).detach()
        base = name.removesuffix(".weight")
        if f"{base}.scale" in planned:
            form = WeightFormat.MXFP4 if EXPERTS.fullmatch(name) else WeightFormat.FP8
            assert inventory.formats[base] is form
            assert torch.equal(inventory.read_matrix(base, (128, 128)), stored(part, form)), name
        else:
            assert torch.equal(inventory.read(name), part.to(DTYPES[dtype])), name
        seen.add((dtype, name.startswith("mtp.")))
    assert seen == {(d, m) for d in ("F8_E4M3", "I8", "BF16", "F32") for m in (False, True)} | {("I64", False)}


def part_of(name: str, parameters: dict[str, torch.Tensor]) -> torch.Tensor:
    """The part of a parameter that an official tensor holds."""
    if expert := EXPERTS.fullmatch(name):
        base, e, w, _ = expert.groups()
        if w == "w2":
            return parameters[f"{base}.w2.weight"][int(e)]
        gate, up = parameters[f"{base}.w13.weight"][int(e)].chunk(2)
        return gate if w == "w1" else up
    if pair := re.fullmatch(r"(.*compressor)\.(wkv|wgate)\.weight", name):
        kv, gate = parameters[f"{pair[1]}.wkv_gate.weight"].chunk(2)
        return kv if pair[2] == "wkv" else gate
    return parameters[re.sub(r"hc_(attn|ffn|head)_(fn|base|scale)$", r"hc_\1.\2", name)]


@torch.no_grad()
def test_the_checkpoint_computes_what_training_did(exported, loaded):
    """Backbone and MTP block: whole sequences through the `training` backend against the cached model."""
    model = Trainee(build(TINY, FP32, "cpu")).model
    forms = shipped_forms(model)
    trained = dict(exported[3].model.named_parameters())
    for name, p in model.named_parameters():
        p.copy_(as_stored(name, trained[name], forms))
    ids = torch.randint(0, 512, (1, 201), generator=torch.Generator().manual_seed(2))
    streams, step, sequences = whole(model, ids[:, :200])
    ours = model.head(model.features(streams))
    assert ours.std() > 0.1 and (loaded(ids[:, :200])[0] - ours).abs().max() < 1e-4
    drafted = model.head(drafts(model, streams, ids[:, 1:], step, sequences))
    theirs = loaded.mtp_logits(streams.view(1, 200, *streams.shape[1:]), ids[:, 1:])[0]
    assert (theirs - drafted).abs().max() < 1e-4


def test_inspect_and_generate_take_it(exported, monkeypatch, capsys):
    for args in (["inspect", "--verify"], ["generate", "--prompt", "the capital", "--max-new-tokens", "3"]):
        monkeypatch.setattr(sys, "argv", ["dsv4", args[0], str(exported[0]), *args[1:]])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        out = capsys.readouterr().out
        assert stop.value.code == 0 and ("is accounted for" in " ".join(out.split()) or args[0] == "generate")


def test_it_says_what_it_wrote_and_never_overwrites(exported, monkeypatch, tmp_path, capsys):
    _, where, data, trainee = exported
    monkeypatch.setattr(exporting, "CONFIG", TINY)
    exporting.export(data, where, tmp_path / "new")
    said = capsys.readouterr().out
    assert f"{len(official_tensors(trainee.model.config))} tensors" in said and " MiB" in said
    errors = {form: float(e) for form, e in re.findall(r"error in (\w+): (\S+)", said)}
    assert errors.keys() == {"FP8", "MXFP4", "BF16", "F32", "I64"} and errors["F32"] == errors["I64"] == 0
    assert 0 < errors["BF16"] < 2**-8 < errors["FP8"] < 2**-4 < errors["MXFP4"] < 0.25
    with pytest.raises(WriteError, match="exists already"):
        exporting.export(data, where, tmp_path / "new")


def test_what_cannot_be_exported_is_refused(exported, monkeypatch, tmp_path):
    _, where, data, trainee = exported
    monkeypatch.setattr(exporting, "CONFIG", TINY)
    with pytest.raises(InputError, match=r"no training state \(state\.json\)"):
        exporting.export(data, tmp_path, tmp_path / "out")
    with pytest.raises(InputError, match="tokenizer.json does not exist"):
        exporting.export(tmp_path, where, tmp_path / "out")
    parameters = {name: p.detach().clone() for name, p in trainee.named_parameters()}
    parameters["model.layers.1.ffn.experts.w2.weight"][3, 5, 7] = float("nan")
    state.save(tmp_path / "diverged", parameters, {"step": 8})
    with pytest.raises(InputError, match=r"layers\.1\.ffn\.experts\.3\.w2\.weight holds values that are not finite"):
        exporting.export(data, tmp_path / "diverged", tmp_path / "out")
    assert sorted(f.name for f in tmp_path.iterdir()) == ["diverged"]
