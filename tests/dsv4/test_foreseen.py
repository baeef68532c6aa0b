"""What a batch launches was foreseen: the engine's launches, beside those of the sizes of its requests."""

import pytest
import torch

from dsv4 import load_model
from dsv4.commands.batch import Options, new_engine
from dsv4.commands.foreseen import Foreseen
from dsv4.engine.state import Request
from dsv4.speculation import draft, verify
from tests import checkpoints
from tests.dsv4.launches import WIDE, Launches, on_hopper

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="counted in the interpreter")


class Zeros(Launches):
    """Kernels do not run, and what they would have written is 0."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = super().__torch_dispatch__(function, types, args, kwargs)
        return made.zero_() if function.name().startswith(("aten::empty", "aten::new_empty")) else made


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return checkpoints.write_official(tmp_path_factory.mktemp("foreseen") / "official", WIDE)


@pytest.mark.parametrize(
    "way",
    [{}, {"together": True}, {"speculate": "mtp", "draft_tokens": "2"}],
    ids=["alone", "together", "drafts"],
)
def test_launches_of_a_batch(path, way, monkeypatch):
    load = lambda: load_model(path, numerics="native", backend="triton", device="cpu", cache="fp8", index_cache="fp4")
    options = Options(3, **way)
    asked = [Request(str(n), tuple(range(n)), 4) for n in (300, 140, 17)]
    on_hopper(monkeypatch)
    for module in (draft, verify):  # as on a GPU, where steps are graphs
        monkeypatch.setattr(module, "captures", lambda model: True)
    counted = Zeros(monkeypatch)
    with torch.inference_mode(), counted:
        Foreseen.of(asked, options).run(load())
    foreseen = {name: set(keys) for name, keys in counted.keys.items()}
    counted.keys.clear()
    results = {}
    engine = new_engine(load(), asked, options, (), lambda r: results.setdefault(r.id, r))
    for request in asked:
        engine.submit(request)
    with torch.inference_mode(), counted:
        engine.run()
    assert {len(r.token_ids) for r in results.values()} == {4}, results
    lacking = {name: set(keys) - foreseen.get(name, set()) for name, keys in counted.keys.items()}
    print(lacking["_grouped"], foreseen["_grouped"])
    lacking = {name: keys for name, keys in lacking.items() if keys}
    assert len(counted.keys) > 20 and not lacking, lacking
