"""Models of two ranks whose kernels leave sums to what reads them, in processes that share memory of the host: bits are
those of sums that are exchanged by themselves."""

import os
from dataclasses import replace
from functools import partial

import pytest
import torch

from dsv4.kernels.collectives.triton_one_shot import OneShot
from dsv4.kernels.experts.triton_combine import ExpertRows
from dsv4.kernels.fusions import COMPOSITIONS
from dsv4.model.load import load_model
from dsv4.model.step import CapturedStep
from dsv4.parallel.threads import together
from tests import checkpoints
from tests.parallel.test_collectives import run_ranks

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="on GPUs: tests/gpu/test_ranks.py")
SMALL = checkpoints.BRIEF | {"num_hidden_layers": 2, "compress_ratios": [0, 4, 0], "hc_sinkhorn_iters": 2}
KERNELS = "moe", "mhc_post_pre_norm", "mhc_post_head_norm"  # which make or take sums that are left to others
SIZES = {"by width": 256, "by expert": 128, "one rank has no width": 128}  # columns of an expert


class Shared:
    """A group whose ranks exchange by `few` alone. defers: whether it leaves sums to who reads them; summed: how many
    sums it took."""

    by = "shared memory"

    def __init__(self, few: OneShot):
        self.kernels, self.defers, self.issued, self.summed = few, True, 0, 0

    @property
    def few(self) -> OneShot | None:
        return self.kernels if self.defers else None

    def all_gather(self, x: torch.Tensor):
        return list(self.kernels.gather(x))

    def sum(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        self.summed += 1
        return self.kernels.sum(x, dtype)


def moe(op, x, indices, routing, w13, w2, shared, limit, simulate, simulate_shared, dtype, combine):
    """Experts' rows as the composition gives them, pair by pair from the reference."""
    pairs = [op.experts(x, i, r, w13, w2, limit, simulate) for i, r in zip(indices.split(1, 1), routing.split(1, 1))]
    rows = torch.stack(pairs, 1).flatten(0, 1).to(x.dtype)
    found = ExpertRows(rows, indices, op.shared_expert(x, *shared, limit, simulate_shared))
    return found.combine(dtype) if combine else found


def run(model, batch: int) -> list[torch.Tensor]:
    """Streams and logits of a captured step, run without a graph."""
    ids = torch.arange(batch).view(batch, 1) + 3
    step = CapturedStep(ids, torch.zeros(batch, dtype=torch.int64), 32, model.rope_frequencies())
    with torch.inference_mode():
        streams, logits = model.captured(step, model.new_cache(batch, 32))
    return [streams, logits.own]


def rank_of(rank: int, size: int, buffers, models, errors) -> None:
    try:
        torch.set_num_threads(1)
        group = Shared(OneShot(rank, [t.data_ptr() for t in buffers], torch.device("cpu"), 132))
        model = models[rank]
        for module in model.modules():
            if hasattr(module, "ranks"):
                module.ranks = replace(module.ranks, group=group)
        for batch in (1, 3):
            group.defers, group.summed = False, 0
            wanted, alone = run(model, batch), group.summed
            group.defers, group.summed = True, 0
            found, left = run(model, batch), group.summed
            assert alone - left == 2 * len(model.layers), f"{left} of {alone} sums are still taken alone"
            assert all(map(torch.equal, found, wanted)), f"bits differ with {batch} rows"
            seen = []
            watches = [module.register_forward_hook(lambda *a: seen.append(a[-1])) for module in watched(model)]
            group.summed = 0
            found = run(model, batch)
            assert group.summed == left + 2, f"{group.summed} sums with two watched modules"
            assert all(map(torch.equal, found, wanted)) and all(type(x) is torch.Tensor for x in seen)
            for watch in watches:
                watch.remove()
    except BaseException as failure:
        errors.put(f"rank {rank}: {type(failure).__name__}: {failure}")
        os._exit(1)  # the others wait for this one


def watched(model) -> tuple:
    return model.layers[0].attn, model.layers[1].ffn


@pytest.mark.parametrize("cut", SIZES)
def test_deferred_sums_have_the_bits_of_sums(tmp_path, cut):
    raw = SMALL | {"moe_intermediate_size": SIZES[cut]}
    path = checkpoints.write_official(tmp_path / "official", raw)
    one = lambda ranks: replace(ranks, by_expert=cut == "by expert")
    models = together(2, lambda ranks: load_model(path, backend="reference", ranks=one(ranks)))
    for model in models:  # everything else would take the interpreter minutes
        model.op.fused = frozenset(KERNELS)
        for name in KERNELS[1:]:
            setattr(model.op, name, COMPOSITIONS[name].implementations["triton"])
        model.op.moe = partial(moe, model.op)
    run_ranks(rank_of, 2, OneShot.nbytes(2), models)
