"""GQA models in the batch engine: outputs are those of each request alone, to the bit, whatever is shared, short or
borrowed."""

import json
import shutil
from functools import partial

import pytest
import torch

from dsv4.cache.paging import pool_pages
from dsv4.engine import BatchEngine, Request
from dsv4.engine.generate import generate, generate_speculative
from dsv4.errors import ContextOverrun, InputError, OutOfPages
from dsv4.model.gqa.choice import Attention
from dsv4.speculation import Adaptive, Static
from dsv4.speculation.captured import Captured
from dsv4.speculation.draft import LookupDrafter, MTPDrafter
from tests.checkpoints import edit_config
from tests.engine.conftest import paged, random_ids, same
from tests.engine.test_batch import SAMPLED, nothing_is_held, requests_of, run, watched
from tests.engine.test_speculation import adds_up, tokens_of
from tests.gqa.test_pages import READINGS
from tests.gqa.tiles import cold

lookup = partial(LookupDrafter, 2, 1)  # random weights repeat single tokens at most


def engine_of(model, drafter=None, rows: int = 3, max_context: int = 512, pages: dict | None = None, **options):
    """An engine over poisoned, shuffled pages, and the results by id as they come."""
    results, rewind = {}, 9 if drafter else 0
    every = pool_pages(model.page_layout().groups, rows, rows * max_context, rewind, prefixes=4)
    cache = paged(model, rows, max_context, max_rewind=rewind, pages=every | (pages or {}))
    return BatchEngine(
        model, cache, on_result=lambda r: results.setdefault(r.id, r), drafter=drafter, **options
    ), results


def few(model, pages: int) -> dict[str, int]:
    """So many pages of whichever group is asked most of."""
    return {next(iter(model.page_layout().groups)): pages}


def crowd(model, **how) -> tuple[list[Request], dict[str, int]]:
    """Three requests, and pages that do not last: for their prompts, and not for what each has amid its answer. Rows of
    a model that has windows alone give tiles back, and hold two at the end of one."""
    narrow = "tokens" not in model.page_layout().groups
    requests = [
        Request(f"r{i}", tuple(random_ids(model, 118 if narrow else 230, seed=i).tolist()), 40, **how) for i in range(3)
    ]
    return requests, few(model, 3 if narrow else 6)


def are_cold(model, requests, results, seen) -> None:
    """Each request's tokens, and the bits of the logits that they were chosen from, are those of the request by
    itself."""
    for request in requests:
        ids, logits = cold(model, request)
        assert results[request.id].token_ids == ids, request.id
        assert same(logits, torch.stack(seen[request.id])), request.id


@pytest.mark.parametrize("reading", READINGS.values(), ids=READINGS)
def test_requests_that_join_and_leave_give_what_each_gives_alone(model, reading):
    model.attention = reading
    requests = requests_of(model, 5)
    engine, results = engine_of(model)
    seen = watched(engine)
    run(engine, requests)
    are_cold(model, requests, results, seen)
    assert sorted(r.grafted for r in results.values()) == [0, 128, 128, 128, 128]
    assert nothing_is_held(engine)


@pytest.mark.few(reading=[READINGS["all"], READINGS["bound"]])
@pytest.mark.parametrize("reading", READINGS.values(), ids=READINGS)
def test_tokens_are_those_of_plain_generation(models, reading):
    """Which reads its prompts in pieces of 256, from a cache as large as its context: bits differ, tokens do not."""
    model = models("some windows")
    model.attention = reading
    requests = requests_of(model, 4)
    expected = {r.id: generate(model, list(r.prompt_ids), r.max_tokens, r.sampling).token_ids for r in requests}
    for options in ({}, {"together": True}):
        engine, results = engine_of(model, **options)
        run(engine, requests)
        assert tokens_of(results) == expected
    model.attention = Attention()


def test_a_policy_reads_less_than_all(models):
    """Else the tests of policies would say nothing: tokens are others than those of dense decoding."""
    model, found = models("dense"), []
    for reading in READINGS.values():
        model.attention = reading
        found.append(tuple(token for r in requests_of(model, 4) for token in cold(model, r)[0]))
    model.attention = Attention()
    assert len(set(found)) >= 4


@pytest.mark.few(model=["dense", "windows"])
@pytest.mark.parametrize("drafter", [None, lookup], ids=["plain", "lookup"])
@pytest.mark.parametrize("reading", ["all", "bound"])
def test_a_request_evicted_amid_its_answer_resumes_with_the_same_bits(model, drafter, reading):
    model.attention = READINGS[reading]
    (requests, short), found = crowd(model, sampling=SAMPLED), []
    for pages in ({}, short):
        engine, results = engine_of(
            model, drafter and drafter(), pages=pages, **({"policy": Static(3, None)} if drafter else {})
        )
        # drafts that shrink would be other passes; here they make others give way instead, so that both runs draft
        # alike
        if drafter:
            cache = engine.cache
            engine.passes._reserve = lambda work, size, cache=cache: (
                cache.make_room(slice(work.row, work.row + 1), 1 + size) or size
            )
        seen, had, evict = watched(engine), [], engine._evict
        engine._evict = lambda work, had=had, evict=evict: (had.append(len(work.result.token_ids)), evict(work))
        run(engine, requests)
        found.append({r.id: (results[r.id].token_ids, torch.stack(seen[r.id])) for r in requests})
        assert not any(r.error for r in results.values()) and nothing_is_held(engine)
    assert max(had) > 5 and all(a[0] == b[0] and same(a[1], b[1]) for a, b in zip(found[0].values(), found[1].values()))
    if drafter is None:
        assert all(same(bits, cold(model, r)[1]) for r, (_, bits) in zip(requests, found[1].values()))


