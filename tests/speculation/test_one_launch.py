"""Rounds whose loop the device runs, on a CPU: the kernel's own source, compiled as C++, decides; a thread is the
device. Sizes, tokens and what the drafter runs are those of the host's loop."""

import threading

import pytest
import torch

from dsv4 import load_model
from dsv4.engine.generate import generate, generate_on_device
from dsv4.errors import RoundError
from dsv4.runtime import conditional
from dsv4.runtime.conditional import ConditionalError, compiled
from dsv4.speculation import Adaptive, Static, on_device, one_launch
from dsv4.speculation.device_drafters import primed
from dsv4.speculation.draft import LookupDrafter, MTPDrafter
from dsv4.speculation.one_launch import TURN, OneLaunch
from dsv4.speculation.rounds import Rounds
from scripts.bench.speculation_gpu import Scheduled
from tests.speculation.scripted import prompt_of


@pytest.fixture(scope="module")
def model(brief_golden):
    return load_model(brief_golden, numerics="fp32", mtp=True)


def ready(kind, model, ids, new, policy, drafter=MTPDrafter(), back=16, **more):
    cache = model.new_cache(len(ids), max(len(row) + n for row, n in zip(ids, new)) + 8, back)
    tokens, *start = primed(model, cache, ids, None, drafter=drafter)
    policy = on_device(policy, len(ids), "cpu")
    return kind(model, cache, 8, tokens, *start, [n - 1 for n in new], (), policy, **more)


def left(rounds, told):
    """What a run leaves, of the rounds in which a row got tokens."""
    out = rounds.run(lambda row, tokens: told[row].extend(tokens))
    ended = max(len(row) for row in rounds.history())
    return out, rounds.cache.lengths, rounds.history(), rounds.counts.rounds[:ended]


@pytest.mark.parametrize("ahead", [1, 2])
@pytest.mark.parametrize("policy", [Static(0), Static(3), Adaptive()], ids=lambda p: p.name)
def test_the_loop_runs_what_the_host_s_loop_runs(model, on_a_thread, policy, ahead):
    ids, new, found = [prompt_of(model, 5), prompt_of(model, 131)], (45, 9), []
    for kind in (Rounds, OneLaunch):
        told = [[] for _ in ids]
        rounds = ready(kind, model, ids, new, policy, ahead=ahead)
        found.append(left(rounds, told))
        assert told == found[-1][0]
    assert found[0] == found[1] and rounds.launches == 1 and len(on_a_thread.threads) == 1


@pytest.mark.parametrize("drafter", [MTPDrafter(), LookupDrafter(1, 1), None], ids=["mtp", "lookup", "none"])
def test_generation_by_one_launch(model, on_a_thread, drafter):
    ids, made = prompt_of(model, 40), []
    make = lambda *of, **more: made.append(OneLaunch(*of, **more)) or made[-1]
    out = generate_on_device(model, [ids], 24, drafter, make=make)[0]
    assert out.token_ids == generate(model, ids, 24).token_ids and made[0].launches == 1
    assert (out.speculation is None) == (drafter is None)


def test_waiting_tokens_run_before_drafts_and_when_no_more_can_wait(model, on_a_thread):
    """Rounds without drafts: the block follows them as in the host's loop, and the last at the end."""
    ids, new, counts = [prompt_of(model, 20)], (60,), []
    for kind in (Rounds, OneLaunch):
        rounds = ready(kind, model, ids, new, Static(0), back=31)
        rounds.run()
        counts.append((rounds.counts.caught_up[:1], rounds.cache.mtp_lengths, rounds.drafter.features.clone()))
    assert counts[0][:2] == counts[1][:2] and counts[1][0] == [32]
    torch.testing.assert_close(counts[0][2], counts[1][2], atol=1e-5, rtol=1e-5)


def test_the_drafter_follows_rests_before_every_draft(model, on_a_thread):
    ids, pattern, found = [prompt_of(model, 20), prompt_of(model, 9)], (0, 1, 0, 0, 3, 0, 0, 0, 1, 8), []
    for kind in (Rounds, OneLaunch):
        rounds = ready(kind, model, ids, (30, 30), Static(0))
        rounds.policy = Scheduled(torch.tensor([[n, n] for n in pattern * 6]))
        tokens, *start = primed(model, _emptied(rounds.cache), ids)
        rounds.restart(tokens, *start, [29, 29])
        rounds.prepare()
        followed, real = [], rounds.drafter.catch_up
        rounds.drafter.catch_up = lambda width, start: (followed.append(width), real(width, start))
        out = rounds.run()
        ended = max(len(row) for row in rounds.history())
        found.append((out, rounds.history(), rounds.counts.rounds[:ended], rounds.counts.caught_up[:6], followed[:6]))
    assert found[0] == found[1] and found[0][3][:3] == [1, 2, 3] and found[0][4][:3] == [2, 2, 8]


def _emptied(cache):
    cache.reset()
    return cache


def test_a_cancelled_loop_ends_after_its_round_and_the_next_begins_anew(model, on_a_thread):
    ids, new = [prompt_of(model, 20)], (50,)
    whole = ready(Rounds, model, ids, new, Static(3)).run()
    on_a_thread.late = threading.Event()
    rounds = ready(OneLaunch, model, ids, new, Static(3))

    def stop(row, tokens):
        on_a_thread.late.set()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rounds.run(stop)
    n = rounds.known.written[0]
    assert (
        0 < n
        and rounds.known.rounds <= 3
        and rounds.cache.lengths == rounds.start.tolist() == [20 + n]
        and rounds.known.rounds == rounds.round
    )
    assert rounds.out[0, :n].tolist() == whole[0][:n] and not on_a_thread.threads[-1].is_alive()
    rounds.cache.reset()
    tokens, *start = primed(model, rounds.cache, ids)
    rounds.restart(tokens, *start, [n - 1 for n in new])
    assert rounds.run() == whole and rounds.launches == 1


def test_a_loop_that_ends_too_early_is_an_error(model, on_a_thread):
    left = iter([1, 1, 0])
    on_a_thread.change = lambda chosen: chosen.__setitem__(0, next(left, 0))
    with pytest.raises(RoundError, match="has ended after 2 rounds, and rows go on"):
        ready(OneLaunch, model, [prompt_of(model, 20)], (50,), Static(0)).run()


def test_where_there_is_no_device_the_reason_is_told():
    with pytest.raises(ConditionalError, match="the model is on cpu.*leave out --loop device"):
        one_launch.check_device("cpu")


def test_the_kernel_compiles_and_links_without_a_device():
    for needed in ("cuda.bindings.nvrtc", "cuda.bindings.nvjitlink", "cuda.pathfinder"):
        pytest.importorskip(needed)
    try:
        assert compiled(TURN.source, (9, 0))[:4] == b"\x7fELF"
    except ConditionalError:
        raise
    except Exception as error:  # the compiler's library comes with torch's CUDA wheels
        pytest.skip(f"no NVRTC: {error}")
    with pytest.raises(ConditionalError, match="did not compile for sm_90"):
        conditional.compiled("extern 'C'", (9, 0))
