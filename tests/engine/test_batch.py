"""The batch engine: outputs do not depend on neighbours, grafts or evictions, and a fault of one request harms no
other."""

import functools
import io
import json

import pytest
import torch

from dsv4.cache.paging import pool_pages
from dsv4.engine import BatchEngine, Request, read_requests
from dsv4.engine.acceptance import read
from dsv4.errors import ContextOverrun, InputError, NotFinite, OutOfPages
from dsv4.sampling import Sampling, sample
from tests.conftest import ROOT
from tests.engine.conftest import paged, prefill, random_ids, same

SAMPLED = Sampling(0.8, 0.95, seed=3)


def engine_of(model, rows: int = 3, max_context: int = 512, pages: dict | None = None, **options):
    """An engine over poisoned, shuffled pages, and the results by id as they come."""
    results = {}
    every = pool_pages(model.page_layout().groups, rows, rows * max_context, prefixes=4)
    cache = paged(model, rows, max_context, max_rewind=0, pages=every | (pages or {}))
    return BatchEngine(model, cache, on_result=lambda r: results.setdefault(r.id, r), **options), results


def alone(model, request: Request, logits: list | None = None) -> list[int]:
    """The tokens of a request on a plain cache of its own, in the engine's pieces; `logits` gets those of each token.
    Found once for each model."""
    tokens, found = _alone(model, request.prompt_ids, request.max_tokens, request.sampling)
    if logits is not None:
        logits += found
    return list(tokens)


@functools.cache
def _alone(model, prompt: tuple[int, ...], tokens: int, sampling: Sampling) -> tuple[list[int], list[torch.Tensor]]:
    cache, ids, logits = model.new_cache(1, 1024, 0), list(prompt), []
    generator = torch.Generator().manual_seed(sampling.seed)
    for _ in range(tokens):
        logits.append(prefill(model, cache, ids, logits="last")[0, -1])
        ids.append(sample(logits[-1], sampling, generator))
    return ids[len(prompt) :], logits


def watched(engine) -> dict[str, list]:
    """The logits that each request's tokens will be chosen from, by id."""
    seen, accept = {}, engine.passes.acceptance.accept

    def watch(work, logits, drafts):
        tokens, error = accept(work, logits, drafts)
        seen.setdefault(work.request.id, []).extend(logits.values[: len(tokens)].clone())
        return tokens, error

    engine.passes.acceptance.accept = watch
    return seen


def equal_alone(model, request: Request, logits: list) -> bool:
    expected = []
    alone(model, request, expected)
    return same(torch.stack(expected), torch.stack(logits))


def requests_of(model, count: int, max_tokens: int = 12, shared: int = 210) -> list[Request]:
    """Prompts of different lengths over one prefix; every other one sampled."""
    prefix = random_ids(model, shared).tolist()
    return [
        Request(
            f"r{i}",
            tuple(prefix + random_ids(model, 3 + 40 * i, seed=i + 1).tolist()),
            max_tokens,
            float(i % 2),
            SAMPLED if i % 2 else Sampling(),
        )
        for i in range(count)
    ]


@pytest.fixture(scope="module")
def asked(model):
    """Five requests and the tokens that each gives alone."""
    requests = requests_of(model, 5)
    return requests, {r.id: alone(model, r) for r in requests}


def run(engine, requests) -> None:
    for request in requests:
        engine.submit(request)
    engine.run()


def nothing_is_held(engine) -> bool:
    engine.prefixes.clear()
    return all(pool.live == 0 for pool in engine.cache.pools.values())


def test_requests_that_join_and_leave_give_what_each_gives_alone(model, asked):
    requests, expected = asked
    engine, results = engine_of(model)
    run(engine, requests)
    assert {name: r.token_ids for name, r in results.items()} == expected
    # one runs the prefix, also for those beside it
    assert sorted(r.grafted for r in results.values()) == [0, 128, 128, 128, 128]
    assert engine.figures()["prefix_hit_tokens"] == 512 and engine.figures()["prefix_hit_rate"] == 512 / (
        2 * 128 + 3 * 256
    )
    assert all(
        r.stop_reason == "max_tokens" and len(r.between_tokens) == 11 and r.first_token > 0 for r in results.values()
    )
    assert nothing_is_held(engine)


