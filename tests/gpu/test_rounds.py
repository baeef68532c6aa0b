"""Speculative rounds as CUDA graphs: plain decoding's tokens, every size, no wait of the host that grows with the
response."""

import pytest
import torch

from dsv4 import load_model
from dsv4.engine.generate import generate, generate_on_device, generate_speculative
from dsv4.model.tokenizer import Tokenizer
from dsv4.sampling import Sampling
from dsv4.speculation import Adaptive, CostAware, Static, on_device
from dsv4.speculation.choosing import choice_of
from dsv4.speculation.device_drafters import primed
from dsv4.speculation.draft import LookupDrafter, MTPDrafter
from dsv4.speculation.noise import ROLES, uniforms
from dsv4.speculation.policy_device import DevicePolicy
from dsv4.speculation.rounds import Rounds
from scripts.bench.speculation_costs import moe
from scripts.bench.speculation_gpu import Scheduled
from scripts.bench.speculation_traces import PROMPT, ROOT
from scripts.bench.waits import counted_syncs
from tests.texts import CODE, PROSE

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

LENGTHS, NEW = (5, 131, 30, 64, 127, 2, 9, 128), (21, 9, 14, 40, 3, 22, 33, 12)
WAYS = pytest.mark.parametrize(
    "drafter, temperature",
    [(d, t) for d in (MTPDrafter(), LookupDrafter(1, 1)) for t in (0, 0.9)],
    ids=lambda v: getattr(v, "name", str(v)),
)
POLICIES = {
    **{f"static {k}": Static(k) for k in (0, 1, 2, 3, 8)},
    "adaptive": Adaptive(),
    "cost-aware": CostAware(moe(), len(LENGTHS)),
}


@pytest.fixture(scope="module")
def model(golden_path):
    return load_model(golden_path, numerics="fp32", mtp=True, device="cuda", backend="triton")


def demo_model(numerics):
    return load_model(ROOT / "demo", numerics=numerics, mtp=True, device="cuda", backend="triton")


def demo_texts(model):
    """Token ids of four texts of code and four of prose."""
    encode = Tokenizer(ROOT / "demo", model.config.vocab_size).encode
    return [ids[at : at + PROMPT] for ids in map(encode, (CODE, PROSE)) for at in range(0, 8 * PROMPT, 2 * PROMPT)]


