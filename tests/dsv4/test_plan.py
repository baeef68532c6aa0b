"""`dsv4 plan`: does it fit, on cards that need not be here, and how layers are split over several."""

import json
import re
import shutil

import pytest
import torch
from accelerate import infer_auto_device_map
from safetensors.torch import load_file, save_file

from dsv4.commands.generate import parse_max_memory
from dsv4.loaders.load import Inventory
from dsv4.model.families import plan_model
from dsv4.model.numerics import NUMERICS
from dsv4.model.offload import _places, whole
from dsv4.runtime import gpus, planning
from dsv4.runtime.gpus import MIB, Unit, max_memory, memory_limits, named_bytes, shares, split
from tests.gqa import oracle

H100 = named_bytes("h100")


@pytest.fixture(scope="module")
def saved(golden_path, tmp_path_factory):
    """Checkpoints by name: of DeepSeek-V4; of GQA models with a head of its own, with one that is the embedding, and
    with a copy of the embedding in the file, which no model holds."""
    folders = {"deepseek_v4": golden_path}
    for name, config in (("own head", "llama, llama3 rope and biases"), ("tied head", "qwen3, tied head")):
        folder, config = tmp_path_factory.mktemp("plan"), oracle.CONFIGS[config]
        folders[name] = oracle.save(oracle.randomised(config), config, folder)
    folders["copied head"] = shutil.copytree(folders["tied head"], tmp_path_factory.mktemp("plan") / "copied")
    tensors = load_file(folders["copied head"] / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, folders["copied head"] / "model.safetensors")
    return folders


def test_the_first_line_answers_and_the_exit_code_says_it(command_line, golden_path):
    code, out, err = command_line("plan", golden_path, "--device", "80GiB")
    assert code == 0 and err == "" and out.startswith("fits: ") and "GiB left free" in out.splitlines()[0]
    code, out, err = command_line("plan", golden_path, "--device", "1536K")
    first = out.splitlines()[0]
    assert code == 1 and err == "" and re.fullmatch(r"does not fit: .* short; \d × 1536K would hold it", first)
    assert out.count("\n") > 20  # the rest follows all the same


@pytest.mark.parametrize("name, share", [("flash", 0.074), ("pro", 0.106)])
def test_the_cache_of_v32_stands_beside(command_line, name, share):
    """576 numbers in bf16, or the 656 bytes of FlashMLA's FP8 row, and a key of 132 bytes, in 61 layers; packed caches
    at 1M tokens are the 7 % and 10 % of it that are published for DeepSeek-V4."""
    options = ("--max-context", "1M", "--batch", "2", "--numerics", "qat", "--cache", "fp8", "--index-cache", "fp4")
    document = json.loads(command_line("plan", name, *options, "--device", "h100", "--json")[1])
    own, fp8, bf16 = document["cache_beside"]
    assert own["nbytes"] == document["cache_bytes"] and own["times"] == 1
    assert own["bytes_per_token"] == document["cache_bytes"] / (2 << 20)
    assert (fp8["bytes_per_token"], bf16["bytes_per_token"]) == (61 * (656 + 132), 61 * (1152 + 132)) == (48068, 78324)
    assert (fp8["nbytes"], bf16["nbytes"]) == (48068 * (2 << 20), 78324 * (2 << 20))
    assert 1 / fp8["times"] == pytest.approx(share, abs=5e-4) and bf16["times"] > fp8["times"]
    for row in (fp8, bf16):
        formula = re.sub(r"rows|tokens|layers|B$", "", row["formula"]).replace("×", "*")
        assert eval(formula) == row["nbytes"]
    out = command_line("plan", name, *options, "--device", "h100")[1]
    assert "the cache beside others" in out and "DeepSeek-V3.2, FP8" in out and f"{fp8['nbytes']}" in out


def test_the_cache_of_a_gqa_model_stands_alone(command_line):
    document = json.loads(command_line("plan", "demo_gqa", "--device", "80GiB", "--json")[1])
    assert document["cache_beside"] == [] and document["cache_bytes_per_token"]


def test_two_cards_hold_what_one_does_not(command_line):
    code, out, _ = command_line("plan", "flash", "--device", "h100", "--gpus", "2", "--json")
    document = json.loads(out)
    assert code == 0 and document["fits"] and document["answer"].startswith("fits: ") and len(document["gpus"]) == 2
    held = document["gpus"]
    assert sum(gpu["weights_bytes"] for gpu in held) == document["weights_bytes"]
    assert sum(gpu["cache_bytes"] for gpu in held) == document["cache_bytes"]
    assert all(H100 == g["left_bytes"] + g["weights_bytes"] + g["cache_bytes"] for g in held)
    assert held[0]["holds"].startswith("embed … layers.") and held[1]["holds"].endswith(" … head")
    assert len(parse_max_memory(document["max_memory"])) == 2


def test_two_cards_share_a_gqa_model(command_line):
    code, out, _ = command_line("plan", "demo_gqa", "--device", "8MiB", "--gpus", "2", "--max-context", "64", "--json")
    document = json.loads(out)
    held = document["gpus"]
    assert code == 0 and held[0]["holds"].startswith("model.embed_tokens … model.layers.")
    assert held[1]["holds"].startswith("model.layers.") and held[1]["holds"].endswith(" … model.norm")
    assert sum(gpu["weights_bytes"] for gpu in held) == document["weights_bytes"]
    assert sum(gpu["cache_bytes"] for gpu in held) == document["cache_bytes"] and all(g["cache_bytes"] for g in held)
    assert len(parse_max_memory(document["max_memory"])) == 2


