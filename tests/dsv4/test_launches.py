"""How many kernels a captured step launches on the triton backend, by layer kind, and which are none of Triton's."""

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dsv4 import load_model
from dsv4.dummy import fill_cache
from dsv4.step import CapturedStep
from tests import checkpoints

# Rows of whole 16 bytes, as streamed products take them.
WIDE = dict(checkpoints.SMALL, hidden_size=256, moe_intermediate_size=128, q_lora_rank=128, hc_sinkhorn_iters=2,
            num_hidden_layers=3, compress_ratios=[0, 4, 128, 0], num_hash_layers=1, index_n_heads=4)


class Launches(TorchDispatchMode):
    """Names of kernels, which do not run, and of the torch operations that would be kernels on a GPU, in order."""

    def __init__(self, monkeypatch):
        super().__init__()
        from triton.runtime.interpreter import InterpretedFunction
        self.names: list[str] = []
        monkeypatch.setattr(InterpretedFunction, "__getitem__",
                            lambda kernel, grid: lambda *args, **kwargs: self.names.append(kernel.fn.__name__))

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name, made = function.name().removeprefix("aten::"), function(*args, **(kwargs or {}))
        held = {t.untyped_storage().data_ptr() for t in tree_leaves(args) if isinstance(t, torch.Tensor)}
        new = any(t.untyped_storage().data_ptr() not in held for t in tree_leaves(made) if isinstance(t, torch.Tensor))
        if not name.startswith("empty") and (new or name.partition(".")[0].endswith("_")):  # neither memory nor a view
            self.names.append(f"torch {name}")
        return made


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = checkpoints.write_official(tmp_path_factory.mktemp("launches") / "official", WIDE)
    return load_model(path, numerics="native", backend="triton", device="cpu", cache="fp8", index_cache="fp4")


@pytest.mark.skipif(torch.cuda.is_available(), reason="counted in the interpreter")
@pytest.mark.parametrize("batch, most", [(1, {"window": 16, "csa": 18, "hca": 16}), (3, {"window": 17, "csa": 20, "hca": 17})])
def test_launches_a_layer(model, monkeypatch, batch, most):
    """Goal: 20 a layer. What is shared: positions, embedded tokens, the end of the streams and the head."""
    cache = model.new_cache(batch, 80)
    fill_cache(cache, 40)
    ids, start = torch.zeros(batch, 1, dtype=torch.int64), torch.full((batch,), 40)
    step = CapturedStep(ids, start, 80, model.rope_frequencies())
    counted, marks = Launches(monkeypatch), []
    for block in model.layers:
        real = block.captured
        monkeypatch.setattr(block, "captured", lambda *args, real=real: (marks.append(len(counted.names)), real(*args))[1])
    with torch.inference_mode(), counted:
        model.captured(step, cache)
    found = Counter(counted.names)
    assert [name for name in found if name.startswith("torch ")] == [], found
    assert found["_place"] == found["_embed"] == 1 and found["_inputs"] == len(model.layers)
    for block, begin, end in zip(model.layers, marks, marks[1:] + [len(counted.names) - 3]):
        assert end - begin <= most[block.kind.value] - block.hashed, (block.kind, counted.names[begin:end])
    assert counted.names[-3:-1] == ["_statistics_few", "_merge"] and marks[0] == 2