def test_evicted_requests_resume_with_the_same_output(model, asked):
    requests, expected = asked
    engine, results = engine_of(model, pages={"csa entries": 4})
    run(engine, requests)
    assert engine.evictions > 0 and sum(r.evictions for r in results.values()) == engine.evictions
    assert {name: r.token_ids for name, r in results.items()} == expected
    assert nothing_is_held(engine)


def test_a_request_evicted_amid_its_answer_resumes_with_the_same_bits(model):
    engine, results = engine_of(model, pages={"csa entries": 3})
    seen, tokens, evict = watched(engine), [], engine._evict
    engine._evict = lambda work: (tokens.append(len(work.result.token_ids)), evict(work))
    asked = [Request(f"r{i}", tuple(random_ids(model, 250, seed=i).tolist()), 20, 0.0, SAMPLED) for i in range(3)]
    run(engine, asked)
    assert max(tokens) > 5 and all(equal_alone(model, r, seen[r.id]) for r in asked)


def test_a_prompt_that_another_request_generated_equals_cold(model):
    """Tokens that ran one by one leave other bits than the same tokens of a prompt, so they are no prefix to borrow."""
    engine, results = engine_of(model)
    first = Request("first", tuple(random_ids(model, 120).tolist()), 20)
    run(engine, [first])
    second, seen = Request("second", first.prompt_ids + tuple(results["first"].token_ids), 3), watched(engine)
    run(engine, [second])
    assert results["second"].grafted == 0 and equal_alone(model, second, seen["second"])


def test_a_batch_that_finds_no_page_for_its_last_row_has_not_run_its_first(model):
    """Rows that decode together lie apart, so they run as two groups; the second needs a page."""
    asked = [
        Request(name, tuple(random_ids(model, n, seed=n).tolist()), tokens, priority)
        for name, n, tokens, priority in (("first", 100, 12, 2.0), ("between", 900, 1, 1.0), ("last", 257, 5, 0.0))
    ]
    engine, results = engine_of(model, max_context=1000, together=True, pages={"csa entries": 5})
    run(engine, asked)
    assert results["last"].evictions > 0 and results["first"].evictions == results["between"].evictions == 0
    assert {r.id: results[r.id].token_ids for r in asked} == {r.id: alone(model, r) for r in asked}


def test_decoding_together_agrees_up_to_rounding(model, asked):
    requests, expected = asked
    engine, results = engine_of(model, together=True, pages={"csa entries": 4})
    run(engine, requests)
    greedy = [r.id for r in requests if r.sampling.temperature == 0]
    assert {name: results[name].token_ids for name in greedy} == {name: expected[name] for name in greedy}
    assert engine.evictions > 0 and nothing_is_held(engine)


IMPLIED = pytest.mark.sweep  # by the cases of two reasons that disagree


@pytest.mark.parametrize(
    "priorities,acceptance,used,first_evicted",
    [
        pytest.param((1.0, 0.0, 1.0), (0.8, 0.8, 0.8), None, "r1", marks=IMPLIED),
        ((0.0, 0.0, 0.0), (0.8, 0.8, 0.8), None, "r2"),
        pytest.param((0.0, 0.0, 0.0), (0.3, 0.8, 0.9), None, "r0", marks=IMPLIED),
        ((0.0, 1.0, 1.0), (0.9, 0.1, 0.1), None, "r0"),
        pytest.param((0.0, 0.0, 0.0), (0.8, 0.8, 0.8), (7, 5, 6), "r1", marks=IMPLIED),
        ((0.0, 0.0, 0.0), (0.3, 0.8, 0.8), (7, 5, 6), "r0"),
        pytest.param((0.0, 1.0, 1.0), (0.8, 0.8, 0.8), (7, 5, 6), "r0", marks=IMPLIED),
        ((0.0, 0.0, 0.0), (0.8, 0.8, 0.8), (5, 6, 6), "r0"),
    ],
    ids=[
        "the lowest priority",
        "the last of equals",
        "the lowest acceptance of equals",
        "priority before acceptance",
        "the least recently advanced of equals",
        "acceptance before the least recent",
        "priority before the least recent",
        "the least recent before the last",
    ],
)
def test_who_gives_way(model, priorities, acceptance, used, first_evicted):
    engine, results = engine_of(model, pages={"csa entries": 3})
    join = engine._join

    def joined():
        join()
        for work in engine.running:  # the first of them is the first to need a page, so that these are still so then
            at = int(work.request.id[1:])
            work.epsilon, work.used = acceptance[at], work.used if used is None else used[at]

    engine._join = joined
    order, evict = [], engine._evict
    engine._evict = lambda work: (order.append(work.request.id), evict(work))
    run(
        engine,
        [Request(f"r{i}", tuple(random_ids(model, 250, seed=i).tolist()), 14, p) for i, p in enumerate(priorities)],
    )
    assert order[0] == first_evicted and len(order) <= 3, "an evicted request joins only when another has left"
    assert len(results) == 3 and all(len(r.token_ids) == 14 for r in results.values())


