"""Generation by rounds on the device says what plain generation says, in the same words; on a CPU nothing is
captured."""

import itertools
from dataclasses import replace

import pytest
import torch

from dsv4 import load_model
from dsv4.commands import generate as run
from dsv4.engine.generate import Generation, generate, generate_on_device, generate_speculative
from dsv4.errors import ContextOverrun, InputError, RoundError
from dsv4.sampling import Sampling, distribution
from dsv4.speculation import Adaptive, Static
from dsv4.speculation.accept import draw
from dsv4.speculation.draft import LookupDrafter, MTPDrafter
from dsv4.speculation.noise import OWN, row_seeds, uniforms
from dsv4.speculation.rounds import Rounds
from tests.speculation.scripted import prompt_of


@pytest.fixture(scope="module")
def model(brief_golden):
    return load_model(brief_golden, numerics="fp32", mtp=True)


DRAFTERS = pytest.mark.parametrize("drafter", [MTPDrafter(), LookupDrafter(1, 1)], ids=lambda d: d.name)


def every(model, seed: int = 0) -> list[int]:
    """A prompt in which lookup of single tokens finds whatever the model says."""
    return torch.randperm(model.config.vocab_size, generator=torch.Generator().manual_seed(seed)).tolist()


POLICIES = [Static(0), Static(1), Static(3), Adaptive()]


@DRAFTERS
@pytest.mark.few(policy=POLICIES[2:])
@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: p.name)
def test_tokens_and_counts_are_those_of_the_loop(model, policy, drafter):
    prompts = [prompt_of(model, 5), every(model), prompt_of(model, 31)]
    told = [[] for _ in prompts]
    found = generate_on_device(
        model, prompts, 17, drafter, policy=policy, on_token=lambda row, token: told[row].append(token), ahead=1
    )
    others = generate_speculative(model, prompts, 17, drafter, policy=policy)
    for ids, out, other, heard in zip(prompts, found, others, told):
        assert out.token_ids == other.token_ids == generate(model, ids, 17).token_ids == heard
        assert (
            out.speculation.document(17) == other.speculation.document(17)
            and out.stop_reason == other.stop_reason == "max_new_tokens"
        )
        assert out.max_context == other.max_context and out.prefill_seconds > 0 and out.decode_seconds > 0
    assert found[1].speculation.proposed or policy.sizes == (0,)


def test_lookup_needs_no_block(brief_official):
    model = load_model(brief_official, numerics="fp32", mtp=False)
    ids = every(model)
    out = generate_on_device(model, [ids], 30, LookupDrafter(1, 1))[0]
    assert (
        out.token_ids == generate(model, ids, 30).token_ids
        and out.speculation.proposed
        and out.speculation.draft_steps == 0
    )


def test_layers_on_several_devices_are_refused_before_the_prompt_runs(model, monkeypatch):
    monkeypatch.setattr(model, "layer_devices", [torch.device("cpu")] * 9)
    monkeypatch.setattr(model, "new_cache", lambda *given, **more: pytest.fail("something was made"))
    with pytest.raises(InputError, match="spread over devices; load without --device-map"):
        generate_on_device(model, [[5, 6, 7]], 4)


SAMPLING = Sampling(0.9, 0.95, 21)


def drawn(model, ids: list[int], n: int, seed: int) -> list[int]:
    """Tokens of plain decoding of one row, drawn by the noise of `seed` at their positions."""
    cache, fed, out = model.new_cache(1, len(ids) + n), ids, []
    for t in range(len(ids), len(ids) + n):
        p = distribution(model.append(torch.tensor([fed]), cache, logits="last")[:, 0], SAMPLING)
        fed = draw(p, uniforms(row_seeds(seed, 1, "cpu"), torch.tensor([t]), OWN)).tolist()
        out += fed
    return out


