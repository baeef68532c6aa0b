"""A GQA model over several devices: host memory, the file on disk, and simulated GPUs."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from dsv4 import load_model
from dsv4.cache.host_tier.choice import HostMemory
from dsv4.cache.paged import new_paged_cache
from dsv4.commands.generate import make_drafter
from dsv4.engine.generate import generate, generate_speculative
from dsv4.errors import CapacityError, Dsv4Error
from dsv4.loaders.errors import CheckpointError
from dsv4.model.gqa.choice import Attention
from dsv4.probes.scenes.simulated_gpus import simulated
from dsv4.runtime.graph import DecodeGraph
from dsv4.sampling import Sampling
from dsv4.speculation.host_loop import check_one_device
from tests.gqa import oracle
from tests.gqa.placed import READINGS, run, same

KINDS = {
    "qwen2, bias and tied head": "native",
    "llama, llama3 rope and biases": "fp32",
    "qwen3, biases, yarn and some sliding layers": "native",
}


@pytest.fixture(scope="module", params=KINDS)
def whole(request, tmp_path_factory):
    config = oracle.CONFIGS[request.param]
    folder = oracle.save(oracle.randomised(config), config, tmp_path_factory.mktemp("placed"), torch.bfloat16)
    return load_model(folder, numerics=KINDS[request.param], backend="reference")


def again(model, device_map, **more):
    return load_model(
        model.inventory.path, numerics=model.numerics.name, backend="reference", device_map=device_map, **more
    )


def in_turn(model, *places) -> dict:
    """Each unit to the next of `places`."""
    return {name: places[i % len(places)] for i, name in enumerate(model.units)}


def cap(model, blocks: float) -> dict:
    """Room for that many of the largest units, and for one that is brought."""
    return {"cpu": int((1 + blocks) * max(sum(p.nbytes for p in u.parameters()) for u in model.units.values()))}


# ---- equal to the whole model -------------------------------------------------------------


@pytest.mark.parametrize("name", READINGS)
def test_a_model_over_two_gpus_is_the_whole_model(whole, name):
    wanted = run(whole, READINGS[name])
    with simulated():
        model = again(whole, in_turn(whole, 0, 1))
        assert len({str(d) for d in model.layer_devices}) == 2 and str(model.device) == "cuda:0"
        assert same(run(model, READINGS[name]), wanted)


def test_gpus_host_and_disk_at_once(whole):
    wanted = run(whole, READINGS["snapkv"])
    with simulated():
        model = again(whole, in_turn(whole, 1, "disk", 0))
        assert {"cuda:0", "cuda:1", "disk"} == set(model.placement.values())
        assert same(run(model, READINGS["snapkv"]), wanted)


@pytest.mark.parametrize("device", ["cuda", "cuda:0"])
def test_layers_in_host_memory_run_on_the_gpu(whole, monkeypatch, device):
    """'cuda' is the current GPU, also for layers that follow others on another."""
    wanted = run(whole, READINGS["pages by bounds"])
    for name, value in (("is_available", True), ("device_count", 2), ("current_device", 0), ("empty_cache", None)):
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    with simulated():
        model = again(whole, in_turn(whole, 1, "cpu", "disk"), device=device)
        assert [str(d) for d in (model.device, *model.layer_devices[:2])] == ["cuda:1", "cuda:0", "cuda:0"]
        assert same(run(model, READINGS["pages by bounds"]), wanted)


@pytest.mark.parametrize("blocks", [0.1, 1.1], ids=["no unit resident", "one unit resident"])
def test_disk_offload_under_a_memory_cap_gives_the_same_logits(whole, blocks):
    model = again(whole, "auto", max_memory=cap(whole, blocks))
    assert "disk" in model.placement.values() and ("cpu" in model.placement.values()) == (blocks > 1)
    assert same(run(model, READINGS["dense"]), run(whole, READINGS["dense"]))
    held = sum(p.nbytes for p in model.parameters() if p.device.type != "meta")
    assert held <= cap(whole, blocks)["cpu"]  # and layers went back to disk after running, the embedding too


def test_drafts_by_lookup_give_the_text_of_plain_decoding(whole):
    ids = [5, 9, 7, 5, 9, 7, 5, 9]
    whole.attention = Attention()
    wanted = generate(whole, ids, 24, Sampling(), 64)
    model = again(whole, in_turn(whole, "disk", "cpu"))
    [found] = generate_speculative(model, [ids], 24, make_drafter("lookup"), Sampling(), max_context=64)
    assert found.token_ids == wanted.token_ids and found.speculation is not None


# ---- the plan -----------------------------------------------------------------------------


def test_each_tensor_is_placed_once(whole):
    placed = [f"{name}.{leaf}" for name, unit in whole.units.items() for leaf, _ in unit.named_parameters()]
    assert sorted(placed) == sorted(name for name, _ in whole.named_parameters())
    model = again(whole, in_turn(whole, "disk", "cpu"))
    assert list(model.placement) == list(whole.units) and model.ledger.problems() == []
    assert model.ledger.totals() == whole.ledger.totals()


def test_a_cap_below_one_layer_is_an_error(whole):
    with pytest.raises(CapacityError, match="one block needs"):
        again(whole, "auto", max_memory={"cpu": 1000})


def test_a_copied_head_that_differs_is_refused_where_layers_are_spread_too(tmp_path):
    config = oracle.CONFIGS["qwen3, tied head"]
    folder = oracle.save(oracle.randomised(config), config, tmp_path / "c")
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] + 1}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="tie_word_embeddings"):
        load_model(folder, device_map="auto", max_memory={"cpu": 1 << 30})


# ---- what stays refused -------------------------------------------------------------------


@pytest.mark.parametrize(
    "ask",
    [
        lambda model: new_paged_cache(model, 1, 128),
        lambda model: DecodeGraph(model, model.new_cache(1, 64)),
        lambda model: model.new_cache(1, 64, memory=HostMemory()),
        check_one_device,
        lambda model: again(model, "auto", kv_memory=HostMemory()),
    ],
    ids=["pages", "captured steps", "a cache in host memory", "rounds", "a model with its cache in host memory"],
)
def test_what_needs_one_device_is_refused(whole, ask):
    model = again(whole, in_turn(whole, "cpu", "disk"))
    with pytest.raises(Dsv4Error, match="--device-map") as caught:
        ask(model)
    assert "\n" not in str(caught.value)
