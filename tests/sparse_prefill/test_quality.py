"""Perplexity, tails, needles, counters and rows at once, on a small model with random weights: against whole runs
without caches kept."""

import math

import pytest
import torch

from dsv4.engine.generate import generate
from dsv4.errors import InputError
from dsv4.kernels.chunked_prefill import Chunking
from dsv4.model.gqa.choice import Attention
from dsv4.probes.measure.base.logits import Positions
from dsv4.probes.measure.base.needles import Limits
from dsv4.probes.measure.base.text import read_text
from dsv4.probes.measure.sparse_prefill import batch, document, mass, memory_use, needles, quality
from dsv4.probes.measure.sparse_prefill.reading import WrongCount, check_updates, read
from dsv4.probes.measure.sparse_prefill.settings import GRID, PUBLISHED, extremes, parse_cuts, settle

CUT, T, TAIL = Chunking(64, 8, 24), 300, 40


@pytest.fixture(scope="module")
def ids():
    return torch.randint(0, 384, (T,), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def pair(gqa, ids):
    return read(gqa, ids[None, :-1], None, 64), read(gqa, ids[None, :-1], CUT, 64)


def whole(model, ids: torch.Tensor, cut: Chunking | None) -> torch.Tensor:
    """Logits [T, vocab] of one append."""
    model.attention = Attention(prefill=cut)
    try:
        return model.append(ids[None], model.new_cache(1, len(ids)), prompt=True)[0]
    finally:
        model.attention = Attention()


def test_positions_are_those_of_whole_runs(gqa, ids, pair):
    found = quality.compared(gqa, *pair, ids, CUT.chunk)
    exact, sparse = (whole(gqa, ids[:-1], cut).double().log_softmax(-1) for cut in (None, CUT))
    places = range(CUT.chunk, T - 1)
    for name, logs in (("exact_nll", exact), ("nll", sparse)):
        wanted = torch.stack([-logs[t, ids[t + 1]] for t in places])
        assert torch.allclose(getattr(found, name), wanted, atol=1e-5)
    assert (found.nll - found.exact_nll).abs().max() > 1e-2
    first, lost = quality.compared(gqa, *pair, ids, 0), quality.by_chunk(found, CUT)
    assert (first.nll - first.exact_nll)[: CUT.chunk].abs().max() < 1e-4  # the first chunk is dense
    assert len(lost) == 4 and lost[1] == pytest.approx((found.nll - found.exact_nll)[64:128].mean().item())
    short = quality.until(found, 100)
    assert torch.equal(short.kl, found.kl[:100]) and len(short.choice) == 100


def test_a_shorter_context_is_the_beginning_of_a_longer_one(gqa, ids, pair):
    exact, sparse = (read(gqa, ids[None, :199], cut, 64) for cut in (None, CUT))
    short, long = (
        quality.compared(gqa, exact, sparse, ids[:200], CUT.chunk),
        quality.compared(gqa, *pair, ids, CUT.chunk),
    )
    assert torch.allclose(short.nll, quality.until(long, 200 - 1 - CUT.chunk).nll, atol=1e-5)


def test_tails_are_decoded_after_a_sparse_prompt_of_that_length(gqa, ids):
    """Longest first by rewinding, against a fresh prompt each, decoded token by token over the whole cache."""
    exact, other = read(gqa, ids[None, :-1], None, 64), read(gqa, ids[None, :-1], CUT, 64)
    ends = [(n - TAIL - 1, n - 1) for n in (T, 200)]
    found = quality.decoded(gqa, exact, other, ids, ends, 16)
    dense = whole(gqa, ids[:-1], None).double().log_softmax(-1)
    for (first, last), of in zip(ends, found):
        fresh = read(gqa, ids[None, :first], CUT, 64, room=TAIL)
        for i, t in enumerate(range(first, last)):
            logits = gqa.append(ids[None, t : t + 1], fresh.cache)[0, 0].double().log_softmax(-1)
            assert of.nll[i].item() == pytest.approx(-logits[ids[t + 1]].item(), abs=1e-4)
            assert of.exact_nll[i].item() == pytest.approx(-dense[t, ids[t + 1]].item(), abs=1e-4)
    assert gqa.attention.plain


def test_loss_and_its_interval():
    def made(lost):
        n = len(lost)
        return Positions(
            torch.zeros(n).long(), torch.zeros(n).long(), torch.ones(n), torch.zeros(n), torch.ones(n), 1 + lost
        )

    even = quality.figures([made(torch.full((600,), 0.04, dtype=torch.float64))])
    assert even["loss"] == pytest.approx(math.exp(0.04) - 1) == even["loss_low"] and even["verdict"] == "met"
    each = torch.tensor([0.0, 0.12]).double().repeat_interleave(256)
    uneven = quality.figures([made(torch.cat((each, each[:40])))])
    mean, error = 0.12 * 256 / 552, 1.96 * 0.12 / math.sqrt(2) / math.sqrt(2)
    assert uneven["loss"] == pytest.approx(math.expm1(mean)) and uneven["verdict"] == "MISSED"
    assert (uneven["loss_low"], uneven["loss_high"]) == pytest.approx(
        (math.expm1(mean - error), math.expm1(mean + error))
    )
    assert quality.figures([made(torch.ones(9).double())])["loss_low"] is None


def test_counters_are_asserted():
    right = torch.tensor([[4, 4], [1, 1], [2, 2]])
    check_updates(0, right, [300, 128, 150], CUT, 300)
    for b in range(3):
        wrong = right.clone()
        wrong[b, 1] += 1
        with pytest.raises(WrongCount, match=f"layer 3, row {b}: the memory was chosen"):
            check_updates(3, wrong, [300, 128, 150], CUT, 300)
    check_updates(0, torch.tensor([[4]]), [256], CUT, 256)  # whole chunks to the end: it may go on
    with pytest.raises(WrongCount):
        check_updates(0, torch.tensor([[3]]), [256], CUT, 256)


def test_dense_mass_is_of_the_dense_run_and_memories_of_the_sparse_one(gqa, ids):
    seen = {}
    with mass.watched(gqa, T - 1, 32, 4) as dense:
        read(gqa, ids[None, :-1], None, 64)
        assert sorted(dense) == [0, 1, 2] and all(int(m.queries.sum()) == (T - 1) // 4 for m in dense.values())
        # each query hands out 1
        assert all(torch.allclose(m.sums.sum((0, 2)), m.queries.sum().float()) for m in dense.values())
    other = read(gqa, ids[None, :-1], CUT, 64)
    for layer, m in dense.items():
        seen[layer] = mass.shares(m.of_chunks(64), other.positions[layer][:, 0], CUT)
        assert ((seen[layer]["kept"] > seen[layer]["own"]) & (seen[layer]["kept"] < 1)).all()
    before = {layer: m.sums.clone() for layer, m in dense.items()}
    read(gqa, ids[None, :-1], None, 64)
    assert all(torch.equal(before[layer], m.sums) for layer, m in dense.items())  # nobody is watched any more


@pytest.fixture(scope="module")
def prose(gqa_path):
    return read_text(None, gqa_path, 384, 4000, 0)


def test_needles_are_planted_once_each_in_a_context_of_that_length(prose):
    tokenizer = prose.tokenizer.backend
    found = needles.planted(tokenizer, prose.ids, 1200, 8, 512, 0, 0)
    text = tokenizer.decode(found.context, skip_special_tokens=False)
    assert len(found.context) == 1200 and len(found.questions) == 8 and found.context[0] == 0
    for asked in found.questions:
        stated = tokenizer.decode(asked.prompt + asked.answer, skip_special_tokens=False)
        assert text.count(stated) == 1 and 0 <= asked.depth < (1200 - 512) / 1200
        place = round(asked.depth * 1200)
        assert found.context[place : place + len(asked.prompt)] == asked.prompt
    depths = [asked.depth for asked in found.questions]
    assert (
        depths == sorted(depths)
        and depths[-1] > 0.4
        and found == needles.planted(tokenizer, prose.ids, 1200, 8, 512, 0, 0)
    )
    with pytest.raises(InputError, match="fewer --needles"):
        needles.planted(tokenizer, prose.ids, 600, 8, 512, 0, 0)


def greedy(model, prompt: list[int], count: int) -> list[int]:
    return generate(model, prompt, count).token_ids


def test_questions_are_decoded_after_the_sparse_prompt_and_forgotten(gqa, prose):
    """What greedy decoding says itself is right, anything else wrong, in whatever order it is asked."""
    context = prose.ids[:200].tolist()
    reading = read(gqa, torch.tensor([context]), CUT, 64, room=document.ROOM)
    asked = []
    for n, question in enumerate(([5, 6, 7], [9, 8], [11, 12, 13, 14])):
        fresh, said = read(gqa, torch.tensor([context]), CUT, 64, room=20), []
        token = [int(gqa.append(torch.tensor([[q]]), fresh.cache)[0, 0].argmax()) for q in question][-1]
        for _ in range(3):
            said.append(token)
            token = int(gqa.append(torch.tensor([[token]]), fresh.cache)[0, 0].argmax())
        asked += [
            needles.Asked(question, said),
            needles.Asked(question, [*said[:n], (said[n] + 1) % 384, *said[n + 1 :]]),
        ]
    assert needles.answers(gqa, reading, asked, 64) == [True, False] * 3 and reading.cache.lengths == [200]
    assert needles.answers(gqa, reading, asked[::-1], 64) == [False, True] * 3


def test_questions_in_the_prompt_are_what_generate_says(gqa, prose):
    context, asked = prose.ids[:150].tolist(), []
    gqa.attention = Attention(prefill=CUT)
    try:
        for n, question in enumerate(([5, 6, 7], [9, 8], [11, 12, 13, 14, 15])):
            said = greedy(gqa, context + question, n + 1)
            asked += [needles.Asked(question, said), needles.Asked(question, [*said[:-1], (said[-1] + 1) % 384])]
    finally:
        gqa.attention = Attention()
    for tokens in (10_000, 320, 1):
        assert needles.answers_in_prompt(gqa, context, asked, CUT, Limits(tokens, 64)) == [True, False] * 3
    dense = [greedy(gqa, context + a.prompt, len(a.answer)) == a.answer for a in asked]
    assert needles.answers_in_prompt(gqa, context, asked, None, Limits(320, 64)) == dense


def test_facts_are_asked_of_every_country():
    assert (
        len(needles.FACTS) == 23
        and len(set(needles.FACTS.values())) == 23
        and all(" " not in value for value in needles.FACTS.values())
    )
    row = needles.row({}, "facts", 100, [], [True] * 3)
    assert row["chance"] == 1 / 23 and row["depths"] == [] and row["at_least"] == pytest.approx(0.2924, abs=1e-4)


def test_rows_at_once_are_beside_each_row_alone(gqa, prose, monkeypatch):
    found = batch.compared(gqa, CUT, prose, 0)
    assert found["lengths"] == [255, 192, 149] and found["largest_difference"] < 1e-4 and found["same_memory"] == 1
    assert found["verdict"] == "met"
    real = batch.read

    def mixed(model, ids, cut, chunk, counts=None):
        return real(model, ids if counts is None else ids.roll(1, 0), cut, chunk, counts=counts)

    monkeypatch.setattr(batch, "read", mixed)
    found = batch.compared(gqa, CUT, prose, 0)
    assert found["verdict"] == "MISSED" and found["same_memory"] < 1


def test_bytes_held_are_those_of_the_formula(gqa, pair):
    [row] = memory_use.rows(gqa, [CUT], [T], {CUT: (T - 1, pair[1].memory_bytes)})
    assert (
        row["held_layers"] > 0
        and row["measured"] is None
        and row["call_share"] == row["call_extra"] / row["call_dense"]
    )
    with pytest.raises(ValueError, match="bytes are held|are held"):
        memory_use.rows(gqa, [CUT], [T], {CUT: (T - 1, pair[1].memory_bytes + 4)})


def test_settings(gqa):
    given = dict(
        contexts=[400, 300, 300],
        cuts="64,8,24 64,8,8 128,8,8 64,16,8 64,8,24",
        rows=1,
        tail=40,
        needles=2,
        asked_contexts=None,
        in_prompt=1,
        every=4,
        seed=0,
    )
    found = settle(gqa, **given)
    assert found.contexts == (300, 400) == found.asked_contexts and len(found.cuts) == 4
    assert found.asked == (Chunking(64, 8, 8), Chunking(64, 8, 24), Chunking(128, 8, 8)) == extremes(found.cuts)
    assert parse_cuts("1K,128,384") == (Chunking(1024, 128, 384),)
    rules = parse_cuts("64,8,24 64,8,24,score=memory 64,8,8 64,16,4,heads=query")
    assert [cut.rule for cut in rules] == ["", "score=memory", "", "heads=query"] and set(extremes(rules)) == {
        *rules[:3]
    }
    assert set(PUBLISHED) < set(GRID) and set(PUBLISHED) < set(extremes(GRID))
    for change, message in (
        (dict(cuts="64,8"), "CHUNK,LOCAL,HEAVY"),
        (dict(cuts="64,40,40"), "less than the chunk"),
        (dict(cuts="64,8,8,score=both"), "expected score= and fused or memory"),
        (dict(cuts=" "), "is empty"),
        (dict(contexts=[160]), "more than a chunk and the tail"),
        (dict(contexts=[4096]), "max_position_embeddings, 2048"),
        (dict(rows=0), "--rows 0"),
        (dict(in_prompt=3), "more needles than there are"),
    ):
        with pytest.raises(InputError, match=message):
            settle(gqa, **given | change)
