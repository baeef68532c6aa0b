"""Speculation in the batch engine: tokens are those of plain decoding, drafts give way before requests do, and
evictions leave no trace."""

from functools import partial

import pytest
import torch

from dsv4 import load_model
from dsv4.cache.paging import pool_pages
from dsv4.engine import BatchEngine, Request
from dsv4.sampling import Sampling
from dsv4.speculation import Adaptive, CostAware, Static, under_pressure
from dsv4.speculation.costs import BatchCost, CostTable
from dsv4.speculation.draft import LookupDrafter, MTPDrafter
from dsv4.speculation.passes import SingleSteps
from tests.engine.conftest import paged, random_ids, same
from tests.engine.test_batch import SAMPLED, alone, nothing_is_held, requests_of, run, watched
from tests.speculation.scripted import Scripted

DRAFTERS = {"mtp": MTPDrafter, "lookup": partial(LookupDrafter, 2, 1)}  # random weights repeat single tokens at most


class Known(Scripted):
    """Knows each prompt's continuation. right: of a prompt, how many drafts of a pass are right."""

    def __init__(self, continuations: dict[tuple[int, ...], list[int]], right, vocab: int, rows: int = 8):
        super().__init__([[]] * rows, [0] * rows, vocab)
        self.continuations, self.of_prompt = continuations, right if callable(right) else lambda prompt: right

    def join(self, b, prompt):
        super().join(b, prompt)
        found = next(p for p in self.continuations if tuple(prompt[: len(p)]) == p)
        self.known[b] = self.continuations[found][len(prompt) - len(found) :]
        self.right[b] = self.of_prompt(found)


def engine_of(model, drafter, rows: int = 3, max_context: int = 512, pages: dict | None = None, **options):
    """An engine that drafts, over poisoned, shuffled pages, and the results by id as they come."""
    results = {}
    every = pool_pages(model.page_layout().groups, rows, rows * max_context, 9, prefixes=4)
    cache = paged(model, rows, max_context, max_rewind=9, pages=every | (pages or {}))
    return BatchEngine(
        model, cache, on_result=lambda r: results.setdefault(r.id, r), drafter=drafter, **options
    ), results


def knowing(model, requests, right=99, rows: int = 8) -> Known:
    return Known({r.prompt_ids: alone(model, r) for r in requests}, right, model.config.vocab_size, rows)


def prompts_of(model, count: int, length: int, tokens: int, **options) -> list[Request]:
    return [
        Request(f"r{i}", tuple(random_ids(model, length, seed=i).tolist()), tokens, **options) for i in range(count)
    ]


def tokens_of(results) -> dict[str, list[int]]:
    return {name: r.token_ids for name, r in results.items()}


def watched_drafts(engine) -> dict[str, list]:
    """The logits that the MTP block's drafts were chosen from, by id."""
    seen, choose = {}, engine.passes.acceptance.choose

    def watch(logits, rows):
        for b, row in zip(rows, logits):
            seen.setdefault(next(w.request.id for w in engine.running if w.row == b), []).append(row.clone())
        return choose(logits, rows)

    engine.passes.drafter._choose = watch
    return seen


def adds_up(result) -> bool:
    """Each pass gave its accepted drafts and a token of the model's own; prefill gave the first."""
    s = result.speculation
    return (
        len(result.token_ids) == 1 + len(s.block_size_history) + s.accepted
        and s.proposed == sum(s.block_size_history)
        and s.accepted == sum(s.accepted_history)
        and len(result.between_tokens) == len(result.token_ids) - 1
    )


@pytest.fixture(scope="module")
def asked(model):
    """Five requests over one prefix, every other one sampled, and the tokens that plain decoding gives each alone."""
    requests = requests_of(model, 5)
    return requests, {r.id: alone(model, r) for r in requests}


@pytest.mark.parametrize("together", [False, True], ids=["alone", "together"])
@pytest.mark.parametrize("drafter", DRAFTERS.values(), ids=DRAFTERS)
def test_tokens_are_those_of_plain_decoding(model, asked, drafter, together):
    """Greedy and sampled rows, joining and leaving, on a borrowed prefix, with drafts that are right and wrong."""
    requests, expected = asked
    engine, results = engine_of(model, drafter(), policy=Static(4), together=together)
    run(engine, requests)
    assert tokens_of(results) == expected
    assert all(adds_up(r) for r in results.values()) and sum(r.speculation.proposed for r in results.values()) > 0
    assert sorted(r.grafted for r in results.values()) == [0, 128, 128, 128, 128]
    assert nothing_is_held(engine)