def test_what_does_not_fit_names_no_split(command_line, golden_path):
    code, out, _ = command_line("plan", golden_path, "--device", "512K", "--gpus", "2", "--json")
    document = json.loads(out)
    assert code == 1 and not document["fits"] and document["max_memory"] is None
    assert min(gpu["left_bytes"] for gpu in document["gpus"]) < 0


def test_a_model_in_whole_layers_may_not_fit_where_its_bytes_would():
    units = [Unit(f"layers.{i}", 30) for i in range(3)]
    held = shares(split(units, [45, 45]), [45, 45])
    assert [gpu["left_bytes"] for gpu in held] == [-15, 15] and sum(u.nbytes for u in units) == 90
    assert gpus.enough(units, 45) == 3 and gpus.enough(units, 29) is None


def test_the_fullest_gpu_has_as_much_room_as_it_can():
    units = [Unit("embed", 5), *(Unit(f"layers.{i}", 10, i) for i in range(4)), Unit("head", 6)]
    parts = split(units, [100, 100])
    assert [[u.name for u in part] for part in parts] == [
        ["embed", "layers.0", "layers.1"],
        ["layers.2", "layers.3", "head"],
    ]
    assert [len(part) for part in split(units, [30, 20])] == [4, 2]  # 8 short on the first, not 11 on the second
    assert split(units[:1], [9, 9])[1] == []


@pytest.mark.parametrize("capacities", [[10 * MIB] * n for n in (1, 2, 3, 5)] + [[1, 10 * MIB]], ids=str)
@pytest.mark.parametrize("name", ["deepseek_v4", "own head", "tied head", "copied head"])
def test_accelerate_makes_the_split_that_is_planned(saved, name, capacities):
    """`--device-map auto` with the limits that the plan prints puts every module where the plan has it."""
    inventory = Inventory.open(saved[name])
    model = plan_model(inventory, NUMERICS["native"], "reference", None)
    units = planning._units(planning.Asking(model.config, inventory, model.numerics, 1, 64, 0))
    held = {name: sum(p.nbytes for p in unit.parameters()) for name, unit in model.units.items()}
    assert [(u.name, u.weights) for u in units] == list(held.items()) and sum(held.values()) == model.nbytes
    parts = split(units, capacities)
    limits = parse_max_memory(max_memory(memory_limits(parts, capacities)))
    placed = _places(model, infer_auto_device_map(model, max_memory=limits, no_split_module_classes=whole(model)))
    assert placed == {unit.name: gpu for gpu, part in enumerate(parts) for unit in part}


def test_a_geometry_has_a_plan_without_a_checkpoint(command_line):
    asked = ("plan", "llama-8b", "--max-context", "8K", "--device", "h100", "--json")
    alone, shared = (json.loads(command_line(*asked, *more)[1]) for more in ((), ("--tensor-parallel-size", "2")))
    assert alone["weights_bytes"] == 2 * 8_030_261_248  # the parameters that Llama 3.1 8B is published with, in bf16
    assert alone["cache_bytes"] == 32 * 2 * 8 * 8192 * 128 * 2
    ranks = shared["ranks"]
    assert (
        sum(r["weights_bytes"] - r["replicated_bytes"] for r in ranks) + ranks[0]["replicated_bytes"]
        == (alone["weights_bytes"])
    )
    assert [r["cache_bytes"] for r in ranks] == [alone["cache_bytes"] // 2] * 2


def test_names_and_sizes_of_devices():
    assert named_bytes("80GiB") == named_bytes("80G") == 80 << 30
    assert named_bytes("RTX 4090") == named_bytes("4090") == (24564 - 1280) * MIB
    assert named_bytes("H100") == 80279 * MIB  # torch could have 80290 on the one that was measured


@pytest.mark.parametrize(
    "args, message",
    [
        (("--device", "x100"), "'x100' is unknown; expected cpu, cuda or cuda:N of this machine, a size such as 80GiB"),
        (("--device", "x100"), "or one of h100, h200"),
        (("--device", "80"), "'80' is unknown"),
        (("--device", "80quarts"), "is not a size"),
        (("--device", "cuda:9"), "CUDA devices"),
        (("--gpus", "2"), "--gpus 2 was given with --device cpu"),
        (("--gpus", "0"), "--gpus"),
        (("--gpus", "2", "--device", "cuda:0"), "expected --device cuda"),
        (("--gpus", "2", "--device", "h100", "--kv-memory", "host"), "runs on one device"),
        (("--max-context", "0"), "--max-context is 0; expected at least 1"),
        (("--max-context", "big"), "--max-context: 'big' is not a size"),
        (("--batch", "0"), "--batch"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_bad_input_is_one_line(command_line, args, message):
    code, out, err = command_line("plan", "flash", *args)
    assert code == 2 and out == "" and err.startswith("error: ") and err.count("\n") == 1 and message in err


def test_pinned_memory_counts_on_this_machine_only(monkeypatch, command_line):
    tight = lambda device: 1 << 40 if device != torch.device("cpu") else 1 << 20
    asked = ("plan", "flash", "--kv-memory", "host", "--max-context", "128K", "--json")
    monkeypatch.setattr(planning, "free_bytes", tight)
    monkeypatch.setattr(planning, "resolve_device", lambda name: torch.device("cuda"))
    code, out, _ = command_line(*asked, "--device", "cuda")
    assert code == 1 and "pinned in host memory" in json.loads(out)["answer"] and not json.loads(out)["fits"]
    code, out, _ = command_line(*asked, "--device", "b200")
    assert code == 0 and json.loads(out)["fits"] and "pinned in host memory" in json.loads(out)["answer"]
