"""Tokens that ranks choose from logits that stay cut by vocabulary, against one process that has all of them."""

from pathlib import Path

import pytest
import torch

from dsv4.cache.paged import new_paged_cache
from dsv4.engine import BatchEngine, Request
from dsv4.engine.acceptance import read
from dsv4.engine.batch import REWIND
from dsv4.engine.generate import generate, generate_speculative
from dsv4.model.cut_values import CutValues, cut, finite, joined_along, whole
from dsv4.model.load import load_model
from dsv4.model.ranks import Ranks
from dsv4.parallel.threads import together
from dsv4.runtime.graph import DecodeGraph
from dsv4.sampling import Sampling, sample
from dsv4.speculation.choosing import choice_of
from dsv4.speculation.device_drafters import primed
from dsv4.speculation.draft import LookupDrafter, MTPDrafter
from dsv4.speculation.policy import Static
from dsv4.speculation.policy_device import on_device
from dsv4.speculation.rounds import Rounds
from tests.parallel.held import run

DEMO = Path(__file__).resolve().parents[2] / "demo"
INF, NAN = float("inf"), float("nan")


def part_of(logits, ranks):
    mine = ranks.slots(logits.shape[-1])
    return cut(logits[..., mine.start : mine.stop].contiguous(), ranks, logits.shape[-1])


def of_all(size, logits, what):
    """what(logits) of every rank, which must be equal; the first one's."""
    found = together(size, lambda ranks: what(part_of(logits, ranks)))
    assert all(torch.equal(other, found[0]) for other in found[1:])
    return found[0]


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("vocab", [4, 5, 97, 386, 1000])
def test_the_greatest_of_all_parts_is_that_of_the_whole(size, vocab):
    g = torch.Generator().manual_seed(vocab * size)
    drawn = torch.randn(200, vocab, generator=g)
    few = torch.randint(0, 3, (200, vocab), generator=g).float()  # many ties, across borders too
    signs = torch.zeros(20, vocab) * torch.randn(20, vocab, generator=g).sign()  # 0 and −0 are equal
    odd = drawn[:60].clone()
    odd[:20] = odd[:20].where(torch.rand(20, vocab, generator=g) > 0.3, NAN)
    odd[20:40] = odd[20:40].where(torch.rand(20, vocab, generator=g) > 0.3, INF)
    odd[40:50] = -INF
    odd[50:] = odd[50:].where(torch.rand(10, vocab, generator=g) > 0.8, -INF)
    for logits in (drawn, few, signs, odd, -drawn.abs() - 10):
        assert torch.equal(of_all(size, logits, lambda x: x.argmax(-1)), logits.argmax(-1))
        assert torch.equal(of_all(size, logits, finite), logits.isfinite().all(-1))
        assert torch.equal(of_all(size, logits, lambda x: whole(x).nan_to_num(7)), logits.nan_to_num(7))


def test_of_equal_logits_on_two_ranks_the_lower_token_wins():
    logits = torch.zeros(3, 10)
    logits[0, [4, 5]] = 1.0  # the last of rank 0 and the first of rank 1
    logits[1, [9, 7]] = 1.0
    logits[2, [3, 6]] = NAN
    assert of_all(2, logits, lambda x: x.argmax(-1)).tolist() == [4, 7, 3]
    assert logits.argmax(-1).tolist() == [4, 7, 3]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_row_drawn_by_seed_is_that_of_one_process(size):
    logits = torch.randn(386, generator=torch.Generator().manual_seed(1)) * 3
    for seed in range(40):
        sampling = Sampling(0.8, (1.0, 0.9)[seed % 2], seed)
        draw = lambda x, s=sampling: torch.tensor(sample(x, s, torch.Generator().manual_seed(s.seed)))
        assert torch.equal(of_all(size, logits, draw), draw(logits))
        choice = lambda x, s=sampling: choice_of(s, 1, "cpu").own(x[None, None], torch.tensor([5]))
        assert torch.equal(of_all(size, logits, choice), choice(logits))


def test_they_are_shaped_as_a_tensor_of_logits():
    logits = torch.randn(6, 10)

    def shaped(x):
        rows = x.unflatten(0, (3, 2))
        assert rows.shape == (3, 2, 10) and len(rows) == 3 and rows.device.type == "cpu" and not rows.is_cuda
        pair = joined_along((rows[:, :1], rows[:, 1:]), 1)
        assert pair[1, 0].shape == (10,) and [part.shape for part in pair] == [(2, 10)] * 3
        assert pair[:1, :1].expand(4, 1, 10).shape == (4, 1, 10)
        return whole(pair[[2, 0]])

    assert torch.equal(of_all(4, logits, shaped), logits.view(3, 2, 10)[[2, 0]])
    assert isinstance(together(2, lambda ranks: part_of(logits, ranks))[0], CutValues)
    assert together(1, lambda ranks: part_of(logits, ranks))[0].equal(logits)
    found, beside = together(2, lambda ranks: read(part_of(logits.view(3, 2, 10), ranks)))[1]
    assert [row.best for row in found] == logits.view(3, 2, 10).argmax(-1).tolist() and beside == [[]] * 3


