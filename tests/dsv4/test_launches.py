"""How many kernels captured steps and chunks of a prompt launch on the triton backend, by layer kind; which are none of
Triton's; and for how many lengths, batches and contexts Triton would compile anew."""

from collections import Counter

import pytest
import torch

from dsv4 import load_model
from dsv4.model.dummy import fill_cache
from dsv4.model.step import CapturedStep
from tests import checkpoints
from tests.dsv4.launches import WIDE, Launches, on_hopper

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="counted in the interpreter")
CHUNK = 2048


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = checkpoints.write_official(tmp_path_factory.mktemp("launches") / "official", WIDE)
    return load_model(path, numerics="native", backend="triton", device="cpu", cache="fp8", index_cache="fp4")


def mark(monkeypatch, model, counted: Launches, marks: list[int]) -> None:
    """`marks` gets how many launches there were when each block began."""
    for block in model.layers:
        real = block.sublayers
        monkeypatch.setattr(
            block, "sublayers", lambda *args, real=real: (marks.append(len(counted.names)), real(*args))[1]
        )


def captured(model, counted: Launches, batch: int, context: int) -> None:
    cache = model.new_cache(batch, context)
    fill_cache(cache, 40)
    ids, start = torch.zeros(batch, 1, dtype=torch.int64), torch.full((batch,), 40)
    step = CapturedStep(ids, start, context, model.rope_frequencies())
    with torch.inference_mode(), counted:
        model.captured(step, cache)


def prefill(
    model, counted: Launches, tokens: int, fill: int = 0, batch: int = 1, room: int = 0, logits: str = "last"
) -> None:
    cache = model.new_cache(batch, fill + tokens + room)
    if fill:
        fill_cache(cache, fill)
    with torch.inference_mode(), counted:
        model.append(torch.zeros(batch, tokens, dtype=torch.int64), cache, logits=logits, chunk=CHUNK)


@pytest.mark.parametrize(
    "batch, most", [(1, {"window": 15, "csa": 17, "hca": 15}), (3, {"window": 16, "csa": 19, "hca": 16})]
)
def test_launches_a_layer(model, monkeypatch, batch, most):
    """Goal: 20 a layer. What is shared: positions, embedded tokens, the end of the streams and the head."""
    counted, marks = Launches(monkeypatch), []
    mark(monkeypatch, model, counted, marks)
    captured(model, counted, batch, 80)
    found = Counter(counted.names)
    assert [name for name in found if name.startswith("torch ")] == [], found
    assert found["_place"] == found["_embed"] == 1 and found["_inputs"] == len(model.layers)
    for block, begin, end in zip(model.layers, marks, marks[1:] + [len(counted.names) - 3]):
        assert end - begin <= most[block.spec.kind.value] - block.spec.hashed, (
            block.spec.kind,
            counted.names[begin:end],
        )
    assert counted.names[-3:-1] == ["_statistics_few", "_merge"] and marks[0] == 2


@pytest.mark.parametrize("batch", [32, 64])
def test_steps_of_more_rows_launch_nothing_of_torch_either(model, monkeypatch, batch):
    """How many kernels they launch at the sizes of Flash: tests/scripts/test_count_launches.py."""
    counted = Launches(monkeypatch)
    captured(model, counted, batch, 80)
    assert [name for name in counted.names if name.startswith("torch ")] == []


def test_a_watched_mixture_gives_its_whole_sum(model, monkeypatch):
    """Otherwise the kernel that merges it adds up experts' rows."""
    counted, seen = Launches(monkeypatch), []
    captured(model, counted, 3, 80)
    assert "combine_experts" not in counted.names
    watch = model.layers[1].ffn.register_forward_hook(lambda *given: seen.append(given[-1]))
    captured(model, counted, 3, 80)
    watch.remove()
    assert counted.names.count("combine_experts") == 1 and [type(x) for x in seen] == [torch.Tensor]


def test_launches_of_a_chunk(model, monkeypatch):
    """A whole chunk behind another one: of each kind the second layer, which shares what depends on positions alone."""
    # Triton's; torch's, half of them decoding 127 rows of the window
    most = {"window": (38, 20), "csa": (50, 34), "hca": (42, 26)}
    on_hopper(monkeypatch)
    counted, marks = Launches(monkeypatch), []
    mark(monkeypatch, model, counted, marks)
    prefill(model, counted, CHUNK, CHUNK, logits="none")
    for block, begin, end in list(zip(model.layers, marks, marks[1:] + [len(counted.names)]))[3:]:
        names, torchs = counted.names[begin:end], sum(name.startswith("torch ") for name in counted.names[begin:end])
        triton, other = most[block.spec.kind.value]
        assert len(names) - torchs <= triton and torchs <= other, (block.spec.kind, names)
        assert not {"torch item", "torch _local_scalar_dense"} & set(names)


def test_chunks_neither_wait_nor_pass_through_fp32_products(model, monkeypatch):
    """Compressors and head multiply bf16 as it is: the tensor cores' products, not IEEE fp32."""
    on_hopper(monkeypatch)
    counted = Launches(monkeypatch)
    prefill(model, counted, CHUNK, logits="all")
    assert "torch _local_scalar_dense" not in counted.names
    assert counted.keys["_gemm"] and not any(
        "'*fp32', 'D'" in key.split(",", 2)[0] + "," + key.split(",", 2)[1] for key in counted.keys["_gemm"]
    )


def test_what_is_compiled_does_not_depend_on_the_length(model, monkeypatch):
    """After one prompt of each size of tiles, prompts of other lengths, last chunks, and caches of other sizes compile
    nothing."""
    on_hopper(monkeypatch)
    counted = Launches(monkeypatch)
    for tokens in (2048, 300, 200, 100, 77, 66, 50, 33, 17, 16, 8, 3, 2, 1):
        prefill(model, counted, tokens)
    for fill in (300, 2000):
        for tokens in (2048, 16, 8, 2, 1):
            prefill(model, counted, tokens, fill)
    known, ranked = counted.compiled(), {"rank_entries": 0}
    assert sum(known.values()) <= 160, known
    for tokens, fill, room in (
        (2047, 0, 0),
        (1999, 0, 5),
        (299, 0, 0),
        (260, 0, 1),
        (99, 0, 0),
        (70, 0, 3),
        (47, 0, 0),
        (13, 0, 0),
        (7, 0, 0),
        (5, 0, 9),
        (2048, 1001, 0),
        (2047, 1531, 7),
        (13, 1777, 0),
        (5, 1444, 100),
        (1, 1900, 1),
    ):
        prefill(model, counted, tokens, fill, room=room)
        assert counted.compiled() | ranked == known | ranked, (tokens, fill, room)
    assert counted.compiled()["rank_entries"] <= 8  # powers of two of the entries, while they are few


def test_what_is_compiled_for_captured_steps(model, monkeypatch):
    """Of the kernels between the products, none is compiled anew for another batch, context or capacity."""
    on_hopper(monkeypatch)
    counted = Launches(monkeypatch)
    captured(model, counted, 1, 4096)
    captured(model, counted, 2, 4096)
    known = counted.compiled()
    for batch, context in ((1, 80), (2, 1001), (3, 1001), (3, 4096), (2, 3000)):
        captured(model, counted, batch, context)
    again = {name for name, keys in counted.compiled().items() if keys != known.get(name)}
    assert not again & {"_place", "_inputs", "_embed", "_merge", "_chosen_rows"}, again
    assert known["_inputs"] == 3
