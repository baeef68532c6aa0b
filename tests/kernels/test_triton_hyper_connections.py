"""mHC on Triton against the reference: every operation, both kernels' forms (few and many tokens), and the
compositions."""

import pytest
import torch

from dsv4.kernels.collectives.unsummed import Unsummed
from dsv4.kernels.errors import UnsupportedInput
from dsv4.kernels.experts.triton_combine import ExpertRows
from dsv4.kernels.hyper_connections import mhc_post, mhc_pre, reference, triton_merge, triton_statistics
from dsv4.kernels.hyper_connections.triton import WIDEST, mhc_post_pre_norm, mhc_pre_norm
from dsv4.kernels.linear import triton_fp8
from dsv4.kernels.quantize import simulate_fp8_blocks
from dsv4.kernels.quantize.coded import CodedRows, RoundedRows
from dsv4.kernels.rms_norm.reference import rms_norm
from tests.kernels.products import poison  # noqa: F401 (a fixture: fresh buffers hold NaN)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPS = 1e-6
gpu = pytest.mark.gpu


class Case:
    """Inputs of one boundary between sublayers; `spread` widens the logits of the matrix."""

    def __init__(self, tokens, n=4, d=80, dtype=torch.float32, spread=2.0, seed=0):
        g, M = torch.Generator().manual_seed(seed), 2 * n + n * n
        randn = lambda *shape: torch.randn(*shape, generator=g)
        self.out, self.streams = randn(tokens, d).to(dtype).to(DEVICE), randn(tokens, n, d).to(dtype).to(DEVICE)
        self.post = (2 * torch.rand(tokens, n, generator=g)).to(DEVICE)
        self.comb = torch.softmax(randn(tokens, n, n), 1).to(DEVICE)
        self.fn, self.base = (randn(M, n * d) * (n * d) ** -0.5).to(DEVICE), randn(M).to(DEVICE)
        self.scale, self.weight, self.n = torch.tensor([0.7, 1.3, spread]).to(DEVICE), randn(d).to(dtype).to(DEVICE), n

    @property
    def mixing(self):
        return self.out, self.streams, self.post, self.comb

    @property
    def weights(self):
        return self.fn, self.scale, self.base


def close(got, wanted, tolerance=2e-6):
    """fp32 within `tolerance` relative to the norm; bf16 equal but for flips: fp32 sums in another order differ by an
    ulp, which moves a rounded result only where it lies at a tie."""
    assert got.shape == wanted.shape and got.dtype == wanted.dtype
    if not got.numel():
        return
    error = ((got.double() - wanted.double()).norm() / wanted.double().norm().clamp(min=1e-30)).item()
    assert error <= (tolerance if got.dtype is torch.float32 else 2e-3), error
    if got.dtype is torch.bfloat16:
        assert (got != wanted).float().mean() <= 0.005 + 2 / got.numel()


def check_boundary(case, iters=20, tolerance=2e-6):
    """The composition against the reference. Statistics of our own streams: a flip in one is not carried on."""
    streams, *results = mhc_post_pre_norm(*case.mixing, *case.weights, iters, EPS, EPS, case.weight, EPS)
    close(streams, reference.mhc_post(*case.mixing), tolerance)
    y, *wanted = reference.mhc_pre(streams, *case.weights, iters, EPS, EPS)
    for a, b in zip(results, (rms_norm(y, case.weight, EPS), *wanted)):
        close(a, b, tolerance)


def check_pre(case, iters=20, tolerance=2e-6):
    """mhc_pre with and without the norm."""
    y, *wanted = reference.mhc_pre(case.streams, *case.weights, iters, EPS, EPS)
    plain = mhc_pre(case.streams, *case.weights, iters, EPS, EPS, backend="triton")
    normed = mhc_pre_norm(case.streams, *case.weights, iters, EPS, EPS, case.weight, EPS)
    for a, b in zip((*plain, *normed), (y, *wanted, rms_norm(y, case.weight, EPS), *wanted)):
        close(a, b, tolerance)