@pytest.mark.few(model=["some windows", "windows"])
@pytest.mark.parametrize("reading", ["all", "bound"])
def test_rows_together_are_evicted_and_resume_with_the_same_tokens(model, reading):
    """Where decoding reads less than a prompt, what came out is run again as it ran first, not as a prompt."""
    model.attention = READINGS[reading]
    if model.numerics.name != "fp32":
        pytest.skip("rows that share a step are rounded otherwise, by as much as bf16 holds")
    requests, pages = crowd(model)
    engine, results = engine_of(model, together=True, pages=pages)
    had, evict = [], engine._evict
    engine._evict = lambda work: (had.append(len(work.result.token_ids)), evict(work))
    run(engine, requests)
    assert (
        max(had) > 5 and tokens_of(results) == {r.id: cold(model, r)[0] for r in requests} and nothing_is_held(engine)
    )


@pytest.mark.parametrize("length", [1, 16, 127, 128, 129, 133, 256, 257])
@pytest.mark.parametrize("reading", ["all", "bound"])
def test_a_request_on_a_borrowed_prefix_equals_a_cold_one(models, reading, length):
    """At lengths around tiles; a last piece of fewer than 17 tokens is a prompt's too."""
    model = models("some windows")
    model.attention = READINGS[reading]
    prompt = random_ids(model, 300).tolist()
    first, second = Request("first", tuple(prompt[:290]), 3), Request("second", tuple(prompt[:length]), 6)
    engine, results = engine_of(model)
    run(engine, [first])
    seen = watched(engine)
    run(engine, [second])
    assert results["second"].grafted == (length - 1) // 128 * 128
    are_cold(model, [second], results, seen)
    model.attention = Attention()


@pytest.mark.few(model=["dense", "windows"])
@pytest.mark.parametrize("together", [False, True], ids=["alone", "together"])
@pytest.mark.parametrize("policy", [Static(4), Adaptive()], ids=["static", "adaptive"])
@pytest.mark.parametrize("reading", ["all", "bound"])
def test_lookup_drafts_change_no_token(model, reading, policy, together):
    """Greedy and sampled, on a borrowed prefix, with drafts that are right and wrong."""
    if together and model.numerics.name != "fp32":
        pytest.skip("rows that share a step are rounded otherwise, by as much as bf16 holds")
    model.attention = READINGS[reading]
    requests = requests_of(model, 5, 24)
    engine, results = engine_of(model, lookup(), policy=policy, together=together)
    run(engine, requests)
    assert tokens_of(results) == {r.id: cold(model, r)[0] for r in requests}
    assert all(adds_up(r) for r in results.values()) and sum(r.speculation.proposed for r in results.values()) > 0
    assert nothing_is_held(engine)


@pytest.mark.parametrize("together", [False, True], ids=["alone", "together"])
@pytest.mark.parametrize("reading", ["all", "bound"])
def test_lookup_in_captured_passes_changes_no_token(model, reading, together):
    if together and model.numerics.name != "fp32":
        pytest.skip("rows that share a step are rounded otherwise, by as much as bf16 holds")
    model.attention = READINGS[reading]
    requests = requests_of(model, 4)
    engine, results = engine_of(model, lookup(), policy=Static(4), verify=Captured, together=together)
    run(engine, requests)
    assert tokens_of(results) == {r.id: cold(model, r)[0] for r in requests}
    graphs = engine.passes.verify.graphs
    assert len(graphs) > 1 and nothing_is_held(engine) and any(rows > 1 for rows, _ in graphs) is together
    model.attention = Attention()


def test_right_drafts_come_out_many_a_pass(models):
    """A text that repeats itself: what generate accepts, the engine accepts."""
    model = models("dense")
    prompt = [5, 6, 7, 8] * 20
    plain = generate_speculative(model, [prompt], 24, LookupDrafter(), policy=Static(4))[0]
    engine, results = engine_of(model, LookupDrafter(), policy=Static(4))
    run(engine, [Request("r", tuple(prompt), 24)])
    assert results["r"].token_ids == plain.token_ids == generate(model, prompt, 24).token_ids
    assert results["r"].speculation.block_size_history == plain.speculation.block_size_history


