"""--attention, --attention-tokens, --terminate and --prefill-chunks on the command line, in plans and without a
checkpoint."""

import json
from math import prod

import pytest
import torch

from dsv4 import load_model
from dsv4.kernels.block_choice import POLICIES, block_bounds
from dsv4.kernels.chunked_prefill import Chunking
from dsv4.kernels.grouped_attention import Termination
from dsv4.loaders.load import Inventory
from dsv4.model import dummy
from dsv4.model.dummy import fill_cache, load_dummy
from dsv4.model.gqa import dummy as geometries
from dsv4.model.gqa.choice import NAMES, attention_named
from dsv4.model.gqa.config import GQAConfig
from dsv4.probes.oracle.gqa import tensor_shapes
from dsv4.runtime.graph import DecodeGraph
from dsv4.runtime.planning import plan
from tests.checkpoints import SMALL

IDS = ",".join(map(str, range(3, 303)))


def test_names_are_those_of_the_policies():
    from dsv4.commands import options

    assert list(options.POLICIES) == list(NAMES) and len(NAMES) == len(POLICIES)
    assert attention_named(None) is None and attention_named("dense").plain
    got = attention_named("block-bound", 8192, True, "1K,128,384")
    assert (got.policy, got.termination, got.prefill) == (block_bounds(8192), Termination(), Chunking(1024, 128, 384))
    rule = attention_named(None, prefill_chunks="1K,256,256, heads=query ,score=memory").prefill
    assert rule == Chunking(1024, 256, 256, "memory", "query") and rule.rule == "score=memory,heads=query"
    assert attention_named("block-bound", "8K").policy == got.policy
    assert attention_named(None, terminate=True, rule=" patience = 2, , tau=1e-4").termination == Termination(
        tau=1e-4, patience=2
    )
    assert {name: attention_named(name).policy.tokens for name in NAMES if name != "dense"} == dict.fromkeys(
        list(NAMES)[1:], 4096
    )


@pytest.mark.parametrize(
    "options, said",
    [
        (("--attention-tokens", "512"), "dense attention reads every token"),
        (("--attention", "dense", "--attention-tokens", "512"), "reads every token"),
        (("--attention", "block-bound", "--attention-tokens", "500"), "a multiple of 128 from 512"),
        (("--attention", "page-bound", "--attention-tokens", "48"), "a multiple of 16 from 64"),
        (("--attention", "sink-window", "--attention-tokens", "128"), "from 256"),
        (("--attention", "nearby"), "nearby"),
        (("--prefill-chunks", "64"), "CHUNK,LOCAL,HEAVY"),
        (("--prefill-chunks", "64,32,32"), "less than the chunk"),
        (("--prefill-chunks", "a,2,3"), "not a size"),
        (("--prefill-chunks", "64,8,8,score=best"), "expected score= and fused or memory"),
        (("--prefill-chunks", "64,8,8,heads=kv,heads=query"), "at most once"),
        (("--prefill-chunks", "64,8,8,12"), "expected each of score, heads"),
        (("--attention", "block-bound", "--attention-tokens", "many"), "--attention-tokens: 'many' is not"),
        (("--attention", "block-bound", "--attention-tokens", "0"), "from 512"),
        (("--terminate-rule", "tau=1"), "add --terminate"),
        (("--terminate", "--terminate-rule", "p=5"), "'p=5'; expected each of tau, phi, patience"),
        (("--terminate", "--terminate-rule", "tau=1,tau=2"), "at most once"),
        (("--terminate", "--terminate-rule", "tau"), "expected tau= and a number"),
        (("--terminate", "--terminate-rule", "patience=1.5"), "patience= and a whole number"),
        (("--terminate", "--terminate-rule", "phi=3"), "phi is 3.0; expected between 0 and 2"),
    ],
)
def test_what_contradicts_itself_is_one_line(checkpoint, command_line, options, said):
    code, out, err = command_line("generate", checkpoint, "--token-ids", "3,4", *options)
    assert code == 2 and out == "" and err.startswith("error: ") and said in err and err.count("\n") == 1


