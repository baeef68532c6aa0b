"""Policies of blocks in a GQA model: against an fp64 decoder with the keep-set as its mask, and against dense where
nothing is lost."""

import pytest
import torch

from dsv4 import load_model
from dsv4.engine.generate import generate, generate_speculative
from dsv4.errors import InputError, MissingSummaries
from dsv4.kernels.block_choice import Policy, block_bounds, block_means, dense, page_bounds, sink_window
from dsv4.kernels.grouped_attention import Termination
from dsv4.model.gqa.choice import Attention
from dsv4.runtime.graph import DecodeGraph
from dsv4.speculation.draft import LookupDrafter
from tests.conftest import TOLERANCE
from tests.gqa import masked, oracle

CONFIG = oracle.CONFIGS["qwen2, bias and tied head"]
PROMPT, TOKENS = 200, 240
POLICIES = {  # of 15 blocks at the end, each keeps 6
    "bound": Policy("bound", "bound", 16, 1, 2, 3),
    "mean": Policy("mean", "mean", 16, 1, 2, 3),
    "sink and window": Policy("window", None, 16, 2, 4),
    "no sink": Policy("no sink", "bound", 16, 0, 1, 5),
}


@pytest.fixture(scope="module")
def subject(tmp_path_factory):
    """(model in fp32, weights, ids [1, 240])."""
    theirs = oracle.randomised(CONFIG)
    folder = oracle.save(theirs, CONFIG, tmp_path_factory.mktemp("sparse") / "m")
    ids = torch.randint(0, CONFIG["vocab_size"], (1, TOKENS), generator=torch.Generator().manual_seed(1))
    weights = {name: p.detach() for name, p in theirs.named_parameters()}
    # its fp32
    assert (masked.forward(weights, CONFIG, ids[0], masked.causal) - oracle.logits(theirs, ids)[0]).abs().max() < 1e-3
    return load_model(folder, numerics="fp32"), weights, ids


@pytest.fixture
def model(subject):
    yield subject[0]
    subject[0].attention = Attention()


@pytest.fixture(scope="module")
def wanted(subject):
    """Logits of positions PROMPT … TOKENS − 1 by each policy, and dense: [40, vocab]."""
    _, weights, ids = subject
    found = {
        name: masked.forward(
            weights, CONFIG, ids[0], masked.kept_blocks(p.selector, p.block, p.sink, p.local, p.topk, PROMPT)
        )[PROMPT:]
        for name, p in POLICIES.items()
    }
    return found | {"dense": masked.forward(weights, CONFIG, ids[0], masked.causal)[PROMPT:]}


def filled(model, ids, tokens=PROMPT, **options):
    cache = model.new_cache(1, TOKENS)
    model.append(ids[:, :tokens], cache, logits="none", prompt=True, **options)
    return cache


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("width", [1, 5, 16])
def test_decode_is_attention_over_the_keep_set(model, subject, wanted, name, width):
    """And is not dense attention: the keep-set loses something that matters here."""
    ids = subject[2]
    model.attention = Attention(POLICIES[name])
    cache = filled(model, ids)
    got = torch.cat([model.append(ids[:, t : t + width], cache) for t in range(PROMPT, TOKENS, width)], 1)[0]
    assert (got - wanted[name]).abs().max() < TOLERANCE
    assert (wanted[name] - wanted["dense"]).abs().max() > 100 * TOLERANCE


