"""Requests in groups, each of which is one launch: what they say, who runs with whom, and what is counted of them."""

import json

import pytest
import torch

from dsv4 import load_model
from dsv4.cache.paged import new_paged_cache
from dsv4.commands import batch as commands
from dsv4.engine import BatchEngine, Request
from dsv4.engine.device_batch import DeviceBatch
from dsv4.engine.generate import generate, generate_on_device
from dsv4.engine.steppers import rounds_in
from dsv4.errors import ContextOverrun, InputError, OutOfPages
from dsv4.sampling import Sampling
from dsv4.speculation import Adaptive, Static, one_launch
from dsv4.speculation.draft import LookupDrafter, MTPDrafter
from dsv4.speculation.one_launch import OneLaunch
from dsv4.speculation.rounds import Rounds
from tests.commands import exit_code
from tests.speculation.scripted import prompt_of

CONTEXT = 300
WAYS = pytest.mark.parametrize(
    "drafter, policy",
    [(None, None), (MTPDrafter(), Adaptive()), (LookupDrafter(1, 1), Static(3))],
    ids=["plain", "mtp", "lookup"],
)


@pytest.fixture(scope="module")
def model(brief_golden):
    return load_model(brief_golden, numerics="fp32", mtp=True)


def engine_of(model, rows, drafter=None, policy=None, make=Rounds, pages=None, **more):
    """An engine over poisoned pages, and the results by id in the order in which they came."""
    most, rewind = rounds_in(model.config, CONTEXT, drafter, policy or Static(0))
    context, results = CONTEXT + most + 1, {}
    every = {name: p.pages for name, p in new_paged_cache(model, rows, context, max_rewind=rewind).pools.items()}
    cache = new_paged_cache(model, rows, context, max_rewind=rewind, pages=every | (pages or {}), poison=True)
    how = {"drafter": drafter, "policy": policy, "make": make, **more}
    return DeviceBatch(model, cache, most, on_result=lambda r: results.setdefault(r.id, r), **how), results


def requests(model, *sizes, **more):
    """Of (tokens of the prompt, new tokens)."""
    return [Request(f"r{i}", tuple(prompt_of(model, n))[::-1], k, **more) for i, (n, k) in enumerate(sizes)]


def ran(engine, asked):
    for request in asked:
        engine.submit(request)
    engine.run()


@WAYS
def test_each_request_says_what_it_says_alone(model, drafter, policy):
    """Five requests in rows of two, so that rows begin anew on old pages and one has no request; one has a single
    token."""
    engine, results = engine_of(model, 2, drafter, policy)
    asked = requests(model, (5, 40), (140, 9), (30, 150), (2, 1), (17, 60))
    ran(engine, asked)
    for request in asked:
        found = results[request.id]
        assert found.token_ids == generate(model, list(request.prompt_ids), request.max_tokens).token_ids
        assert (found.stop_reason, found.error, found.prompt_tokens) == ("max_tokens", None, len(request.prompt_ids))
        spec = found.speculation
        assert sum(spec.accepted_history) + len(spec.accepted_history) == request.max_tokens - 1
        assert len(found.pressed_history) == len(spec.block_size_history)
        assert len(found.between_tokens) == request.max_tokens - 1 and found.first_token > 0
        assert spec.method == (drafter.name if drafter else "off") and (drafter is not None or not spec.proposed)
    assert all(pool.live == 0 for pool in engine.cache.pools.values())


@WAYS
def test_a_group_is_one_launch(model, on_a_thread, drafter, policy):
    found = []
    for make in (Rounds, OneLaunch):
        engine, results = engine_of(model, 2, drafter, policy, make)
        ran(engine, requests(model, (5, 40), (140, 9), (30, 20)))
        documents = {r.id: (r.token_ids, r.speculation.block_size_history, r.pressed_history) for r in results.values()}
        found.append((documents, engine.steps))
    assert found[0] == found[1] and engine.launches == len(on_a_thread.threads) == 2


def test_a_stop_id_ends_a_row_and_not_its_neighbour(model):
    asked = requests(model, (5, 40), (9, 40))
    whole = {r.id: generate(model, list(r.prompt_ids), r.max_tokens).token_ids for r in asked}
    stop = next(t for t in whole["r0"][3:] if t not in whole["r1"])
    engine, results = engine_of(model, 2, stop_ids=(stop,))
    ran(engine, asked)
    cut = whole["r0"].index(stop) + 1
    assert results["r0"].token_ids == whole["r0"][:cut] and results["r0"].stop_reason == "eos"
    assert results["r1"].token_ids == whole["r1"] and results["r1"].stop_reason == "max_tokens"