def test_who_advanced_in_this_step_stays(model):
    """Rows that decode together come before a prompt that is still read: it needs a page when the other, though the
    last to come, has just advanced."""
    asked = [
        Request("reads", tuple(random_ids(model, 600).tolist()), 2),
        Request("decodes", tuple(random_ids(model, 20).tolist()), 12),
    ]
    engine, results = engine_of(model, rows=2, max_context=700, together=True, pages={"csa entries": 3})
    run(engine, asked)
    assert (results["reads"].evictions, results["decodes"].evictions) == (1, 0)


def test_faults_of_some_requests_harm_no_other(model, asked):
    requests, expected = asked
    engine, results = engine_of(model, max_context=700, pages={"csa entries": 2})
    long = Request("long", tuple(random_ids(model, 600).tolist()), 10)
    for request in (
        Request("overrun", (1,) * 700, 2),
        Request("empty", ()),
        Request("unknown", (1, 512)),
        requests[0],
        long,
        Request("cancelled", requests[1].prompt_ids, 10),
        requests[2],
    ):
        engine.submit(request)
    for _ in range(5):
        engine.step()
    engine.cancel("cancelled")
    engine.run()
    assert [type(results[name].error) for name in ("overrun", "empty", "unknown", "long")] == [
        ContextOverrun,
        InputError,
        InputError,
        OutOfPages,
    ]
    assert results["cancelled"].stop_reason == "cancelled"
    for request in (requests[0], requests[2]):
        assert results[request.id].token_ids == expected[request.id], request.id
    with pytest.raises(InputError, match="'long' neither waits nor runs"):
        engine.cancel("long")
    assert nothing_is_held(engine)


def test_a_request_whose_logits_are_not_finite_ends_alone(model, asked):
    requests, expected = asked
    engine, results = engine_of(model)
    accept = engine.passes.acceptance.accept
    spoiled = lambda work: float("nan") if work.request.id == "r1" and work.result.token_ids else 1.0
    engine.passes.acceptance.accept = lambda work, logits, drafts: accept(
        work, read((logits.values * spoiled(work)).unsqueeze(0))[0][0], drafts
    )
    run(engine, requests[:3])
    assert isinstance(results["r1"].error, NotFinite) and len(results["r1"].token_ids) == 1
    assert results["r0"].token_ids == expected["r0"] and results["r2"].token_ids == expected["r2"]


def test_stop_ids_end_a_request(model, asked):
    requests, expected = asked
    stop = expected["r0"][4]
    engine, results = engine_of(model, stop_ids=[stop])
    run(engine, requests[:1])
    assert (
        results["r0"].stop_reason == "eos"
        and results["r0"].token_ids == expected["r0"][: expected["r0"].index(stop) + 1]
    )