@pytest.mark.parametrize("name", POLICIES)
def test_captured_steps_and_ragged_rows(model, subject, wanted, name):
    """Steps of 1 and 3 tokens without a graph, rows at other positions beside them, and what the cache held before in
    NaN."""
    ids = subject[2]
    model.attention = Attention(POLICIES[name])
    cache = model.new_cache(3, TOKENS)
    for layer in cache.layers:
        for tensor in layer.tensors.values():
            tensor.fill_(float("nan"))
    model.append(ids.expand(3, -1)[:, :PROMPT], cache, n_new=[PROMPT, 77, PROMPT - 1], logits="none", prompt=True)
    model.append(ids[:, PROMPT - 1 : PROMPT].expand(3, -1), cache, n_new=[0, 0, 1], prompt=True)
    graph, wide = DecodeGraph(model, cache), DecodeGraph(model, cache, tokens=3)
    for t in range(PROMPT, PROMPT + 20, 4):
        logits = graph.step(torch.stack([ids[0, t], ids[0, t] * 0 + 3, ids[0, t]]).unsqueeze(1)).clone()
        more = wide.step(ids[:, t + 1 : t + 4].expand(3, -1))
        for row in (0, 2):
            assert (logits[row, 0] - wanted[name][t - PROMPT]).abs().max() < TOLERANCE
            assert (more[row] - wanted[name][t - PROMPT + 1 : t - PROMPT + 4]).abs().max() < TOLERANCE
    assert "6 of 14 blocks" in model.layer_paths()[0]["path"] and model.layer_paths()[0]["tokens"] == 5 * 16 + 12


def test_the_dense_policy_changes_no_bit(model, subject):
    ids = subject[2]
    cache = filled(model, ids)
    want = [model.append(ids[:, t : t + 1], cache) for t in range(PROMPT, TOKENS)]
    model.attention = Attention(dense())
    again = filled(model, ids)
    assert again.nbytes == cache.nbytes and all(
        torch.equal(model.append(ids[:, t : t + 1], again), w) for t, w in zip(range(PROMPT, TOKENS), want)
    )


@pytest.mark.parametrize("chunk", [None, 7, 16, 64])
def test_prefill_is_dense_to_the_bit_under_any_policy(model, subject, chunk):
    """Logits, keys and values; in pieces of few tokens too, as long as one append has more than 16, or is said to be a
    prompt's."""
    ids = subject[2]
    plain, sparse = model.new_cache(1, TOKENS), None
    want = model.append(ids[:, :PROMPT], plain, chunk=chunk)
    model.attention = Attention(POLICIES["bound"])
    sparse = model.new_cache(1, TOKENS)
    assert torch.equal(model.append(ids[:, :PROMPT], sparse, chunk=chunk), want)
    tail = model.append(ids[:, PROMPT : PROMPT + 3], sparse, prompt=True)
    model.attention = Attention()
    assert torch.equal(model.append(ids[:, PROMPT : PROMPT + 3], plain), tail)
    for a, b in zip(plain.layers, sparse.layers):
        assert torch.equal(a.keys, b.keys) and torch.equal(a.values, b.values)


@pytest.mark.few(first=["mean"])
@pytest.mark.parametrize(
    "first, second", [("bound", "mean"), ("mean", "bound"), ("sink and window", "bound"), ("bound", "no sink")]
)
def test_a_filled_cache_takes_another_policy(model, subject, wanted, first, second):
    """Dense and sparse decode share keys and values: what is decoded after the switch is as if it had been chosen from
    the beginning."""
    ids = subject[2]
    cache = filled(model, ids)  # dense: no summaries
    for name in (first, second):
        model.attention = Attention(POLICIES[name])
        if POLICIES[name].selector and name == first:
            with pytest.raises(MissingSummaries, match="cache.adopt"):
                model.append(ids[:, PROMPT : PROMPT + 1], cache)
            assert cache.lengths == [PROMPT]
        cache.adopt(model.attention.policy)
        got = torch.cat([model.append(ids[:, t : t + 1], cache) for t in range(PROMPT, TOKENS)], 1)[0]
        assert (got - wanted[name]).abs().max() < TOLERANCE
        fresh = filled(model, ids)
        assert torch.equal(
            torch.cat([model.append(ids[:, t : t + 1], fresh) for t in range(PROMPT, TOKENS)], 1)[0], got
        )
        assert fresh.nbytes == cache.nbytes and fresh.plan == cache.plan
        cache.rewind(TOKENS - PROMPT)
    model.attention = Attention()
    plain = filled(model, ids)
    for t in range(PROMPT, TOKENS):
        assert torch.equal(model.append(ids[:, t : t + 1], cache), model.append(ids[:, t : t + 1], plain))


