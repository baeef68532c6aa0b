"""The curve of experts' cost: cliffs are found, and the page and picture show what was measured."""

import pytest
import torch

from scripts import bench_experts

ABOUT = {"device": "a GPU", "torch": "2", "triton": "3", "commit": "c", "command": "python x"}


def row(tokens: int, us: float, numerics: str = "official") -> dict:
    return {"tokens": tokens, "numerics": numerics, "us": us, "share_of_bandwidth": 0.5, "kernels": ["product"]}


@pytest.mark.parametrize("us, cliffs", [((10, 20, 30), 0), ((10, 31.4, 30), 0), ((10, 32, 30), 1), ((40, 32, 30), 2)])
def test_cliffs(us, cliffs):
    rows = [row(tokens, each) for tokens, each in zip((1, 8, 64), us)]
    found = bench_experts.cliffs([*rows, row(64, 5, "native"), row(1, 4, "native")])
    assert len(found) == cliffs and all(line.startswith("official: ") for line in found)


def test_page_and_picture():
    rows = [row(1, 12.34), row(8, 56.78), row(1, 9.1, "native")]
    text = bench_experts.markdown(rows, ["official: 1 token"], ABOUT)
    assert "| 1 | 9.1 | 50% | 12.3 | 50% | product |" in text and "| 8 | – | – | 56.8 | 50% | product |" in text
    assert "- cliff: official: 1 token" in text and "No cliff" in bench_experts.markdown(rows, [], ABOUT)
    picture = bench_experts.svg(rows, ABOUT)
    assert picture is None or "official" in picture


@pytest.mark.skipif(torch.cuda.is_available(), reason="without a GPU")
def test_without_a_gpu(capsys):
    assert bench_experts.main([]) == 2 and "there is none" in capsys.readouterr().err
