"""Caches: sized by context and ratio, allocated once, exactly as planned."""

import resource
from dataclasses import replace

import pytest
import torch

from dsv4 import load_model
from dsv4.cache.cache import Cache
from dsv4.cache.layer import linked
from dsv4.cache.layout import LatentLayout
from dsv4.cache.sequence import layer_of
from dsv4.cache.streams import CHAINED, cache_streams, layer_streams
from dsv4.errors import ContextOverrun, InputError
from dsv4.loaders.expected import preset
from dsv4.model.config import ModelConfig
from dsv4.model.numerics import NUMERICS
from dsv4.model.spec import LayerKind
from dsv4.runtime.memory import cache_rows
from dsv4.units import format_bytes, parse_count


def resident() -> int:
    """Bytes of this process in memory."""
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * resource.getpagesize()


@pytest.mark.parametrize("name,per_token", [("flash", 6880), ("pro", 9848)])
def test_plan_at_1m_is_what_is_allocated_to_the_byte(name, per_token):
    config = ModelConfig.from_official(preset(name))
    context, native = 1 << 20, NUMERICS["native"]
    rows = cache_rows(config, 1, context, 128, native, mtp=True)
    n = len(config.compress_ratios) + 1
    before = resident()
    cache = Cache(LatentLayout(config, native, True), 1, context, 128, [torch.device("cpu")] * n)
    assert sum(r.nbytes for r in rows) == cache.nbytes
    assert resident() - before < cache.nbytes / 3  # allocated, but not written yet: a laptop can plan for 1M
    # the growth per token, from the widths alone: 21 CSA layers × (512 + 128) × 2 B / 4 + 20 HCA layers × 512 × 2 B /
    # 128
    csa, hca = config.compress_ratios.count(4), config.compress_ratios.count(128)
    assert csa * (512 + 128) * 2 // 4 + hca * 512 * 2 // 128 == per_token
    linear = sum(r.nbytes for r in rows if "entries" in r.name or "keys" in r.name)
    assert linear == per_token * context


def test_each_stream_has_its_own_width():
    config = ModelConfig.from_official(preset("flash"))
    for layer in cache_streams(config, 3, 4099, 16, NUMERICS["native"], mtp=True):
        shapes = {s.name: s.shape for s in layer.streams}
        assert shapes["window"] == (3, 128 + 16 + (CHAINED if layer.label == "mtp 0" else 0), 512)
        if layer.kind is LayerKind.WINDOW:
            assert set(shapes) == {"window"}
        elif layer.kind is LayerKind.HCA:
            assert shapes["entries"] == (3, 33, 512) and "index keys" not in shapes
            assert shapes["main raw rows"] == (3, 128 + 16, 2 * 512)
        else:
            assert shapes["entries"] == (3, 1025, 512) and shapes["index keys"] == (3, 1025, 128)
            assert shapes["main raw rows"] == (3, 8 + 16, 2 * 1024) and shapes["index raw rows"] == (3, 8 + 16, 2 * 256)


def test_formulas_evaluate_to_the_numbers():
    import math
    import re

    config = ModelConfig.from_official(preset("pro"))
    for row in cache_rows(config, 2, 100_003, 7, NUMERICS["fp32"], mtp=True):
        text = re.sub(r"⌈(\d+) / (\d+)⌉", lambda m: str(math.ceil(int(m[1]) / int(m[2]))), row.formula)
        text = re.sub(r"[a-zA-Z]+", "", text).replace("×", "*")
        assert eval(text) == row.nbytes, row.formula


def test_nothing_is_allocated_that_grows_with_the_context(official):
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        size = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            fresh = {
                "empty",
                "zeros",
                "new_zeros",
                "new_empty",
                "clone",
                "cat",
                "index_select",
                "mm",
                "bmm",
                "add",
                "mul",
            }
            if isinstance(out, torch.Tensor) and func.__name__.split(".")[0] in fresh:
                Largest.size = max(Largest.size, out.numel())
            return out

    model = load_model(official, numerics="fp32", backend="reference")
    sizes = {}
    for context in (512, 4096):
        cache = model.new_cache(1, context)
        model.append(torch.zeros(1, 64, dtype=torch.int64), cache)
        Largest.size = 0
        with Largest():
            model.append(torch.zeros(1, 1, dtype=torch.int64), cache)
        sizes[context] = Largest.size
    assert sizes[512] == sizes[4096] > 0