@pytest.mark.parametrize("together", [False, True], ids=["alone", "together"])
def test_right_drafts_come_out_many_a_pass(model, asked, together):
    requests, expected = asked
    engine, results = engine_of(model, knowing(model, requests), policy=Static(5), together=together)
    run(engine, requests)
    assert tokens_of(results) == expected
    assert all(r.speculation.block_size_history == [5, 4] and r.speculation.accepted == 9 for r in results.values())
    assert all(r.between_tokens.count(0.0) == 9 for r in results.values()), "tokens of one pass come at once"


def test_sampled_drafts_are_drawn_as_their_tokens_are(model):
    """A block whose logits are the model's own is right each time, at any temperature."""
    request = Request("r", tuple(random_ids(model, 20).tolist()), 13, sampling=Sampling(1.0, 0.9, seed=5))
    seen, expected = [], alone(model, request, logits := [])

    class Oracle(MTPDrafter):
        def draft(self, sizes):
            done = len(engine.running[0].result.token_ids)
            for i in range(sizes[0]):
                seen.append(int(self._choose(logits[done + i].unsqueeze(0), [0])[0]))
            found = super().draft(sizes)
            return found._replace(tokens=torch.tensor([seen[-sizes[0] :]]) if sizes[0] else found.tokens)

    engine, results = engine_of(model, Oracle(), rows=1, policy=Static(3))
    run(engine, [request])
    assert results["r"].token_ids == expected and results["r"].speculation.block_size_history == [3, 3, 3]
    assert results["r"].speculation.acceptance == 1.0


def test_rows_with_policies_of_their_own(model):
    """Static, adaptive with right and with wrong drafts, cost-aware, and none, beside each other: each row its own
    sizes."""
    costs = CostTable("flat", 1.0, {1: BatchCost(0.01, (1.0,) * 9, (True,) * 9)}, {"how": "made up"})
    policies = {"r0": Static(3), "r1": Adaptive(), "r2": Adaptive(), "r3": CostAware(costs, 1), "r4": Static(0)}
    requests = [Request(r.id, r.prompt_ids, 30, policy=policies[r.id]) for r in prompts_of(model, 5, 40, 30)]
    wrong = requests[2].prompt_ids
    drafter = knowing(model, requests, lambda prompt: 0 if prompt == wrong else 99)
    engine, results = engine_of(model, drafter, rows=5)
    run(engine, requests)
    assert tokens_of(results) == {r.id: alone(model, r) for r in requests}
    sizes = {name: r.speculation.block_size_history for name, r in results.items()}
    assert sizes["r0"] == [3] * 7 + [0] and sizes["r1"] == [8, 8, 8, 1] and sizes["r4"] == [0] * 29
    assert sizes["r2"][:6] == [8, 4, 4, 1, 1, 1] and sizes["r3"][0] == 8
    assert all(adds_up(r) for r in results.values())


@pytest.mark.few(together=[True])
@pytest.mark.parametrize("together", [False, True], ids=["alone", "together"])
def test_under_pressure_no_row_drafts_more_than_two(model, together):
    # beyond 256 tokens each needs a second page: 3 of 7 are live at first, then 6
    requests = prompts_of(model, 3, 225, 60)
    engine, results = engine_of(
        model, knowing(model, requests), pages={"csa entries": 7}, policy=(policy := Static(8)), together=together
    )
    engine.prefixes.remember = lambda *_: None  # kept prefixes are live pages too; here the requests alone press
    choose, asked = policy.choose, []

    def watch(states, pressure):
        found = choose(states, pressure)
        asked.append((pressure, any(under_pressure(p.live, p.pages) for p in engine.cache.pools.values()), max(found)))
        return found

    policy.choose = watch
    for request in requests:
        engine.submit(request)
    while engine.running or engine.waiting:
        engine.step()
        assert not any(pool.drafts for pool in engine.cache.pools.values()), "between steps no page is a draft's"
    assert all(told == true for told, true, _ in asked)
    assert {size for told, _, size in asked if told} == {2} and {size for told, _, size in asked if not told} == {8}
    sizes = [size for r in results.values() for size in r.speculation.block_size_history]
    assert 2 in sizes and 8 in sizes, "it was under pressure for a part of the run"
    assert 0 < engine.figures()["share_of_steps_under_pressure"] < 1
    assert tokens_of(results) == {r.id: alone(model, r) for r in requests}


