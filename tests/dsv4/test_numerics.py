"""The quantisation simulation sits exactly where the official code has it."""

import pytest
import torch

from dsv4 import load_model
from dsv4.kernels.hadamard import hadamard
from dsv4.kernels.quantize import simulate_fp4_blocks, simulate_fp8_blocks
from tests import checkpoints

IDS = torch.randint(0, 320, (1, 200), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    return checkpoints.write_dense(tmp_path_factory.mktemp("dense") / "c", dtype="F32")


def caches(path, numerics):
    model = load_model(path, numerics=numerics)
    cache = model.new_cache(1, 200)
    logits = model.append(IDS, cache)
    return model, cache, logits


def test_main_kv_is_fp8_on_all_but_the_rotated_dims(official):
    _, cache, _ = caches(official, "qat:fp32")
    for layer in cache.layers + cache.mtp_layers[:0]:
        rows = layer.tensors["window"][0, :136]
        assert torch.equal(simulate_fp8_blocks(rows[:, :48], 64), rows[:, :48])
        assert not torch.equal(simulate_fp8_blocks(rows[:, 48:], 64), rows[:, 48:])
        if layer.main is not None:
            entries = layer.main.entries.visible(
                type("S", (), {"rows": slice(0, 1), "max_visible": lambda self, r: 200 // r})()
            )[0]
            assert len(entries) and torch.equal(simulate_fp8_blocks(entries[:, :48], 64), entries[:, :48])


def test_index_keys_are_fp4_after_hadamard(official):
    _, simulated, _ = caches(official, "qat:fp32")
    keys = simulated.layers[1].tensors["index keys"][0, :50]
    assert torch.equal(simulate_fp4_blocks(keys, 32), keys) and keys.abs().sum() > 0
    # the first CSA layer stands behind one window layer only: undoing the transform gives back its plain keys, nearly
    _, plain, _ = caches(official, "fp32")
    exact = plain.layers[1].tensors["index keys"][0, :50]
    undone = hadamard(keys)
    assert (undone - exact).norm() / exact.norm() < 0.6
    assert (keys - exact).norm() / exact.norm() > 1.0


def test_index_queries_go_through_the_same_transform_as_the_keys(official):
    from dsv4.model.step import Step

    qr, queries = torch.randn(20, 64, generator=torch.Generator().manual_seed(0)), {}
    for numerics in ("qat:fp32", "fp32"):
        model = load_model(official, numerics=numerics)
        step = Step(IDS[:, :20], 0, [5], model.rope_frequencies())
        queries[numerics] = model.layers[1].attn.indexer.queries(qr, step)
    simulated, exact = queries["qat:fp32"], queries["fp32"]
    assert torch.equal(simulate_fp4_blocks(simulated, 32), simulated)
    assert (hadamard(simulated) - exact).norm() / exact.norm() < 0.3 < (simulated - exact).norm() / exact.norm()


def test_fp32_and_native_simulate_nothing(official):
    for numerics in ("fp32", "native"):
        model, cache, _ = caches(official, numerics)
        calls = {row["operation"]: row["calls"] for row in model.dispatch.rows()}
        assert calls["simulate_fp8_blocks"] == calls["simulate_fp4_blocks"] == calls["hadamard"] == 0
        assert cache.layers[0].tensors["window"].dtype is {"fp32": torch.float32, "native": torch.bfloat16}[numerics]


def test_with_an_unquantised_checkpoint_only_kv_and_indexer_are_simulated(dense, official, monkeypatch):
    from dsv4.kernels.linear import reference

    seen = []
    monkeypatch.setattr(reference, "simulate_fp8_blocks", lambda x, b: seen.append(b) or simulate_fp8_blocks(x, b))
    model, _, _ = caches(dense, "qat:fp32")
    calls = {row["operation"]: row["calls"] for row in model.dispatch.rows()}
    assert calls["simulate_fp8_blocks"] > 0 and calls["simulate_fp4_blocks"] > 0 and seen == []
    caches(official, "qat:fp32")
    assert set(seen) == {128}


def test_only_linears_with_fp8_or_fp4_weights_quantise_their_input(official):
    model = load_model(official, numerics="qat")
    attn = model.layers[1].attn
    simulated = {n for n, m in attn.named_modules() if getattr(m, "simulate", False)}
    assert simulated == {"wq_a", "wq_b", "wkv", "wo_b", "indexer.wq_b"}
    calls = {}
    op, real = attn.wo_a.op, attn.wo_a.op.linear
    op.linear = lambda x, w, simulate=False: (
        calls.setdefault(w.weight.data_ptr(), simulate) and None or real(x, w, simulate)
    )
    model.append(IDS[:, :60], model.new_cache(1, 60))
    assert attn.wo_a.weight.data_ptr() not in calls  # multiplied as grouped_linear, in bf16
    assert calls[attn.wq_a.weight.data_ptr()] and not calls[attn.compressor.wkv_gate.weight.data_ptr()]
    assert not calls[attn.indexer.weights_proj.weight.data_ptr()] and not calls[model.head.weight.data_ptr()]


def test_simulation_changes_the_logits_and_stays_near(official):
    _, _, exact = caches(official, "fp32")
    for numerics in ("native", "qat", "qat:fp32"):
        _, _, got = caches(official, numerics)
        assert torch.isfinite(got).all() and not torch.equal(got, exact)


def test_nvfp4_and_mxfp4_of_the_same_values_give_the_same_logits(official, tmp_path):
    from dsv4.loaders.convert import convert
    from dsv4.model.config import ModelConfig

    convert(official, tmp_path / "nv", "nvfp4", ModelConfig.from_official(checkpoints.SMALL))
    for numerics in ("fp32", "qat:fp32"):
        assert torch.equal(caches(official, numerics)[2], caches(tmp_path / "nv", numerics)[2])


@pytest.mark.few(numerics=["qat"])
@pytest.mark.parametrize("numerics", ["native", "qat", "qat:fp32"])
def test_steps_agree_with_one_shot_up_to_rounding(official, numerics):
    model = load_model(official, numerics=numerics)
    whole = model.append(IDS, model.new_cache(1, 200))
    parts = model.append(IDS, model.new_cache(1, 200), chunk=7)
    assert (whole.argmax(-1) == parts.argmax(-1)).float().mean() > (0.9 if numerics == "native" else 0.6)


def test_the_command_line_offers_every_format_of_a_stream():
    """Options do not import the kernels, which would make --help wait for torch."""
    from dsv4.commands.options import CACHES, INDEX_CACHES
    from dsv4.kernels.cache_rows import STREAM_FORMATS

    assert CACHES == ("auto", *STREAM_FORMATS["kv"]) and INDEX_CACHES == ("auto", *STREAM_FORMATS["index"])


def test_a_format_is_one_object_in_copies_and_in_other_processes():
    import copy
    import pickle

    from dsv4.kernels.cache_rows import RowFormat

    for form in (RowFormat.KV_FP8, RowFormat.INDEX_FP8, RowFormat.INDEX_FP4):
        assert pickle.loads(pickle.dumps(form)) is form and copy.deepcopy(form) is form and copy.copy(form) is form
