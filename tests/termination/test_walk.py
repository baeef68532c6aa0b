"""Walks and stops against the implementation that a model runs, against a loop in fp64, and against the bound's own
derivation."""

import math

import pytest
import torch

from dsv4.kernels.block_choice import POLICIES, Observed, choose_blocks, choose_tokens, dense
from dsv4.kernels.block_summaries import summarise_blocks
from dsv4.kernels.gather_attention import gather_attention
from dsv4.kernels.grouped_attention import Termination, grouped_attention
from dsv4.probes.measure.termination import orders
from dsv4.probes.measure.termination.stops import at, bounds, figures, oracle_stops, probe_bounds, probe_stops
from dsv4.probes.measure.termination.walk import walk

H, KV, D, S, SCALE = 6, 2, 48, 512, 0.3
RULES = {
    "all": {},
    "no scale": {"scale": False},
    "no direction": {"direction": False},
    "no patience": {"persistence": False},
}


def randn(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def row():
    """Attention that is neither flat nor of one key; 5 queries at positions 495 … 499."""
    q, keys, values = randn(1, 5, H, D, seed=0), randn(1, KV, S, D, seed=1), randn(1, KV, S, D, seed=2)
    keys[:, :, 256:] *= 0.2
    return q, keys, values, torch.tensor([495])


def written_out(q, keys, values, places, position):
    """Outputs of one head after each tile, by the formula: fp64 [n, D], and the sums of exponentials."""
    out, sums, shown = [], [], []
    for tile in places:
        shown += [p for p in tile.tolist() if 0 <= p <= position]
        e = (SCALE * keys[shown].double() @ q.double()).exp()
        out.append((e / e.sum()) @ values[shown].double())
        sums.append(e.sum())
    return torch.stack(out), torch.stack(sums)


def test_a_walk_is_the_formula_tile_by_tile(row):
    q, keys, values, start = row
    found = orders.heads(*row, SCALE, dense(), 64)
    order = orders.places(q, keys, start, dense(), 64)
    for t, h in ((0, 0), (4, 5)):
        kv, position = h // (H // KV), 495 + t
        tiles = [tile for tile in order[t, kv] if (tile >= 0).any()]
        assert [int(tile[0]) // 64 for tile in tiles] == [0, 7, 6, 5, 4, 3, 2, 1]
        o, sums = written_out(q[0, t, h], keys[0, kv], values[0, kv], tiles, position)
        mine = lambda values: values[t * KV + kv, h % (H // KV)]
        assert torch.allclose(mine(found.left), (o - o[-1]).norm(dim=-1), atol=1e-12)
        assert torch.allclose(mine(found.changed)[1:], o.diff(dim=0).norm(dim=-1), atol=1e-12)
        assert torch.allclose(mine(found.mass) / mine(found.mass)[-1], sums / sums[-1], atol=1e-12)
        assert mine(found.size).item() == pytest.approx(o[-1].norm().item()) and found.tiles.tolist() == [8] * 10


def attended(row, policy, rule):
    """What a model runs: (out, tiles read)."""
    q, keys, values, start = row
    if policy.dense:
        return grouped_attention(*row, None, SCALE, rule)
    low, high, mean = (torch.zeros(1, KV, S // policy.block, D) for _ in range(3))
    summarise_blocks(keys, torch.zeros_like(start), int(start[0]) + 5, low, high, mean, policy.block)
    blocks = choose_blocks(q, KV, low, high, mean, start, policy, True)
    return gather_attention(q, keys, values, blocks, start, None, SCALE, policy.block, rule)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("policy", ["dense", "sink+window", "page-bound", "block-bound", "block-mean"])
def test_stops_are_those_that_the_model_makes(row, policy, name):
    """Tiles, their order and their number are those that `model.attention` runs."""
    policy = POLICIES[policy]() if policy == "dense" else POLICIES[policy](448, block=16)
    rule = Termination(tau=0.7, phi=0.12, patience=2, tile=64, **RULES[name])
    found = orders.heads(*row, SCALE, policy, 64)
    out, read = attended(row, policy, rule)
    stop = probe_stops(found, rule).amax(-1)
    assert torch.equal(stop.view(5, KV), read[0].long()) and 1 < stop.double().mean() < found.tiles.double().mean()
    full = attended(row, policy, Termination(tau=0, tile=64))[0]
    error = (out - full)[0].view(5 * KV, H // KV, D).norm(dim=-1)
    assert torch.allclose(at(found.left, stop.view(-1, 1).expand(-1, H // KV)).float(), error, atol=1e-5)


def test_the_bound_holds_and_is_the_sum_it_comes_from(row):
    """For every stop there could be, not only those that the rule makes."""
    found, rule = orders.heads(*row, SCALE, dense(), 64), Termination(tau=0.05)
    for stop in range(1, 9):
        where = torch.full(found.size.shape, stop)
        whole, steady = bounds(found, rule, where)
        assert (at(found.left, where) <= whole * (1 + 1e-12) + 1e-15).all()
        n, g = 3, 1
        l, c = found.mass[n, g], found.mass[n, g] * found.changed[n, g]
        drift = max([0.0] + [float(c[t - 1] - 0.05 * l[stop - 1]) for t in range(stop + 1, 9)])
        nu = min(float(l[t - 1]) / t for t in range(stop, 9))
        assert whole[n, g].item() == pytest.approx((0.05 * float(l[stop - 1]) + drift) / nu * math.log(8 / stop))
        assert steady[n, g].item() == pytest.approx(0.05 * stop * math.log(8 / stop))
    assert (
        at(found.left, torch.full_like(where, 4)) > bounds(found, Termination(tau=1e-9), torch.full_like(where, 4))[1]
    ).any()


def test_the_oracle_stops_where_the_output_is_the_final_one():
    """One key has it all, in the fourth tile of eight: the probe is fooled by the two before, the oracle is not."""
    logits, values = torch.full((1, 8, 64), -20.0), randn(8, 64, D, seed=5)
    logits[0, 0, 0], logits[0, 3, 0] = 0.0, 30.0
    found = walk(logits, values)
    eager = Termination(tau=1e-3, phi=1e-3, patience=2, tile=64)
    assert probe_stops(found, eager).tolist() == [[3]] and oracle_stops(found, eager).tolist() == [[4]]
    patient = Termination(tau=1e-3, phi=1e-3, patience=3, tile=64)
    assert probe_stops(found, patient).tolist() == [[7]] and oracle_stops(found, patient).tolist() == [[4]]
    f = figures(found, eager)
    assert (f["early"], f["agree"], f["late"], f["offset_median"]) == (1, 0, 0, -1) and f["skipped"] == pytest.approx(
        5 / 8
    )
    assert (
        f["error_max"] > 0.5
        and f["skipped_oracle"] == pytest.approx(4 / 8)
        and f["steady_broken"] == 1
        and f["bound_tight"] <= 1
    )
    f = figures(found, patient)
    assert (f["early"], f["agree"], f["late"], f["offset_median"]) == (0, 1, 0, 3) and f["error_max"] < 1e-9
    never = figures(found, Termination(tau=0, tile=64))
    assert never["skipped"] == 0 and never["bound_of"] == 0 and never["bound_tight"] is None and never["decided"] == 0


def test_a_group_reads_until_its_last_head_stops():
    """The first head has seen all after one tile, the second only at the end."""
    logits, values = torch.full((2, 8, 64), -20.0), randn(8, 64, D, seed=5)
    logits[0, 0, 0], logits[1] = 30.0, 0.0
    found, rule = walk(logits, values), Termination(tau=1e-3, phi=1e-3, patience=2, tile=64)
    assert probe_stops(found, rule).tolist() == [[3, 8]] and oracle_stops(found, rule).tolist() == [[1, 8]]
    f = figures(found, rule)
    assert f["skipped"] == 0 == f["skipped_oracle_shared"] and f["error_max"] == 0
    assert f["skipped_alone"] == pytest.approx(5 / 16) and f["skipped_oracle"] == pytest.approx(7 / 16)


def test_a_sink_is_there_from_the_beginning():
    logits, values = randn(2, 4, 8, seed=1), randn(4, 8, D, seed=2)
    sink = torch.tensor([3.0, -1.0])
    found = walk(logits, values, sink)
    for t in range(1, 5):
        e = logits[:, :t].flatten(1).double().exp()
        o = e @ values[:t].flatten(0, 1).double() / (e.sum(-1) + sink.double().exp()).unsqueeze(-1)
        if t == 4:
            assert torch.allclose(found.size[0], o.norm(dim=-1))
        else:
            assert torch.allclose(found.left[0, :, t - 1], (o - last(logits, values, sink)).norm(dim=-1), atol=1e-12)


def last(logits, values, sink):
    e = logits.flatten(1).double().exp()
    return e @ values.flatten(0, 1).double() / (e.sum(-1) + sink.double().exp()).unsqueeze(-1)


def naive(row, t, h, rule, places):
    """(stop by the probe, stop by the whole output, probe bound at the first, its steady form, ν) of query t and head h
    by loops over tiles, in fp64; the probe's channels are written out."""
    q, keys, values, _ = row
    kv, position, probe = h // (H // KV), 495 + t, sorted((5 + 37 * i) % D for i in range(32))
    tiles = [tile for tile in places[t, kv] if (tile >= 0).any()]
    o, _ = written_out(q[0, t, h], keys[0, kv], values[0, kv], tiles, position)

    def moves(of):
        return [(b - a).norm().item() for a, b in zip(of, of[1:])]

    def stop(of):
        streak = 0
        for n, (a, b) in enumerate(zip(of, of[1:]), 2):
            near = (b - a).norm() < rule.tau
            along = 1 - (a @ b) / (a.norm() * b.norm()) < rule.phi
            streak = streak + 1 if near and along else 0
            if streak == rule.patience:
                return n
        return len(of)

    at, T, x = stop(o[:, probe]), len(o), o[:, probe]
    b = at - rule.patience + 1
    after = list(zip(range(2, T + 1), moves(x), moves(o)))[at - 1 :]  # tiles at + 1 … T
    drift = max([0.0] + [n * m - rule.tau * b for n, m, _ in after])
    nu = min([m / whole for _, m, whole in after], default=1.0)
    log = math.log(T / at)
    return at, stop(o), (rule.tau * b + drift) / nu * log, rule.tau * b / nu * log, nu


@pytest.mark.parametrize(
    "tau, phi, early, late", [(0.2, 0.2, 12, 0), (9, 0.005, 0, 2)], ids=["by scale", "by direction"]
)
def test_the_oracle_by_the_whole_output_and_the_probes_bound_are_those_of_loops(row, tau, phi, early, late):
    stopping = Termination(tau=tau, phi=phi, patience=2, tile=64)
    q, keys, _, start = row
    found = orders.heads(*row, SCALE, dense(), 64)
    places = orders.places(q, keys, start, dense(), 64)
    stop, whole = probe_stops(found, stopping), probe_stops(found, stopping, whole=True)
    bound, steady, nu, drift = probe_bounds(found, stopping, stop)
    for t in range(5):
        for h in range(H):
            mine = t * KV + h // (H // KV), h % (H // KV)
            at_, of, most, level, constant = naive(row, t, h, stopping, places)
            assert (stop[mine].item(), whole[mine].item()) == (at_, of)
            assert steady[mine].item() == pytest.approx(level) and bound[mine].item() == pytest.approx(most)
            assert nu[mine].item() == pytest.approx(constant) and (drift[mine] > 0) == (most > level * (1 + 1e-9))
    assert ((stop < whole).sum(), (stop > whole).sum()) == (early, late) and (stop < 8).any() and (whole < 8).any()
    assert (at(found.left, stop) <= bound * (1 + 1e-12)).all() and (nu[stop < 8] < 1).all()
    f = figures(found, stopping)
    decided = (stop < 8) | (whole < 8)
    offset = (stop - whole)[decided]
    shares = [(offset == 0).double().mean(), (offset < 0).double().mean(), (offset > 0).double().mean()]
    assert [f["whole"][k] for k in ("agree", "early", "late")] == pytest.approx([s.item() for s in shares])
    assert f["whole"]["decided"] == decided.double().mean().item()
    assert f["whole"]["offset_median"] == offset.double().quantile(0.5).item()
    assert f["whole"]["skipped"] == pytest.approx(1 - whole.sum().item() / 240)
    stops = stop < 8
    assert f["by_probe"]["bound_tight"] == pytest.approx((at(found.left, stop)[stops] / bound[stops]).max().item())
    assert f["by_probe"]["drifting"] == (drift[stops] > 0).double().mean().item()
    assert f["by_probe"]["steady_broken"] == (at(found.left, stop) > steady)[stops].double().mean().item()


@pytest.mark.parametrize("seed", range(6))
def test_the_probes_bound_holds_at_every_stop(seed):
    """Random, growing, fading and spiking tiles; for every stop there could be. The steady bound does not hold."""
    grow = [0.0, 0.3, -0.3, 0.0, 1.0, 0.1][seed]
    logits, values = randn(3, 24, 64, seed=seed) + grow * torch.arange(24).view(24, 1), randn(24, 64, D, seed=9 + seed)
    if seed == 3:
        logits[:, 20] += 6
    found, rule, broken = walk(logits, values), Termination(tau=1e-3, patience=3), 0
    for stop in range(4, 25):
        where = torch.full(found.size.shape, stop)
        bound, steady, nu, _ = probe_bounds(found, rule, where)
        assert (at(found.left, where) <= bound * (1 + 1e-12) + 1e-15).all() and (nu > 0).all()
        broken += int((at(found.left, where) > steady * (1 + 1e-12)).sum())
    assert broken > 0


def test_tiles_alike_have_no_drift():
    """Where every tile brings the same weight and a value that alternates evenly, t·‖Δ‖ is level: the steady bound is
    the bound."""
    values = randn(1, 1, D, seed=3).expand(16, 64, D) + torch.where(torch.arange(16) % 2 == 0, 1.0, -1.0).view(16, 1, 1)
    found = walk(torch.zeros(1, 16, 64), values)
    rule = Termination(tau=float(found.moved[0, 0, 1:].max()), phi=2, patience=2)
    stop = probe_stops(found, rule)
    bound, steady, _, drift = probe_bounds(found, rule, stop)
    assert stop.item() < 16 and drift.item() == 0 and bound.item() == steady.item() >= at(found.left, stop).item()


def test_few_channels_are_all_probed():
    """With 32 channels and less the probe is the whole output: ν is 1, and no stop is early or late."""
    found = walk(randn(4, 12, 64, seed=1), randn(12, 64, 32, seed=2))
    rule = Termination(tau=0.15, phi=1, patience=2)
    f = figures(found, rule)
    assert f["whole"]["agree"] == 1 and f["by_probe"]["nu_least"] == pytest.approx(1) and 0 < f["skipped_alone"] < 1


def test_stops_under_a_choice_made_after_the_prompt(row):
    """The walk reads the model's list: the newest token first back to the window's first, then by falling score."""
    q, keys, _, start = row
    policy, rule = Observed("snap", retention=0.6, window=32), Termination(tau=0.7, phi=0.2, patience=2, tile=64)
    best, since = choose_tokens(randn(32, H, D, seed=7), keys[0, :, :495], SCALE, policy, 0, 1)
    found = orders.heads(*row, SCALE, policy, 64, (best, since))
    listed = torch.full((1, 5, KV, 320), -1, dtype=torch.int32)
    for t in range(5):
        order = torch.cat((torch.arange(495 + t, since - 1, -1).expand(KV, -1), best), 1)
        listed[0, t, :, : order.shape[1]] = order
    out, read = gather_attention(*row[:3], listed, start, None, SCALE, 1, rule)
    stop = probe_stops(found, rule).amax(-1)
    assert torch.equal(stop.view(5, KV), read[0].long()) and found.tiles.tolist() == [5] * 10 and (stop < 5).any()
    full, _ = gather_attention(*row[:3], listed, start, None, SCALE, 1, Termination(tau=0, tile=64))
    error = (out - full)[0].view(5 * KV, H // KV, D).norm(dim=-1)
    assert torch.allclose(at(found.left, stop.view(-1, 1).expand(-1, H // KV)).float(), error, atol=1e-5)


def test_walks_of_several_queries_are_those_of_each(row, monkeypatch):
    """At once, or one at a time, as memory allows; also where queries have different numbers of tiles. On another
    device nothing is left on it."""
    q, keys, values, start = row
    start = torch.tensor([126])  # queries before and behind a tile's end
    for policy in (dense(), POLICIES["sink+window"](128, block=16)):
        together = orders.heads(q, keys, values, start, SCALE, policy, 64)
        monkeypatch.setattr(orders, "AT_ONCE", (1, 1))
        alone = orders.heads(q, keys, values, start, SCALE, policy, 64)
        monkeypatch.undo()
        for name in ("tiles", "moved", "turned", "changed", "veered", "left", "astray", "mass", "size"):
            a, b = getattr(together, name), getattr(alone, name)
            assert a.shape == b.shape and torch.allclose(a, b, rtol=1e-12, atol=1e-14), name
        assert together.tiles.tolist() == [2, 2] * 2 + [3, 3] * 3 if policy.dense else together.tiles.max() == 2
        one = orders.heads(q[:, :1], keys, values, start, SCALE, policy, 64)
        assert torch.allclose(one.moved, together.moved[:KV, :, : one.moved.shape[-1]], rtol=1e-12)
        # beyond its last tile a query repeats it, as one by itself does when walks are joined
        short = together.tiles < together.tiles.max()
        assert torch.equal(together.moved[short][..., -1], together.moved[short][..., -2])
