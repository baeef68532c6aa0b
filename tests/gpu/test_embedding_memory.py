"""The token embedding in pinned host memory on a CUDA device: kernels read it there, captured steps too."""

from pathlib import Path

import pytest
import torch

from tests.gpu.test_expert_memory import decoded

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
DEMO = Path(__file__).resolve().parents[2] / "demo"


def loaded(**options):
    """A model, and the bytes of the device that it took."""
    from dsv4 import load_model

    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    model = load_model(DEMO, device="cuda", **options)
    return model, torch.cuda.memory_allocated() - before


@pytest.mark.parametrize("backend", ["triton", "reference"])
@pytest.mark.parametrize("numerics", ["native", "qat", "fp32"])
def test_the_bits_of_a_model_on_the_device(numerics, backend):
    """Prompts and steps, which the triton backend captures, and the MTP block."""
    from tests.dsv4.test_expert_memory import appended

    (plain, there), (host, left) = (
        loaded(numerics=numerics, backend=backend, embedding_memory=m) for m in ("device", "host")
    )
    weight, table = host.embed.weight, host.embed.table
    assert not weight.is_cuda and table.is_cuda and table.data_ptr() == weight.data_ptr()
    assert torch.equal(table.cpu(), plain.embed.weight.cpu())
    assert sum(p.nbytes for p in host.parameters() if p.is_cuda) == host.nbytes - host.embed.host_bytes
    assert there - left >= host.embed.host_bytes
    for step, (a, b) in enumerate(zip(appended(plain), appended(host), strict=True)):
        assert torch.equal(a.nan_to_num(), b.nan_to_num()), step
    if backend == "triton":
        for step, (a, b) in enumerate(zip(decoded(plain, 2), decoded(host, 2), strict=True)):
            assert torch.equal(a, b), step


@pytest.mark.parametrize("numerics", ["native", "fp32"])
def test_a_part_of_the_vocabulary(numerics):
    """What a rank looks up: the branch of ranks reads pinned memory in a captured graph too."""
    from types import SimpleNamespace

    from dsv4.model.ranks import Ranks
    from dsv4.model.vocabulary import Embedding
    from dsv4.runtime.timing import capture

    class Apart(Ranks):
        """A rank by itself: nothing comes from the others."""

        same = lambda self, ids, what: None
        sum = lambda self, x, dtype=None: x

    dtype = torch.float32 if numerics == "fp32" else torch.bfloat16
    embed = Embedding(SimpleNamespace(vocab_size=1000, hidden_size=4096), dtype, Apart(1, 2))
    embed.to_host(torch.device("cuda"))
    embed.weight.copy_(torch.randn(500, 4096))
    ids, kept = torch.zeros(64, dtype=torch.int64, device="cuda"), {}
    graph = capture(lambda: kept.update(out=embed(ids)))
    for seed in range(20):
        ids.copy_(torch.randint(0, 1000, (64,), generator=torch.Generator().manual_seed(seed)))
        graph.replay()
        rows = ids.cpu() - 500
        wanted = torch.where(rows.unsqueeze(1) < 0, 0.0, embed.weight[rows.clamp(min=0)])
        assert torch.equal(kept["out"].cpu(), wanted), seed