@pytest.mark.parametrize(
    "line,match",
    [
        ("{", "line 2 is not JSON"),
        ("[1]", "line 2 is a list; expected an object"),
        ('{"token_ids": [1], "max_tokens": 0}', "max_tokens 0; expected at least 1"),
        ('{"token_ids": [1], "maxtokens": 3}', "has 'maxtokens'; expected only id, prompt"),
        ("{}", "neither prompt and token_ids"),
        ('{"token_ids": [1.5]}', "no integers"),
        ('{"token_ids": [1], "priority": NaN}', "priority NaN; expected a number"),
        ('{"token_ids": [1], "temperature": -1}', "temperature -1"),
        ('{"token_ids": [1], "id": "line 1"}', "was used before"),
        ('{"prompt": 3}', "prompt 3; expected a string"),
        ('{"token_ids": [1], "seed": 1e999}', "seed Infinity; expected an integer"),
        ('{"token_ids": [true]}', "no integers"),
        ("[" * 100_000, "is not JSON"),
        ('{"token_ids": [1], "temperature": 1e-300}', "expected 0 .greedy., or 1e-06 to 1000000"),
        ('{"prompt": null}', "prompt null; expected a string"),
        ('{"token_ids": [1], "seed": 99999999999999999999}', "a number of 64 bits"),
    ],
)
def test_a_bad_line_is_a_result_and_the_others_are_requests(line, match):
    good = '{"token_ids": [1, 2]}'
    first, bad, last = read_requests([good, line, "", good], lambda text: [1], "mtp")
    assert bad.id == "line 2" and bad.document()["speculation"] == "mtp"  # under no other request's name
    assert isinstance(first, Request) and isinstance(last, Request) and (first.id, last.id) == ("line 1", "line 4")
    assert bad.stop_reason == "error" and isinstance(bad.error, InputError)
    with pytest.raises(InputError, match=match):
        raise bad.error
    assert "\n" not in str(bad.error)


@pytest.mark.parametrize("given", ["file", "-"])
def test_text_that_is_no_unicode_is_its_lines_own_error(given, tmp_path, monkeypatch, command_line):
    """Half of a surrogate pair, and a byte that is no UTF-8; the file begins with a byte order mark."""
    held = (
        b'\xef\xbb\xbf{"prompt": "a", "max_tokens": 2}\n{"prompt": "\\ud800"}\n{"prompt": '
        b'"\xff"}\n{"token_ids": [1], "max_tokens": 140000}'
    )
    file = tmp_path / "requests.jsonl"
    file.write_bytes(held)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(held)))
    asked = ("batch", "-" if given == "-" else file, "--checkpoint", ROOT / "demo", "--numerics", "fp32")
    code, out, _ = command_line(*asked)
    found = [json.loads(line) for line in out.splitlines()]
    errors = {d["id"]: d["error"] for d in found if "id" in d}
    assert code == 1 and errors["line 1"] is None and len(found) == 5
    assert (
        "no Unicode; expected UTF-8" in errors["line 2"]["message"]
        and "'\\udcff' at character 1" in errors["line 3"]["message"]
    )
    assert "max_position_embeddings) that the checkpoint takes" in errors["line 4"]["message"]


def test_the_command_writes_a_result_a_line_and_the_figures(long_golden, tmp_path, command_line):
    file = tmp_path / "requests.jsonl"
    lines = [
        {"id": "a", "token_ids": [1, 2, 3], "max_tokens": 4},
        {"id": "b", "token_ids": [1] * 5000},
        {"prompt": "text"},
    ]
    file.write_text("\n".join(map(json.dumps, lines)) + "\nnot JSON\n")
    asked = ("batch", file, "--checkpoint", long_golden, "--numerics", "fp32", "--rows", "2")
    code, out, _ = command_line(*asked)
    found = {d.get("id", "figures"): d for d in map(json.loads, out.splitlines())}
    assert code == 1 and len(found) == 5
    assert (
        len(found["a"]["token_ids"]) == 4
        and found["a"]["error"] is None
        and len(found["a"]["inter_token_seconds"]) == 3
    )
    assert [found[name]["error"]["type"] for name in ("b", "line 3", "line 4")] == [
        "ContextOverrun",
        "InputError",
        "InputError",
    ]
    assert found["figures"]["figures"]["pools"]["window"]["live"] == 0