def test_mtp_drafts_are_refused(models):
    with pytest.raises(InputError, match="this model has none; use --speculate lookup"):
        engine_of(models("dense"), MTPDrafter())


def test_faults_of_some_requests_harm_no_other(model):
    requests = requests_of(model, 3)
    full = "tokens" in model.page_layout().groups
    engine, results = engine_of(model, max_context=500, pages=few(model, 3 if full else 2))
    long = Request("long", tuple(random_ids(model, 450).tolist()), 10)
    for request in (
        Request("overrun", (1,) * 500, 2),
        Request("empty", ()),
        Request("unknown", (1, 384)),
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
    assert [type(results[name].error) for name in ("overrun", "empty", "unknown")] == [
        ContextOverrun,
        InputError,
        InputError,
    ]
    assert isinstance(results["long"].error, OutOfPages) is full and results["cancelled"].stop_reason == "cancelled"
    for request in (requests[0], requests[2]):
        assert results[request.id].token_ids == cold(model, request)[0], request.id
    assert nothing_is_held(engine)


# ---- the command -----------------------------------------------------------------------------


@pytest.fixture
def asked(tmp_path):
    """A file of requests: texts over one prefix longer than a tile, one by ids, one too long, one that is none."""
    text = "Requests join and leave between steps over one pool of pages. " * 6
    lines = [
        {"id": f"t{i}", "prompt": text + word, "max_tokens": 8}
        for i, word in enumerate(("Those that", "share", "a prefix"))
    ]
    lines += [
        {"id": "ids", "token_ids": [5, 6, 7] * 4, "max_tokens": 8, "temperature": 0.8},
        {"id": "long", "token_ids": [1] * 5000},
    ]
    file = tmp_path / "requests.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)) + "\nnot JSON\n")
    return file


@pytest.fixture(scope="module")
def templated(checkpoint, tmp_path_factory):
    """The checkpoint, whose config.json names another first token than its tokenizer's template has: the template's
    counts."""
    return edit_config(shutil.copytree(checkpoint, tmp_path_factory.mktemp("gqa") / "c"), bos_token_id=7)


def documents(out: str) -> dict[str, dict]:
    return {d.get("id", "figures"): d for d in map(json.loads, out.splitlines())}


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--speculate", "lookup", "--draft-tokens", "2"),
        ("--attention", "page-bound", "--attention-tokens", "64"),
        ("--attention", "block-bound", "--attention-tokens", "512", "--terminate"),
    ],
    ids=lambda options: " ".join(options) or "plain",
)
def test_the_command_says_what_generate_says(templated, asked, command_line, options):
    code, out, err = command_line("batch", asked, "--checkpoint", templated, "--rows", 2, "--quiet", *options)
    found = documents(out)
    assert code == 1 and len(found) == 7 and err == ""
    assert [found[name]["error"]["type"] for name in ("long", "line 6")] == ["ContextOverrun", "InputError"]
    assert (
        found["figures"]["figures"]["prefix_hit_tokens"] >= 2 * 128
        and found["figures"]["figures"]["pools"]["tokens"]["shared"] == 0
    )
    for line in asked.read_text().splitlines()[:3]:
        request = json.loads(line)
        code, out, err = command_line(
            "generate", templated, "--prompt", request["prompt"], "--max-new-tokens", 8, "--json", *options
        )
        said = json.loads(out)
        assert code == 0 and found[request["id"]]["token_ids"] == said["token_ids"], err
        assert found[request["id"]]["prompt_tokens"] == len(said["prompt_token_ids"])


def test_the_report_says_what_was_read(checkpoint, asked, command_line, tmp_path):
    reads = ("--attention", "page-bound", "--attention-tokens", "64", "--terminate", "--terminate-rule", "patience=2")
    code, _, err = command_line("batch", asked, "--checkpoint", checkpoint, *reads, "--report", tmp_path / "r", "-q")
    report = json.loads((tmp_path / "r" / "batch_requests.json").read_text())
    assert (
        code == 1
        and err == ""
        and report["about"]["attention"]
        == "page-16 bound of 64 tokens, until stable (tau=1e-05, phi=0.001, patience=2)"
    )
    assert "attention page-16 bound of 64 tokens" in (tmp_path / "r" / "batch_requests.md").read_text()


@pytest.mark.parametrize(
    "options, said",
    [
        (("--speculate", "mtp"), "use --speculate lookup"),
        (("--kv-memory", "host"), "which is on the device"),
        (("--attention", "block-bound", "--attention-tokens", "100"), "keeps whole blocks of 128 tokens"),
        (("--cache", "fp8"), "use auto"),
        (("--prefill-chunks", "64,32,32"), "together are at least 1 and less than the chunk"),
        (("--terminate", "--terminate-rule", "rho=1"), "expected each of tau"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_refusals_are_one_line(checkpoint, asked, command_line, options, said):
    code, out, err = command_line("batch", asked, "--checkpoint", checkpoint, *options)
    assert code == 2 and out == "" and said in err and err.count("\n") == 1