def prompts(model, lengths, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [torch.randint(model.config.vocab_size, (n,), generator=g).tolist() for n in lengths]


@pytest.fixture(scope="module")
def plain(model):
    return [generate(model, row, n).token_ids for row, n in zip(prompts(model, LENGTHS), NEW)]


def ready(model, ids, new, policy, drafter=MTPDrafter(), sampling=Sampling(), back=16, **more):
    """Rounds over the prompts, and each row's first token."""
    lengths = [len(row) for row in ids]
    cache = model.new_cache(len(ids), max(n + more for n, more in zip(lengths, new)) + 8, back)
    choice = choice_of(sampling, len(ids), "cuda")
    tokens, *start = primed(model, cache, ids, None, choice, drafter)
    policy = policy if isinstance(policy, DevicePolicy) else on_device(policy, len(ids), "cuda")
    found = Rounds(model, cache, 8, tokens, *start, [n - 1 for n in new], (), policy, choice=choice, **more)
    return found, tokens.tolist()


@pytest.mark.parametrize("ahead", [1, 2])
@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_tokens_are_those_of_plain_decoding(model, plain, policy, ahead):
    found, first = ready(model, prompts(model, LENGTHS), NEW, policy, ahead=ahead)
    told = [[] for _ in LENGTHS]
    out = found.run(on_tokens=lambda row, tokens: told[row].extend(tokens))
    assert [[t, *row] for t, row in zip(first, out)] == plain and told == out
    assert found.graphs and set(found.graphs) == set(found.counts.rounds)
    assert found.cache.lengths == found.cache.mtp_lengths == found.start.tolist()


def test_captures_while_another_round_is_not_read_yet(model, plain):
    """Sizes that are first wanted in the middle of a run, on the smallest ring that it may have."""
    found, first = ready(model, prompts(model, LENGTHS), NEW, Adaptive(), ring=2)
    told = [[] for _ in LENGTHS]
    out = found.run(on_tokens=lambda row, tokens: told[row].extend(tokens))
    assert [[t, *row] for t, row in zip(first, out)] == plain and told == out and len(found.graphs) > 1


def test_captures_of_lookup_are_no_time_of_decoding(model):
    ids = prompts(model, (40,))[0]
    (out,) = generate_speculative(model, [ids], 24, LookupDrafter())
    assert out.token_ids == generate(model, ids, 24).token_ids and out.capture_seconds > 0 and out.decode_seconds > 0


@WAYS
@pytest.mark.parametrize("policy", [Static(3), Adaptive()], ids=["static", "adaptive"])
def test_graphs_draw_what_rounds_without_graphs_draw(model, policy, drafter, temperature):
    ids, texts = prompts(model, (5, 131, 400)), []
    for captured in (True, False):
        found, first = ready(model, ids, (40, 30, 35), policy, drafter, Sampling(temperature, 0.95, 4))
        if not captured:
            found.captures, found.side = False, None
        told = [[] for _ in ids]
        out = found.run(lambda row, tokens: told[row].extend(tokens))
        assert bool(found.graphs) == captured and told == out
        texts.append((first, out))
    assert texts[0] == texts[1]


PATTERN = (0, 3, 0, 0, 1, 8, *(0,) * 13, 2, 0, 0, 4, 0)


@pytest.mark.parametrize("temperature", [0, 0.9])
def test_rounds_that_rest(temperature):
    """Rounds without drafts, which the block follows by graphs of their own: plain decoding's text greedily, and what
    comes without graphs. On trained weights, whose drafts are sometimes right."""
    model = demo_model("fp32")
    texts = demo_texts(model)
    ids, new, found = [texts[0][:5], texts[-1]], (60, 60), []
    for captured in (True, False):
        sizes = Scheduled(torch.tensor([[n, n] for n in PATTERN * 4], device="cuda"))
        rounds, first = ready(model, ids, new, sizes, sampling=Sampling(temperature, 0.95, 4))
        if captured:
            rounds.prepare()
            assert set(rounds.catching_up) == set(rounds.catch_up_widths) == {2, 8}  # of a cache that can be rewound by
            16
        else:
            rounds.captures, rounds.side = False, None
        with counted_syncs() as syncs:
            out = rounds.run()
        assert not captured or not syncs
        found.append((first, out, rounds.history(), rounds.counts.caught_up))
    assert found[0][:3] == found[1][:3] and sum(a for row in found[0][2] for _, a in row) > 5
    # the last is of rounds behind the end: as many as began before the host knew of it
    until = min(len(behind) for *_, behind in found) - 1
    assert found[0][3][:until] == found[1][3][:until] and until > 5 and max(found[0][3][:until]) == 8
    if not temperature:
        assert [[t, *row] for t, row in zip(*found[0][:2])] == [
            generate(model, row, n).token_ids for row, n in zip(ids, new)
        ]


@pytest.mark.parametrize(
    "lengths, rested, back, within",
    [((5, 131), 2, 16, 0), ((5, 131), 7, 16, 1e-4), (LENGTHS, 32, 31, 1e-4)],
    ids=["4 tokens", "16 tokens", "256 tokens"],
)
def test_following_many_at_once_is_following_each(model, lengths, rested, back, within):
    """Bit for bit for up to 4 tokens of all rows together, whose four streams are 16 rows of h_proj."""
    held = []
    for each in (True, False):
        rounds, _ = ready(model, prompts(model, lengths), (40,) * len(lengths), Static(0), back=back)
        rounds.prepare()
        for _ in range(rested):
            rounds._launch(0)
            rounds._read(None)
            if each:
                rounds._follow_rests()
        rounds._follow_rests()
        assert rounds.counts.caught_up == ([1] * rested if each else [rested])
        held.append((rounds.drafter.features.clone(), rounds.drafter.chained.clone()))
    for one, other in zip(*held):
        torch.testing.assert_close(one, other, atol=within, rtol=within)


def test_noise_is_the_processor_s():
    seeds, at = torch.tensor([0, 5, -1, 2**62]), torch.arange(4 * 50).view(4, 50) * 977
    for role in range(ROLES):
        assert torch.equal(uniforms(seeds.cuda(), at.cuda(), role).cpu(), uniforms(seeds, at, role))


def test_sampled_lookup_says_what_sampling_without_drafts_says(model):
    ids, sampling = [prompts(model, (300,))[0]], Sampling(0.9, 0.95, 2)
    plain = generate_on_device(model, ids, 60, LookupDrafter(), sampling, Static(0))[0]
    found = generate_on_device(model, ids, 60, LookupDrafter(1, 1), sampling, Static(4))[0]
    assert found.token_ids == plain.token_ids and found.speculation.proposed


@WAYS
def test_the_host_waits_no_more_for_a_long_response_than_for_a_short_one(model, drafter, temperature):
    waits = []
    for new in (16, 160):
        found, _ = ready(model, prompts(model, (20, 33)), (new, new), Static(3), drafter, Sampling(temperature))
        found.prepare()
        with counted_syncs() as syncs:
            out = found.run()
        assert [len(row) for row in out] == [new - 1] * 2
        waits.append((len(syncs), found.ring.nbytes))
    assert waits[0] == waits[1] and waits[0][0] == 0, syncs


def test_other_requests_on_the_same_graphs(model, plain):
    found, _ = ready(model, prompts(model, LENGTHS, seed=9), (40,) * 8, Static(3))
    found.run()
    held, ids = dict(found.graphs), prompts(model, LENGTHS)
    found.cache.reset()
    tokens, *start = primed(model, found.cache, ids)
    found.restart(tokens, *start, [n - 1 for n in NEW])
    assert [[t, *row] for t, row in zip(tokens.tolist(), found.run())] == plain
    assert all(found.graphs[k] is graph for k, graph in held.items())


@pytest.mark.parametrize("numerics", ["fp32", "native", "qat"])
def test_the_demo_checkpoint_says_what_it_says_without_drafts(numerics):
    """By graphs of rounds against graphs of single steps; code and prose, several rows and each by itself."""
    model = demo_model(numerics)
    texts = demo_texts(model)
    plain = [generate(model, ids, 48).token_ids for ids in texts]
    for drafter in (MTPDrafter(), LookupDrafter()):
        assert [generate_on_device(model, [ids], 48, drafter)[0].token_ids for ids in texts] == plain
    if numerics == "fp32":  # rows that share a step round as they do, with drafts and without
        assert [out.token_ids for out in generate_on_device(model, texts, 48, policy=Adaptive())] == plain
