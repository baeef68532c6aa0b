"""The oracle of the probes, against golden values, this project's model, and number formats code by code."""

import ast
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from dsv4 import load_model
from dsv4.kernels import quantize
from dsv4.kernels.hadamard import hadamard as project_hadamard
from dsv4.kernels.quantize import reference
from dsv4.loaders.load import Inventory
from dsv4.probes import oracle as oracle_package
from dsv4.probes.oracle import Oracle, OracleConfig, Weights, blocks, formats, weights_of
from dsv4.probes.oracle import attention as steps
from dsv4.probes.subject import POINTS
from tests import checkpoints


@pytest.fixture(scope="module")
def golden(golden_path):
    return Oracle.open(golden_path), load_file(golden_path / "expected.safetensors")


@pytest.fixture(scope="module")
def nvfp4(official, tmp_path_factory):
    """The official checkpoint with its routed experts cast to NVFP4, in one file (§2.3)."""
    source, root = weights_of(official), tmp_path_factory.mktemp("nvfp4")
    tensors = {}
    for file in official.glob("*.safetensors"):
        tensors |= load_file(file)
    for name in [n for n in tensors if ".ffn.experts." in n and n.endswith(".scale") and not n.startswith("mtp.")]:
        base = name.removesuffix(".scale")
        packed, scale, top = quantize.quantize_nvfp4(source(f"{base}.weight").float())
        del tensors[name]
        tensors |= {
            f"{base}.weight": packed,
            f"{base}.weight_scale": scale,
            f"{base}.weight_scale_2": top,
            f"{base}.input_scale": torch.tensor(1.0),
        }
    save_file({k: v.contiguous() for k, v in tensors.items()}, root / "model.safetensors")
    (root / "config.json").write_text((official / "config.json").read_text())
    return root


def far(a: torch.Tensor, b: torch.Tensor) -> float:
    """Largest difference of a and b over the largest of b; infinities must be in the same places."""
    finite = torch.isfinite(b)
    assert torch.equal(torch.isfinite(a), finite) and torch.equal(a[~finite].double(), b[~finite].double())
    return float((a - b)[finite].abs().max() / b[finite].abs().max()) if finite.any() else 0.0