def test_kept_prefixes_are_no_pressure(model):
    """Prompts that come one after another leave prefixes behind; those go before drafts do."""
    requests = prompts_of(model, 6, 140, 20)
    engine, results = engine_of(model, knowing(model, requests), rows=1, pages={"csa entries": 4}, policy=Static(8))
    run(engine, requests)
    assert all(r.speculation.block_size_history == [8, 8, 0] for r in results.values())
    figures = engine.figures()
    assert figures["share_of_steps_under_pressure"] == 0 and figures["prefixes_kept"] > 0 < figures["prefixes_dropped"]


@pytest.mark.few(together=[False])
@pytest.mark.parametrize("together", [False, True], ids=["alone", "together"])
def test_drafts_shrink_before_anyone_is_evicted(model, together):
    """Pages that suffice for what is final: a page of entries each, which is full with the 259th token. A stop id ends
    both there."""
    requests = [Request(f"r{seed}", tuple(random_ids(model, 224, seed=seed).tolist()), 60) for seed in (1, 2)]
    expected = {r.id: alone(model, r) for r in requests}
    stops = [tokens[35] for tokens in expected.values()]
    assert not any(stop in tokens[:35] for stop in stops for tokens in expected.values())
    engine, results = engine_of(
        model,
        knowing(model, requests, 0),
        rows=2,
        pages={"csa entries": 2},
        policy=Static(8, None),
        stop_ids=stops,
        together=together,
    )
    engine.prefixes.remember = lambda *_: None
    run(engine, requests)
    assert engine.evictions == 0 and tokens_of(results) == {name: tokens[:36] for name, tokens in expected.items()}
    for result in results.values():
        assert result.stop_reason == "eos" and result.speculation.block_size_history[:34] == [8] * 27 + [
            7,
            6,
            5,
            4,
            3,
            2,
            1,
        ]
    # one had left the other its page
    assert [r.speculation.block_size_history[34] for r in results.values()] == [0, 0 if together else 8]


@pytest.mark.few(drafter=["mtp", "known"])
@pytest.mark.parametrize("drafter", [*DRAFTERS, "known"])
def test_evicted_requests_resume_with_the_same_output(model, drafter):
    """Evicted amid their answers, and with drafts both before and after."""
    asked = prompts_of(model, 2, 250, 16, sampling=SAMPLED)
    expected = {r.id: alone(model, r) for r in asked}
    make = DRAFTERS.get(drafter, partial(knowing, model, asked, 2))
    engine, results = engine_of(model, make(), pages={"csa entries": 3}, policy=Adaptive())
    had, evict = [], engine._evict
    engine._evict = lambda work: (had.append(len(work.result.token_ids)), evict(work))
    run(engine, asked)
    assert max(had) > 3 and engine.evictions == sum(r.evictions for r in results.values())
    assert tokens_of(results) == expected and all(adds_up(r) for r in results.values())
    assert nothing_is_held(engine)


# Over 5 s: quantised prompts of two pages are read three times and more, as the second request waits for pages.
@pytest.mark.few(numerics=["qat"], drafter=["mtp"])
@pytest.mark.parametrize("numerics, drafter", [("fp32", "mtp"), ("qat", "mtp"), ("qat", "known")])
def test_a_resumed_row_has_the_bits_of_one_that_was_never_evicted(brief_official, model, numerics, drafter):
    """The logits behind each token and each draft, where a pass of other tokens would round otherwise, and where it
    would quantise otherwise."""
    if numerics == "qat":
        model = load_model(brief_official, numerics="qat", backend="cpu", cache="fp8", index_cache="fp4")
    asked = prompts_of(model, 2, 256, 8, sampling=SAMPLED)
    make = MTPDrafter if drafter == "mtp" else partial(knowing, model, asked, 2)
    found = []
    for pages in ({}, {"csa entries": 3}):
        engine, results = engine_of(model, make(), pages=pages, policy=Static(3, None))
        # drafts that shrink would be other passes; here they make others give way instead, so that both runs draft
        # alike
        engine.passes._reserve = lambda work, size, engine=engine: (
            engine.cache.make_room(slice(work.row, work.row + 1), 1 + size) or size
        )
        seen, drafts = watched(engine), watched_drafts(engine)
        run(engine, asked)
        found.append(
            {r.id: (results[r.id].speculation.block_size_history, seen[r.id] + drafts.get(r.id, [])) for r in asked}
        )
    assert engine.evictions > 0
    for (sizes, logits), (expected_sizes, expected) in zip(found[1].values(), found[0].values()):
        assert sizes == expected_sizes and same(torch.stack(logits), torch.stack(expected))