def groups_of(engine):
    """The requests of each group that runs from now on."""
    found, group = [], engine._group
    engine._group = lambda: (chosen := group()) and found.append([w.request.id for w in chosen]) or chosen
    return found


def test_the_highest_priority_leads_a_group_and_the_like_join_it(model):
    warm = Sampling(0.7, 0.9)
    sizes = ((5, 3), (6, 3), (7, 3), (8, 3))
    asked = [
        Request(r.id, r.prompt_ids, 3, priority=priority, sampling=sampling)
        for r, priority, sampling in zip(requests(model, *sizes), (0, 1, 0, 2), (Sampling(), warm, warm, Sampling()))
    ]
    engine, _ = engine_of(model, 3)
    groups = groups_of(engine)
    ran(engine, asked)
    assert groups == [["r3", "r0"], ["r1", "r2"]]


def test_as_many_run_at_once_as_have_pages(model):
    """Of four pages the first request needs two, a row of up to 256 tokens one, with a request or without. The third
    has to wait, and a later one that fits does not."""
    engine, results = engine_of(model, 3, pages={"csa entries": 4})
    groups = groups_of(engine)
    ran(engine, requests(model, (250, 20), (20, 30), (100, 200), (10, 3)))
    assert groups == [["r0", "r1", "r3"], ["r2"]] and all(r.error is None for r in results.values())
    assert engine.cache.pools["csa entries"].peak == 4


def test_what_no_pool_holds_is_its_own_error(model):
    engine, results = engine_of(model, 2, pages={"csa entries": 2})
    asked = requests(model, (250, 20), (9, 5), (400, 3), (280, 100))
    ran(engine, asked)
    assert isinstance(results["r0"].error, OutOfPages)
    assert "2 rows of 272 tokens need 3 pages of csa entries, and it has 2; make the pool larger" in str(
        results["r0"].error
    )
    assert [isinstance(results[n].error, ContextOverrun) for n in ("r2", "r3")] == [True, True]
    assert results["r1"].token_ids == generate(model, list(asked[1].prompt_ids), 5).token_ids


def test_sampled_text_depends_on_the_request_alone(model):
    """Not on the rows beside it. The first request of a seed draws as `generate` does on the device."""
    asked = requests(model, (5, 25), (9, 25), (5, 25), sampling=Sampling(0.9, 0.95, seed=5))
    found = []
    for rows in (1, 3):
        engine, results = engine_of(model, rows, MTPDrafter(), Static(2))
        ran(engine, asked)
        found.append({r.id: r.token_ids for r in results.values()})
    alone = generate_on_device(model, [list(asked[0].prompt_ids)], 25, MTPDrafter(), asked[0].sampling, Static(2))
    assert found[0] == found[1] and found[0]["r0"] == alone[0].token_ids
    assert found[0]["r0"] != found[0]["r2"], "requests of one seed draw different numbers"


def test_another_temperature_is_drawn_by_other_rounds(model):
    """And a group that returns to the first temperature has that one's rounds, with its own seeds."""
    engine, results = engine_of(model, 1)
    [plain] = requests(model, (6, 12))
    ways = (Sampling(), Sampling(1.5, seed=1), Sampling(), Sampling(1.5, seed=2))
    ran(engine, [Request(f"w{i}", plain.prompt_ids, 12, sampling=s) for i, s in enumerate(ways)])
    said = [results[f"w{i}"].token_ids for i in range(4)]
    want = [generate_on_device(model, [list(plain.prompt_ids)], 12, None, s)[0].token_ids for s in ways]
    assert said == want and said[0] == said[2] != said[1] != said[3] and len(engine._made) == 2


def test_sizes_shrink_under_pressure_and_it_is_counted(model):
    """More than 85 % of the entries' pages are live once both rows hold more than 255 tokens."""
    engine, results = engine_of(model, 2, MTPDrafter(), Static(8), pages={"csa entries": 4})
    ran(engine, requests(model, (20, 275), (9, 275)))
    for result in results.values():
        spec = result.speculation
        full = list(zip(result.pressed_history, spec.block_size_history))[:-8]  # at the end there is room for fewer
        assert {size for pressed, size in full if pressed} == {2}
        assert {size for pressed, size in full if not pressed} == {8}
    figures = engine.figures()
    course = figures["live_share"]["csa entries"]
    assert course[0] == 0.5 and max(course) == 1.0 and 0 < figures["share_of_steps_under_pressure"] < 1
    assert figures["steps"] == engine.steps == len(course) and figures["evictions"] == 0


