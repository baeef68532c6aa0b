"""Rounds whose loop the device runs: the host's loop bit for bit, in one launch, without a wait; cancelled cleanly."""

import pytest
import torch

from dsv4.engine.generate import generate, generate_on_device
from dsv4.runtime.conditional import missing
from dsv4.sampling import Sampling
from dsv4.speculation import Adaptive, Static
from dsv4.speculation.choosing import choice_of
from dsv4.speculation.device_drafters import primed
from dsv4.speculation.draft import MTPDrafter
from dsv4.speculation.one_launch import OneLaunch
from dsv4.speculation.policy_device import DevicePolicy, on_device
from dsv4.speculation.rounds import Rounds
from scripts.bench.waits import counted_syncs
from tests.gpu.test_rounds import LENGTHS, NEW, POLICIES, WAYS, demo_model, demo_texts, model, prompts  # noqa: F401

CUDA = torch.cuda.is_available()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not CUDA, reason="needs a CUDA device"),
    pytest.mark.skipif(CUDA and bool(missing(torch.device("cuda"))), reason="this device has no such loop"),
]


def ready(kind, model, ids, new, policy, drafter=MTPDrafter(), sampling=Sampling(), back=16, **more):
    """Rounds of `kind` over the prompts."""
    cache = model.new_cache(len(ids), max(len(row) + n for row, n in zip(ids, new)) + 8, back)
    choice = choice_of(sampling, len(ids), "cuda")
    tokens, *start = primed(model, cache, ids, None, choice, drafter)
    policy = policy if isinstance(policy, DevicePolicy) else on_device(policy, len(ids), "cuda")
    found = kind(model, cache, 8, tokens, *start, [n - 1 for n in new], (), policy, choice=choice, **more)
    found.prepare()
    return found


def both(model, ids, new, policy, *of, **more):
    """What the two loops leave: tokens, what was told, the caches' lengths, counts, each round's drafts."""
    left = []
    for kind in (Rounds, OneLaunch):
        found = ready(kind, model, ids, new, policy, *of, **more)
        told = [[] for _ in ids]
        with counted_syncs() as syncs:
            out = found.run(lambda row, tokens: told[row].extend(tokens))
        assert not syncs and told == out
        if kind is OneLaunch:
            assert found.launches == 1
        ended = max(len(row) for row in found.history())  # the host's loop runs rounds behind the end
        left.append(
            (out, found.cache.lengths, found.history(), found.counts.rounds[:ended], found.counts.sizes[:ended])
        )
    return left


@pytest.mark.parametrize("ahead", [1, 2])
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_one_launch_is_the_host_s_loop(model, policy, ahead):
    host, device = both(model, prompts(model, LENGTHS), NEW, policy, ahead=ahead)
    assert host == device


@WAYS
@pytest.mark.parametrize("policy", [Static(3), Adaptive()], ids=["static", "adaptive"])
def test_sampled_or_not_by_either_drafter(model, policy, drafter, temperature):
    host, device = both(
        model, prompts(model, (5, 131, 400)), (40, 30, 35), policy, drafter, Sampling(temperature, 0.95, 4)
    )
    assert host == device


@pytest.mark.parametrize("tokens", [16, 128, 1024])
def test_one_launch_whatever_the_length(tokens):
    model, texts = demo_model("native"), demo_texts(demo_model("native"))
    plain, made = generate(model, texts[0], tokens).token_ids, []
    for policy in (Static(0), Adaptive()):
        make = lambda *of, **more: made.append(OneLaunch(*of, **more)) or made[-1]
        out = generate_on_device(model, [texts[0]], tokens, policy=policy, make=make)[0]
        assert out.token_ids == plain and made[-1].launches == 1 and len(made[-1].graphs) == len(made[-1].widths)


def test_a_cancelled_launch_leaves_nothing_behind(model):
    """The loop ends after the round that is running; what came is the beginning of the text; other requests on the same
    graphs say what they say."""
    ids, new = prompts(model, LENGTHS), (200,) * len(LENGTHS)
    whole = ready(Rounds, model, ids, new, Adaptive()).run()
    found, told = ready(OneLaunch, model, ids, new, Adaptive()), [[] for _ in ids]

    def stop(row, tokens):
        told[row].extend(tokens)
        if len(told[0]) > 20:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        found.run(stop)
    torch.cuda.synchronize()
    n = len(told[0])
    assert 20 < n < 199 and told[0] == whole[0][:n] and not found.under_way
    assert found.start.tolist() == found.cache.lengths and found.known.rounds == int(found.round)
    assert [row[:k] for row, k in zip(whole, found.known.written)] == [
        row[:k] for row, k in zip(found.out.tolist(), found.known.written)
    ]
    found.cache.reset()
    tokens, *start = primed(model, found.cache, ids)
    found.restart(tokens, *start, [n - 1 for n in new])
    assert found.run() == whole and found.launches == 1
