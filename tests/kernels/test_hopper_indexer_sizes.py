"""Index scores and selections by codes at production shapes, on a Hopper GPU."""

import pytest
import torch

from dsv4.kernels.indexer import reference, triton, triton_fp8
from dsv4.kernels.indexer.triton import select_entries
from dsv4.kernels.quantize.reference import simulate_fp4_blocks
from tests.kernels.test_triton_indexer import assert_scores, formats
from tests.kernels.test_triton_indexer_sizes import flash
from tests.kernels.test_triton_selection import assert_selected

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
    ),
]
SIZES = [(1, 4, 64), (1, 300, 3000), (3, 37, 1000), (1, 5000, 700), (2, 9, 32768)]


def prompt(B: int, T: int, n: int, form, whole: bool = False):
    """Rounded queries that see more and more entries. whole: of small whole numbers, whose sums are exact."""
    q, weights, keys = flash(B, T, n, form)
    if whole:
        g = torch.Generator(device="cuda").manual_seed(4)
        q = torch.randint(-1, 2, q.shape, device="cuda", generator=g).bfloat16()
        weights = torch.randint(-2, 3, weights.shape, device="cuda", generator=g).float()
    elif form is None:
        keys = simulate_fp4_blocks(keys)
    visible = ((torch.arange(T, device="cuda") + 1) * n // T).expand(B, T)
    return simulate_fp4_blocks(q), weights, keys, visible


@formats
@pytest.mark.parametrize("B, T, n", SIZES, ids=str)
def test_scores_are_those_of_the_rounded_numbers(B, T, n, form):
    """But for 13 bits of a sum; and the same bits every time."""
    q, weights, keys, visible = prompt(B, T, n, form)
    codes = triton_fp8.coded_keys(keys)
    out = torch.full((20, B, T, n), float("-inf"), device="cuda")
    for each in out:
        triton_fp8.launch_codes(q, weights, codes, visible, each, n)
    assert_scores(out[0], reference.index_scores(q, weights, keys, visible), 2.0**-12)
    assert all(torch.equal(each, out[0]) for each in out)


@pytest.mark.parametrize("scratch", [1 << 20, 96 << 20])
@pytest.mark.parametrize("B, T, n", [size for size in SIZES if size[2] > 64], ids=str)
def test_selections_of_whole_numbers_are_exact(B, T, n, scratch, monkeypatch):
    q, weights, keys, visible = prompt(B, T, n, None, whole=True)
    g = torch.Generator(device="cuda").manual_seed(5)
    keys = torch.randint(-1, 2, keys.shape, device="cuda", generator=g).bfloat16()
    monkeypatch.setattr(triton, "CODED_PAIRS", 1)
    monkeypatch.setattr(triton, "CODED_QUERIES", 1)
    monkeypatch.setattr(triton, "CODES_SCRATCH_BYTES", scratch)
    wanted = reference.topk_entries(reference.index_scores(q, weights, keys, visible), 512)
    assert_selected(select_entries(q, weights, keys, visible, 512, True), wanted)