@pytest.mark.parametrize(
    "tokens,dtype",
    [
        (0, torch.float32),
        (1, torch.bfloat16),
        (3, torch.float32),
        (9, torch.bfloat16),
        (17, torch.bfloat16),
        (66, torch.float32),
    ],
    ids=str,
)
def test_boundaries_by_token_count(tokens, dtype):
    check_boundary(Case(tokens, d=40, dtype=dtype), iters=3)


@pytest.mark.few("tokens", "n", "dtype")
@pytest.mark.parametrize(
    "tokens,n,dtype",
    [(3, 4, torch.bfloat16), (66, 4, torch.bfloat16), (66, 4, torch.float32), (17, 3, torch.float32)],
    ids=str,
)
def test_products_of_many_tokens(tokens, n, dtype, monkeypatch):
    monkeypatch.setattr(triton_statistics, "FEW_TOKENS", 0)
    check_boundary(Case(tokens, n, d=40, dtype=dtype), iters=3)
    check_pre(Case(tokens, n, d=40, dtype=dtype), iters=3)


@pytest.mark.parametrize("tokens,n", [(2, 1), (1, 2), (2, 3), (1, 5), (2, 8), (17, 3), (5, 8)])
def test_any_number_of_streams(tokens, n):
    check_boundary(Case(tokens, n, 33), iters=3)


@pytest.mark.parametrize("d,n", [(1, 4), (31, 4), (130, 4), (4100, 1)])
def test_any_width(d, n):
    check_boundary(Case(1, n, d), iters=3)


@pytest.mark.parametrize("iters", [1, 2, 20])
@pytest.mark.parametrize("spread", [0.5, 8.0, 40.0])
def test_sinkhorn_by_iterations_and_logits(iters, spread):
    case = Case(2, d=40, spread=spread)
    check_boundary(case, iters, tolerance=1e-5)
    if iters == 20:
        comb = mhc_pre(case.streams, *case.weights, iters, EPS, EPS, backend="triton")[2]
        assert (comb.sum(-2) - 1).abs().max() < 2e-5  # ends on a column step


@pytest.mark.parametrize("tokens", [2, 17])
def test_extreme_logits_stay_finite(tokens):
    case = Case(tokens, d=40)
    case.base *= 400  # sigmoids saturate, exponentials would overflow if taken naively
    got, wanted = (
        mhc_pre(case.streams, *case.weights, 20, EPS, EPS, backend=backend) for backend in ("triton", "reference")
    )
    for a, b in zip(got, wanted):
        assert torch.isfinite(a).all() and (a - b).abs().max() < 1e-5


def test_equal_logits_ties_and_zero_streams():
    case = Case(2)
    case.fn.zero_(), case.base.zero_()
    comb = mhc_pre(case.streams, *case.weights, 20, EPS, EPS, backend="triton")[2]
    assert (comb - 0.25).abs().max() < 1e-5
    case = Case(2)
    case.streams.zero_(), case.out.zero_()
    check_boundary(case, 2)


def test_strided_inputs_equal_contiguous_ones():
    case = Case(3, d=40)
    wide = case.streams.repeat(1, 1, 2)[:, :, 40:]
    columns = case.comb.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(
        mhc_post(case.out, wide, case.post, columns, backend="triton"), mhc_post(*case.mixing, backend="triton")
    )
    for a, b in zip(
        mhc_pre(wide, case.fn, case.scale, case.base, 3, EPS, EPS, backend="triton"),
        mhc_pre(case.streams, *case.weights, 3, EPS, EPS, backend="triton"),
    ):
        assert torch.equal(a, b)