@pytest.mark.parametrize(
    "policy",
    [
        page_bounds(512),
        block_bounds(512),
        block_means(512),
        sink_window(512),
        Policy("all", "bound", 16, 1, 2, 100),
        Policy("all", "mean", 32, 0, 1, 100),
    ],
    ids=lambda p: f"{p.name} {p.kept}",
)
def test_what_keeps_everything_is_dense(model, subject, wanted, policy):
    ids = subject[2]
    model.attention = Attention(policy)
    cache = filled(model, ids)
    got = torch.cat([model.append(ids[:, t : t + 1], cache) for t in range(PROMPT, TOKENS)], 1)[0]
    assert (got - wanted["dense"]).abs().max() < TOLERANCE


@pytest.mark.few(name=["bound"])
@pytest.mark.parametrize("name", ["bound", "mean"])
def test_a_rewound_row_has_no_stale_summary(model, subject, name):
    """Wrong tokens far from the right ones, over several blocks, then the right ones: bit for bit what never was
    wrong."""
    ids = subject[2]
    model.attention = Attention(POLICIES[name])
    for back, run in ((1, 1), (17, 16), (33, 40), (100, 40)):
        cache, clean = filled(model, ids, PROMPT), filled(model, ids, PROMPT)
        cache.rewind(back)
        model.append(ids[:, :run].flip(1), cache, logits="none", prompt=True)
        cache.rewind(run)
        model.append(ids[:, PROMPT - back : PROMPT], cache, logits="none", prompt=True, chunk=9)
        a, b = (
            torch.cat([model.append(ids[:, t : t + 1], c) for t in range(PROMPT, TOKENS)], 1) for c in (cache, clean)
        )
        assert (a - b).abs().max() < 1e-4, (back, run)
        for mine, other in zip(cache.layers, clean.layers):
            for key in set(mine.tensors) - {"keys", "values"}:
                whole = TOKENS // 16
                assert torch.allclose(mine.tensors[key][:, :, :whole], other.tensors[key][:, :, :whole], atol=1e-4), key


def test_drafts_verified_at_once_are_the_single_steps(model, subject):
    ids = subject[2][0, :60].tolist() * 3
    model.attention = Attention(POLICIES["bound"])
    plain = generate(model, ids, 40).token_ids
    drafted = generate_speculative(model, [ids], 40, LookupDrafter())[0]
    assert drafted.token_ids == plain and drafted.speculation.proposed > 5


def test_the_last_piece_of_a_prompt_is_read_densely(model, subject):
    """A prompt one token longer than the pieces that generation takes: its first token is dense attention's."""
    ids = (subject[2][0].tolist() * 2)[:257]
    assert model.chunk == 256
    want = int(model(torch.tensor([ids]))[0, -1].argmax())
    model.attention = Attention(Policy("newest", None, 16, 0, 1))
    sparse = model.append(torch.tensor([ids[-1:]]), (cache := _after(model, ids[:-1])))[0, -1]
    assert int(sparse.argmax()) != want and cache.lengths == [257]  # it would differ
    assert generate(model, ids, 1).token_ids == [want]
    assert generate_speculative(model, [ids], 1, LookupDrafter())[0].token_ids == [want]


def _after(model, ids):
    cache = model.new_cache(1, len(ids) + 1)
    model.append(torch.tensor([ids]), cache, logits="none")
    return cache


# ---- termination ---------------------------------------------------------------------------------

NEVER, SOON = Termination(tau=0, tile=64), Termination(tau=1e9, phi=2, patience=1, tile=64)


@pytest.mark.parametrize("name", [*POLICIES, "dense"])
def test_never_stopping_loses_nothing(model, subject, wanted, name):
    ids = subject[2]
    model.attention = Attention(POLICIES.get(name, dense()), NEVER)
    cache = filled(model, ids)
    got = torch.cat([model.append(ids[:, t : t + 1], cache) for t in range(PROMPT, TOKENS)], 1)[0]
    assert (got - wanted[name]).abs().max() < TOLERANCE
    path = model.layer_paths()[0]
    if name == "dense":  # a policy lists its blocks in another order without a rule
        model.attention = Attention(dense())
        cache = filled(model, ids)
        assert torch.equal(
            got, torch.cat([model.append(ids[:, t : t + 1], cache) for t in range(PROMPT, TOKENS)], 1)[0]
        )
    assert path["tiles_read"] == path["of_tiles"] == (4 if name == "dense" else 2), path


