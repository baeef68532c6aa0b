"""Arguments that cannot be run: a typed error of one line, and neither lengths nor bytes of the cache change."""

import re

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from dsv4 import load_model
from dsv4.errors import Dsv4Error, InputError, RewindError
from dsv4.runtime.graph import DecodeGraph
from tests.engine.conftest import paged
from tests.gqa import oracle

CONTEXT = 24


@pytest.fixture(scope="module")
def ours(official):
    return load_model(official, numerics="fp32", backend="cpu")


@pytest.fixture(scope="module")
def grouped(tmp_path_factory):
    config = oracle.CONFIGS["qwen2, bias and tied head"]
    return load_model(oracle.save(oracle.randomised(config), config, tmp_path_factory.mktemp("g")), numerics="fp32")


def state(cache) -> tuple:
    """Lengths, and every byte."""
    layers = cache.layers + getattr(cache, "mtp_layers", [])
    held = [t.contiguous().view(torch.uint8).clone() for layer in layers for t in layer.tensors.values()]
    return cache.lengths, list(cache._main.high), getattr(cache, "mtp_lengths", None), held


def unchanged(before: tuple, cache) -> bool:
    now = state(cache)
    return now[:3] == before[:3] and all(map(torch.equal, now[3], before[3]))


def refused(act, *caches, error=InputError) -> str:
    """The message with which `act` is refused, of one line; `caches` are as they were."""
    before = [state(cache) for cache in caches]
    with pytest.raises(error) as raised:
        act()
    assert all(map(unchanged, before, caches)) and len(str(raised.value).splitlines()) == 1
    return str(raised.value)


@pytest.fixture(scope="module")
def filled(ours):
    """A cache of two rows that hold 8 tokens and their MTP entries, and the streams."""
    cache = ours.new_cache(2, CONTEXT, 4)
    ids = torch.arange(16).view(2, 8)
    _, streams = ours.append(ids, cache, return_streams=True)
    ours.mtp_logits(streams[:, :7], ids[:, 1:], cache)
    return cache, streams


IDS = torch.zeros(2, 2, dtype=torch.int64)
BAD_APPENDS = {
    "a list": (dict(ids=[[1, 2], [3, 4]]), "ids are list"),
    "a numpy array": (dict(ids=np.zeros((2, 2), np.int64)), "ids are ndarray"),
    "int32": (dict(ids=IDS.int()), "ids are torch.int32"),
    "one extent": (dict(ids=IDS[0]), "expected a tensor int64"),
    "nothing": (dict(ids=None), "ids are NoneType"),
    "rows of another batch": (dict(ids=IDS[:1]), "ids have 1 rows, the cache 2"),
    "an id beyond the vocabulary": (dict(ids=IDS + 10**6), "outside the vocabulary"),
    "parts of tokens": (dict(n_new=[1.7, 1]), r"n_new is \[1.7, 1\]"),
    "a count for both rows": (dict(n_new=2), "n_new is int 2"),
    "counts in a tensor": (dict(n_new=torch.tensor([1, 1])), "n_new is torch.int64"),
    "true counts": (dict(n_new=[True, 1]), "expected 2 counts"),
    "too many tokens": (dict(n_new=[3, 1]), "expected 2 counts of 0 … 2"),
    "a negative chunk": (dict(chunk=-3), "chunk is int -3"),
    "a chunk of nothing": (dict(chunk=0), "chunk is int 0"),
    "half a chunk": (dict(chunk=1.5), "chunk is float 1.5"),
    "logits of the first": (dict(logits="first"), "expected 'all', 'last' or 'none'"),
    "logits in a list": (dict(logits=["all"]), "expected 'all', 'last' or 'none'"),
}
BAD_DRAFTS = {name: case for name, case in BAD_APPENDS.items() if name != "rows of another batch"} | {
    "a negative block": (dict(block=-1), "MTP block int -1 was asked for; this model was loaded with 1"),
    "a block too many": (dict(block=1), "MTP block int 1"),
    "half a block": (dict(block=0.0), "MTP block float"),
    "streams in fp64": (dict(streams=lambda s: s.double()), "streams are torch.float64"),
    "streams of one token": (dict(streams=lambda s: s[:, :1]), "streams are torch.float32"),
    "streams of one residual": (dict(streams=lambda s: s[:, :, 0]), "streams are torch.float32"),
    "streams as a list": (dict(streams=lambda s: s.tolist()), "streams are list"),
    "no streams": (dict(streams=lambda s: None), "streams are NoneType"),
}


@pytest.mark.parametrize("change,match", BAD_APPENDS.values(), ids=BAD_APPENDS)
def test_appends_that_cannot_be_run(ours, grouped, filled, change, match):
    for model, cache in ((ours, filled[0]), (grouped, grouped.new_cache(2, CONTEXT))):
        assert re.search(match, refused(lambda m=model, c=cache: m.append(**(dict(ids=IDS, cache=c) | change)), cache))