# ---- decoding ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def alone():
    return load_model(DEMO, numerics="fp32", backend="reference")


@pytest.fixture(scope="module", params=[2, 4])
def models(request):
    return together(request.param, lambda ranks: load_model(DEMO, numerics="fp32", backend="reference", ranks=ranks))


PROMPT = torch.randint(3, 4000, (40,), generator=torch.Generator().manual_seed(0)).tolist()


def steps(model):
    """Greedy tokens of captured steps, which run uncaptured on a CPU."""
    cache = model.new_cache(1, 64)
    logits = model.append(torch.tensor([PROMPT]), cache, logits="last", whole=False)
    graph, said = DecodeGraph(model, cache, whole=False), []
    for left in reversed(range(12)):
        tokens, logits = graph.greedy(logits, left > 0)
        said += tokens
    return said


def rounds(model, sampling=Sampling(), drafter=MTPDrafter()):
    cache, most = model.new_cache(2, 80, max_rewind=8), 2
    choice = choice_of(sampling, 2, "cpu")
    tokens, on = primed(model, cache, [PROMPT, PROMPT[:17]], choice=choice, drafter=drafter)
    policy = on_device(Static(most), 2, "cpu")
    return Rounds(model, cache, most, tokens, on, [14, 9], (), policy, choice=choice).run()


SAMPLINGS = (Sampling(0.8, 1.0, 3), Sampling(0.8, 0.9, 4))


def served(model, sampling, drafter):
    """Three requests in two rows on pages, drafted for."""
    results = {}
    cache = new_paged_cache(model, 2, 128, max_rewind=REWIND)
    engine = BatchEngine(model, cache, drafter=drafter, on_result=lambda r: results.setdefault(r.id, r))
    for n, tokens in ((40, 5), (17, 3), (25, 4)):
        engine.submit(Request(str(n), tuple(PROMPT[:n]), tokens, sampling=sampling))
    engine.run()
    return {name: (r.token_ids, r.error) for name, r in results.items()}


def drafted(model, sampling, drafter):
    return [out.token_ids for out in generate_speculative(model, [PROMPT, PROMPT[:17]], 12, drafter, sampling)]


def of_both(way):
    """way(model, sampling) of each of SAMPLINGS."""
    return lambda model: [way(model, sampling) for sampling in SAMPLINGS]


WAYS = {
    "appended": lambda model: generate(model, PROMPT, 12).token_ids,
    "captured steps": steps,
    "sampled": of_both(lambda model, s: generate(model, PROMPT, 12, s).token_ids),
    "drafts of the block": lambda model: generate_speculative(model, [PROMPT], 12, MTPDrafter())[0].token_ids,
    "drafts of the text": lambda model: generate_speculative(model, [PROMPT], 12, LookupDrafter())[0].token_ids,
    "sampled drafts of the block": of_both(lambda model, s: drafted(model, s, MTPDrafter())),
    "sampled drafts of the text": of_both(lambda model, s: drafted(model, s, LookupDrafter(2, 1))),
    "rounds": rounds,
    "sampled rounds": of_both(rounds),
    "sampled rounds, drafts of the text": of_both(lambda model, s: rounds(model, s, LookupDrafter(2, 1))),
    "a batch": lambda model: served(model, Sampling(), MTPDrafter()),
    "a sampled batch, drafts of the block": of_both(lambda model, s: served(model, s, MTPDrafter())),
    "a sampled batch, drafts of the text": of_both(lambda model, s: served(model, s, LookupDrafter(2, 1))),
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_decode_says_what_one_process_says_and_joins_no_logits(alone, models, monkeypatch, way):
    wanted = WAYS[way](alone)
    monkeypatch.setattr(Ranks, "joined", lambda *given: pytest.fail("logits were joined"))
    assert all(said == wanted for said in run(models, WAYS[way]))


def test_a_greedy_step_sends_eight_bytes_a_row_for_its_token(models):
    def sent(model):
        cache = model.new_cache(2, 64)
        model.append(torch.tensor([PROMPT, PROMPT]), cache, logits="none")
        graph, group = DecodeGraph(model, cache, whole=False), model.ranks.group
        logits = graph.step(torch.tensor([[5], [6]]))
        before = group.issued
        logits.argmax(-1)
        return group.sent[before:]

    assert run(models, sent) == [[2 * 8]] * len(models)


def test_who_asks_for_logits_gets_all(alone, models):
    def asked(model):
        cache = model.new_cache(1, 64)
        said = [model.append(torch.tensor([PROMPT]), cache)]
        said.append(DecodeGraph(model, cache).step(torch.tensor([[5]])))
        return torch.cat(said, 1)

    for found in run(models, asked):
        assert torch.allclose(found, asked(alone), atol=1e-4)
