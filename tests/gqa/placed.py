"""What models whose layers lie on several devices are asked: every way to read a cache, prompts, decoding, rewinds."""

import torch

from dsv4.kernels.block_choice import Policy, pyramidkv, snapkv
from dsv4.kernels.chunked_prefill import Chunking
from dsv4.kernels.grouped_attention import Termination
from dsv4.model.gqa.choice import Attention

LENGTH = 200
STOPS = Termination(tile=64, tau=0.5, phi=1.0, patience=1)
READINGS = {
    "dense": Attention(),
    "dense, terminating": Attention(termination=STOPS),
    "sink-window": Attention(Policy("sink-window", None, 32, 1, 2)),
    "pages by bounds": Attention(Policy("page-bound", "bound", 16, 1, 1, 2)),
    "blocks by means, terminating": Attention(Policy("block-mean", "mean", 32, 1, 1, 1), STOPS),
    "snapkv": Attention(snapkv(0.4)),
    "pyramidkv": Attention(pyramidkv(0.4)),
    "chunks": Attention(prefill=Chunking(32, 8, 8)),
}


def run(model, attention: Attention, lengths=(LENGTH, LENGTH - 37)) -> list[torch.Tensor]:
    """Logits of prompts of several lengths, of decoded tokens, after a rewind, and the streams of the last step."""
    model.attention = attention
    ids = torch.randint(0, 384, (len(lengths), LENGTH), generator=torch.Generator().manual_seed(3))
    cache, counts = model.new_cache(len(lengths), LENGTH + 20), list(lengths)
    found = [model.append(ids, cache, n_new=counts, chunk=64 if attention.prefill else None, prompt=True)]
    found += [model.append(ids[:, t : t + 1], cache) for t in range(3)]
    found.append(model.append(ids[:, 3:6], cache, n_new=[3, 1]))
    cache.rewind([2, 0])
    found += model.append(ids[:, 6:8], cache, return_streams=True)
    for layer, device in zip(cache.layers, model.devices, strict=True):
        assert {t.device for t in layer.tensors.values()} == {device}
        held = [] if layer.memory is None else [layer.memory.positions, layer.memory.scores]
        assert {t.device for t in held} <= {device}
    assert {t.device for t in found} == {model.device}
    return [t.cpu() for t in found]


def same(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> bool:
    """Whether all are equal bit for bit, NaN where nothing was run."""
    return all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(found, wanted, strict=True)) and all(
        a.isnan().equal(b.isnan()) for a, b in zip(found, wanted)
    )
