"""Grouped attention, block summaries, block choice, gather attention and termination: the references against their
formulas."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv4.kernels.block_choice import (
    POLICIES,
    Policy,
    block_bounds,
    block_means,
    block_scores,
    choose_blocks,
    dense,
    page_bounds,
    sink_window,
)
from dsv4.kernels.block_summaries import summarise_blocks
from dsv4.kernels.errors import UnsupportedInput
from dsv4.kernels.gather_attention import gather_attention
from dsv4.kernels.grouped_attention import Termination, cpu, grouped_attention
from dsv4.kernels.grouped_attention.termination import probed_channels
from tests.kernels.gqa_inputs import (
    DEVICE,
    NAN,
    cache,
    close,
    concentrated,
    newest_first,
    randn,
    terminated,
    written_out,
)


def summaries(keys, end, block, value=NAN):
    """low, high, mean of every complete or begun block of `end` tokens a row, by their definition."""
    B, KV, S, D = keys.shape
    low, high, mean = (torch.full((B, KV, S // block, D), value, device=keys.device) for _ in range(3))
    for b in range(B):
        for j in range(-(-int(end[b]) // block)):
            k = keys[b, :, j * block : min(j * block + block, int(end[b]))]
            low[b, :, j], high[b, :, j], mean[b, :, j] = k.amin(1), k.amax(1), k.mean(1)
    return low, high, mean


# Attention
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [None, 1, 50, 128, 4096])
@pytest.mark.parametrize("H,KV", [(4, 4), (7, 1), (6, 2)])
def test_grouped_attention_is_its_formula(H, KV, window):
    args = (*cache(2, 3, H, KV, 256, 16, [126, 0]), window, 0.3)
    close(grouped_attention(*args), written_out(*args))


def test_grouped_attention_is_torchs():
    q, keys, values, start = cache(1, 40, 6, 2, 128, 16, [60])
    k, v = keys[:, :, :100], values[:, :, :100]
    mask = torch.arange(100, device=DEVICE) <= 60 + torch.arange(40, device=DEVICE).unsqueeze(1)
    wanted = F.scaled_dot_product_attention(q.transpose(1, 2), k, v, mask, scale=0.25, enable_gqa=True).transpose(1, 2)
    close(grouped_attention(q, keys, values, start, None, 0.25), wanted)


@pytest.mark.skipif(DEVICE != "cpu", reason="of a host processor")
@pytest.mark.parametrize("window", [None, 1, 50, 4096])
@pytest.mark.parametrize("H,KV", [(4, 4), (7, 1), (6, 2)])
def test_prompts_on_a_host_processor_are_the_formula(H, KV, window, monkeypatch):
    """Pieces of queries that end inside a row, rows that begin elsewhere, NaN behind each row's last token."""
    monkeypatch.setattr(cpu, "PIECE", 16)
    args = (*cache(2, 40, H, KV, 256, 16, [90, 0]), window, 0.3)
    close(grouped_attention(*args, backend="cpu"), written_out(*args))
    q, keys, values, start = cache(2, 40, H, KV, 256, 16, [90, 0], dtype=torch.bfloat16)
    close(
        grouped_attention(q, keys, values, start, window, 0.3, backend="cpu"),
        written_out(q, keys, values, start, window, 0.3),
        1e-2,
    )


@pytest.mark.skipif(DEVICE != "cpu", reason="of a host processor")
def test_decoding_on_a_host_processor_has_the_references_bits():
    args = (*cache(2, 16, 6, 2, 256, 16, [100, 3]), None, 0.3)
    assert torch.equal(grouped_attention(*args, backend="cpu"), grouped_attention(*args))
    rule = Termination(tau=1.0, phi=1.0, patience=1, tile=64)
    for got, wanted in zip(grouped_attention(*args, rule, backend="cpu"), grouped_attention(*args, rule)):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("block", [16, 128])
