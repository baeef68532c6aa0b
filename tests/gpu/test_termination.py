"""`dsv4 termination` on a CUDA device: walks of the same model are those of the host, needles are asked under the
kernels' own splits."""

import json

import pytest
import torch

from tests.conftest import ROOT
from tests.fidelity.conftest import run  # noqa: F401  (a fixture)

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def test_walks_are_those_of_the_host(run):
    given = (
        "termination",
        ROOT / "demo_gqa",
        "--context",
        "4K",
        "--queries",
        4,
        "--policy",
        "block-bound",
        "--numerics",
        "fp32",
        "--json",
    )
    found = []
    for more in ((), ("--device", "cuda", "--backend", "triton", "--needles", 2, "--looser", "1e-2")):
        code, out, err = run(*given, *more)
        assert code == 0, err
        found.append(json.loads(out))
    here, there = found
    for a, b in zip(here["rows"], there["rows"], strict=True):
        assert (a["order"], a["layer"]) == (b["order"], b["layer"]) and abs(a["skipped"] - b["skipped"]) < 0.02
    assert here["needles"] is None and {row["tau"] for row in there["needles"]} == {None, 1e-5, 1e-2}