# Over 5 s: quantised prompts that fill a page, read by the engine, after an eviction, and by plain decoding.
@pytest.mark.few(numeric_model=["fp32", "fp8, index keys fp4"])
def test_single_steps_give_plain_tokens_in_any_numerics(numeric_model):
    """Under pressure, with evictions: what is left is the rounding of passes of several tokens."""
    asked = prompts_of(numeric_model, 2, 256, 8)
    engine, results = engine_of(
        numeric_model, MTPDrafter(), pages={"csa entries": 3}, policy=Adaptive(), verify=SingleSteps
    )
    run(engine, asked)
    assert engine.evictions > 0 and tokens_of(results) == {r.id: alone(numeric_model, r) for r in asked}


def test_who_drafts_badly_gives_way_first(model):
    """Both of one priority; the first to come would stay, were its drafts not wrong."""
    requests = prompts_of(model, 2, 240, 40)
    bad, good = requests
    drafter = knowing(model, requests, lambda prompt: 0 if prompt == bad.prompt_ids else 1)
    engine, results = engine_of(model, drafter, rows=2, pages={"csa entries": 3}, policy=Static(1))
    order, evict = [], engine._evict
    engine._evict = lambda work: (
        order.append((work.request.id, {w.request.id: float(w.epsilon) for w in engine.running})),
        evict(work),
    )
    run(engine, requests)
    assert [name for name, _ in order] == ["r0"] and order[0][1]["r0"] < 0.3 < 0.9 < order[0][1]["r1"]
    assert tokens_of(results) == {r.id: alone(model, r) for r in requests}


def test_the_mean_is_that_of_the_specification(model):
    requests = prompts_of(model, 1, 20, 30)
    engine, _ = engine_of(model, knowing(model, requests, 1), rows=1, policy=Static(4))
    engine.submit(requests[0])
    for _ in range(4):
        engine.step()
    mean = Adaptive().initial()
    for _ in range(3):
        mean = Adaptive().observe(mean, 1, 4)
    assert engine.running[0].epsilon == mean


@pytest.mark.few(drafter=[MTPDrafter])
@pytest.mark.parametrize("drafter", DRAFTERS.values(), ids=DRAFTERS)
def test_a_request_s_output_and_drafts_do_not_depend_on_neighbours_or_borrowed_prefixes(model, asked, drafter):
    """A request runs cold and alone, then on a prefix of another beside three: passes and bits are equal."""
    requests, _ = asked
    found = []
    for chosen in (requests[3:4], requests):
        engine, results = engine_of(model, drafter(), policy=Adaptive())
        seen, drafts = watched(engine), watched_drafts(engine)
        run(engine, chosen)
        result, bits = results["r3"], seen["r3"] + drafts.get("r3", [])
        found.append((result.token_ids, result.speculation.block_size_history, torch.stack(bits), result.grafted))
    assert found[0][:2] == found[1][:2] and same(found[0][2], found[1][2])
    assert (found[0][3], found[1][3]) == (0, 128)


def test_seeds_decide_and_neighbours_do_not(model):
    """Under pressure too, where neighbours decide how many are drafted."""
    prompt = tuple(random_ids(model, 240).tolist())
    requests = [Request(f"r{seed}", prompt, 24, sampling=Sampling(0.8, 0.95, seed)) for seed in range(3)]
    expected = {r.id: alone(model, r) for r in requests}
    assert len({tuple(tokens) for tokens in expected.values()}) == 3
    sizes = []
    for chosen in ([requests[1]], requests):
        engine, results = engine_of(model, MTPDrafter(), pages={"csa entries": 4}, policy=Static(6))
        run(engine, chosen)
        assert all(results[r.id].token_ids == expected[r.id] for r in chosen)
        sizes.append(results["r1"].speculation.block_size_history)
    assert sizes[0] != sizes[1]


@pytest.mark.parametrize("place", range(5))
def test_a_stop_id_inside_a_block(model, asked, place):
    """Drafts behind it were right and do not come out."""
    requests, expected = asked
    stop = expected["r0"][place]
    engine, results = engine_of(model, knowing(model, requests), policy=Static(3), stop_ids=[stop])
    run(engine, requests[:1])
    first = expected["r0"].index(stop)
    assert results["r0"].token_ids == expected["r0"][: first + 1] and results["r0"].stop_reason == "eos"
    assert results["r0"].speculation.accepted_history == {0: [], 1: [1], 2: [2], 3: [3], 4: [3]}[first]