def test_buffers_are_never_replaced(official):
    model = load_model(official, numerics="fp32")
    cache = model.new_cache(2, 300)
    before = [t.data_ptr() for layer in cache.layers for t in layer.tensors.values()]
    model.append(torch.zeros(2, 200, dtype=torch.int64), cache, chunk=33)
    cache.rewind(5)
    model.append(torch.zeros(2, 50, dtype=torch.int64), cache)
    assert before == [t.data_ptr() for layer in cache.layers for t in layer.tensors.values()]


def test_a_context_beyond_the_checkpoint_s_is_an_error_not_a_clamp(official):
    model = load_model(official)
    with pytest.raises(InputError, match="max_context 4097 exceeds the checkpoint's max_position_embeddings 4096"):
        model.new_cache(1, 4097)


def test_overrun_is_an_error_and_changes_nothing(official):
    model = load_model(official)
    cache = model.new_cache(2, 10)
    model.append(torch.zeros(2, 8, dtype=torch.int64), cache)
    with pytest.raises(
        ContextOverrun, match="row 0 holds 8 tokens and would get 3 more, over the cache's max_context of 10"
    ):
        model.append(torch.zeros(2, 3, dtype=torch.int64), cache)
    assert cache.lengths == [8, 8]
    model.append(torch.zeros(2, 2, dtype=torch.int64), cache)


@pytest.mark.parametrize(
    "ids,match",
    [
        (torch.tensor([[320]]), "token id 320 is outside the vocabulary of 320"),
        (torch.tensor([[-1]]), "token id -1"),
        (torch.zeros(1, 0, dtype=torch.int64), "no token to append"),
        (torch.zeros(1, 2), "expected a tensor int64"),
        (torch.zeros(2, 2, dtype=torch.int64), "ids have 2 rows, the cache 1"),
    ],
    ids=["too large", "negative", "empty", "floats", "wrong batch"],
)
def test_bad_ids_are_named(official, ids, match):
    model = load_model(official)
    with pytest.raises(InputError, match=match):
        model.append(ids, model.new_cache(1, 10))


def test_a_csa_layer_without_a_selection_raises(official):
    from dsv4.errors import MissingSelection

    model = load_model(official)
    model.layers[1].attn.indexer.forward = lambda *a: None
    with pytest.raises(MissingSelection):
        model.append(torch.zeros(1, 9, dtype=torch.int64), model.new_cache(1, 10))


def test_paths_say_what_each_layer_read(official):
    model = load_model(official)
    model.append(torch.zeros(1, 140, dtype=torch.int64), model.new_cache(1, 140))
    rows = model.layer_paths()
    assert [r["kind"] for r in rows] == ["window", "csa", "hca", "csa", "hca", "window"]
    assert [r["experts"] for r in rows] == ["hash", "hash", "scored", "scored", "scored", "scored"]
    assert rows[1]["path"] == "window of 8 + 6 of 35 visible entries"
    assert rows[2]["path"] == "window of 8 + all 1 visible entries"
    assert rows[-1]["path"] == "not run yet"


@pytest.mark.parametrize(
    "text,value", [("4096", 4096), ("128K", 131072), ("1M", 1048576), ("2GiB", 2 << 30), ("70gb", 70 << 30)]
)
def test_sizes_parse(text, value):
    assert parse_count(text) == value


@pytest.mark.parametrize("text", ["", "K", "1.5M", "ten", "-3"])
def test_sizes_that_do_not_parse(text):
    with pytest.raises(InputError, match="is not a size"):
        parse_count(text)


def test_bytes_are_printed_with_units():
    assert [format_bytes(n) for n in (5, 2048, 3 << 20, 5 << 30, 2 << 40)] == [
        "5 B",
        "2.00 KiB",
        "3.00 MiB",
        "5.00 GiB",
        "2.00 TiB",
    ]


def test_a_layer_reads_the_entries_of_the_layer_that_its_spec_names():
    """Ownership is by source: one layer compresses, another reads what it made, and has no stream of its own."""
    config = ModelConfig.from_official(preset("flash"))
    csa = next(spec for spec in config.layers if spec.kind is LayerKind.CSA)
    reader = replace(csa, label="layer 99", selection_of=csa.label)
    owner, other = linked([layer_of(config, csa), layer_of(config, reader)])
    assert other.main is owner.main and other.index is None and other.window is not owner.window
    names = [s.name for s in layer_streams(config, reader, 1, 64, 0, NUMERICS["native"]).streams]
    assert names == ["window"]