@pytest.mark.parametrize("window", [None, 100])
def test_gather_attention_is_its_formula(block, window):
    q, keys, values, start = cache(2, 2, 6, 2, 512, 16, [300, 127])
    blocks = torch.full((2, 2, 2, 4), -1, dtype=torch.int32, device=DEVICE)
    blocks[0, :, :, 1] = 300 // block
    blocks[0, :, 0, 3], blocks[0, 1, 1, 0] = 0, 1
    blocks[1, 0, 0] = torch.tensor([-1, 127 // block, -1, 0 if block == 16 else -1])
    args = q, keys, values, blocks, start, window, 0.3
    for backend in ("reference", "cpu") if DEVICE == "cpu" else ("reference",):
        close(
            gather_attention(*args, block, backend=backend),
            written_out(q, keys, values, start, window, 0.3, blocks, block),
        )


def test_gathering_every_block_is_dense_attention():
    q, keys, values, start = cache(2, 2, 6, 2, 512, 16, [509, 200])
    blocks = torch.arange(4, dtype=torch.int32, device=DEVICE).expand(2, 2, 2, 4)
    close(
        gather_attention(q, keys, values, blocks, start, None, 0.3, 128),
        grouped_attention(q, keys, values, start, None, 0.3),
        1e-6,
    )


# Summaries
# --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [16, 128])
@pytest.mark.parametrize("start,tokens", [([0, 127], 1), ([127, 128], 2), ([100, 3], 200), ([0, 0], 256)], ids=str)
def test_summaries_of_touched_blocks(block, start, tokens):
    _, keys, _, begin = cache(2, tokens, 2, 2, 512, 8, start)
    low, high, mean = summaries(keys, begin, block, 7.0)  # what is there already; 7 elsewhere
    wanted = summaries(keys, begin + tokens, block, 7.0)
    before = low.clone()
    summarise_blocks(keys, begin, tokens, low, high, mean, block)
    for got, want in zip((low, high, mean), wanted):
        close(got, want, 1e-6)
    last = (int(begin[0]) + tokens - 1) // block
    assert torch.equal(low[0, :, last + 1 :], before[0, :, last + 1 :])


def test_a_rewound_row_has_the_summaries_of_one_that_never_went_further():
    keys = randn(1, 2, 256, 8)
    far, never = (tuple(torch.full((1, 2, 16, 8), 7.0, device=DEVICE) for _ in range(3)) for _ in range(2))
    put = lambda held, first, count: summarise_blocks(keys, torch.tensor([first], device=DEVICE), count, *held, 16)
    put(far, 0, 60)
    put(never, 0, 37)
    keys[:, :, 36:] = randn(1, 2, 220, 8, seed=9)  # rewound to 36, other tokens follow
    put(far, 36, 1)
    put(never, 36, 1)
    policy = Policy("p", "bound", 16, 1, 1, 1)
    q, start = randn(1, 1, 2, 8, seed=3), torch.tensor([36], device=DEVICE)
    assert all(torch.equal(a[:, :, :3], b[:, :, :3]) for a, b in zip(far, never))
    assert torch.equal(choose_blocks(q, 2, *far, start, policy), choose_blocks(q, 2, *never, start, policy))


# Choice
# --------------------------------------------------------------------------------------------------


numbers = st.floats(-64, 64, width=16)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_bound_is_never_exceeded(data):
    """For every token of a distant block and every head of the group, in any numbers."""
    G, D, block = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 5)), 16
    draw = lambda *shape: torch.tensor(
        data.draw(st.lists(numbers, min_size=shape[0] * shape[1], max_size=shape[0] * shape[1]))
    ).view(shape)
    q, keys = draw(G, D).view(1, 1, G, D), draw(3 * block, D).view(1, 1, 3 * block, D)
    low, high, _ = summaries(keys, [3 * block], block)
    scores = block_scores(q, low, high, None, torch.tensor([3 * block - 1]), Policy("p", "bound", block, 0, 1, 1))
    for j in range(2):
        dots = q[0, 0].double() @ keys[0, 0, j * block : j * block + block].double().T
        rounding = D * 2.0**-23 * (q[0, 0].double().abs() @ keys[0, 0].double().abs().T).max()
        assert scores[0, 0, 0, j] >= dots.max() - rounding
    assert scores[0, 0, 0, 2] == float("-inf")  # the block of the position itself is not distant


def test_a_bound_is_attained():
    """By one token that is the only one of its block: a bound that is merely large would not tell blocks apart."""
    q, k = randn(1, 1, 3, 8), randn(1, 1, 1, 8, seed=1)
    keys = k.expand(1, 1, 32, 8).contiguous()
    scores = block_scores(
        q, *summaries(keys, [32], 16)[:2], None, torch.tensor([31], device=DEVICE), Policy("p", "bound", 16, 0, 1, 1)
    )
    close(scores[0, 0, 0, 0], (q[0, 0] @ k[0, 0, 0]).max(), 1e-6)