def test_sampled_lookup_says_what_sampling_without_drafts_says(model):
    """Whatever is drafted, and for a row by itself as in a batch."""
    prompts = [prompt_of(model, 5), every(model)]
    plain = [out.token_ids for out in generate_on_device(model, prompts, 20, LookupDrafter(), SAMPLING, Static(0))]
    assert plain == [drawn(model, ids, 20, 21 + b) for b, ids in enumerate(prompts)]
    for policy in (Static(4), Adaptive()):
        found = generate_on_device(model, prompts, 20, LookupDrafter(1, 1), SAMPLING, policy)
        assert [out.token_ids for out in found] == plain and found[1].speculation.proposed
    alone = generate_on_device(model, prompts[1:], 20, LookupDrafter(), Sampling(0.9, 0.95, 22))[0]
    assert alone.token_ids == plain[1]
    assert generate_on_device(model, prompts[:1], 20, MTPDrafter(), SAMPLING, Static(0))[0].token_ids == plain[0]


def test_sampled_drafts_of_the_block(model):
    """Seeds decide, not neighbours; a sharp temperature says what greedy decoding says."""
    prompts = [prompt_of(model, 5), prompt_of(model, 40)]
    found = generate_on_device(model, prompts, 20, MTPDrafter(), SAMPLING)
    assert (
        found[1].token_ids
        == generate_on_device(model, prompts[1:], 20, MTPDrafter(), Sampling(0.9, 0.95, 22))[0].token_ids
    )
    assert (
        found[0].token_ids
        != generate_on_device(model, prompts[:1], 20, MTPDrafter(), Sampling(0.9, 0.95, 22))[0].token_ids
    )
    assert found[0].speculation.proposed and found[0].speculation.draft_steps == found[0].speculation.proposed
    sharp = generate_on_device(model, prompts, 20, MTPDrafter(), Sampling(1e-4))
    assert [out.token_ids for out in sharp] == [generate(model, ids, 20).token_ids for ids in prompts]


@DRAFTERS
def test_a_sampled_row_ends_at_its_stop_id_and_tells_every_token_once(model, drafter):
    ids = every(model)
    whole = generate_on_device(model, [ids], 20, drafter, SAMPLING)[0].token_ids
    stop, told = whole[9], []
    out = generate_on_device(
        model, [ids], 20, drafter, SAMPLING, stop_ids=[stop], on_token=lambda row, token: told.append(token)
    )[0]
    assert out.token_ids == whole[: whole.index(stop) + 1] and told == out.token_ids[:-1] and out.stop_reason == "eos"


@pytest.mark.few(room=[0, 3])
@DRAFTERS
@pytest.mark.parametrize("room", [0, 1, 3])
def test_a_context_near_the_checkpoint_s_end_leaves_room_for_fewer_drafts(model, drafter, room, monkeypatch):
    ids = every(model)
    plain, limit = generate(model, ids, 20).token_ids, len(ids) + 19
    monkeypatch.setattr(model, "config", replace(model.config, max_position_embeddings=limit + 1 + room))
    made = []
    out = generate_on_device(
        model,
        [ids],
        20,
        drafter,
        policy=Static(8),
        make=lambda *of, **more: made.append(Rounds(*of, **more)) or made[0],
    )[0]
    # no wider round is captured
    assert out.token_ids == plain and max(out.speculation.block_size_history) == room == max(made[0].widths)
    monkeypatch.setattr(model, "config", replace(model.config, max_position_embeddings=limit))
    with pytest.raises(InputError, match=f"{limit} tokens is all that the checkpoint takes.*by one"):
        generate_on_device(model, [ids], 20, drafter)


def test_long_prompts_in_pieces(model, monkeypatch):
    monkeypatch.setattr(type(model), "chunk", 32)
    done = []
    ids = prompt_of(model, 100)
    out = generate_on_device(model, [ids], 9, on_prefill=lambda now, of: done.append((now, of)))[0]
    assert out.token_ids == generate(model, ids, 9).token_ids and done == [(32, 100), (64, 100), (96, 100), (100, 100)]