def test_few_and_many_tokens_agree_and_tokens_do_not_meet(monkeypatch):
    case = Case(18, d=40)
    run = lambda streams: mhc_pre(streams, *case.weights, 5, EPS, EPS, backend="triton")
    alone = [run(case.streams[first : first + 1]) for first in (0, 17)]
    for few in (128, 4):
        monkeypatch.setattr(triton_statistics, "FEW_TOKENS", few)
        together = run(case.streams)
        for first, one in zip((0, 17), alone):
            for a, b in zip(one, together):
                close(a, b[first : first + 1])
        bad = case.streams.clone()
        bad[7] = float("nan")
        for a, b in zip(run(bad), together):
            rest = torch.arange(18, device=DEVICE) != 7
            assert torch.equal(a[rest], b[rest]) and a[7].isnan().all()


def test_what_the_kernels_cannot_take_is_refused():
    with pytest.raises(UnsupportedInput, match="9 streams"):
        mhc_post(*Case(1, 9, 4).mixing, backend="triton")
    wide = torch.zeros(1, 1, WIDEST + 1, device=DEVICE)
    with pytest.raises(UnsupportedInput, match="columns"):
        mhc_pre(wide, wide[0].expand(3, -1), wide[0, 0, :3], wide[0, 0, :3], 2, EPS, EPS, backend="triton")


@pytest.mark.parametrize("tokens", [2, 17])
def test_repeats_are_bitwise_equal(tokens):
    case = Case(tokens, d=40, dtype=torch.bfloat16)
    run = lambda: mhc_post_pre_norm(*case.mixing, *case.weights, 3, EPS, EPS, case.weight, EPS)
    first = run()
    assert all(torch.equal(a, b) for a, b in zip(run(), first))


def test_few_tokens_are_split_over_the_columns():
    case = Case(2, d=80, dtype=torch.bfloat16)
    parts = triton_statistics.statistics(case.streams, case.fn, (case.out, case.post, case.comb))[1]
    assert parts.products == 24 and parts.data.shape == (3, 2, 32)


@gpu
@pytest.mark.parametrize("tokens", [1, 2, 4, 8, 16, 17, 64, 129, 300, 1000, 4096])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_production_shapes(tokens, dtype):
    check_boundary(Case(tokens, d=4096, dtype=dtype), tolerance=1e-5)
    check_pre(Case(tokens, d=4096, dtype=dtype), tolerance=1e-5)


@gpu
@pytest.mark.parametrize("d,n", [(7168, 4), (256, 4), (4096, 2), (1000, 8)])
@pytest.mark.parametrize("tokens", [3, 129])
def test_other_models(d, n, tokens):
    check_boundary(Case(tokens, n, d, torch.bfloat16), tolerance=1e-5)


@gpu
@pytest.mark.parametrize("tokens", [1, 8, 600])
def test_graph_replays_and_repeats(tokens):
    case = Case(tokens, d=4096, dtype=torch.bfloat16)
    run = lambda: mhc_post_pre_norm(*case.mixing, *case.weights, 20, EPS, EPS, case.weight, EPS)
    first = [t.clone() for t in run()]
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(run(), first))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = run()
    for _ in range(3):
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(replayed, first))