@pytest.mark.parametrize("change,match", BAD_DRAFTS.values(), ids=BAD_DRAFTS)
def test_drafts_that_cannot_be_run(ours, filled, change, match):
    cache, streams = filled
    given = dict(streams=streams[:, :2], next_ids=IDS, cache=cache) | change
    if "ids" in given:
        given["next_ids"] = given.pop("ids")
    if callable(given["streams"]):
        given["streams"] = given["streams"](streams[:, :2])
    assert re.search(match, refused(lambda: ours.mtp_logits(**given), cache))


def test_one_row_on_a_cache_of_two_and_two_on_one(ours, filled):
    cache, streams = filled
    assert "ids have 1 rows, the cache 2" in refused(lambda: ours.mtp_logits(streams[:1, :2], IDS[:1], cache), cache)
    one = ours.new_cache(1, CONTEXT)
    assert "ids have 2 rows, the cache 1" in refused(lambda: ours.mtp_logits(streams[:, :2], IDS, one), one)
    assert "outside the vocabulary" in refused(lambda: ours.mtp_logits(streams[:, :2], IDS - 1, cache), cache)


@pytest.mark.parametrize(
    "n", [[1.5, 0], [torch.tensor(1), 0], torch.tensor([1, 1]), "12", [True, 0], None, [1], 2.0, [0, -1], -1, {}]
)
def test_rewinds_that_are_no_counts(filled, grouped, n):
    cache, other = filled[0], grouped.new_cache(2, CONTEXT)
    for act in (cache.rewind, cache.rewind_mtp):
        refused(lambda act=act: act(n), cache, error=RewindError)
    grouped.append(IDS, other)
    refused(lambda: other.rewind(n), other, error=RewindError)
    cache.rewind(np.int64(0))  # whole numbers of numpy are counts
    cache.rewind(np.array([0, 0]))


def test_caches_of_others(ours, grouped, filled, official):
    cache, streams = filled
    for model, other, what in ((ours, grouped.new_cache(2, CONTEXT), "config"), (grouped, cache, "config")):
        assert f"made for another model: its {what} is" in refused(lambda m=model, c=other: m.append(IDS, c), other)
        refused(lambda m=model, c=other: DecodeGraph(m, c), other)
    packed = load_model(official, numerics="qat", backend="cpu", cache="fp8", index_cache="fp4")
    assert "its formats is" in refused(lambda: packed.append(IDS, cache), cache)
    assert "its mtp is" in refused(
        lambda: load_model(official, numerics="fp32", backend="cpu", mtp=False).append(IDS, cache), cache
    )
    assert "its config is" in refused(lambda: ours.mtp_logits(streams[:, :2], IDS, grouped.new_cache(2, 24)))
    for nothing in (None, [], "cache", torch.zeros(2)):
        assert "expected what the model's new_cache gives" in refused(lambda c=nothing: ours.append(IDS, c))
    elsewhere = ours.new_cache(2, CONTEXT)
    elsewhere.made_for = elsewhere.made_for._replace(devices=(torch.device("meta"),))
    assert "its devices is" in refused(lambda: ours.append(IDS, elsewhere), elsewhere)


@pytest.mark.parametrize("name", ["batch", "max_context", "max_rewind"])
@pytest.mark.parametrize("value", [-1, 1.5, "8", None, True])
def test_sizes_of_caches(ours, grouped, name, value):
    if (name, value) == ("max_context", None):
        return  # the model's own
    sizes = dict(batch=1, max_context=16, max_rewind=0) | {name: value}
    for make in (ours.new_cache, grouped.new_cache, lambda **how: paged(ours, **how)):
        assert f"{name} of a cache is" in refused(lambda make=make: make(**sizes))


ANYTHING = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 3), st.floats(), st.text(max_size=3), st.lists(st.integers(-2, 3))
)


@settings(max_examples=40, deadline=None, derandomize=True, database=None, phases=[Phase.generate])
@given(n_new=ANYTHING, chunk=ANYTHING, block=ANYTHING, logits=ANYTHING, rewind=ANYTHING)
def test_whatever_is_given_is_refused_with_one_line_or_run(ours, filled, n_new, chunk, block, logits, rewind):
    cache, streams = filled
    given = dict(n_new=n_new, chunk=chunk, logits=logits)
    for act in (
        lambda: cache.rewind(rewind),
        lambda: cache.rewind_mtp(rewind),
        lambda: ours.append(IDS, cache, **given),
        lambda: ours.mtp_logits(streams[:, :2], IDS, cache, block=block, **given),
    ):
        before = state(cache)
        try:
            act()
        except Dsv4Error as error:
            assert len(str(error).splitlines()) == 1 and unchanged(before, cache)