def test_a_deepseek_model_refuses(checkpoint, command_line, monkeypatch, golden_path):
    monkeypatch.setattr(dummy, "preset", lambda name: dict(SMALL) if name == "flash" else None)
    for source in (("--dummy-weights", "flash", "--prompt-tokens", "4"), (golden_path, "--token-ids", "3,4")):
        for options in (("--attention", "dense"), ("--terminate",), ("--prefill-chunks", "64,8,8")):
            code, _, err = command_line("generate", *source, *options)
            assert code == 2 and "has learnt what it reads" in err and err.count("\n") == 1
    code, _, err = command_line("plan", "flash", "--attention", "block-bound")
    assert code == 2 and "has learnt what it reads" in err and err.count("\n") == 1


def test_what_was_read_is_reported(checkpoint, command_line):
    args = ("generate", checkpoint, "--token-ids", IDS, "--max-new-tokens", "3", "--numerics", "fp32")
    plain = json.loads(command_line(*args, "--json")[1])
    assert plain["attention"] == {"policy": {"name": "dense"}, "termination": None, "prefill": None}
    found = json.loads(
        command_line(*args, "--attention", "page-bound", "--attention-tokens", "96", "--terminate", "--json")[1]
    )
    assert found["attention"]["policy"]["kept_tokens"] == 96 and found["attention"]["termination"]["patience"] == 5
    ruled = json.loads(command_line(*args, "--terminate", "--terminate-rule", "tau=9,phi=2,patience=1", "--json")[1])
    assert {k: ruled["attention"]["termination"][k] for k in ("tau", "phi", "patience")} == {
        "tau": 9,
        "phi": 2,
        "patience": 1,
    }
    assert ruled["layers"][0]["tiles_read"] < ruled["layers"][0]["of_tiles"]
    layer = found["layers"][0]
    assert (layer["blocks"], layer["of_blocks"], layer["tokens"]) == (6, 19, 80 + 14)
    assert (
        layer["tiles_read"] == layer["of_tiles"] == 1
        and "6 of 19 blocks" in layer["path"]
        and "; read 1.0 of 1 tiles" in layer["path"]
    )
    assert (
        (layer["traversals"], layer["tiles_each"]) == (1, 1)
        and "so few cannot stop" in layer["path"]
        and not plain["notes"]
    )
    assert found["notes"] == [
        "--terminate: 1 tile a split at batch 1 (1 of 128 tokens in 1 split): nothing can stop; a split can leave "
        "tiles out if it has 7 or more"
    ]
    assert found["bytes"]["cache"] == plain["bytes"]["cache"] * 17 // 16  # bounds of pages: two vectors beside 32
    assert {row["operation"] for row in found["dispatch"] if row["calls"]} >= {
        "choose_blocks",
        "gather_attention",
        "summarise_blocks",
    }
    assert found["token_ids"][0] == plain["token_ids"][0]  # the prompt is read densely
    code, _, err = command_line(
        *args, "--verbose", "--prefill-chunks", "64,8,8", "--attention", "sink-window", "--attention-tokens", "256"
    )
    assert code == 0 and "2 of 3 blocks, 174 tokens, by sink+window" in err and "chunked_prefill" in err
    chunks = json.loads(command_line(*args[:-3], "1", "--numerics", "fp32", "--prefill-chunks", "64,8,8", "--json")[1])
    assert (
        chunks["layers"][0]["path"] == "44 tokens of its chunk and 16 of the memory"
        and chunks["attention"]["prefill"]["heavy"] == 8
    )


