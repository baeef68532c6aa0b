"""Routed experts in pinned host memory in captured steps on a CUDA device: the bits of a model that has them there."""

from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
DEMO = Path(__file__).resolve().parents[2] / "demo"


def decoded(model, batch, tokens=(1, 1, 1, 1, 3, 1, 1, 1)):
    """Logits of a prompt and of captured steps of so many tokens, chosen by a seed."""
    from dsv4.runtime.graph import DecodeGraph

    g, cache = torch.Generator().manual_seed(batch), model.new_cache(batch, 700)
    new = lambda n: torch.randint(0, model.config.vocab_size, (batch, n), generator=g)
    found = [model.append(new(500), cache, logits="last").clone()]
    graphs = {n: DecodeGraph(model, cache, n) for n in set(tokens)}
    return found + [graphs[n].step(new(n)).clone() for n in tokens * 4]


@pytest.mark.parametrize("numerics", ["native", "qat", "fp32"])
@pytest.mark.parametrize("batch", [1, 2])
def test_captured_steps_of_the_demo(numerics, batch, capsys):
    from dsv4 import load_model
    from dsv4.model.expert_memory import ExpertMemory

    given = dict(numerics=numerics, device="cuda", backend="triton")
    want = decoded(load_model(DEMO, **given), batch)
    for slots in (4 * batch, 12):
        model = load_model(DEMO, expert_memory=ExpertMemory(slots), **given)
        for step, (a, b) in enumerate(zip(want, decoded(model, batch), strict=True)):
            assert torch.equal(a, b), (slots, step)
        counts = model.expert_tier.counts()
        with capsys.disabled():
            print(f"\n{numerics}, batch {batch}, {slots} of 16 slots: {counts.hit_rate:.1%} hit, {counts}")
        assert min(counts.hits, counts.misses, counts.wholes) > 0


def test_captured_steps_of_flash_widths(capsys):
    """Two layers with random weights, whose experts are drawn on the device and kept in host memory: 6.8 GB of it."""
    from dsv4.model.dummy import load_dummy
    from dsv4.model.expert_memory import ExpertMemory

    given = dict(layers=2, numerics="native", device="cuda")
    want = decoded(load_dummy("flash", **given), 1)
    model = load_dummy("flash", expert_memory=ExpertMemory(24), **given)
    for step, (a, b) in enumerate(zip(want, decoded(model, 1), strict=True)):
        assert torch.equal(a, b), step
    counts, link = model.expert_tier.counts(), model.expert_tier.link()
    with capsys.disabled():
        print(f"\n24 of 256 slots: {counts.hit_rate:.1%} hit, {counts}; link {link / 1e9:.1f} GB/s")
    assert counts.misses > 0 and model.expert_tier.device_bytes == model.expert_tier.sizes.device_bytes(24)
