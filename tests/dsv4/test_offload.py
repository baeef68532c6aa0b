"""A model larger than the memory it is given answers all the same, with the same logits."""

import pytest
import torch

from dsv4 import load_model
from dsv4.errors import CapacityError


@pytest.fixture(scope="module", params=["fp32", "native", "qat"])
def plain(request, official):
    return load_model(official, numerics=request.param)


def cap(model, blocks: float) -> dict:
    largest = max(sum(p.nbytes for p in layer.parameters()) for layer in model.layers)
    return {"cpu": int(largest * (1 + blocks)) + sum(p.nbytes for p in model.embed.parameters())}


@pytest.mark.parametrize("blocks", [0.1, 2.2], ids=["no block resident", "two blocks resident"])
def test_disk_offload_under_a_memory_cap_gives_the_same_logits(plain, official, blocks):
    model = load_model(official, numerics=plain.numerics.name, device_map="auto", max_memory=cap(plain, blocks))
    places = list(model.placement.values())
    assert "disk" in places and places.count("cpu") >= (1 if blocks < 1 else 3)
    ids = torch.randint(0, 320, (1, 150), generator=torch.Generator().manual_seed(0))
    cache, wanted = model.new_cache(1, 160), plain.new_cache(1, 160)
    got, streams = model.append(ids, cache, return_streams=True)
    exact, exact_streams = plain.append(ids, wanted, return_streams=True)
    assert torch.equal(got, exact) and torch.equal(streams, exact_streams)
    assert torch.equal(model.append(ids[:, :1], cache), plain.append(ids[:, :1], wanted))
    assert torch.equal(model.mtp_logits(streams, ids, cache), plain.mtp_logits(streams, ids, wanted))
    resident = sum(p.nbytes for p in model.parameters() if p.device.type != "meta")
    assert resident <= cap(plain, blocks)["cpu"]  # and blocks went back to disk after running


def test_a_cap_below_one_block_is_an_error(official):
    with pytest.raises(CapacityError, match="one block needs"):
        load_model(official, device_map="auto", max_memory={"cpu": 1000})