@pytest.mark.parametrize(
    "name, vectors",
    [("page-bound", 2 * 256 // 16), ("block-bound", 2 * 2), ("block-mean", 2), ("sink-window", 0), ("dense", 0)],
)
def test_plans_have_the_summaries(checkpoint, name, vectors):
    document = plan(str(checkpoint), "200", 3, 0, "native", "cpu", attention=attention_named(name))
    base = plan(str(checkpoint), "200", 3, 0, "native", "cpu")
    model = load_model(checkpoint)
    model.attention = attention_named(name)
    assert (
        document["cache_bytes"] == model.new_cache(3, 200).nbytes == base["cache_bytes"] + 3 * 3 * 2 * vectors * 8 * 2
    )
    rows = {row["name"].rsplit(" ", 1)[-1]: row["formula"] for row in document["rows"] if row["group"] == "cache"}
    assert (set(rows) - {"keys", "values"}) == {
        "page-bound": {"low", "high"},
        "block-bound": {"low", "high"},
        "block-mean": {"mean"},
    }.get(name, set())
    if name == "page-bound":
        assert rows["low"] == "3 layers × 3 rows × 2 heads × ⌈200 / 128⌉ × 128 / 16 blocks × 8 × 2 B"
    assert base["attention"] is None and document["attention"]["policy"]["name"]


def test_a_plan_on_the_command_line(checkpoint, command_line):
    code, out, _ = command_line(
        "plan", checkpoint, "--max-context", "512", "--attention", "block-mean", "--attention-tokens", "512"
    )
    assert code == 0 and "full layers: mean" in out
    code, out, _ = command_line("plan", checkpoint, "--attention", "block-bound")
    assert (
        code == 0
        and f"of {GQAConfig.from_dict(Inventory.open(checkpoint).config).max_position_embeddings} tokens (the "
        "model's longest"
        in out
    )


@pytest.fixture
def narrow(monkeypatch):
    thin = dict(hidden_size=64, intermediate_size=96, vocab_size=300, num_attention_heads=8, num_key_value_heads=2)
    for name, raw in geometries.GEOMETRIES.items():
        monkeypatch.setitem(geometries.GEOMETRIES, name, raw | thin)


def test_dummy_geometries(narrow, command_line):
    for name, layers in (("llama-8b", 32), ("qwen2.5-7b", 28), ("qwen3-8b", 36)):
        model = load_dummy(name, backend="reference")
        assert (
            len(model.layers) == layers
            and model.config.max_position_embeddings == 1 << 20
            and model.config.qkv_bias == (layers == 28)
        )
        assert all(
            p.dtype is torch.bfloat16 and p.float().isfinite().all() and p.float().abs().sum() > 0
            for p in model.parameters()
        )
        logits = model(torch.arange(40).view(1, 40))
        assert 0.05 < logits.std() < 20
    code, out, err = command_line(
        "generate",
        "--dummy-weights",
        "qwen2.5-7b",
        "--layers",
        "2",
        "--prompt-tokens",
        "400",
        "--max-new-tokens",
        "2",
        "--attention",
        "page-bound",
        "--attention-tokens",
        "64",
        "--verbose",
    )
    assert code == 0 and "4 of 26 blocks" in err
    for args, said in ((("llama-8b", "--layers", "33"), "expected 1 … 32"), (("grand",), "takes flash, pro, llama-8b")):
        code, _, err = command_line("generate", "--dummy-weights", *args, "--prompt-tokens", "4")
        assert code == 2 and said in err and err.count("\n") == 1


def test_geometries_are_the_published_ones():
    sizes = {name: sum(map(prod, tensor_shapes(raw).values())) for name, raw in geometries.GEOMETRIES.items()}
    # as their model cards count them
    assert sizes == {"llama-8b": 8_030_261_248, "qwen2.5-7b": 7_615_616_512, "qwen3-8b": 8_190_735_360}


def test_a_filled_cache_has_the_summaries_of_its_keys(narrow):
    model = load_dummy("llama-8b", layers=2, backend="reference", attention=attention_named("block-bound", 512))
    cache = model.new_cache(2, 2048)
    fill_cache(cache, [2000, 700])
    rows = cache.layers[1]
    assert cache.lengths == [2000, 700] and torch.equal(rows.tensors["high"][0, :, 3], rows.keys[0, :, 384:512].amax(1))
    assert torch.equal(rows.tensors["low"][1, :, 4], rows.keys[1, :, 512:640].amin(1))
    assert (
        DecodeGraph(model, cache).step(torch.tensor([[3], [4]])).isfinite().all()
        and model.layer_paths()[0]["blocks"] == 4
    )
