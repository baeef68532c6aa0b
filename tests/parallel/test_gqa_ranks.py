"""A GQA model that several ranks hold together by KV head, against the whole one."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dsv4.cache.host_tier.choice import HostMemory
from dsv4.cache.host_tier.planning import brought_layers, grouped_plan
from dsv4.cache.streams import LayerStreams
from dsv4.engine import BatchEngine, Request
from dsv4.engine.batch import REWIND
from dsv4.engine.generate import generate, generate_on_device, generate_speculative
from dsv4.errors import InputError
from dsv4.kernels.block_choice import Policy
from dsv4.kernels.chunked_prefill import Chunking
from dsv4.loaders.cuts import joint_problems
from dsv4.model.gqa.cache import cache_streams, token_bytes
from dsv4.model.gqa.choice import Attention
from dsv4.model.gqa.heads import heads_of
from dsv4.model.load import load_model
from dsv4.model.ranks import Ranks
from dsv4.parallel.threads import together
from dsv4.runtime.graph import DecodeGraph
from dsv4.sampling import Sampling
from dsv4.speculation.draft import LookupDrafter
from tests.conftest import TOLERANCE
from tests.engine.conftest import paged
from tests.gqa import oracle, placed
from tests.parallel.held import close, run
from tests.parallel.test_launch import TWO, ended, start

ROOT = Path(__file__).resolve().parents[2]
WIDE = dict(oracle.TINY, vocab_size=386, num_attention_heads=8, num_key_value_heads=4, head_dim=16)  # 386 = 3 · 97 + 95
CONFIGS = {
    "biases": dict(WIDE, model_type="llama", attention_bias=True, mlp_bias=True, rope_theta=1e4),
    "norms of heads, windows and a tied head": dict(
        WIDE,
        model_type="qwen3",
        attention_bias=True,
        tie_word_embeddings=True,
        use_sliding_window=True,
        sliding_window=40,
        max_window_layers=2,
        rope_theta=1e4,
    ),
}
CUT = Chunking(32, 8, 8)
BOUND = Policy("block-bound", "bound", 32, 1, 1, 1)
READINGS = placed.READINGS | {
    "blocks by bounds, terminating": Attention(BOUND, placed.STOPS),
    "chunks, a memory of each query head": Attention(prefill=replace(CUT, heads="query")),
    "chunks, scores by the memory": Attention(BOUND, prefill=replace(CUT, score="memory")),
}
SEEN = ("kept tokens", "low", "high", "mean", "keys", "values")  # tensors of a layer's cache, by KV head


@pytest.fixture(scope="module", params=CONFIGS)
def checkpoint(request, tmp_path_factory):
    """(folder, transformers' model)."""
    theirs = oracle.randomised(CONFIGS[request.param])
    return oracle.save(theirs, CONFIGS[request.param], tmp_path_factory.mktemp("ranks") / "c"), theirs


@pytest.fixture(scope="module")
def whole(checkpoint):
    return load_model(checkpoint[0], numerics="fp32", backend="reference")


@pytest.fixture(scope="module", params=[2, 4])
def models(request, checkpoint):
    load = lambda ranks: load_model(checkpoint[0], numerics="fp32", backend="reference", ranks=ranks)
    return together(request.param, load)


def ids(rows=2, tokens=placed.LENGTH, seed=0):
    return torch.randint(0, 384, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def same_on_all(whole, models, what):
    """what(model) → tensors: every rank has the same, and they are those of the whole model."""
    wanted, found = what(whole), run(models, what)
    for mine, theirs, *others in zip(wanted, *found, strict=True):
        assert torch.equal(mine.isnan(), theirs.isnan())
        close(theirs.nan_to_num(), mine.nan_to_num())
        assert all(torch.equal(theirs.nan_to_num(), other.nan_to_num()) for other in others), "ranks disagree"


@pytest.mark.parametrize("reading", READINGS.values(), ids=READINGS)
def test_ranks_compute_what_the_whole_model_computes(whole, models, reading):
    """A ragged batch of prompts, decoding, a ragged step, a rewind."""
    same_on_all(whole, models, lambda model: placed.run(model, reading))


def test_logits_are_those_of_transformers(checkpoint, models):
    def logits(model):
        model.attention = Attention()
        return model(ids())

    wanted = oracle.logits(checkpoint[1], ids())
    assert all((found - wanted).abs().max() < TOLERANCE for found in run(models, logits))


@pytest.mark.parametrize("reading", READINGS.values(), ids=READINGS)
def test_each_rank_chooses_what_the_whole_model_chooses_for_its_heads(whole, models, reading):
    """No reading compares heads of different groups: lists, summaries, blocks, tiles and memories of a rank are its
    part of the whole model's, and what is allocated is its share."""

    def chosen(model):
        model.attention, blocks = reading, []
        choose = model.op.choose_blocks
        model.op.choose_blocks = lambda *given, **more: blocks.append(choose(*given, **more)) or blocks[-1]
        try:
            cache = model.new_cache(2, placed.LENGTH + 20)
            model.append(ids(), cache, n_new=[placed.LENGTH, 150], logits="none", prompt=True)
            model.append(ids(seed=1)[:, :1], cache)
        finally:
            model.op.choose_blocks = choose
        held = [(layer.tensors[name], 1) for layer in cache.layers for name in SEEN if name in layer.tensors]
        held += [(found, 2) for found in [*blocks, *(tiles for tiles in model.tiles if tiles is not None)]]
        held += [(layer.memory.positions, 2) for layer in cache.layers if layer.memory is not None]
        return held, cache.nbytes

    wanted, nbytes = chosen(whole)
    found = run(models, chosen)
    assert [n for _, n in found] == [nbytes // len(models)] * len(models)
    for (whole_one, axis), *parts in zip(wanted, *(held for held, _ in found), strict=True):
        joined = torch.cat([part for part, _ in parts], axis)
        close(joined, whole_one) if joined.is_floating_point() else None
        assert joined.is_floating_point() or torch.equal(joined, whole_one)
    lists = [t for t, _ in wanted if not t.is_floating_point()]
    assert bool(lists) == (not reading.plain)


def test_captured_steps_pages_and_host_memory(whole, models):
    """The other ways to hold a cache; and maps that run as one, as on a GPU, which leave biases to what follows."""

    def served(model):
        model.attention, found = Attention(BOUND), []
        caches = model.new_cache(2, 320), paged(model, 2, 320), model.new_cache(2, 320, memory=HostMemory(4))
        for cache in caches:
            model.append(ids()[:, :128], cache, n_new=[128, 90], logits="none", prompt=True)
            found.append(model.append(ids(seed=1)[:, :1], cache))
        found.append(DecodeGraph(model, caches[0]).step(ids(seed=2)[:, :1]).clone())
        separate, model.op.fused = model.op.fused, frozenset({"linears"})
        try:
            found.append(DecodeGraph(model, caches[0]).step(ids(seed=2)[:, :1]).clone())
        finally:
            model.op.fused = separate
        return found

    same_on_all(whole, models, served)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("policy", [BOUND, READINGS["snapkv"].policy, Attention().policy], ids=lambda p: p.name)
def test_plans_of_caches_are_shares_of_the_whole_plan(whole, size, policy):
    """On the device, and in host memory with its buffers: bytes by stream."""

    def planned(heads):
        given = whole.config, heads, 3, 300, whole.numerics
        plans = [cache_streams(*given, policy)]
        if not policy.once:
            plans += [grouped_plan(*given, policy, None), [LayerStreams(None, (brought_layers(*given),))]]
        return [s.nbytes for plan in plans for layer in plan for s in layer.streams]

    wanted = planned(heads_of(whole.config, Ranks()))
    for rank in range(size):
        mine = heads_of(whole.config, Ranks(rank, size))
        assert planned(mine) == [n // size for n in wanted]
        assert token_bytes(whole.config, mine, whole.numerics)[0] * size == whole_token_bytes(whole)


def whole_token_bytes(model) -> int:
    c = model.config
    return 2 * c.num_hidden_layers * c.num_key_value_heads * c.head_dim * 4


def test_texts_are_equal(whole, models, monkeypatch):
    """Greedy, sampled and drafted, by itself, in rounds and in a batch; no rank joins logits for them."""
    prompt = ids(1, 40)[0].tolist() * 2

    def batch(model, sampling):
        cache, results = paged(model, 2, 128, max_rewind=REWIND), {}
        engine = BatchEngine(model, cache, drafter=LookupDrafter(), on_result=lambda r: results.setdefault(r.id, r))
        for name, n in (("long", 80), ("short", 30), ("third", 50)):
            engine.submit(Request(name, tuple(prompt[:n]), 8, sampling=sampling))
        engine.run()
        return {name: r.token_ids for name, r in results.items()}

    def texts(model, sampling):
        model.attention = Attention()
        return (
            generate(model, prompt, 24, sampling).token_ids,
            generate_speculative(model, [prompt], 24, LookupDrafter(), sampling)[0].token_ids,
            generate_on_device(model, [prompt], 24, LookupDrafter(), sampling)[0].token_ids,
            batch(model, sampling),
        )

    samplings = Sampling(), Sampling(0.8, 1.0, 5), Sampling(0.8, 0.9, 5)
    wanted = [texts(whole, sampling) for sampling in samplings]
    assert wanted[0][0] == wanted[0][1] == wanted[0][2] != wanted[1][0] != wanted[2][0]
    monkeypatch.setattr(Ranks, "joined", lambda *given: pytest.fail("logits were joined"))
    assert all(found == wanted for found in run(models, lambda model: [texts(model, s) for s in samplings]))


def test_all_parts_of_all_ranks_are_the_checkpoint(whole, models):
    names, accounts = list(whole.ledger.used), [model.ledger.held for model in models]
    assert joint_problems(accounts, names) == [] and all(set(account) == set(names) for account in accounts)
    axes = {name: part.axis for name, part in accounts[0].items() if part is not None}
    mine = {re.sub(r".*layers\.\d+\.", "", name): axis for name, axis in axes.items()}
    rows = {f"self_attn.{x}_proj.{leaf}" for x in "qkv" for leaf in ("weight", "bias")}
    rows |= {f"mlp.{x}_proj.{leaf}" for x in ("gate", "up") for leaf in ("weight", "bias")}
    rows |= {"model.embed_tokens.weight", "lm_head.weight"}
    columns = {"self_attn.o_proj.weight", "mlp.down_proj.weight"}
    assert mine == {re.sub(r".*layers\.\d+\.", "", n): int(n.endswith(tuple(columns))) for n in names
                    if n.endswith(tuple(rows | columns))}  # fmt: skip
    replicated = sum(p.nbytes for name, p in whole.named_parameters() if name not in axes)
    assert sum(model.nbytes for model in models) == whole.nbytes + replicated * (len(models) - 1)


def test_sums_are_taken_in_fp32_and_a_bias_is_added_once(checkpoint):
    """In bf16, of the output projection and of the down projection."""
    load = lambda ranks: load_model(checkpoint[0], numerics="native", backend="reference", ranks=ranks)
    one, parts = load(Ranks()), together(2, load)
    for name in ("model.layers.1.self_attn.o_proj", "model.layers.1.mlp.down_proj"):
        w, b = one.get_submodule(name).weight, one.get_submodule(name).bias
        x = torch.randn(5, w.shape[1], generator=torch.Generator().manual_seed(1)).bfloat16()
        cuts = [part.get_submodule(name).cut for part in parts]
        mine = [x[:, cut.start : cut.stop] for cut in cuts]
        total = sum(y.float() @ w[:, cut.start : cut.stop].float().T for y, cut in zip(mine, cuts))
        wanted = (total if b is None else total + b).bfloat16()
        rounded = sum((y @ w[:, cut.start : cut.stop].bfloat16().T) for y, cut in zip(mine, cuts))
        found = run(parts, lambda model: model.get_submodule(name)(mine[model.ranks.rank]))
        assert all(torch.equal(y, wanted) for y in found)
        assert not torch.equal((rounded if b is None else rounded + b).bfloat16(), wanted), "this shows nothing"


def test_caches_of_other_heads_are_refused(whole, models):
    def refused(model):
        for cache in (whole.new_cache(1, 20), models[(model.ranks.rank + 1) % len(models)].new_cache(1, 20)):
            with pytest.raises(InputError, match="another model: its heads is"):
                model.append(ids(1, 3), cache)

    run(models, refused)


@pytest.mark.parametrize(
    "changes, ranks, said",
    [
        ({}, 3, "num_key_value_heads is 4, which 3 ranks cannot share"),
        ({}, 8, "num_key_value_heads is 4, which 8 ranks cannot share"),
        ({"intermediate_size": 82}, 4, "intermediate_size is 82, which 4 ranks cannot share"),
        ({"num_key_value_heads": 1}, 2, "num_key_value_heads is 1, which 2 ranks cannot share"),
    ],
)
def test_numbers_that_cannot_be_shared_are_refused(tmp_path, changes, ranks, said):
    config = CONFIGS["biases"] | changes
    folder = oracle.save(oracle.randomised(config), config, tmp_path / "c")
    with pytest.raises(InputError, match=said):
        load_model(folder, ranks=Ranks(0, ranks))


def test_only_one_module_reads_the_config_s_numbers_of_heads():
    """Everything else of the model and of its caches takes `Heads`, so that no cache gets the heads of all ranks."""
    files = [*(ROOT / "dsv4" / "cache").rglob("*.py"), *(ROOT / "dsv4" / "model" / "gqa").glob("*.py")]
    found = {f.name for f in files if re.search(r"\.num_(key_value|attention)_heads\b", f.read_text())}
    assert found <= {"heads.py", "config.py"} and "heads.py" in found


# Over 5 s: processes that import torch.
@pytest.mark.parametrize(
    "more", ["", "--attention page-bound --attention-tokens 64 --terminate --temperature 0.8 --top-p 0.9"]
)
def test_the_text_of_the_demo_is_that_of_one_process(more):
    prompt = ",".join(map(str, range(3, 303)))
    given = "generate", str(ROOT / "demo_gqa"), "--numerics", "fp32", "--token-ids", prompt
    runs = [start(*given, "--max-new-tokens", "24", "--json", *more.split(), *ranks) for ranks in ((), TWO)]
    (code, out, err), (other, theirs, complaint) = map(ended, runs)
    assert code == other == 0, err + complaint
    assert json.loads(out)["token_ids"] == json.loads(theirs)["token_ids"] and len(json.loads(out)["token_ids"]) == 24