@gpu
def test_offsets_beyond_two_gib():
    tokens = (1 << 31) // (4 * 4096) + 70
    case = Case(70, d=4096, dtype=torch.bfloat16)
    large = [torch.zeros(tokens, *t.shape[1:], dtype=t.dtype, device=DEVICE) for t in case.mixing]
    for whole, part in zip(large, case.mixing):
        whole[-70:] = part
    got = mhc_post_pre_norm(*large, *case.weights, 20, EPS, EPS, case.weight, EPS)
    wanted = mhc_post_pre_norm(*case.mixing, *case.weights, 20, EPS, EPS, case.weight, EPS)
    assert torch.equal(got[0][-70:], wanted[0])
    fused = wanted[0]
    for a, b in zip(got[1:], wanted[1:]):  # sums in other splits, whose last bits the scaled softmax magnifies
        close(a[-70:], b, 1e-4)
    del got
    alone = mhc_post(*case.mixing, backend="triton")
    assert torch.equal(mhc_post(*large, backend="triton")[-70:], alone)
    # the same sums in another kernel, where a compiler may fuse other multiplications and additions
    close(alone, fused)


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("tokens,dtype", [(1, torch.bfloat16), (3, torch.float32), (40, torch.bfloat16)], ids=str)
def test_rows_of_experts_are_added_up_while_they_are_merged(tokens, dtype, shared):
    """With the bits of their sum, which is rounded once; rows of expert −1 were not written."""
    case, each = Case(tokens, d=40, dtype=dtype), 3
    g = torch.Generator().manual_seed(tokens)
    rows = torch.randn(tokens * each, 40, generator=g).to(dtype).to(DEVICE)
    indices = torch.arange(tokens * each, device=DEVICE).view(tokens, each) % 5 - 1
    rows[indices.flatten() < 0] = float("nan")
    found = ExpertRows(rows, indices, torch.randn(tokens, 40, generator=g).to(DEVICE) if shared else None)
    rest = *case.mixing[1:], *case.weights, 3, EPS, EPS, case.weight, EPS
    later = mhc_post_pre_norm(Unsummed(found, dtype, None), *rest)
    assert all(map(torch.equal, later, mhc_post_pre_norm(found.combine(dtype), *rest)))
    assert torch.equal(Unsummed(found, dtype, None).to(torch.device(DEVICE)), found.combine(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("tokens,d", [(17, 384), (33, 128)])
def test_the_input_comes_with_the_codes_of_its_rounding(tokens, d, dtype, monkeypatch):
    """Blocks of sizes of their own, one of zeros; x and the rest are those without codes, bit for bit."""
    monkeypatch.setattr(triton_merge, "capability", lambda device: (9, 0))
    case = Case(tokens, d=d, dtype=dtype)
    case.weight *= 2.0 ** (torch.arange(d, device=DEVICE) // 128 * 9 - 12)
    case.out[3], case.streams[3] = 0, 0
    given = *case.weights, 3, EPS, EPS, case.weight, EPS
    for run, first in ((mhc_post_pre_norm, case.mixing), (mhc_pre_norm, (case.streams,))):
        *before, found, post, comb = run(*first, *given, True)
        *others, x, _, _ = wanted = run(*first, *given)
        assert isinstance(found, CodedRows) and all(map(torch.equal, (*before, found.x, post, comb), wanted))
        assert all(map(torch.equal, found[1:], triton_fp8.quantised(x)))
        assert len(others) == len(before) and len(found.scales.unique()) > d // 128


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_input_comes_with_its_rounded_numbers(dtype):
    """For more tokens than are rounded while weights are streamed, and whole blocks."""
    case = Case(33, d=384, dtype=dtype)
    case.weight *= 2.0 ** (torch.arange(384, device=DEVICE) // 128 * 9 - 12)
    given = *case.weights, 3, EPS, EPS, case.weight, EPS
    _, found, *rest = mhc_post_pre_norm(*case.mixing, *given, False, True)
    _, x, *wanted = mhc_post_pre_norm(*case.mixing, *given)
    assert isinstance(found, RoundedRows) and torch.equal(found.x, x) and all(map(torch.equal, rest, wanted))
    assert torch.equal(found.rounded, simulate_fp8_blocks(x, 128)) and not torch.equal(found.rounded, x)
    for other in (Case(32, d=384, dtype=dtype), Case(33, d=80, dtype=dtype)):
        x, *_ = mhc_pre_norm(other.streams, *other.weights, 3, EPS, EPS, other.weight, EPS, False, True)
        assert type(x) is torch.Tensor


@pytest.mark.parametrize("tokens,d,generation", [(16, 128, 9), (17, 80, 9), (17, 128, 8)])
def test_inputs_without_codes(tokens, d, generation, monkeypatch):
    """Where there are too few tokens, parts of blocks, or no products of codes."""
    monkeypatch.setattr(triton_merge, "capability", lambda device: (generation, 0))
    case = Case(tokens, d=d, dtype=torch.bfloat16)
    x, *_ = mhc_pre_norm(case.streams, *case.weights, 3, EPS, EPS, case.weight, EPS, True)
    assert type(x) is torch.Tensor
