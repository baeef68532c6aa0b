"""Prompts in chunks and a memory through a whole model: against an fp64 decoder with the memory's own masks."""

from dataclasses import replace

import pytest
import torch

from dsv4 import load_model
from dsv4.engine.generate import generate, generate_speculative
from dsv4.errors import InputError
from dsv4.kernels.block_choice import Policy
from dsv4.kernels.chunked_prefill import Chunking
from dsv4.model.gqa.choice import Attention
from dsv4.speculation.draft import LookupDrafter
from tests.conftest import TOLERANCE
from tests.gqa import masked, oracle

CONFIG = oracle.CONFIGS["qwen2, bias and tied head"]
CUT, PROMPT, TOKENS = Chunking(32, 8, 12), 141, 150


@pytest.fixture(scope="module")
def subject(tmp_path_factory):
    theirs = oracle.randomised(CONFIG)
    folder = oracle.save(theirs, CONFIG, tmp_path_factory.mktemp("chunked") / "m")
    return load_model(folder, numerics="fp32"), {name: p.detach() for name, p in theirs.named_parameters()}


@pytest.fixture
def model(subject):
    subject[0].attention = Attention(prefill=CUT)
    yield subject[0]
    subject[0].attention = Attention()


@pytest.fixture(scope="module")
def rows(subject):
    """ids int64 [4, 150] and what four prompts of 141, 64, 31 and 128 of them give, then read densely: [150, vocab]
    each."""
    ids = torch.randint(0, 384, (4, TOKENS), generator=torch.Generator().manual_seed(2))
    return ids, [
        masked.forward(subject[1], CONFIG, row, masked.chunks(CUT.chunk, CUT.local, CUT.memory, n))
        for row, n in zip(ids, (PROMPT, 64, 31, 128))
    ]


@pytest.mark.parametrize("chunk", [None, 32, 64, 128])
def test_a_ragged_batch_of_prompts_and_what_follows(model, subject, rows, chunk):
    """Every position of each prompt, NaN beyond, then dense decode over the whole cache; and it is not dense
    prefill."""
    ids, want = rows
    lengths, cache = [PROMPT, 64, 31, 128], model.new_cache(4, TOKENS)
    got = model.append(
        torch.where(torch.arange(PROMPT) < torch.tensor(lengths)[:, None], ids[:, :PROMPT], -9),
        cache,
        n_new=lengths,
        chunk=chunk,
    )
    assert cache.lengths == lengths
    for b, n in enumerate(lengths):
        assert (got[b, :n] - want[b][:n]).abs().max() < TOLERANCE and got[b, n:].isnan().all()
    dense = masked.forward(subject[1], CONFIG, ids[0], masked.causal)
    assert (dense[PROMPT - 1] - want[0][PROMPT - 1]).abs().max() > 100 * TOLERANCE
    for t in range(6):
        step = model.append(torch.stack([row[n + t] for row, n in zip(ids, lengths)]).unsqueeze(1), cache)
        for b, n in enumerate(lengths):
            assert (step[b, 0] - want[b][n + t]).abs().max() < TOLERANCE
    assert cache.layers[0].last_memory.updates.shape == (4, 2)


@pytest.mark.parametrize("score,heads", [("memory", "kv"), ("memory", "query"), ("fused", "query")])
def test_the_other_rules_read_as_they_say(model, subject, rows, score, heads):
    """In pieces, so that each memory is handed on; a cache that another rule has filled is used again."""
    ids, usual = rows[0][0], rows[1][0]
    want = masked.forward(
        subject[1], CONFIG, ids, masked.chunks(CUT.chunk, CUT.local, CUT.memory, PROMPT, score, heads)
    )
    cache = model.new_cache(1, TOKENS)
    model.append(ids[None, :PROMPT], cache, prompt=True)
    cache.reset()
    model.attention = Attention(prefill=replace(CUT, score=score, heads=heads))
    got = model.append(ids[None, :PROMPT], cache, prompt=True, chunk=64)
    assert (got[0] - want[:PROMPT]).abs().max() < TOLERANCE
    assert (usual[:PROMPT] - want[:PROMPT]).abs().max() > 100 * TOLERANCE


def test_prompts_may_come_in_appends_of_whole_chunks(model, rows):
    """Rows that end at different appends; the last token alone."""
    ids, want = rows
    cache, at = model.new_cache(4, TOKENS), 0
    last = {}
    for tokens in (32, 64, 32, 13):
        counts = [min(tokens, max(0, n - at)) for n in (PROMPT, 64, 31, 128)]
        logits = model.append(ids[:, at : at + tokens], cache, n_new=counts, logits="last", prompt=True)
        at += tokens
        last |= {b: logits[b, 0] for b, n in enumerate(counts) if n}
    for b, n in enumerate((PROMPT, 64, 31, 128)):
        assert (last[b] - want[b][n - 1]).abs().max() < TOLERANCE
    assert cache.layers[0].memory.updates.tolist() == [[4, 4], [1, 1], [0, 0], [4, 4]]
    # only who ended with its piece may go on
    assert [held and held[0] for held in cache.remembered] == [None, None, None, 128]


