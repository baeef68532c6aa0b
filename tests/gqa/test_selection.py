"""SnapKV and PyramidKV: what is chosen after a prompt against the published rule on transformers' own attention
probabilities, and decoding against transformers with a cache of just those tokens."""

import copy
import json

import pytest
import torch

from dsv4 import load_model
from dsv4.engine.generate import generate_speculative
from dsv4.errors import InputError, MissingSummaries
from dsv4.kernels.block_choice import Observed, block_bounds, choose_tokens, pyramidkv, snapkv
from dsv4.kernels.errors import UnsupportedInput
from dsv4.kernels.grouped_attention import Termination
from dsv4.model.dummy import fill_cache, load_dummy
from dsv4.model.gqa.choice import Attention, attention_named
from dsv4.model.gqa.model import GQAModel
from dsv4.runtime.graph import DecodeGraph
from dsv4.runtime.planning import plan
from dsv4.speculation.draft import LookupDrafter
from tests.gqa import oracle

W, P, NEW = 8, 180, 5
SNAP = Observed("snap", retention=0.3, window=W, kernel=5)
WAYS = {
    "snapkv": SNAP,
    "snapkv, tokens and max pooling": Observed("snap", retention=40, window=W, kernel=7, pooling="max"),
    "pyramidkv": Observed("pyramid", retention=0.3, window=W, beta=4),
    "pyramidkv, bounded by the prompt": Observed("pyramid", retention=0.8, window=W, beta=20),
}
NAMES = ["qwen2, bias and tied head", "llama, llama3 rope and biases", "qwen3, tied head", "llama, linear rope"]


