"""Faults of single requests while the batch engine speculates harm no other."""

from dataclasses import replace

import pytest
import torch

from dsv4 import load_model
from dsv4.engine import BatchEngine, Request
from dsv4.engine.acceptance import read
from dsv4.errors import ContextOverrun, InputError, NotFinite, OutOfPages
from dsv4.speculation import Adaptive, Static
from dsv4.speculation.draft import MTPDrafter
from tests.engine.conftest import paged, random_ids
from tests.engine.test_batch import alone, nothing_is_held, run
from tests.engine.test_speculation import DRAFTERS, asked, engine_of, knowing, prompts_of  # noqa: F401  (a fixture)


@pytest.mark.parametrize("drafter", DRAFTERS.values(), ids=DRAFTERS)
def test_faults_of_some_requests_harm_no_other(model, asked, drafter):
    requests, expected = asked
    engine, results = engine_of(model, drafter(), max_context=700, pages={"csa entries": 2}, policy=Static(4))
    long = Request("long", tuple(random_ids(model, 600).tolist()), 10)
    for request in (
        Request("overrun", (1,) * 700, 2),
        Request("empty", ()),
        Request("unknown", (1, 512)),
        requests[0],
        long,
        Request("cancelled", requests[1].prompt_ids, 300),
        requests[2],
    ):
        engine.submit(request)
    while not any(w.request.id == "cancelled" and w.passes for w in engine.running):
        engine.step()
    engine.cancel("cancelled")
    engine.run()
    errors = [type(results[name].error) for name in ("overrun", "empty", "unknown", "long")]
    assert errors == [ContextOverrun, InputError, InputError, OutOfPages]
    assert results["cancelled"].stop_reason == "cancelled"
    for request in (requests[0], requests[2]):
        assert results[request.id].token_ids == expected[request.id], request.id
    assert nothing_is_held(engine)


@pytest.mark.parametrize("together", [False, True], ids=["alone", "together"])
@pytest.mark.parametrize(
    "ended, gone, tokens", [("r0", "r1", 12), ("r2", "r0", 8)], ids=["a later row", "an earlier row"]
)
def test_one_that_is_cancelled_while_results_are_given_out(model, together, ended, gone, tokens):
    """Whoever is told of a result cancels another in the midst of the same pass: one whose tokens are still to be given
    out, or were just."""
    *requests, last = prompts_of(model, 3, 40, 12)  # equally long prompts: their passes are in one step
    requests.append(replace(last, max_tokens=tokens))
    other = next(r.id for r in requests if r.id not in (ended, gone))
    expected = {r.id: alone(model, r) for r in requests}
    engine, results = engine_of(model, knowing(model, requests), policy=Static(4), together=together)

    def told(result):
        results[result.id] = result
        if result.id == ended:
            engine.cancel(gone)

    engine.on_result = told
    run(engine, requests)
    assert results[gone].stop_reason == "cancelled" and len(results[gone].token_ids) < 12
    assert results[ended].token_ids == expected[ended] and results[other].token_ids == expected[other]
    assert nothing_is_held(engine)


@pytest.mark.parametrize("place", [0, 2], ids=["after the last token", "amid a block"])
def test_logits_that_are_not_finite_end_a_request_alone(model, asked, place):
    requests, expected = asked
    engine, results = engine_of(model, knowing(model, requests), policy=Static(4))
    accept = engine.passes.acceptance.accept

    def spoiled(work, logits, drafts):
        if work.request.id == "r1" and drafts:
            values = logits.values.clone()
            values[place] = float("nan")
            logits = read(values.unsqueeze(0))[0][0]
        return accept(work, logits, drafts)

    engine.passes.acceptance.accept = spoiled
    run(engine, requests[:3])
    assert isinstance(results["r1"].error, NotFinite) and results["r1"].token_ids == expected["r1"][: 1 + place]
    assert results["r0"].token_ids == expected["r0"] and results["r2"].token_ids == expected["r2"]
    assert nothing_is_held(engine)


@pytest.mark.parametrize("together", [False, True], ids=["alone", "together"])
def test_a_drafting_block_that_is_not_finite_ends_its_request_alone(model, asked, monkeypatch, together):
    """Of a sampled request, whose draft could not be drawn."""
    requests, expected = asked
    engine, results = engine_of(model, MTPDrafter(), policy=Static(4), together=together)
    choose = engine.passes.acceptance.choose

    def spoiled(logits, rows):
        row = next((w.row for w in engine.running if w.request.id == "r1"), None)
        return choose(torch.where(torch.tensor([[b == row] for b in rows]), float("nan"), logits), rows)

    engine.passes.drafter._choose = spoiled
    run(engine, requests[:3])
    assert isinstance(results["r1"].error, NotFinite) and "MTP" in str(results["r1"].error)
    assert results["r0"].token_ids == expected["r0"] and results["r2"].token_ids == expected["r2"]
    assert nothing_is_held(engine)


def test_what_cannot_speculate_is_refused(model, brief_golden):
    without = load_model(brief_golden, numerics="fp32", mtp=False)
    with pytest.raises(InputError, match="has none; use --speculate lookup"):
        BatchEngine(without, paged(without, max_rewind=9), drafter=MTPDrafter())
    with pytest.raises(InputError, match="built with max_rewind 8 and passes have up to 9 tokens"):
        BatchEngine(model, paged(model, max_rewind=8), drafter=MTPDrafter())
    with pytest.raises(InputError, match="policy 'ASBS' was given and nothing drafts"):
        BatchEngine(model, paged(model), policy=Adaptive())
    engine, results = engine_of(model, None)
    engine.submit(Request("r", (1, 2), policy=Adaptive()))
    assert "policy 'ASBS' and nothing drafts" in str(results["r"].error)