def test_figures_have_the_keys_of_the_other_engine(model):
    engine, _ = engine_of(model, 1)
    ran(engine, requests(model, (6, 4)))
    other = BatchEngine(model, new_paged_cache(model, 1, CONTEXT, max_rewind=9)).figures()
    found = engine.figures()
    assert found.keys() - other.keys() == {"launches"} and not other.keys() - found.keys()
    assert found["pools"].keys() == other["pools"].keys()
    assert 0 < found["pools"]["csa entries"]["mean_fragmentation"] < 1


def test_what_it_cannot_run_is_said(model):
    engine, results = engine_of(model, 1, MTPDrafter(), Static(2))
    engine.submit(Request("a", (5, 6), 4, policy=Static(1)))
    assert "requests that are one launch share the engine's" in str(results["a"].error)
    with pytest.raises(InputError, match="nothing drafts; give a drafter too"):
        engine_of(model, 1, None, Static(2))


def test_an_exception_gives_all_pages_back(model):
    engine, _ = engine_of(model, 2)

    def fails(*of, **more):
        raise KeyboardInterrupt

    engine.make = fails
    for request in requests(model, (5, 40)):
        engine.submit(request)
    with pytest.raises(KeyboardInterrupt):
        engine.run()
    assert all(pool.live == 0 for pool in engine.cache.pools.values())
    assert all(not t.physical.any() for t in engine.cache.tables.values())


def test_requests_of_a_gqa_model():
    model = load_model("demo_gqa", numerics="fp32")
    drafter, policy = LookupDrafter(1, 1), Static(3)
    engine, results = engine_of(model, 2, drafter, policy)
    asked = [Request(f"r{i}", tuple(range(7, 7 + n)), k) for i, (n, k) in enumerate(((5, 30), (140, 12), (40, 9)))]
    ran(engine, asked)
    for r in asked:
        assert results[r.id].token_ids == generate(model, list(r.prompt_ids), r.max_tokens).token_ids
    assert sum(r.speculation.proposed for r in results.values()) > 0
    assert torch.is_tensor(engine.held.tables["tokens"].physical)


def test_a_later_request_may_be_longer_than_all_before(model):
    engine, results = engine_of(model, 1)
    for request in requests(model, (5, 4), (6, 30)):
        ran(engine, [request])
        assert results[request.id].token_ids == generate(model, list(request.prompt_ids), request.max_tokens).token_ids


def test_the_command_runs_groups(brief_golden, on_a_thread, monkeypatch, tmp_path, capsys):
    """All of it but the GPU: results as lines, figures with the launches, and a report that names the loop."""
    for where in (one_launch, commands):
        monkeypatch.setattr(where, "check_loop", lambda model: None)
    monkeypatch.setattr(one_launch, "check_device", lambda device: None)
    lines = [{"id": f"r{i}", "token_ids": [5 + i, 9, 4], "max_tokens": n} for i, n in enumerate((3, 20, 7))]
    (tmp_path / "asked.jsonl").write_text("\n".join(map(json.dumps, lines)))
    how = ["--numerics", "fp32", "--rows", "2", "--speculate", "mtp", "--draft-tokens", "4", "--quiet"]
    files = ["batch", tmp_path / "asked.jsonl", "--checkpoint", brief_golden, "--report", tmp_path]
    texts = []
    for loop in ("host", "device"):
        assert exit_code(*files, *how, "--loop", loop) == 0
        *found, last = map(json.loads, capsys.readouterr().out.splitlines())
        texts.append({r["id"]: r["token_ids"] for r in found})
    assert texts[0] == texts[1] and last["figures"]["launches"] == 2
    report = json.loads((tmp_path / "batch_asked.json").read_text())
    assert report["about"]["loop"] == "on the device, one launch a group of requests"
    assert report["about"]["rows run"] == "together" and report["totals"]["tokens"] == 30
    assert "one launch a group" in (tmp_path / "batch_asked.md").read_text()


def test_on_a_host_the_command_says_why_not(brief_golden, tmp_path, capsys):
    (tmp_path / "asked.jsonl").write_text('{"token_ids": [5], "max_tokens": 2}')
    assert exit_code("batch", tmp_path / "asked.jsonl", "--checkpoint", brief_golden, "--loop", "device") == 2
    said = capsys.readouterr().err
    assert said == "error: the model is on cpu, and a graph that repeats needs a CUDA device; leave out --loop device\n"