def test_scores_of_means():
    q, keys = randn(2, 2, 6, 8), randn(2, 2, 64, 8, seed=1)
    mean = summaries(keys, [64, 64], 16)[2]
    scores = block_scores(q, None, None, mean, torch.tensor([62, 30], device=DEVICE), Policy("p", "mean", 16, 1, 1, 2))
    wanted = torch.einsum("btkgd,bknd->btkn", q.view(2, 2, 2, 3, 8), mean) / 3
    # sink; block of 62, 63 and of 30, 31
    wanted[:, :, :, 0] = wanted[0, :, :, 3:] = wanted[1, :, :, 1:] = float("-inf")
    close(scores, wanted, 1e-6)


def kept(policy, position, scores=None, by_importance=False):
    """The keep-set of one query whose distant blocks have these bounds."""
    N = 64
    low = torch.zeros(1, 1, N, 1, device=DEVICE)
    if scores is not None:
        low[0, 0, :, 0] = torch.tensor(scores + [99.0] * (N - len(scores)))  # 99 beyond: never to be chosen
    start = torch.tensor([position], device=DEVICE)
    return (
        choose_blocks(torch.ones(1, 1, 1, 1, device=DEVICE), 1, low, low, low, start, policy, by_importance)
        .flatten()
        .tolist()
    )


@pytest.mark.parametrize("selector", ["bound", "mean"])
def test_keep_sets(selector):
    p = Policy("p", selector, 128, 1, 2, 2)
    scores = [50.0, 1.0, 3.0, 2.0, 3.0, 3.0]
    assert kept(p, 0, scores) == [0, -1, -1, -1, -1]
    assert kept(p, 127, scores) == [0, -1, -1, -1, -1]
    assert kept(p, 128, scores) == kept(p, 129, scores) == [0, 1, -1, -1, -1]
    assert kept(p, 3 * 128 - 1, scores) == [0, 1, 2, -1, -1]
    assert kept(p, 3 * 128, scores) == [0, 1, 2, 3, -1]
    assert kept(p, 5 * 128 - 1, scores) == [0, 1, 2, 3, 4]
    assert kept(p, 6 * 128 - 1, scores) == [0, 2, 3, 4, 5]
    assert kept(p, 8 * 128 - 1, scores) == [0, 2, 4, 6, 7]  # ties: 2, 4 and 5 are equal, the lowest win
    assert kept(p, 8 * 128 - 1, scores, True) == [0, 7, 6, 2, 4]
    assert kept(p, 7 * 128 - 1, [50.0, 1, 3, 2, 4, 3], True) == [0, 6, 5, 4, 2]


def test_keep_sets_without_distant_blocks_or_sinks():
    assert kept(Policy("p", None, 128, 1, 3), 900) == [0, 5, 6, 7]
    assert kept(Policy("p", None, 128, 2, 3), 300) == [0, 1, 2, -1, -1]
    assert kept(Policy("p", None, 128, 2, 3), 300, by_importance=True) == [0, 1, 2, -1, -1]
    assert kept(Policy("p", "bound", 128, 0, 1, 1), 300, [1.0, 2.0]) == [1, 2]
    assert kept(Policy("p", "bound", 128, 3, 1, 1), 300, [1.0, 2.0]) == [0, 1, 2, -1, -1]


@pytest.mark.parametrize("make", [m for m in POLICIES.values() if not m().dense and not m().once])
def test_policies_keep_what_they_say(make):
    policy = make(1024)
    assert policy.tokens == 1024 and policy.kept * policy.block == 1024
    blocks = torch.tensor(kept(policy, 64 * policy.block - 1, [float(i % 7) for i in range(63)]))
    assert len(blocks) == policy.kept and (blocks.diff() > 0).all() and blocks[0] == 0 and blocks[-1] == 63


