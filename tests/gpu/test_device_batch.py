"""Groups of requests as one launch each: the host's rounds bit for bit."""

import pytest
import torch

from dsv4.commands.batch import Options, new_engine
from dsv4.engine import Request
from dsv4.engine.device_batch import DeviceBatch
from dsv4.runtime.conditional import missing
from dsv4.sampling import Sampling
from dsv4.speculation.rounds import Rounds
from tests.gpu.test_rounds import demo_model, demo_texts

CUDA = torch.cuda.is_available()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not CUDA, reason="needs a CUDA device"),
    pytest.mark.skipif(CUDA and bool(missing(torch.device("cuda"))), reason="this device has no such loop"),
]
WAYS = {"plain": {}, "mtp": {"speculate": "mtp", "draft_tokens": "adaptive"}, "lookup": {"speculate": "lookup"}}


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.8, 0.95, 3)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_groups_are_the_host_s_rounds(way, sampling):
    """Three rows, seven requests: three launches of loops that begin anew, over pages that are used again."""
    model, found = demo_model("native"), []
    texts = demo_texts(model)
    asked = [
        Request(f"r{i}", tuple(texts[i % len(texts)][: 40 + 37 * i]), n, sampling=sampling)
        for i, n in enumerate((40, 9, 120, 1, 64, 30, 77))
    ]
    for make in (Rounds, None):
        results = {}
        engine = new_engine(model, asked, Options(3, loop="device", **way), (), lambda r: results.setdefault(r.id, r))
        assert isinstance(engine, DeviceBatch)
        if make is not None:
            engine.make = make
        for request in asked:
            engine.submit(request)
        engine.run()
        spec = lambda r: (r.token_ids, r.stop_reason, r.speculation.block_size_history, r.speculation.accepted_history)
        found.append({name: spec(r) for name, r in results.items()})
    assert found[0] == found[1] and engine.launches == 3 and len(engine._made) == 1
