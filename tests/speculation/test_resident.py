"""Generation by rounds on the device says what plain generation says, in the same words; on a CPU nothing is captured."""

import pytest

from dsv4 import load_model
from dsv4.errors import ContextOverrun, InputError
from dsv4.generate import generate
from dsv4.speculation import Adaptive, Static
from dsv4.speculation.draft import MTPDrafter
from dsv4.speculation.loop import generate_speculative
from dsv4.speculation.resident import generate_resident
from tests.speculation.scripted import prompt_of


@pytest.fixture(scope="module")
def model(golden_path):
    return load_model(golden_path, numerics="fp32", mtp=True)


@pytest.mark.parametrize("policy", [Static(0), Static(1), Static(3), Adaptive()], ids=lambda p: p.name)
def test_tokens_and_counts_are_those_of_the_loop(model, policy):
    prompts = [prompt_of(model, n) for n in (5, 130, 31)]
    told = [[] for _ in prompts]
    found = generate_resident(model, prompts, 17, policy=policy, on_token=lambda row, token: told[row].append(token), ahead=1)
    others = generate_speculative(model, prompts, 17, MTPDrafter(), policy=policy)
    for ids, out, other, heard in zip(prompts, found, others, told):
        assert out.token_ids == other.token_ids == generate(model, ids, 17).token_ids == heard
        assert out.speculation.document(17) == other.speculation.document(17) and out.stop_reason == other.stop_reason == "max_new_tokens"
        assert out.max_context == other.max_context and out.prefill_seconds > 0 and out.decode_seconds > 0


def test_long_prompts_in_pieces(model, monkeypatch):
    monkeypatch.setattr(type(model), "chunk", 32)
    done = []
    ids = prompt_of(model, 100)
    out = generate_resident(model, [ids], 9, on_prefill=lambda now, of: done.append((now, of)))[0]
    assert out.token_ids == generate(model, ids, 9).token_ids and done == [(32, 100), (64, 100), (96, 100), (100, 100)]


def test_stops(model):
    prompts = [prompt_of(model, n) for n in (5, 40)]
    plain = [generate(model, ids, 15).token_ids for ids in prompts]
    for stop in (plain[0][0], plain[0][6]):
        found, told = generate_resident(model, prompts, 15, policy=Static(8), stop_ids=[stop], on_token=lambda row, token: told.append(token)), []
        for out, row in zip(found, plain):
            want = row[:row.index(stop) + 1] if stop in row else row
            assert out.token_ids == want and out.stop_reason == ("eos" if stop in row else "max_new_tokens")


def test_a_full_context_is_told_after_all_that_fits(model):
    ids, told = prompt_of(model, 20), []
    with pytest.raises(ContextOverrun, match="context of 24 tokens is full after 5 new tokens"):
        generate_resident(model, [ids], 10, max_context=24, on_token=lambda row, token: told.append(token))
    assert told == generate(model, ids, 5).token_ids


def test_refusals(model, official):
    with pytest.raises(InputError, match="the prompt is empty"):
        generate_resident(model, [[]], 3)
    without = load_model(official, numerics="fp32", mtp=False)
    with pytest.raises(InputError, match="use --speculate lookup"):
        generate_resident(without, [[5]], 3)
    most = model.config.max_position_embeddings
    with pytest.raises(InputError, match="draft fewer"):
        generate_resident(model, [[5]], most)
