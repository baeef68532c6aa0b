"""`dsv4 plan --tensor-parallel-size`: what each rank holds, against the models that ranks load."""

import json
import re

import pytest

from dsv4.cache.host_tier.choice import HostMemory
from dsv4.loaders.expected import official_tensors, preset
from dsv4.loaders.write import tensor_bytes
from dsv4.model.config import ModelConfig
from dsv4.model.gqa.choice import attention_named
from dsv4.model.load import load_model
from dsv4.model.ranks import Ranks
from dsv4.parallel import launch
from dsv4.runtime import planning
from dsv4.runtime.gpus import named_bytes
from dsv4.runtime.planning import plan
from tests.parallel.test_ranks import DEMO

GQA = DEMO.parent / "demo_gqa"

# tensors that ranks hold parts of; all others are on every rank
CUT = r"^(embed|head)\.|\.experts\.|\.shared_experts\.|\.attn\.(wq_b|wo_a|wo_b|attn_sink)"


def group(rank: dict, name: str) -> dict[str, int]:
    return {row["name"]: row["nbytes"] for row in rank["rows"] if row["group"] == name}


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    "numerics, formats", [("fp32", {}), ("native", {}), ("qat", dict(cache="fp8", index_cache="fp4"))], ids=str
)
def test_a_rank_allocates_what_its_plan_says(size, numerics, formats):
    document = plan(str(DEMO), "300", 3, 8, numerics, "80GiB", ranks=size, **formats)
    assert [r["rank"] for r in document["ranks"]] == list(range(size))
    for r in document["ranks"]:
        model = load_model(DEMO, numerics=numerics, backend="reference", ranks=Ranks(r["rank"], size), **formats)
        assert r["weights_bytes"] == model.nbytes == sum(group(r, "weights").values())
        assert r["cache_bytes"] == model.new_cache(3, 300, 8).nbytes == sum(group(r, "cache").values())
        held = {name: p.nbytes for name, p in model.named_parameters()}
        experts = sum(n for name, n in held.items() if ".ffn.experts." in name and not name.startswith("mtp."))
        mtp = sum(n for name, n in held.items() if name.startswith("mtp."))
        assert (group(r, "weights")["routed experts"], group(r, "weights")["MTP"]) == (experts, mtp)
        assert r["step_bytes"] == sum(group(r, "step").values()) > 0
        left = named_bytes("80GiB") - sum(r[key] for key in ("weights_bytes", "cache_bytes", "step_bytes"))
        assert document["gpus"][r["rank"]]["left_bytes"] == left
    for key in ("weights_bytes", "cache_bytes", "step_bytes"):
        assert document[key] == sum(r[key] for r in document["ranks"])
    assert document["total_bytes"] == sum(row["nbytes"] for row in document["rows"])


@pytest.mark.parametrize(
    "policy, memory",
    [(None, None), ("block-bound", None), ("snapkv", None), ("block-mean", HostMemory(12))],
    ids=lambda given: given if isinstance(given, str) else str(type(given).__name__),
)
@pytest.mark.parametrize("numerics", ["fp32", "native"])
def test_a_rank_of_a_gqa_model_allocates_what_its_plan_says(numerics, policy, memory):
    reads = policy and attention_named(policy, "1K")
    asked = dict(attention=reads, kv_memory=memory)
    document, whole = (plan(str(GQA), "2K", 3, 8, numerics, "80GiB", ranks=n, **asked) for n in (2, 1))
    for r in document["ranks"]:
        model = load_model(GQA, numerics=numerics, backend="reference", ranks=Ranks(r["rank"], 2), **asked)
        cache = model.new_cache(3, 2048, 8)
        assert r["weights_bytes"] == model.nbytes == sum(group(r, "weights").values())
        assert r["cache_bytes"] + r["staging_bytes"] == cache.nbytes
        assert r["pinned_bytes"] == getattr(cache, "host_bytes", 0) and bool(r["pinned_bytes"]) == bool(memory)
        assert r["step_bytes"] == sum(group(r, "step").values()) > 0
    for key in ("cache_bytes", "pinned_bytes"):
        assert sum(r[key] for r in document["ranks"]) == whole[key]
    again = {r["replicated_bytes"] for r in document["ranks"]}
    assert document["weights_bytes"] - whole["weights_bytes"] == again.pop() and not again
    read, of_whole = ({row["name"]: row["nbytes"] for row in d["step"]} for d in (document, whole))
    cached = [name for name in read if name not in ("embedding", "layers and norms", "output head")]
    assert cached and all(2 * read[name] == of_whole[name] for name in cached)


