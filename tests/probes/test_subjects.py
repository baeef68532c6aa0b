"""Two implementations, seen through one interface, are the same numbers at every point; a fault shows where it is."""

from contextlib import contextmanager

import pytest
import torch

from dsv4.cache.rows import Entries, Tokens
from dsv4.probes.subject import POINTS
from dsv4.probes.subjects.ours import IN_ATTENTION, OurSubject
from dsv4.probes.subjects.transformers import TransformersSubject
from tests import oracle

TOLERANCE = 2e-4  # of the largest value of a tensor
T = 140  # tokens: one HCA entry, 35 CSA entries of which 8 are selected, longer than the ring takes in place
CONFIG = oracle.CONFIGS["Flash-like start"]  # window, window, CSA, HCA, CSA, window
CSA, HCA = 2, 3
ALL = tuple(POINTS)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    model = oracle.randomised(CONFIG)
    return model, oracle.save_in_memory_names(model, CONFIG, tmp_path_factory.mktemp("subjects") / "tiny")


@pytest.fixture(scope="module")
def ours(checkpoint):
    return OurSubject(checkpoint[1])


@pytest.fixture(scope="module")
def theirs(checkpoint):
    return TransformersSubject(checkpoint[0])


@pytest.fixture(scope="module")
def ids():
    return torch.randint(0, CONFIG["vocab_size"], (2, T), generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def expected(theirs, ids):
    return theirs.run(ids, want=ALL)


def differs(point: str, a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return True
    if point == "selection":
        return not torch.equal(a.sort(-1).values, b.sort(-1).values)
    real = torch.isfinite(b)
    if not torch.equal(real, torch.isfinite(a)) or not torch.equal(a.isnan(), b.isnan()):
        return True
    return bool(real.any()) and bool((a - b)[real].abs().max() > TOLERANCE * b[real].abs().max())


def differences(a, b) -> list:
    """(layer, point) where two captures differ, by layer, then by the order of POINTS; what only one has differs."""
    keys = sorted(a.points.keys() | b.points.keys(), key=lambda k: (k[0], ALL.index(k[1])))
    return [k for k in keys if k not in a.points or k not in b.points or differs(k[1], a.points[k], b.points[k])]


def assert_same(a, b):
    assert differences(a, b) == []
    if a.logits is not None and b.logits is not None:
        assert not differs("logits", a.logits, b.logits)


# ---- the same numbers --------------------------------------------------------------------


def test_both_have_every_point_of_every_layer_and_they_agree(ours, ids, expected):
    got = ours.run(ids, want=ALL)
    csa, compressed = {2, 4}, {2, 3, 4}
    layers = {"compressed_kv": compressed, "index_keys": csa, "index_scores": csa, "selection": csa}
    assert got.points.keys() == {(i, p) for p in POINTS for i in layers.get(p, range(6))}
    H, D, S, d = (CONFIG[n] for n in ("num_attention_heads", "head_dim", "hc_mult", "hidden_size"))
    k, Di = CONFIG["index_topk"], CONFIG["index_head_dim"]
    shapes = {
        "attn_in": (2, T, d),
        "q_after_rope": (2, T, H, D),
        "kv_window": (2, T, D),
        "compressed_kv": (2, T // 4, D),
        "index_keys": (2, T // 4, Di),
        "index_scores": (2, T, T // 4),
        "selection": (2, T, k),
        "attn_out": (2, T, d),
        "ffn_out": (2, T, d),
        "streams": (2, T, S, d),
    }
    assert {p: tuple(got.points[CSA, p].shape) for p in POINTS} == shapes
    assert got.points[HCA, "compressed_kv"].shape == (2, 1, D)
    for (_, point), value in got.points.items():
        assert value.device.type == "cpu" and value.dtype is (torch.int64 if point == "selection" else torch.float32)
        assert not value.isnan().any() and not value.is_inference()
    assert_same(got, expected)


def test_invisible_entries_have_no_score_and_are_not_selected(expected):
    visible = torch.arange(T // 4) < ((torch.arange(T) + 1) // 4).unsqueeze(1)
    assert torch.equal(torch.isfinite(expected.points[CSA, "index_scores"]), visible.expand(2, -1, -1))
    picks = expected.points[CSA, "selection"]
    assert torch.equal((picks >= 0).sum(-1), visible.sum(-1).clamp(max=8).expand(2, -1))


@pytest.mark.parametrize(
    "schedule",
    [(50, 40, 50), (1,) * T, (40, 60, -30, 20, 50), (90, -90, 2, 138), (133, -5, *(1,) * 12), (135, 5, -139, 139)],
    ids=["chunks", "tokens", "rewind", "to zero", "draft", "far back"],
)
def test_ours_is_the_same_however_it_is_cut(ours, ids, expected, schedule):
    assert_same(ours.run(ids, schedule, ALL), expected)


@pytest.mark.parametrize("schedule", [(50, 40, 50), (90, 1, 1, 1, 47)], ids=["chunks", "with decode"])
def test_theirs_is_the_same_however_it_is_cut(theirs, ids, expected, schedule):
    assert_same(theirs.run(ids, schedule, ALL), expected)


def test_one_step_is_one_step_and_longer_than_the_ring(ours, theirs):
    """300 tokens: the ring keeps the last 144 of them, `append` would cut them at 256, HCA has a second entry."""
    long, seen = torch.randint(0, CONFIG["vocab_size"], (1, 300), generator=torch.Generator().manual_seed(4)), []
    handle = ours.model.layers[0].register_forward_pre_hook(lambda module, args: seen.append(args[1].T))
    try:
        got = ours.run(long, want=ALL)
    finally:
        handle.remove()
    assert seen == [300] and not got.points[0, "kv_window"].isnan().any()
    assert_same(got, theirs.run(long, want=ALL))


def test_fewer_tokens_than_a_window_of_entries(ours, theirs, ids):
    a, b = (subject.run(ids[:, :3], (2, 1), ALL) for subject in (ours, theirs))
    assert a.points[CSA, "index_scores"].shape == a.points[CSA, "selection"].shape == (2, 3, 0)
    assert_same(a, b)


def test_rows_of_different_lengths(ours, ids, expected):
    ragged = ids.clone()
    ragged[0, 77:] = -1
    got = ours.run(ragged, (60, 50, -10, 40), ALL)
    alone = ours.run(ids[:1, :77], want=ALL)
    for (i, point), value in got.points.items():
        n = alone.points[i, point].shape[1]
        assert not differs(point, value[1:], expected.points[i, point][1:]), (i, point)
        mine = value[:1, :n, : alone.points[i, point].shape[-1]] if point == "index_scores" else value[:1, :n]
        assert not differs(point, mine, alone.points[i, point]), (i, point)
        beyond = value[0, n:]
        assert (beyond == -1).all() if point == "selection" else (~beyond.isfinite()).all(), (i, point)
    assert got.logits[0, 77:].isnan().all() and not got.logits[0, :77].isnan().any()


@pytest.mark.parametrize("layer", [0, CSA, HCA])
def test_attention_alone(ours, theirs, ids, layer):
    x = torch.randn(2, T, CONFIG["hidden_size"], generator=torch.Generator().manual_seed(layer))
    a = ours.attention(layer, x, ids, (60, 50, -20, 50), IN_ATTENTION)
    assert {i for i, _ in a.points} == {layer} and torch.equal(a.points[layer, "attn_in"], x)
    assert_same(a, theirs.attention(layer, x, ids, (100, 1, 39), IN_ATTENTION))
    assert (
        list(ours.attention(layer, x, ids).points)
        == list(theirs.attention(layer, x, ids).points)
        == [(layer, "attn_out")]
    )


def test_attention_alone_is_the_layer_s(ours, ids):
    whole = ours.run(ids, want=ALL)
    alone = ours.attention(CSA, whole.points[CSA, "attn_in"], ids, want=IN_ATTENTION)
    assert all(torch.equal(value, whole.points[key]) for key, value in alone.points.items())


# ---- a fault shows where it is -----------------------------------------------------------


@contextmanager
def planted(module, leaf, value):
    """A parameter of the model scaled, or an attribute replaced, for a while."""
    before = getattr(module, leaf)
    kept = before.data if isinstance(before, torch.Tensor) else None
    try:
        if kept is None:
            setattr(module, leaf, value)
        else:
            before.data = kept * value
        yield
    finally:
        if kept is None:
            setattr(module, leaf, before)
        else:
            before.data = kept


FAULTS = {  # what is wrong → (layer and point where it must show first, module of ours, attribute, factor or value)
    "input norm": (CSA, "attn_in", "attn_norm", "weight", 1.1),
    "swapped theta of a window layer": (1, "q_after_rope", "attn", "base", "compress"),
    "swapped theta of a compressed layer": (HCA, "q_after_rope", "attn", "base", "main"),
    "kv norm": (0, "kv_window", "attn.kv_norm", "weight", 1.1),
    "CSA position bias": (CSA, "compressed_kv", "attn.compressor", "ape", 0),
    "HCA position bias": (HCA, "compressed_kv", "attn.compressor", "ape", 0),
    "theta of entries": (CSA, "compressed_kv", "attn.compressor", "base", "main"),
    "indexer position bias": (CSA, "index_keys", "attn.indexer.compressor", "ape", 0),
    "score temperature": (4, "index_scores", "attn.indexer", "scale", 1.0),
    "fewer picks": (4, "selection", "attn.indexer", "topk", 7),
    "sinks": (HCA, "attn_out", "attn", "attn_sink", 0),
    "shared expert": (1, "ffn_out", "ffn.shared_experts.w2", "weight", 1.1),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_difference_shows_first_where_it_is(ours, ids, expected, fault):
    layer, point, module, leaf, value = FAULTS[fault]
    with planted(ours.model.layers[layer].get_submodule(module), leaf, value):
        assert differences(ours.run(ids, want=ALL), expected)[0] == (layer, point)


def test_a_wrong_block_shows_in_the_streams(ours, ids, expected):
    handle = ours.model.layers[HCA].register_forward_hook(lambda module, args, out: out * 1.01)
    try:
        assert differences(ours.run(ids, want=ALL), expected)[0] == (HCA, "streams")
    finally:
        handle.remove()


@pytest.mark.parametrize("schedule", [(), (60, 80), (1,) * T], ids=["one step", "in place", "tokens"])
def test_a_ring_that_loses_a_row_is_seen(ours, ids, expected, monkeypatch, schedule):
    """kv_window is what the cache holds, not what it was given."""
    real = Tokens.extend

    def forgetful(ring, step, values):
        pool = real(ring, step, values)
        ring.flat[10] = 0
        return pool

    monkeypatch.setattr(Tokens, "extend", forgetful)
    assert differences(ours.run(ids, schedule, ALL), expected)[0] == (0, "kv_window")


def test_an_entry_that_is_not_written_is_seen(ours, ids, expected, monkeypatch):
    monkeypatch.setattr(Entries, "write", lambda entries, step, values: None)
    assert differences(ours.run(ids, want=ALL), expected)[0] == (CSA, "compressed_kv")
