"""Prompts that the batch engine reads in chunks: alone or together they give what `generate` gives."""

import json

import pytest
import torch

from dsv4.engine import Request
from dsv4.engine.generate import generate, generate_speculative
from dsv4.errors import InputError
from dsv4.kernels.chunked_prefill import Chunking
from dsv4.model.gqa.choice import Attention
from dsv4.speculation import Static
from dsv4.speculation.draft import LookupDrafter
from tests.engine.conftest import paged, random_ids
from tests.engine.test_batch import SAMPLED, nothing_is_held
from tests.engine.test_batch import run as run_engine
from tests.engine.test_speculation import tokens_of
from tests.gqa.test_batch import engine_of, few

CUT = Chunking(32, 6, 10)
PUBLISHED = Chunking(32, 6, 10, "memory", "query")


@pytest.fixture(params=["dense", "some windows"])
def model(request, models):
    found = models(request.param)
    found.attention = Attention(prefill=CUT)
    yield found
    found.attention = Attention()


def asked(model, lengths: tuple[int, ...] = (300, 90, 299, 288), **how) -> list[Request]:
    """Prompts over one prefix: of two pieces of 256, of one that is no whole number of chunks, of whole chunks."""
    prefix = random_ids(model, 64).tolist()
    return [
        Request(f"r{i}", tuple(prefix + random_ids(model, n - 64, seed=i + 1).tolist()), 10, **how)
        for i, n in enumerate(lengths)
    ]


def alone(model, requests) -> dict[str, list[int]]:
    return {r.id: generate(model, list(r.prompt_ids), r.max_tokens, r.sampling).token_ids for r in requests}


@pytest.mark.parametrize("cut", [CUT, PUBLISHED], ids=["default", "published rule"])
@pytest.mark.parametrize("rows", [2, 4])
def test_texts_are_those_of_one_prompt_at_a_time(model, cut, rows):
    """With 4 rows all begin together, with 2 some begin while others decode. Chunks change the texts, else this would
    say nothing."""
    requests = asked(model)
    model.attention = Attention()
    dense = alone(model, requests)
    model.attention = Attention(prefill=cut)
    expected = alone(model, requests)
    assert expected != dense and len(set(map(tuple, expected.values()))) > 1
    for together in (False, True):
        engine, results = engine_of(model, rows=rows, together=together)
        run_engine(engine, requests)
        assert tokens_of(results) == expected
        figures = engine.figures()
        assert figures["prompts_at_once"] == (rows if together else 1) and figures["prefix_hit_tokens"] == 0
        assert all(r.grafted == 0 and r.first_token > 0 for r in results.values()) and nothing_is_held(engine)


def test_sampled_texts_and_drafts_too(model):
    requests = asked(model, sampling=SAMPLED)
    expected = alone(model, requests)
    engine, results = engine_of(model, LookupDrafter(2, 1), rows=4, together=True, policy=Static(2))
    run_engine(engine, requests)
    assert tokens_of(results) == expected


@pytest.mark.parametrize("together", [False, True])
def test_a_request_that_lost_its_pages_reads_its_chunks_again(models, together):
    model = models("dense")
    model.attention = Attention(prefill=CUT)
    requests = [Request(r.id, r.prompt_ids, 40) for r in asked(model, (230, 230, 230))]
    expected = alone(model, requests)
    engine, results = engine_of(model, together=together, pages=few(model, 6))
    run_engine(engine, requests)
    model.attention = Attention()
    assert engine.evictions and tokens_of(results) == expected


def test_short_prompts_take_no_pages_for_the_pads_of_long_ones(models):
    model = models("dense")
    model.attention = Attention(prefill=CUT)
    cache = paged(model, 2, 512, max_rewind=0)
    model.append(random_ids(model, 2, 256), cache, [256, 100], prompt=True)
    assert cache.pools["tokens"].live == 2 + 1
    model.attention = Attention()


def test_a_memory_ends_with_its_row(models):
    """Chunks follow their own whole chunks: not what was rewound, and not those of another request."""
    model = models("dense")
    model.attention = Attention(prefill=CUT)
    cache, ids = paged(model, 2, 512, max_rewind=64), random_ids(model, 2, 96)
    model.append(ids[:, :64], cache, prompt=True)
    assert cache.remembered == [(64, CUT)] * 2 and all(len(layer.memory.updates) == 2 for layer in cache.layers)
    cache.rewind([32, 0])
    cache.leave(1)
    assert cache.remembered == [None, None]
    with pytest.raises(InputError, match="row 0 holds 32 tokens"):
        model.append(ids[:, 32:64], cache, prompt=True)
    model.attention = Attention()


def test_pieces_on_pages_give_the_bits_of_a_contiguous_cache(model):
    """Row by row: what is read of free pages would be NaN."""
    ids = random_ids(model, 1, 290)
    plain, cache = model.new_cache(1, 512), paged(model, 2, 512, max_rewind=0)
    for first, last in ((0, 64), (64, 256), (256, 290)):
        wanted = model.append(ids[:, first:last], plain, prompt=True)
        piece = torch.cat((ids[:, first:last], ids[:, first:last].roll(1, 1)))
        found = model.append(piece, cache, [last - first, 0], prompt=True)
        assert torch.equal(found[0], wanted[0])


def test_several_prompts_of_one_generation(models):
    """`generate_speculative` reads its prompts together."""
    model = models("dense")
    model.attention = Attention(prefill=CUT)
    requests = asked(model)
    found = generate_speculative(model, [list(r.prompt_ids) for r in requests], 10, LookupDrafter(2, 1))
    assert {r.id: g.token_ids for r, g in zip(requests, found)} == alone(model, requests)
    model.attention = Attention()


def test_the_command_says_when_first_tokens_came(command_line, checkpoint, tmp_path):
    file = tmp_path / "requests.jsonl"
    ids = torch.randint(2, 250, (3, 70), generator=torch.Generator().manual_seed(0)).tolist()
    file.write_text("".join(json.dumps({"token_ids": row, "max_tokens": 4}) + "\n" for row in ids))
    chunks = "--prefill-chunks", "32,6,10,score=memory"
    code, out, err = command_line(
        "batch", file, "--checkpoint", checkpoint, "--together", "--report", tmp_path, "--numerics", "fp32", *chunks
    )
    *results, last = map(json.loads, out.splitlines())
    first = last["figures"]["time_to_first_token_seconds"]
    assert code == 0 and last["figures"]["prompts_at_once"] == 3, err
    assert first["p50"] > 0 and f"first token after {first['p50']:.2f} s (p50)" in err
    assert "prompts in chunks of 32 beside 6 + 10, score=memory" in (tmp_path / "batch_requests.md").read_text()
    for row, result in zip(ids, sorted(results, key=lambda r: int(r["id"]) if r["id"].isdigit() else r["id"])):
        given = "--token-ids", ",".join(map(str, row)), "--max-new-tokens", 4, "--numerics", "fp32", "--json"
        code, out, err = command_line("generate", checkpoint, *given, *chunks)
        assert code == 0 and json.loads(out)["token_ids"] == result["token_ids"], err