def test_stops(model):
    prompts = [prompt_of(model, n) for n in (5, 40)]
    plain = [generate(model, ids, 15).token_ids for ids in prompts]
    for stop in (plain[0][0], plain[0][6]):
        found = generate_on_device(model, prompts, 15, policy=Static(8), stop_ids=[stop])
        for out, row in zip(found, plain):
            want = row[: row.index(stop) + 1] if stop in row else row
            assert out.token_ids == want and out.stop_reason == ("eos" if stop in row else "max_new_tokens")


def test_a_full_context_is_told_after_all_that_fits(model):
    ids, told = prompt_of(model, 20), []
    with pytest.raises(ContextOverrun, match="context of 24 tokens is full after 5 new tokens"):
        generate_on_device(model, [ids], 10, max_context=24, on_token=lambda row, token: told.append(token))
    assert told == generate(model, ids, 5).token_ids


def altered(**changed):
    """Makes rounds whose left tokens and stop ids are changed(what was given)."""

    def make(model, cache, most, tokens, drafts, left, stops, *rest, **more):
        left, stops = changed.get("left", list)(left), changed.get("stops", set)(stops)
        return Rounds(model, cache, most, tokens, drafts, left, stops, *rest, **more)

    return make


def test_a_device_that_disagrees_with_the_host_is_an_error(model):
    """It passes over a stop id, amid the tokens of a round or behind them; it ends a row early; it holds other tokens
    than it said."""
    ids = prompt_of(model, 20)
    first, *later = generate(model, ids, 8).token_ids
    for stop in {*later} - {first}:
        with pytest.raises(RoundError, match="tokens of row 0 and (ended|runs) it; the host has .* and room for 0"):
            generate_on_device(model, [ids], 15, stop_ids=[stop], make=altered(stops=lambda stops: ()))
    with pytest.raises(RoundError, match="12 tokens of row 0 and ended it; the host has 12 and room for 2"):
        generate_on_device(model, [ids], 15, make=altered(left=lambda left: [n - 2 for n in left]))

    class Other(Rounds):
        def finish(self, on_tokens=None):
            return [tokens[:-1] for tokens in super().finish(on_tokens)]

    with pytest.raises(RoundError, match="the device has 13 tokens of row 0 and ended it; the host has 14"):
        generate_on_device(model, [ids], 15, make=Other)


def test_refusals(model, brief_official):
    with pytest.raises(InputError, match="the prompt is empty"):
        generate_on_device(model, [[]], 3)
    without = load_model(brief_official, numerics="fp32", mtp=False)
    with pytest.raises(InputError, match="use --speculate lookup"):
        generate_on_device(without, [[5]], 3)
    most = model.config.max_position_embeddings
    with pytest.raises(InputError, match="by one, or leave out --speculate"):
        generate_on_device(model, [[5]], most)


def test_where_steps_are_captured_requests_run_as_rounds(brief_golden, monkeypatch):
    """With either drafter at any temperature, also where passes might be appends; elsewhere as passes that the host
    waits for."""
    called = []
    for name in ("generate_on_device", "generate_speculative"):
        monkeypatch.setattr(
            run,
            name,
            lambda model, prompts, n, drafter, sampling, *rest, name=name, **more: (
                called.append((name, drafter.name, sampling.temperature)) or [Generation(prompts[0])]
            ),
        )
    session = run.Session(brief_golden, run.Choices(numerics="fp32"))
    for captured, together in itertools.product((True, False), repeat=2):
        monkeypatch.setattr(run, "captures", lambda model, captured=captured: captured)
        for drafter in ("mtp", "lookup"):
            for temperature in (0, 0.8):
                request = run.Request(
                    "1", is_ids=True, sampling=Sampling(temperature), speculate=drafter, together=together
                )
                session.generate([1], request, lambda text: None)
                wanted = "generate_on_device" if captured else "generate_speculative"
                assert called.pop() == (wanted, drafter, temperature) and not called
                assert session.together is (together and not captured)