def test_a_mean_loses_a_short_needle_and_a_bound_finds_it():
    """One token of 128 that the query is after, among blocks whose tokens are all a little like it."""
    D, S = 32, 64 * 128
    q, keys = randn(1, 1, 4, D).sign(), randn(1, 1, S, D, seed=1) * 0.2
    q[:, :, 1:] = q[:, :, :1]
    keys[0, 0] += 0.08 * torch.arange(64, device=DEVICE).repeat_interleave(128).remainder(5).unsqueeze(1) * q[0, 0, 0]
    needle = 20
    keys[0, 0, needle * 128 : needle * 128 + 128] -= 0.05 * q[0, 0, 0]
    keys[0, 0, needle * 128 + 77] = 2 * q[0, 0, 0]
    start, held = torch.tensor([S - 1], device=DEVICE), summaries(keys, [S], 128)
    assert needle in choose_blocks(q, 1, *held, start, block_bounds(8 * 128)).flatten().tolist()
    assert needle not in choose_blocks(q, 1, *held, start, block_means(8 * 128)).flatten().tolist()


def test_policies_that_contradict_themselves_are_named():
    for wrong, message in (
        (dict(selector="best", topk=1), "selector 'best'"),
        (dict(block=100), "block 100"),
        (dict(local=0), "0 local"),
        (dict(topk=3), "selector None"),
        (dict(selector="mean"), "0 distant"),
        (dict(sink=-1), "-1 sink"),
    ):
        with pytest.raises(UnsupportedInput, match=message):
            Policy("p", **wrong)
    with pytest.raises(UnsupportedInput, match="dense"):
        choose_blocks(randn(1, 1, 1, 8), 1, None, None, None, torch.zeros(1, dtype=torch.int64), dense())
    assert (page_bounds().kept, block_bounds().kept, sink_window().kept) == (256, 32, 32)


# Termination
# --------------------------------------------------------------------------------------------------


def test_probed_channels_are_32_different_ones():
    for D in (64, 80, 96, 128, 256):
        channels = probed_channels(D)
        assert channels.tolist() == sorted({(5 + 37 * i) % D for i in range(32)}) and len(channels) == 32
    assert probed_channels(16).tolist() == list(range(16))


@pytest.mark.parametrize("window", [None, 700])
@pytest.mark.parametrize(
    "rule",
    [
        dict(),
        dict(scale=False, phi=1e-6),
        dict(direction=False),
        dict(persistence=False),
        dict(patience=2),
        dict(tau=1e-9, phi=1e-6),
    ],
    ids=str,
)
def test_dense_termination_is_its_definition(rule, window):
    """Both heads stop at different tiles; the KV head reads as many as the slower one."""
    args = concentrated()
    made = Termination(tile=64, **rule)
    out, read = grouped_attention(*args, window, 1.0, made)
    tiles = {(0, 0, 0): newest_first(1000, 64, window)}
    wanted, count = terminated(*args, tiles, window, 1.0, made.tau, made.phi, made.wait, made.scale, made.direction)
    assert torch.equal(read, count) and read.dtype is torch.int32
    close(out, wanted)


def test_termination_reads_until_the_slowest_head_has_stopped():
    q, keys, values, start = concentrated()
    assert grouped_attention(q[:, :, :1], keys, values, start, None, 1.0, Termination(tile=64))[1].item() == 6
    both = grouped_attention(q, keys, values, start, None, 1.0, Termination(tile=64))[1].item()
    assert (
        both == grouped_attention(q[:, :, 1:], keys, values, start, None, 1.0, Termination(tile=64))[1].item()
        and 6 < both < 16
    )


def test_direction_and_scale_see_different_things():
    """Outputs that shrink keep their direction; tiny outputs that turn move by less than τ."""
    q, keys, values, start = concentrated(far=0)
    values[:] = values[:, :, :1] / (1 + torch.arange(1024, device=DEVICE).view(1, 1, -1, 1))
    run = lambda **rule: grouped_attention(q[:, :, 1:], keys, values, start, None, 1.0, Termination(tile=64, **rule))[
        1
    ].item()
    assert run(scale=False) == 6 and run() == 16
    values[:] = randn(1, 1, 1024, 32, seed=8) * 1e-7
    assert run(direction=False) == 6 and run(phi=1e-6) == 16