def test_it_imports_nothing_of_what_it_judges():
    imports, ours, itself = {}, ("dsv4.",), oracle_package.__name__
    for file in Path(oracle_package.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                imports |= {a.name: {a.name} for a in node.names if a.name.startswith(ours)}
            if isinstance(node, ast.ImportFrom) and node.module.startswith(ours) and itself not in node.module:
                imports.setdefault(node.module, set()).update(a.name for a in node.names)
    assert imports == {"dsv4.errors": {"InputError"}, "dsv4.loaders.load": {"Inventory"}}


# ---- golden values -----------------------------------------------------------------------------


def test_logits_are_the_golden_ones(golden):
    oracle, expected = golden
    run = oracle.model(expected["ids"])
    assert run.logits.dtype is torch.float64
    assert (run.logits - expected["logits"]).abs().max() < 1e-4
    assert far(run.streams, expected["streams_before_head"]) < 1e-5
    assert (oracle.mtp(run.streams, expected["next_ids"]).logits - expected["mtp_logits"]).abs().max() < 1e-4


def test_mtp_logits_from_the_golden_streams(golden):
    oracle, expected = golden
    run = oracle.mtp(expected["streams_before_head"], expected["next_ids"])
    assert (run.logits - expected["mtp_logits"]).abs().max() < 2e-5


# ---- this project's model ----------------------------------------------------------------------


def observed(model, ids: torch.Tensor) -> tuple[torch.Tensor, dict]:
    """Logits of one step over ids [1, T] of a freshly loaded model, and its points: by wrapped methods, and from the
    caches."""
    points, T = {}, ids.shape[1]
    cache = model.new_cache(1, T, T)  # rings that hold every row

    def wrap(owner, method: str, i: int, *names: str, pick=lambda args, value: (value,)):
        original = getattr(owner, method)

        def recording(*args):
            value = original(*args)
            points.update({(i, name): v.clone() for name, v in zip(names, pick(args, value))})
            return value

        owner.__dict__[method] = recording

    one_row = lambda args, value: (value.unsqueeze(0),)
    for i, block in enumerate(model.layers):
        wrap(
            block.attn,
            "forward",
            i,
            "attn_in",
            "attn_out",
            pick=lambda args, value: (args[0].unsqueeze(0), value.unsqueeze(0)),
        )
        wrap(block.attn, "queries", i, "q_after_rope", pick=lambda args, value: (value[1].unsqueeze(0),))
        wrap(block.ffn, "forward", i, "ffn_out", pick=one_row)
        wrap(block, "forward", i, "streams", pick=one_row)
        if hasattr(block.attn, "indexer"):
            wrap(block.attn.indexer, "scores", i, "index_scores")
            wrap(block.attn.indexer, "forward", i, "selection")
    logits = model.append(ids, cache)
    for i, layer in enumerate(cache.layers):
        points[i, "kv_window"] = layer.tensors["window"][:, :T]
        if layer.main:
            points[i, "compressed_kv"] = layer.tensors["entries"][:, : T // layer.main.ratio]
        if layer.index:
            points[i, "index_keys"] = layer.tensors["index keys"][:, : T // layer.index.ratio]
    return logits, points


def sets(selection: torch.Tensor) -> list[set[int]]:
    return [set(row) - {-1} for row in selection.flatten(0, 1).tolist()]


@pytest.mark.parametrize("T", [5, 33, 140])
def test_every_point_agrees_with_the_model(official, T):
    oracle, model = Oracle.open(official), load_model(official, numerics="fp32")
    ids = torch.randint(0, 320, (1, T), generator=torch.Generator().manual_seed(T))
    logits, points = observed(model, ids)
    run = oracle.model(ids)
    assert far(run.logits, logits) < 2e-5
    for (i, name), theirs in points.items():
        mine = run.points[i, name]
        if name == "selection":
            assert sets(mine) == sets(theirs), (i, name)
        elif theirs.numel():
            assert mine.shape == theirs.shape and far(mine, theirs) < 2e-5, (i, name, far(mine, theirs))
    scored = {(1, "index_scores"), (3, "index_scores")} if T // 4 > 6 else set()
    assert scored <= set(points) and {name for _, name in run.points if "." not in name} == set(POINTS)
    next_ids = ids.roll(-1)
    assert far(oracle.mtp(run.streams, next_ids).logits, model.mtp_logits(run.streams.float(), next_ids)) < 2e-5


def test_one_attention_layer_on_given_inputs_and_two_rows(official):
    oracle = Oracle.open(official)
    x = torch.randn(2, 20, 128, generator=torch.Generator().manual_seed(0))
    both = oracle.attention_layer(1, x)
    for b in range(2):
        alone = oracle.attention_layer(1, x[b : b + 1])
        assert all(torch.allclose(both[name][b : b + 1], value, rtol=0, atol=1e-12) for name, value in alone.items())


def test_masses_add_up_and_lie_where_the_selection_is(official):
    found = Oracle.open(official).attention_layer(
        1, torch.randn(1, 90, 128, generator=torch.Generator().manual_seed(0))
    )
    entries = found["masses.entries"]
    assert torch.allclose(
        found["masses.window"] + entries.sum(-1) + found["masses.sink"], torch.ones(1, 90, 4).double()
    )
    assert (found["masses.sink"] > 0).all()
    assert [set(t.nonzero()[:, 0].tolist()) for t in entries[0, :, 0]] == sets(found["selection"])


# ---- weights -----------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["official", "nvfp4", "fp8 experts", "bf16", "golden"])
def test_both_readers_give_the_same_weights(which, official, nvfp4, golden_path, tmp_path):
    path = {
        "official": lambda: official,
        "nvfp4": lambda: nvfp4,
        "golden": lambda: golden_path,
        "fp8 experts": lambda: checkpoints.write_official(tmp_path / "c", experts="FP8"),
        "bf16": lambda: checkpoints.write_dense(tmp_path / "c", dtype="BF16"),
    }[which]()
    mine, theirs = weights_of(path), weights_of(path, independent=False)
    inventory = Inventory.open(path)
    for name in (n for n in inventory.sources if not n.endswith((".scale", "_scale", "_scale_2")) or ".hc_" in n):
        a, b = mine(name), theirs(name)
        assert a.dtype is b.dtype and a.shape == b.shape, name
        assert torch.equal(a, b) if ".experts." not in name or which != "nvfp4" else far(a, b) < 1e-7, name
    assert all(mine.quantised(base) == theirs.quantised(base) for base in inventory.formats)


def test_fp8_bytes_with_every_code_and_scale():
    codes = np.arange(256, dtype=np.uint8).reshape(16, 16)
    for byte in (0, 1, 126, 127, 128, 254, 255):
        value = formats.decode_fp8(codes, formats.E8M0[[[byte]]], (128, 128))
        packed = quantize.PackedWeight(
            quantize.WeightFormat.FP8,
            torch.from_numpy(codes).view(torch.float8_e4m3fn),
            torch.tensor([[byte]], dtype=torch.uint8).view(torch.float8_e8m0fnu),
        )
        same_bits(value, quantize.to_float(packed))


def test_fp8_blocks_are_rows_by_columns():
    g = torch.Generator().manual_seed(0)
    weight, scale = quantize.quantize_fp8(torch.randn(70, 50, generator=g) * torch.logspace(-3, 3, 50), (32, 16))
    value = formats.decode_fp8(
        weight.view(torch.uint8).numpy(), formats.E8M0[scale.view(torch.uint8).numpy()], (32, 16)
    )
    same_bits(value, quantize.to_float(quantize.PackedWeight(quantize.WeightFormat.FP8, weight, scale, block=(32, 16))))


def test_every_fp4_code_with_every_scale_byte():
    packed = np.tile(np.arange(256, dtype=np.uint8)[:, None], (1, 16))  # both nibbles, all pairs
    for byte in range(256):
        scale = np.full((256, 1), byte, np.uint8)
        theirs = quantize.to_float(
            quantize.PackedWeight(
                quantize.WeightFormat.MXFP4,
                torch.from_numpy(packed),
                torch.from_numpy(scale).view(torch.float8_e8m0fnu),
            )
        )
        same_bits(formats.decode_mxfp4(packed, scale), theirs)
        step = np.full((256, 2), byte, np.uint8)
        theirs = quantize.to_float(
            quantize.PackedWeight(
                quantize.WeightFormat.NVFP4,
                torch.from_numpy(packed),
                torch.from_numpy(step).view(torch.float8_e4m3fn),
                torch.tensor([0.25]),
            )
        )
        same_bits(formats.decode_nvfp4(packed, step, 0.25), theirs)


def same_bits(mine: np.ndarray, theirs: torch.Tensor) -> None:
    """Equal as fp32, bit by bit (signs of zeros too); NaN in the same places."""
    mine = torch.from_numpy(mine).float()
    nan = theirs.isnan()
    assert torch.equal(mine.isnan(), nan) and torch.equal(mine[~nan].view(torch.int32), theirs[~nan].view(torch.int32))


# ---- quantisation simulation -------------------------------------------------------------------


def awkward(*shape) -> torch.Tensor:
    """fp32 with blocks of all sizes, zeros, exact halves of the grids, and amax right at and beside powers of two."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=g) * 2.0 ** torch.randint(-40, 40, (shape[0], 1), generator=g)
    x[1], x[2] = 0, torch.randint(-24, 25, shape[1:], generator=g) / 4
    for row, top in enumerate((448.0, 6.0, 3.0, 224.0, 7.0, 480.0, 1e-4, 1e-30, 6 * 2.0**-126)):
        x[3 + 3 * row : 6 + 3 * row] *= top / x[3 + 3 * row : 6 + 3 * row].abs().amax(-1, keepdim=True)
        for k, side in enumerate((0.0, top, float("inf"))):
            edge = torch.tensor(top)
            x[3 + 3 * row + k, 0] = edge if k == 1 else torch.nextafter(edge, torch.tensor(side))
    return x


@pytest.mark.parametrize("block, keep", [(128, 0), (64, 0), (64, 16), (32, 7), (100, 0)])
def test_simulated_fp8_is_bit_equal(block, keep):
    x = awkward(200, 200)
    assert torch.equal(
        formats.simulate_fp8(x.double(), block, keep).float().view(torch.int32),
        reference.simulate_fp8_blocks(x, block, keep).view(torch.int32),
    )


@pytest.mark.parametrize("block", [32, 16, 64])
def test_simulated_fp4_is_bit_equal(block):
    x = awkward(200, 200)
    assert torch.equal(
        formats.simulate_fp4(x.double(), block).float().view(torch.int32),
        reference.simulate_fp4_blocks(x, block).view(torch.int32),
    )


def test_rounding_to_the_grids_takes_the_even_code_of_two():
    halves = (formats.E2M1_GRID[1:] + formats.E2M1_GRID[:-1]) / 2
    assert formats.round_to_grid(halves, formats.E2M1_GRID).tolist() == [0, 1, 1, 2, 2, 4, 4]
    grid = formats.E4M3_GRID
    halves = (grid[1:] + grid[:-1]) / 2
    assert torch.equal(formats.round_to_grid(halves, grid).float(), halves.float().to(torch.float8_e4m3fn).float())


def test_hadamard_is_the_project_s():
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(formats.hadamard(x.double()).float(), project_hadamard(x), atol=1e-6)


def test_simulation_touches_what_the_official_code_quantises(official, tmp_path):
    x = torch.randn(1, 40, 128, generator=torch.Generator().manual_seed(0))
    plain, simulated = (
        Oracle.open(official).attention_layer(1, x),
        Oracle.open(official, simulate=True).attention_layer(1, x),
    )
    keys = simulated["index_keys"]
    assert torch.equal(formats.simulate_fp4(keys), keys) and not torch.equal(plain["index_keys"], keys)
    for name in ("kv_window", "compressed_kv"):
        rows = simulated[name]
        assert torch.equal(formats.simulate_fp8(rows, 64, 16), rows) and not torch.equal(
            formats.simulate_fp8(rows, 64), rows
        )
    rotated = lambda found, name: found[name][..., -16:]  # what only the activations of a linear can have changed
    assert torch.equal(rotated(plain, "compressed_kv"), rotated(simulated, "compressed_kv"))  # wkv in BF16
    assert not torch.equal(rotated(plain, "kv_window"), rotated(simulated, "kv_window"))  # wkv in FP8
    dense = checkpoints.write_dense(tmp_path / "c")
    plain, simulated = Oracle.open(dense).attention_layer(0, x), Oracle.open(dense, simulate=True).attention_layer(0, x)
    assert torch.equal(plain["q_after_rope"], simulated["q_after_rope"])


def test_simulated_layers_agree_with_the_model_in_simulated_numerics(official):
    """Each layer on the model's own streams. A value beside a rounding boundary may go the other way in fp32, which
    moves its token by far more than fp32 does; so it is nearly all tokens that agree, not all."""
    ids = torch.randint(0, 320, (1, 140), generator=torch.Generator().manual_seed(9))
    oracle, (logits, points) = (
        Oracle.open(official, simulate=True),
        observed(load_model(official, numerics="qat:fp32"), ids),
    )
    streams = oracle.weights("embed.weight")[ids].unsqueeze(2).repeat(1, 1, 4, 1)
    for i in range(5):
        found = oracle.block(i, streams, ids)
        for name in {name for layer, name in points if layer == i} - {"selection", "index_scores"}:
            difference = (found[name] - points[i, name]).flatten(2).norm(dim=-1) / found[name].flatten(2).norm(dim=-1)
            assert (difference < 1e-5).double().mean() > 0.95 and difference.max() < 0.1, (i, name)
        streams = points[i, "streams"].double()
    assert far(oracle.head(streams), logits) < 2e-6


def test_simulated_drafts_agree_with_the_model(official):
    """The embedding is stored in bf16: what it gives the MTP block is held in the activations' dtype all the same."""
    ids = torch.randint(0, 320, (1, 60), generator=torch.Generator().manual_seed(10))
    model, following = load_model(official, numerics="qat:fp32"), torch.roll(ids, -1, 1)
    _, streams = model.append(ids, model.new_cache(1, 60), return_streams=True)
    wanted = Oracle.open(official, simulate=True).mtp(streams, following).logits
    difference = (model.mtp_logits(streams, following) - wanted).norm(dim=-1) / wanted.norm(dim=-1)
    assert (difference < 1e-5).double().mean() > 0.9 and difference.max() < 0.1


def test_caches_in_bf16_hold_bf16(official):
    x = torch.randn(1, 40, 128, generator=torch.Generator().manual_seed(0))
    plain = Oracle.open(official).attention_layer(1, x)
    stored = Oracle.open(official, cache=torch.bfloat16).attention_layer(1, x)
    for name in ("kv_window", "compressed_kv", "index_keys"):
        assert torch.equal(stored[name], plain[name].bfloat16().double()) and not torch.equal(stored[name], plain[name])
    assert torch.equal(stored["q_after_rope"], plain["q_after_rope"])


# ---- single steps, by hand ---------------------------------------------------------------------


def test_yarn_limits_of_the_published_models():
    """low = 15 and high = 25 (§3): frequencies up to 15 are untouched, from 25 on divided by the factor."""
    raw = checkpoints.SMALL | dict(
        qk_rope_head_dim=64,
        head_dim=64,
        index_head_dim=64,
        rope_scaling=dict(type="yarn", factor=16, beta_fast=32, beta_slow=1, original_max_position_embeddings=65536),
    )
    config = OracleConfig.of(raw)
    plain = 160000 ** (-torch.arange(0, 64, 2).double() / 64)
    f = steps.frequencies(config, True)
    assert (
        torch.equal(f[:16], plain[:16]) and torch.allclose(f[25:], plain[25:] / 16) and (f[16:25] < plain[16:25]).all()
    )
    assert torch.allclose(f[20], plain[20] * (0.5 + 0.5 / 16))
    assert torch.allclose(steps.frequencies(config, False), 10000 ** (-torch.arange(0, 64, 2).double() / 64))


def test_equal_scores_go_to_the_lowest_entry():
    scores = torch.tensor([[[0.0, 2, -0.0, 2, 0, -torch.inf]]]).double()
    assert steps.select(scores, 4).tolist() == [[[1, 3, 0, 2]]]
    assert steps.select(scores, 9).tolist() == [[[1, 3, 0, 2, 4, -1]]]
    many = torch.randint(0, 3, (1, 4, 5000), generator=torch.Generator().manual_seed(0)).double()
    for picked, row in zip(steps.select(many, 4000)[0].tolist(), many[0].tolist()):
        assert picked == sorted(range(5000), key=lambda e: (-row[e], e))[:4000]


def test_a_window_s_last_token_sees_its_entry():
    assert steps.visible(torch.arange(9), 2, 4).sum(-1).tolist() == [0, 0, 0, 1, 1, 1, 1, 2, 2]


def test_sinkhorn_ends_on_columns():
    C = blocks.sinkhorn(torch.randn(7, 4, 4, generator=torch.Generator().manual_seed(0)).double(), 20, 1e-6)
    assert torch.allclose(C.sum(-2), torch.ones(7, 4).double(), rtol=0, atol=2e-6)


def test_an_expert_clamps_its_gate_above_and_its_value_on_both_sides():
    one = torch.ones(1, 1).double()
    weights = Weights(
        {}, {"e.w1.weight": one, "e.w3.weight": -3 * one, "e.w2.weight": one}.__getitem__, lambda base: False
    )
    layer = steps.Layer(OracleConfig.of(checkpoints.SMALL), weights, "", 0)
    silu = lambda g: g / (1 + np.exp(-g))
    for x, g, u in ((2.0, 2.0, -6.0), (50.0, 10.0, -10.0), (-2.0, -2.0, 6.0), (-12.0, -12.0, 10.0)):
        assert float(blocks.expert(layer, "e", x * one, 0.5)) == pytest.approx(0.5 * silu(g) * u, rel=1e-12)