@pytest.mark.parametrize("size, weights", [(2, 80485863496), (4, 40924052296), (8, 21143146696)])
def test_parts_of_the_published_geometry_are_all_of_it(size, weights):
    whole = plan("flash", "1M", 1, 128, "native", "h100")
    document = plan("flash", "1M", 1, 128, "native", "h100", ranks=size)
    assert {r["weights_bytes"] for r in document["ranks"]} == {weights}
    assert {r["cache_bytes"] for r in document["ranks"]} == {whole["cache_bytes"]}
    (again,) = {r["replicated_bytes"] for r in document["ranks"]}
    tensors = official_tensors(ModelConfig.from_official(preset("flash")))
    assert again == sum(tensor_bytes(*t) for name, t in tensors.items() if not re.search(CUT, name))
    assert size * weights - (size - 1) * again == whole["weights_bytes"]
    assert whole["ranks"] == [] and whole["step_bytes"] == 0 and whole["tensor_parallel_size"] == 1


def test_it_answers_for_each_device(command_line, monkeypatch):
    monkeypatch.setattr(launch, "launch", lambda *given: pytest.fail("a plan starts no processes"))
    asked = ("plan", "flash", "--tensor-parallel-size", "2", "--max-context", "1M", "--device")
    code, out, err = command_line(*asked, "h200")
    assert code == 0 and err == ""
    assert re.match(r"fits: .* on 2 × h200 .* left free; .* are an estimate of a step\n", out)
    assert all(re.search(rf"\n{title} of each rank\n *ranks 0, 1  part", out) for title in ("weights", "cache"))
    assert len(re.findall(r"\n   [01]  74.96 GiB              1.27 GiB  6.78 GiB", out)) == 2
    code, out, _ = command_line(*asked, "h100", "--json")
    document = json.loads(out)
    assert code == 1 and not document["fits"] and document["max_memory"] is None and len(document["ranks"]) == 2
    assert document["answer"].startswith("does not fit: ") and "would hold it" not in document["answer"]


def test_ranks_that_hold_unequal_parts_have_columns(command_line):
    out = command_line("plan", "demo", "--tensor-parallel-size", "4", "--device", "80GiB")[1]
    columns = re.search(r"weights of each rank\n(.*?)part", out).group(1).split("  ")
    assert len([c for c in columns if c.strip()]) > 1 and "rank 0: " in out


def test_ranks_share_host_memory(monkeypatch):
    one = plan(str(DEMO), "300", 1, 8, "native", "80GiB", ranks=2)
    of = lambda document: sum(sum(r[key] for key in ("weights_bytes", "cache_bytes")) for r in document["ranks"])
    for spare in (1 << 30, -1):
        document = plan(str(DEMO), "300", 1, 8, "native", "cpu", ranks=2)
        monkeypatch.setattr(planning, "free_bytes", lambda device, n=document["total_bytes"] + spare: n)
        document = plan(str(DEMO), "300", 1, 8, "native", "cpu", ranks=2)
        assert document["fits"] == (spare > 0) and len(document["gpus"]) == 1 and of(document) == of(one)
        assert document["gpus"][0]["left_bytes"] == spare


@pytest.mark.parametrize(
    "args, message",
    [
        (("flash", "--tensor-parallel-size", "3"), "num_attention_heads is 64, which 3 ranks cannot share equally"),
        (("flash", "--tensor-parallel-size", "16"), "o_groups is 8, which 16 ranks cannot share equally"),
        (("demo", "--tensor-parallel-size", "8"), "o_groups is 4, which 8 ranks cannot share equally"),
        (("demo_gqa", "--tensor-parallel-size", "4"), "num_key_value_heads is 2, which 4 ranks cannot share equally"),
        (("flash", "--tensor-parallel-size", "2", "--gpus", "2", "--device", "h100"), "leave out one"),
        (("flash", "--tensor-parallel-size", "2", "--device", "cuda:0"), "--tensor-parallel-size 2 was given with"),
        (("flash", "--tensor-parallel-size", "0"), "--tensor-parallel-size"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_what_cannot_be_shared_is_refused_in_one_line(command_line, args, message):
    code, out, err = command_line("plan", *args)
    assert code == 2 and out == "" and err.startswith("error: ") and err.count("\n") == 1 and message in err
