"""The model on a CUDA device. scripts/gpu_tests.sh runs these; elsewhere they are skipped for want of a device."""

import pytest
import torch

from dsv4 import load_model
from tests import checkpoints
from tests.conftest import GOLDEN, TOLERANCE

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


BACKENDS = pytest.mark.parametrize("backend", ["reference", "triton"])


@BACKENDS
def test_golden_on_the_device_in_every_step_size(backend):
    from safetensors.torch import load_file

    expected = load_file(GOLDEN / "expected.safetensors")
    model = load_model(GOLDEN, numerics="fp32", device="cuda", backend=backend)
    for chunk in (1, 7, 128, 300):
        got = model.append(expected["ids"], model.new_cache(1, 300), chunk=chunk)
        assert got.device.type == "cuda"
        assert (got.cpu() - expected["logits"]).abs().max() < TOLERANCE, chunk
    cache = model.new_cache(1, 300)
    _, streams = model.append(expected["ids"], cache, return_streams=True)
    got = model.mtp_logits(streams, expected["next_ids"], cache)
    assert (got.cpu() - expected["mtp_logits"]).abs().max() < TOLERANCE


@BACKENDS
@pytest.mark.parametrize("numerics", ["fp32", "qat:fp32"])
@pytest.mark.parametrize("experts", ["MXFP4", "FP8"])
def test_device_equals_host(tmp_path, numerics, experts, backend):
    raw = {**checkpoints.SMALL, "moe_intermediate_size": 128}
    path = checkpoints.write_official(tmp_path / "c", raw, experts)
    ids = torch.randint(0, 320, (2, 280), generator=torch.Generator().manual_seed(0))
    host, device = (
        load_model(path, numerics=numerics),
        load_model(path, numerics=numerics, device="cuda", backend=backend),
    )
    got, wanted = device(ids).cpu(), host(ids)
    if numerics == "fp32":
        assert (got - wanted).abs().max() < TOLERANCE
        assert (got - wanted).abs().median() < 1e-4
    else:
        # A rounding that falls the other way moves a value by a whole step: weights moved by 2^-22 make a difference of
        # 0.02 on a host, and no rounding at all one of 0.42. The device may make a quarter of the latter.
        unrounded = load_model(path, numerics="fp32")(ids)
        assert (got - wanted).norm() < (unrounded - wanted).norm() / 4


@BACKENDS
def test_rewind_and_ragged_rows_on_the_device(backend):
    from safetensors.torch import load_file

    expected = load_file(GOLDEN / "expected.safetensors")
    model, ids, wanted = (
        load_model(GOLDEN, numerics="fp32", device="cuda", backend=backend),
        expected["ids"],
        expected["logits"],
    )
    lengths = [5, 130, 290]
    cache = model.new_cache(3, 300)
    got = model.append(ids.expand(3, -1)[:, :290], cache, n_new=lengths).cpu()
    for b, n in enumerate(lengths):
        assert (got[b, :n] - wanted[0, :n]).abs().max() < TOLERANCE
    cache.rewind([0, 4, 130 - 2])
    nxt = torch.stack([ids[0, n : n + 2] for n in cache.lengths])
    got = model.append(nxt, cache).cpu()
    for b, n in enumerate([5, 126, 162]):
        assert (got[b] - wanted[0, n : n + 2]).abs().max() < TOLERANCE


def test_a_device_that_is_not_there_is_an_error():
    from dsv4.errors import InputError

    with pytest.raises(InputError, match="CUDA devices"):
        load_model(GOLDEN, device="cuda:99")


def block_bytes(model) -> int:
    return max(sum(p.nbytes for p in layer.parameters()) for layer in model.layers)


@pytest.mark.parametrize("gpus", [1, 2])
def test_layers_spread_over_gpus_host_and_disk_give_the_same_logits(tmp_path, gpus):
    if torch.cuda.device_count() < gpus:
        pytest.skip(f"needs {gpus} CUDA devices")
    path = checkpoints.write_official(tmp_path / "c")
    plain = load_model(path, numerics="fp32", device="cuda")
    block = block_bytes(plain)
    limits = {**{i: int(2.6 * block) for i in range(gpus)}, "cpu": int(1.2 * block)}
    model = load_model(path, numerics="fp32", device="cuda", device_map="auto", max_memory=limits)
    places = set(model.placement.values())
    assert {f"cuda:{i}" for i in range(gpus)} <= places and len(places) > 1
    ids = torch.randint(0, 320, (1, 150), generator=torch.Generator().manual_seed(0))
    cache, other = model.new_cache(1, 160), plain.new_cache(1, 160)
    got, streams = model.append(ids, cache, return_streams=True)
    wanted, _ = plain.append(ids, other, return_streams=True)
    assert (got.cpu() - wanted.cpu()).abs().max() < TOLERANCE
    assert torch.isfinite(model.mtp_logits(streams, ids, cache)).all()
    assert (model.append(ids[:, :1], cache).cpu() - plain.append(ids[:, :1], other).cpu()).abs().max() < TOLERANCE