def test_stopping_at_once_reads_two_tiles(model, subject):
    """Sink and newest tile of dense attention; of a policy the most important blocks: its first tiles, which are the
    sink and local ones."""
    ids = subject[2]
    model.attention = Attention(dense(), SOON)
    got = model.append(ids[:, PROMPT : PROMPT + 2], filled(model, ids))[0]
    path = model.layer_paths()[0]
    assert (path["tiles_read"], path["of_tiles"]) == (2, 4) and "2.0 of 4 tiles" in path["path"]
    weights = subject[1]

    def mask(layer, q, k):
        seen = masked.causal(layer, q, k)
        seen[:, PROMPT:, 64:192] = False  # first tile, and the one of the query
        return seen

    want = masked.forward(weights, CONFIG, ids[0, : PROMPT + 2], mask)[PROMPT:]
    assert (got - want).abs().max() < TOLERANCE


def test_termination_reads_the_most_important_first(model, subject):
    """64 tokens are four pages: sink, both local ones, and the best of the distant."""
    ids = subject[2]
    model.attention = Attention(Policy("bound", "bound", 16, 1, 2, 9), Termination(tau=1e9, phi=2, patience=1, tile=64))
    real, seen = model.op.gather_attention, []
    for layer in model.layers:
        layer.self_attn.op = type(
            "Op", (), vars(model.op) | {"gather_attention": staticmethod(lambda *a: (seen.append(a[3]), real(*a))[1])}
        )
    try:
        model.append(ids[:, PROMPT : PROMPT + 1], filled(model, ids))
    finally:
        for layer in model.layers:
            layer.self_attn.op = model.op
    for blocks in seen:
        assert blocks[0, 0, :, :3].tolist() == [[0, 12, 11]] * 2 and (blocks[0, 0].diff() < 0).any()
    assert len(seen) == 3 and any(
        blocks[0, 0, 0, 3:].tolist() != sorted(blocks[0, 0, 0, 3:].tolist()) for blocks in seen
    )


# ---- windows, refusals ---------------------------------------------------------------------------


def test_a_layer_with_a_window_stays_dense_within_it(pair):
    """And keeps no summaries; layers without one follow the policy."""
    model, _, ids, _ = pair
    try:
        plain = model.new_cache(1, 310)
        want = (model.append(ids[:, :300], plain, logits="none"), model.append(ids[:, 300:301], plain))[1]
        model.attention = Attention(Policy("bound", "bound", 16, 1, 2, 1), NEVER)
        cache = model.new_cache(1, 310)
        got = (model.append(ids[:, :300], cache, logits="none"), model.append(ids[:, 300:301], cache))[1]
        for layer, rows, path in zip(model.layers, cache.layers, model.layer_paths()):
            assert set(rows.tensors) == {"keys", "values"} | (set() if layer.self_attn.window else {"low", "high"})
            assert ("tiles_read" in path) == ("blocks" in path) == (layer.self_attn.window is None)
        if all(model.config.windows):
            assert torch.equal(got, want)
        else:
            assert (got - want).abs().max() > 100 * TOLERANCE
    finally:
        model.attention = Attention()


def test_refusals(model, subject):
    with pytest.raises(InputError, match="divisor of 128"):
        Attention(Policy("wide", None, 256, 1, 1))
    with pytest.raises(InputError, match="expected a dsv4.model.gqa.choice.Attention"):
        model.attention = POLICIES["bound"]
    graph = DecodeGraph(model, filled(model, subject[2]))
    model.attention = Attention(POLICIES["sink and window"])
    with pytest.raises(InputError, match="new DecodeGraph"):
        graph.step(torch.tensor([[3]]))
    from scripts.training.gqa import CONFIG as trained
    from scripts.training.gqa import build

    with pytest.raises(InputError, match="differentiable"):
        build(trained | {"num_hidden_layers": 1}, "cpu").attention = Attention(block_bounds(4096))