def test_termination_by_a_list_skips_what_is_absent():
    q, keys, values, start = concentrated()
    blocks = torch.tensor([0, -1, -1, 5, -1, 7, 6, 4, -1, 3, 1, 2], dtype=torch.int32, device=DEVICE).view(1, 1, 1, -1)
    rule = Termination(patience=2)
    out, read = gather_attention(q, keys, values, blocks, start, None, 1.0, 128, rule)
    listed = {(0, 0, 0): [list(range(128 * i, 128 * i + 128)) for i in blocks.flatten().tolist() if i >= 0]}
    wanted, count = terminated(q, keys, values, start, listed, None, 1.0, rule.tau, rule.phi, 2)
    assert torch.equal(read, count) and count.item() < 8
    close(out, wanted)


def test_stable_tiles_must_be_in_a_row():
    """Those that the second head does not see (below 4) between those that it does: stable, unstable, stable, …"""
    q, keys, values, start = concentrated()
    blocks = torch.tensor([0, 5, 3, 7, 2, 6, 1, 4], dtype=torch.int32, device=DEVICE).view(1, 1, 1, -1)
    run = lambda patience: gather_attention(
        q, keys, values, blocks, start, None, 1.0, 128, Termination(patience=patience)
    )[1].item()
    assert run(1) == 3 and run(2) == 8


def test_never_stopping_is_attention():
    args = (*cache(2, 2, 6, 2, 512, 16, [400, 77]), None, 0.3)
    for splits in (None, 1, 3):
        out, read = grouped_attention(*args, Termination(tau=0, tile=64, splits=splits))
        assert torch.equal(out, grouped_attention(*args)) and read[:, :, 0].tolist() == [[7, 7], [2, 2]]


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("block", [16, 128])
def test_never_stopping_over_kept_blocks_has_the_bits_of_the_same_list_without_a_rule(backend, block):
    q, keys, values, start = cache(2, 2, 6, 2, 1024, 16, [1000, 77])
    order = torch.randperm(1024 // block, generator=torch.Generator().manual_seed(1))
    blocks = order[:-1].int().expand(2, 2, 2, -1).clone()
    blocks[..., 1] = -1
    run = lambda listed, *rule: gather_attention(
        q, keys, values, listed, start, None, 0.3, block, *rule, backend=backend
    )
    for splits in (None, 3):
        out, read = run(blocks, Termination(tau=0, tile=64, splits=splits))
        assert torch.equal(out, run(blocks)) and int(read.max()) >= 10
    soon = run(blocks, Termination(tau=1e9, phi=2, patience=1, tile=64))  # what was left out is
    assert not torch.allclose(soon[0], out, atol=1e-2) and soon[1].max() == 2


def test_how_many_traversals_a_rule_has():
    """Its own number where that is said, else the implementation's, or fewer, so that each has tiles enough."""
    assert [Termination().dealt(own, 32) for own in (1, 32)] == [1, 32] and Termination(splits=3).dealt(32, 32) == 3
    assert [Termination(least=12).dealt(own, 32) for own in (1, 2, 32)] == [1, 2, 2] and Termination(least=12).dealt(
        4, 7
    ) == 1
    assert (Termination().useful, Termination(persistence=False).useful) == (7, 3)


def test_a_traversal_of_useful_tiles_leaves_one_out_and_a_shorter_one_none():
    """Of an output that never changes: each block has the same keys and values."""
    q, keys, values, start = cache(1, 1, 2, 1, 64 * 8, 16, [511])
    keys, values = (x[:, :, :64].repeat(1, 1, 8, 1) for x in (keys, values))
    for patience in (1, 2, 5):
        rule = Termination(tau=1e-3, phi=1e-3, patience=patience, tile=64)
        for tiles in (rule.useful - 1, rule.useful):
            blocks = torch.arange(tiles, dtype=torch.int32, device=DEVICE).view(1, 1, 1, -1)
            read = gather_attention(q, keys, values, blocks, start, None, 1.0, 64, rule)[1].item()
            assert read == rule.useful - 1, (patience, tiles)


def test_wrong_rules_are_named():
    for wrong, message in (
        (dict(tau=-1), "tau is -1"),
        (dict(phi=3), "phi is 3"),
        (dict(patience=0), "patience is 0"),
        (dict(tile=100), "tile is 100"),
        (dict(splits=0), "splits is 0"),
        (dict(least=0), "least is 0"),
        (dict(least=8, splits=2), "least is 8"),
        (dict(scale=False, direction=False), "neither"),
    ):
        with pytest.raises(UnsupportedInput, match=message):
            Termination(**wrong)
