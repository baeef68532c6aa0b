"""The cost model's timer on a GPU: graphs of all layers, the fastest backend, and both kinds of model."""

import pytest
import torch

from dsv4.cost_model import csa
from dsv4.cost_model.gqa import GQA, POLICIES, Geometry
from dsv4.cost_model.measure import Timer
from dsv4.kernels.attention import hca_attention

pytestmark = pytest.mark.gpu


def test_rows_of_gqa_are_measured_as_graphs():
    of = GQA(Geometry(), {name: make() for name, make in POLICIES.items()}, torch.device("cuda"))
    found, why = Timer(torch.device("cuda"), 5).shape(of, 1, 16384, False)
    assert (
        not why
        and [r.policy for r in found] == ["dense", *POLICIES]
        and found[0].by in ("SDPA cuDNN", "SDPA flash", "triton")
    )
    dense = found[0]
    # cold: no faster than memory can be
    assert all(5e-7 < r.seconds < 1e-2 for r in found) and dense.bytes / dense.seconds < 5e12, dense


def test_longer_contexts_take_longer():
    timer, of = Timer(torch.device("cuda"), 5), GQA(Geometry(), {}, torch.device("cuda"))
    short, long = (timer.shape(of, 1, context, False)[0][0].seconds for context in (32768, 262144))
    assert 3 < long / short < 12


def test_rows_of_csa_run_on_triton_and_agree_with_the_reference():
    of = csa.CSA(torch.device("cuda"), "triton")
    found, why = Timer(torch.device("cuda"), 5).shape(of, 2, 8192, False)
    assert not why and [(r.policy, r.by) for r in found] == [("dense", "triton"), ("csa", "triton")]
    inputs = of.inputs(2, 8192, 1, 1)
    out, (latent,) = of.rows(2, 8192)[0].make(inputs)["triton"](0), inputs.latents
    wanted = hca_attention(
        inputs.queries[0], latent.flatten(0, 1), inputs.near, latent[:, 128:], inputs.seen, inputs.sink, 512**-0.5
    )
    assert (out - wanted).float().norm() / wanted.float().norm() < 1e-2