def test_where_it_cannot_go_on_it_says_so(model, rows):
    ids = rows[0][:1]
    cache = model.new_cache(1, TOKENS)
    for tokens, back in ((40, 0), (64, 1), (64, 32)):  # inside a chunk; rewound; rewound to a whole chunk
        cache.reset()
        model.append(ids[:, :tokens], cache, logits="none")
        if back:
            cache.rewind(back)
        with pytest.raises(InputError, match="cannot go on"):
            model.append(ids[:, :20], cache)
        assert cache.lengths == [tokens - back]
    cache.reset()
    model.append(ids[:, :32], cache, logits="none")
    model.append(ids[:, 32:33], cache), cache.rewind(1)  # decoded and forgotten: the memory may be of another text
    with pytest.raises(InputError, match="cannot go on"):
        model.append(ids[:, 32:64], cache)
    assert model.append(ids[:, 32:64], cache, prompt=False).isfinite().all()
    with pytest.raises(InputError, match="multiple of its chunk, 32"):
        model.append(ids[:, :33], model.new_cache(1, 40), chunk=33)


def test_one_chunk_is_plain_attention(model, subject, rows):
    ids = rows[0]
    model.attention = Attention(prefill=Chunking(160, 8, 12))
    dense = masked.forward(subject[1], CONFIG, ids[0], masked.causal)
    assert (model(ids)[0] - dense).abs().max() < TOLERANCE
    assert model.layer_paths()[0]["path"] == "150 tokens of its chunk and 0 of the memory"


def test_generation_reads_the_prompt_in_chunks(model, rows):
    ids, want = rows
    text = generate(model, ids[0, :PROMPT].tolist(), 5).token_ids
    assert text[0] == int(want[0][PROMPT - 1].argmax())
    assert generate_speculative(model, [ids[0, :PROMPT].tolist()], 5, LookupDrafter())[0].token_ids == text
    assert model.chunk == 256
    model.append(ids[:1, :PROMPT], model.new_cache(1, TOKENS))
    assert model.layer_paths()[0]["path"] == "13 tokens of its chunk and 20 of the memory"


def test_pieces_longer_than_usual_are_whole_chunks(model):
    model.attention = Attention(prefill=Chunking(100, 8, 12))
    assert model.chunk == 300


def test_a_policy_decodes_after_it(model, subject, rows):
    """Summaries are those of the keys that chunked prefill wrote, pads of shorter rows not among them."""
    ids, _ = rows
    policy = Policy("bound", "bound", 16, 1, 2, 2)
    model.attention = Attention(policy, prefill=CUT)
    cache = model.new_cache(2, TOKENS)
    model.append(ids[:2, :PROMPT], cache, n_new=[PROMPT, 64], logits="none")
    got = [model.append(torch.stack([ids[0, PROMPT + t], ids[1, 64 + t]]).unsqueeze(1), cache) for t in range(8)]
    for b, n in enumerate((PROMPT, 64)):
        chunked, kept = masked.chunks(CUT.chunk, CUT.local, CUT.memory, n), masked.kept_blocks("bound", 16, 1, 2, 2, n)
        want = masked.forward(subject[1], CONFIG, ids[b, : n + 8], lambda *a: chunked(*a) & kept(*a))
        assert max((step[b, 0] - want[n + t]).abs().max() for t, step in enumerate(got)) < TOLERANCE


def test_layers_with_a_window_are_as_ever(pair):
    model, _, ids, _ = pair
    if not all(model.config.windows):
        pytest.skip("a model with full layers")
    try:
        want = model(ids)
        model.attention = Attention(prefill=CUT)
        assert torch.allclose(model(ids), want, atol=1e-4)
    finally:
        model.attention = Attention()


def test_no_token_is_told_of_what_follows_it(model, rows):
    """Through all layers, memories and chunks: another token changes its own logits and later ones alone."""
    ids = rows[0][:1]
    before = model(ids)
    for t in (149, 128, 96, 33, 7):
        other = ids.clone()
        other[0, t] = (other[0, t] + 1) % 384
        after = model(other)
        assert torch.equal(before[:, :t], after[:, :t]) and not torch.equal(before[:, t], after[:, t])