def published(mass: torch.Tensor, policy: Observed, KV: int, count: int) -> list[list[int]]:
    """The rule by its definition, token by token. mass [H, P, P]: transformers' attention probabilities of one layer;
    → the `count` best tokens before the window of each KV head, by falling score."""
    H, before, reach = len(mass), P - W, policy.kernel // 2
    summed = mass[:, P - W :, :before].double().sum(1).tolist()
    pooled = []
    for row in summed:
        near = [row[max(0, t - reach) : t + reach + 1] for t in range(before)]
        pooled.append([max(n) if policy.pooling == "max" else sum(n) / policy.kernel for n in near])
    found = []
    for kv in range(KV):
        group = pooled[kv * H // KV : (kv + 1) * H // KV]
        score = [sum(row[t] for row in group) / len(group) for t in range(before)]
        found.append(sorted(range(before), key=lambda t: -score[t])[:count])
    return found


def budgets(policy: Observed, layers: int) -> list[int]:
    """Tokens of the prompt by layer, window included, as PyramidKV's code defines them."""
    kept = round(policy.retention * P) if isinstance(policy.retention, float) else policy.retention
    if policy.beta is None:
        return [kept] * layers
    least = (kept - W) // policy.beta
    most = (kept - W) * 2 - least
    if most >= P - W:
        most = P - W
        least = (kept - W) * 2 - most
    step = (most - least) // (layers - 1)
    return [W + most - layer * step for layer in range(layers)]


@pytest.fixture(scope="module", params=NAMES)
def made(request, tmp_path_factory):
    """(folder of a checkpoint, transformers' model of it, ids [1, P + NEW], its attention to the prompt by layer)."""
    config = oracle.CONFIGS[request.param]
    theirs = oracle.randomised(config)
    folder = oracle.save(theirs, config, tmp_path_factory.mktemp("selection"))
    ids = torch.randint(0, config["vocab_size"], (1, P + NEW), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        mass = theirs(ids[:, :P], output_attentions=True).attentions
    return folder, theirs, ids, [layer[0] for layer in mass]


def pruned(theirs, ids, kept: list[list[list[int]]]) -> torch.Tensor:
    """Logits [NEW, vocab] of transformers for the tokens after the prompt, with a cache of the tokens `kept` by layer
    and KV head, and of all tokens after the prompt."""
    from transformers import DynamicCache

    theirs = copy.deepcopy(theirs)
    theirs.set_attn_implementation("sdpa")  # which needs no mask for one query
    cache = DynamicCache(config=theirs.config)
    with torch.no_grad():
        theirs(ids[:, :P], past_key_values=cache)
        for layer, heads in zip(cache.layers, kept, strict=True):
            at = torch.tensor(heads)[None, :, :, None].expand(-1, -1, -1, layer.keys.shape[-1])
            layer.keys, layer.values = (t.gather(2, at) for t in (layer.keys, layer.values))
        out = []
        for t in range(P, P + NEW):
            place = torch.tensor([[t]])
            out.append(theirs(ids[:, t : t + 1], past_key_values=cache, position_ids=place, attention_mask=None).logits)
    return torch.cat(out, 1)[0]


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("name", WAYS)
def test_the_choice_and_what_is_decoded_are_those_of_the_published_rule(made, name, backend):
    folder, theirs, ids, mass = made
    policy, KV = WAYS[name], theirs.config.num_key_value_heads
    model = load_model(folder, numerics="fp32", backend=backend, attention=Attention(policy))
    cache = model.new_cache(1, P + NEW, max_rewind=NEW)
    model.append(ids[:, :P], cache, logits="none", prompt=True, chunk=44)  # the window lies in two pieces
    kept = []
    for layer, tokens in enumerate(budgets(policy, len(mass))):
        wanted = published(mass[layer], policy, KV, tokens - W)
        selection = cache.layers[layer].selection
        lists, slots = selection.kept[0].tolist(), selection.slots
        if tokens == P:
            assert selection.chosen == [(0, 0)] and lists == [[*range(slots)][::-1] + [-1]] * KV
            kept.append([[*range(P)]] * KV)
            continue
        assert selection.chosen == [(tokens - W, P - W)]
        for whole, best in zip(lists, wanted, strict=True):
            own = slots - (P - W)
            assert whole[:own] == [*range(P - W, slots)][::-1] and set(whole[own + len(best) :]) == {-1}
            mine = whole[own : own + len(best)]
            assert sum(a == b for a, b in zip(mine, best)) >= 0.97 * len(best), "order"  # but for what fp32 rounds
            assert set(mine) == set(best)
        kept.append([[*sorted(best), *range(P - W, P)] for best in wanted])
    found = torch.cat([model.append(ids[:, t : t + 1], cache)[0] for t in range(P, P + NEW)])
    wanted = pruned(theirs, ids, kept)
    assert torch.allclose(found, wanted, atol=2e-4, rtol=2e-4)
    dense = oracle.logits(theirs, ids)[0, P:]
    assert (found - dense).abs().max() > 50 * (found - wanted).abs().max()  # the choice matters
    cache.rewind(NEW)
    assert torch.allclose(model.append(ids[:, P:], cache)[0], wanted, atol=2e-4, rtol=2e-4)  # several at once


def test_kvpress_chooses_the_same():
    press = pytest.importorskip("kvpress.presses.snapkv_press").SnapKVPress
    q, keys = torch.randn(P, 6, 16), torch.randn(2, P, 16)
    logits = torch.einsum("qhd,hpd->hqp", q, keys.repeat_interleave(3, 0)) / 4
    mass = logits.masked_fill(torch.ones(P, P).triu(1).bool(), -torch.inf).softmax(-1).unsqueeze(0)
    module = torch.nn.Module()
    module.config = type("Config", (), {"num_attention_heads": 6, "num_key_value_heads": 2})
    theirs = press(0.7, W, 5).score(module, torch.zeros(1, P, 1), keys.unsqueeze(0), None, mass, {})[0]
    best, since = choose_tokens(q[-W:], keys, 0.25, SNAP, 0, 3)
    mine = [{*row.tolist(), *range(since, P)} for row in best]
    assert mine == [set(row.tolist()) for row in theirs.topk(54, -1).indices] and since == P - W


def test_budgets_fall_by_equal_steps_and_keep_the_mean():
    for layers, beta, retention in ((32, 20, 2048), (36, 8, 0.2), (3, 4, 0.8)):
        policy = Observed("p", retention=retention, beta=beta)
        found = [policy.budget(i, layers, 10_000) for i in range(layers)]
        steps = {a - b for a, b in zip(found, found[1:])}
        mean = policy.tokens or round(retention * 10_000)
        assert len(steps) == 1 and 0 <= sum(found) / layers - mean <= (layers - 1) / 2
        assert found[0] <= 10_000 and found[-1] >= 32 + (mean - 32) // beta - 1
    assert [pyramidkv(64).budget(i, 3, 50) for i in range(3)] == [50] * 3  # shorter than the budget: all of it
    assert snapkv(0.2).budget(0, 3, 100) == 32 and pyramidkv(64).budget(0, 1, 100) == 64
    assert block_bounds(512).budget(1, 3, 10_000) == 4 * 128 - 112 and block_bounds(512).budget(0, 1, 100) == 100
    for wrong, said in (
        (dict(retention=1.5), "a share"),
        (dict(retention=0), "a number of tokens"),
        (dict(window=0), "window"),
        (dict(kernel=4), "odd"),
        (dict(pooling="sum"), "avg or max"),
        (dict(beta=0), "beta"),
        (dict(block=16), "single tokens"),
    ):
        with pytest.raises(UnsupportedInput, match=said):
            Observed("p", **wrong)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> GQAModel:
    config = oracle.CONFIGS[NAMES[0]]
    folder = oracle.save(oracle.randomised(config), config, tmp_path_factory.mktemp("selection"))
    return load_model(folder, numerics="fp32", backend="reference", attention=Attention(SNAP))


def listed(cache) -> list:
    return [layer.selection.kept.clone() for layer in cache.layers]


def same(a: list, b: list) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_rows_choose_for_themselves_and_only_prompts_choose(model):
    ids = torch.randint(0, 384, (2, 200), generator=torch.Generator().manual_seed(4))
    cache, alone = model.new_cache(2, 220), model.new_cache(1, 220)
    model.append(ids[:, :180], cache, n_new=[180, 77], logits="none", prompt=True)
    model.append(ids[1:, :77], alone, logits="none", prompt=True)
    before = listed(cache)
    assert all(torch.equal(a[1], b[0]) for a, b in zip(before, listed(alone)))
    wanted = [model.append(ids[:, 180 + t : 181 + t], cache) for t in range(4)]
    assert same(before, listed(cache))
    cache.rewind(4)
    graph = DecodeGraph(model, cache)  # where nothing is captured, the step of a capture runs
    for t in range(4):
        assert torch.allclose(graph.step(ids[:, 180 + t : 181 + t]), wanted[t], atol=1e-4)
    assert same(before, listed(cache))
    path = model.layer_paths()[0]
    assert (path["kept"], path["prompt"], path["tokens"]) == (54, 180, 58)
    assert path["path"] == "54 of 180 tokens of the prompt, 58 in all, by snap"


def test_a_rewind_into_the_prompt_drops_the_choice(model):
    ids = torch.randint(0, 384, (2, 200), generator=torch.Generator().manual_seed(5))
    cache, fresh = model.new_cache(2, 200), model.new_cache(2, 200)
    model.append(ids[:, :150], cache, logits="none", prompt=True)
    before = listed(cache)
    cache.rewind([0, 30])
    everything = torch.arange(cache.layers[0].selection.slots - 1, -2, -1, dtype=torch.int32)
    for now, then in zip(listed(cache), before):
        assert torch.equal(now[0], then[0]) and torch.equal(now[1], everything.expand(2, -1))
    cache.reset()
    assert all(torch.equal(now, everything.expand(2, 2, -1)) for now in listed(cache))
    for held in (cache, fresh):
        model.append(ids[:, :100], held, logits="none", prompt=True)
    assert same(listed(cache), listed(fresh))


def test_a_second_prompt_chooses_again_over_everything(model):
    ids = torch.randint(0, 384, (1, 200), generator=torch.Generator().manual_seed(6))
    cache, whole = model.new_cache(1, 200), model.new_cache(1, 200)
    model.append(ids[:, :100], cache, logits="none", prompt=True)
    model.append(ids[:, 100:101], cache)
    model.append(ids[:, 101:180], cache, logits="none", prompt=True)
    assert cache.layers[0].selection.runs == [(101, 180)] and cache.layers[0].selection.chosen == [(46, 172)]
    model.append(ids[:, :180], whole, logits="none", prompt=True)
    assert same(listed(cache)[:1], listed(whole)[:1])  # layers above saw a sparse token


def test_stopping_reads_the_newest_first(model):
    """With a rule that never stops the logits are those without; the order is the window's, newest first, and then by
    falling score."""
    ids = torch.randint(0, 384, (2, 200), generator=torch.Generator().manual_seed(7))
    cache = model.new_cache(2, 200)
    model.append(ids[:, :180], cache, n_new=[180, 120], logits="none", prompt=True)
    wanted = model.append(ids[:, 180:183], cache)
    cache.rewind(3)
    never = Attention(SNAP, Termination(tau=0, tile=64))
    model.attention = never
    try:
        assert torch.allclose(model.append(ids[:, 180:183], cache), wanted, atol=1e-4)
        assert model.layer_paths()[0]["of_tiles"] == 1
    finally:
        model.attention = Attention(SNAP)
    selection = cache.layers[0].selection
    step = type("S", (), dict(captured=False, starts=[180, 120], T=3, B=2, rows=slice(0, 2)))()
    step.pos, step.memo = torch.tensor([[180, 181, 182], [120, 121, 122]]), lambda key, compute: compute()
    lists = selection.lists(step)
    for b, t in ((0, 0), (0, 2), (1, 1)):
        k, since = selection.chosen[b]
        here, own = int(step.pos[b, t]), selection.slots - since
        order = [p for p in lists[b, t, 1].tolist() if p >= 0]
        assert order == [*range(since, here + 1)][::-1] + selection.kept[b, 1, own : own + k].tolist()


def test_drafts_are_verified_by_the_fixed_choice(model):
    prompt = torch.randint(0, 50, (150,), generator=torch.Generator().manual_seed(8)).tolist()
    cache = model.new_cache(1, 180)
    logits, wanted = model.append(torch.tensor([prompt]), cache, logits="last", prompt=True), []
    for _ in range(16):
        wanted.append(int(logits[0, -1].argmax()))
        logits = model.append(torch.tensor([wanted[-1:]]), cache, logits="last")
    [found] = generate_speculative(model, [prompt], 16, LookupDrafter())
    assert found.token_ids == wanted


def test_what_cannot_be_combined_is_refused(model, checkpoint, command_line):
    other = model.new_cache(1, 50)
    model.attention = Attention(snapkv(40))
    try:
        with pytest.raises(MissingSummaries, match="keeps no such choice"):
            model.append(torch.tensor([[3]]), other)
        model.append(torch.tensor([[3, 4]]), model.new_cache(1, 50), prompt=True)
        with pytest.raises(InputError, match="share prefixes of 128 tokens"):
            model.page_layout()
        model.attention = Attention()
        held = model.new_cache(1, 50)
        model.append(torch.tensor([[3, 4]]), held, prompt=True)
        with pytest.raises(MissingSummaries, match="whose queries are gone"):
            held.adopt(snapkv(40))
        held.reset()
        held.adopt(SNAP)
        assert held.layers[0].selection.policy == SNAP and held.nbytes == other.nbytes
        held.adopt(block_bounds(512))
        assert held.layers[0].selection is None and "kept tokens" not in held.layers[0].tensors
    finally:
        model.attention = Attention(SNAP)
    base = ("generate", checkpoint, "--token-ids", "3,4", "--attention", "snapkv")
    for options, said in (
        (("--prefill-chunks", "64,8,8"), "leave out one of them"),
        (("--attention-tokens", "32"), "keeps the last 32 tokens"),
        (("--attention-tokens", "1.5"), "a share of the prompt"),
        (("--kv-memory", "host"), "single tokens"),
    ):
        code, out, err = command_line(*base, *options)
        assert code == 2 and out == "" and said in err and err.count("\n") == 1
    code, _, err = command_line(*base[:-1], "block-bound", "--attention-tokens", "0.2")
    assert code == 2 and "shares are for snapkv and pyramidkv" in err and err.count("\n") == 1


def test_plans_count_what_is_read_by_layer(checkpoint):
    model = load_model(checkpoint)
    base = {row["name"]: row["nbytes"] for row in plan(str(checkpoint), "400", 2, 0, "native", "cpu")["step"]}
    for name, share in (("snapkv", "0.2"), ("pyramidkv", "0.5")):
        model.attention = reading = attention_named(name, share)
        document = plan(str(checkpoint), "400", 2, 0, "native", "cpu", attention=reading)
        assert document["cache_bytes"] == model.new_cache(2, 400).nbytes
        step = {row["name"]: row["nbytes"] for row in document["step"]}
        tokens = sum(reading.policy.budget(i, 3, 400) for i in range(3))
        assert step["keys"] == step["values"] == 2 * tokens * 2 * 8 * 2 == base["keys"] * tokens // 1200
        assert step["token lists"] == 2 * 2 * tokens * 4
        assert document["attention"]["policy"]["retention"] == float(share)


def test_the_command_line_reports_it(checkpoint, command_line):
    args = ("generate", checkpoint, "--token-ids", ",".join(map(str, range(3, 203))), "--max-new-tokens", "3")
    found = json.loads(command_line(*args, "--attention", "pyramidkv", "--attention-tokens", "0.5", "--json")[1])
    assert [layer["kept"] for layer in found["layers"]] == [165, 100, 35]
    assert [layer["tokens"] for layer in found["layers"]] == [167, 102, 37]
    assert found["attention"]["policy"]["kept_tokens"] is None and found["attention"]["policy"]["beta"] == 20


def test_filled_caches_choose_by_random_queries(monkeypatch):
    from dsv4.model.gqa import dummy as geometries

    thin = dict(hidden_size=64, intermediate_size=96, vocab_size=300, num_attention_heads=8, num_key_value_heads=2)
    monkeypatch.setitem(geometries.GEOMETRIES, "llama-8b", geometries.GEOMETRIES["llama-8b"] | thin)
    model = load_dummy("llama-8b", layers=2, backend="reference", attention=attention_named("snapkv", "0.2"))
    cache = model.new_cache(2, 1024)
    fill_cache(cache, [1000, 700])
    assert [layer.selection.chosen for layer in cache.layers] == [[(168, 968), (108, 668)]] * 2
    assert not torch.equal(cache.layers[0].selection.kept, cache.layers[1].selection.kept)
    assert DecodeGraph(model, cache).step(torch.tensor([[3], [4]])).isfinite().all()
