"""Index scores by codes on Hopper: the kernel emulated, with any order of copies, products and warps that a GPU may
have; the codes in Triton's interpreter or on a GPU."""

import pytest
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from dsv4.kernels.cache_rows import KEY_FORMATS, PAGE, RowFormat, decode_rows
from dsv4.kernels.indexer import hopper, reference, triton, triton_fp8
from dsv4.kernels.indexer.triton_choose import Plan
from dsv4.kernels.quantize.reference import simulate_fp4_blocks
from tests.gluon import SEEDS, OnCPU, launch
from tests.kernels.test_triton_indexer import DEVICE, pack

H, D = 64, 128
NAN, INF = float("nan"), float("inf")


def drawn(*shape: int, seed: int, spread: float = 0.0) -> torch.Tensor:
    """fp32 [..., 128] as `simulate_fp4_blocks` gives them; blocks of 32 differ in size by powers of two."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, D, generator=g)
    size = torch.exp2((torch.randn(*shape, D // 32, generator=g) * spread).round())
    return simulate_fp4_blocks(x * size.repeat_interleave(32, -1), 32)


def value(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return codes.view(torch.float8_e4m3fn).float() * scales.float().unsqueeze(-1)


# Scores ---------------------------------------------------------------------------------------------------------------


def coded(q, weights, visible, n, known):
    """What `coded_queries` gives, by torch."""
    B, T = q.shape[:2]
    exponent = torch.ceil(torch.log2(q.float().abs().amax(-1).clamp(min=1e-30) / 448))
    codes = (q.float() / torch.exp2(exponent).unsqueeze(-1)).to(torch.float8_e4m3fn).view(torch.uint8)
    more = (0, -T % 4)
    pad = lambda x, *inner: torch.nn.functional.pad(x, (*inner, *more))
    ends = visible.clamp(0, n).to(torch.int32)
    return pad(codes, 0, 0, 0, 0), pad(weights * torch.exp2(exponent) / 2, 0, 0), pad(ends)


def coded_rows(keys: torch.Tensor) -> triton_fp8.Coded:
    """What `coded_keys` gives of fp32 [B, n, 128], by torch."""
    B, n = keys.shape[:2]
    exponent = torch.ceil(torch.log2(keys.abs().amax(-1).clamp(min=1e-30) / 448))
    codes = (keys / torch.exp2(exponent).unsqueeze(-1)).to(torch.float8_e4m3fn).view(torch.uint8)
    more = (0, -n % PAGE)
    pad = torch.nn.functional.pad
    return triton_fp8.Coded(pad(codes, (0, 0, *more)), pad(torch.exp2(exponent), more), n)


def on_cpu(monkeypatch, seed: int, programs: int, stages: int, parts: int | None) -> None:
    """`launch_codes` as a GPU of so many multiprocessors runs it, with a ring of so many pages."""
    for name, found in (("processors", programs), ("dependent_launch", True)):
        monkeypatch.setattr(triton_fp8, name, lambda device, found=found: found)
    monkeypatch.setattr(triton_fp8, "STAGES", stages)
    monkeypatch.setattr(triton_fp8, "coded_queries", coded)
    if parts:
        monkeypatch.setattr(triton_fp8, "parts_of", lambda tiles, pages, programs: parts)
    monkeypatch.setattr(hopper, "scores", OnCPU(hopper.scores, seed))


def causal(B: int, T: int, n: int) -> torch.Tensor:
    """int64 [B, T]: as in prompts; a batch row sees fewer entries than the one before."""
    return torch.stack([(torch.arange(T) + 1) * n // T - 3 * b for b in range(B)])


CASES = [  # batch rows, queries, entries, programs, stages, parts
    (1, 4, 64, 132, 2, None),  # one page: a warpgroup has none
    (1, 9, 300, 2, 2, 1),  # tiles that are not whole, a page that is not
    (2, 13, 330, 3, 4, 1),  # the last round is not whole, and runs backwards
    (2, 6, 200, 8, 8, 3),  # parts of a tile
    (1, 8, 520, 3, 4, 5),
    (3, 5, 70, 1, 2, 1),
]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("B, T, n, programs, stages, parts", CASES)
def test_scores(B, T, n, programs, stages, parts, seed, monkeypatch):
    q, keys = drawn(B, T, H, seed=1, spread=1.0).bfloat16(), drawn(B, n, seed=2, spread=1.0)
    weights, visible = torch.randn(B, T, H, generator=torch.Generator().manual_seed(3)), causal(B, T, n)
    weights[0, T // 2, 5] = NAN
    width = n + 7
    out, rows = torch.full((B, T, width), 12345.0), coded_rows(keys)
    rows.codes[0, n // 2, 70], keys[0, n // 2, 70] = 0x7F, NAN
    on_cpu(monkeypatch, seed, programs, stages, parts)
    triton_fp8.launch_codes(q, weights, rows, visible, out, width)
    right = reference.index_scores(q.float(), weights, keys, visible)
    seen = torch.arange(width) < visible.unsqueeze(-1)
    assert torch.equal(out[~seen], torch.full_like(out[~seen], 12345.0))
    got, wanted = out[seen], right[seen[..., :n]]
    assert torch.equal(got.isnan(), wanted.isnan()) and wanted.isnan().sum() > n // 2
    size = reference.index_scores(q.float().abs(), weights.abs(), keys.abs(), visible)[seen[..., :n]]
    assert bool((((got - wanted).abs() <= size * 2**-20) | wanted.isnan()).all())


@pytest.mark.parametrize("seed", SEEDS)
def test_queries_that_see_nothing(seed, monkeypatch):
    """Between others: their tiles have no pages."""
    B, T, n = 1, 16, 140
    q, keys, weights = drawn(B, T, H, seed=1).bfloat16(), drawn(B, n, seed=2), torch.ones(B, T, H)
    visible = torch.zeros(B, T, dtype=torch.int64)
    visible[0, 1], visible[0, 9], visible[0, 15] = 140, 64, 1
    out = torch.full((B, T, n), NAN)
    on_cpu(monkeypatch, seed, 2, 2, 1)
    triton_fp8.launch_codes(q, weights, coded_rows(keys), visible, out, n)
    right = reference.index_scores(q.float(), weights, keys, visible)
    assert torch.equal(out.isnan(), right == -INF)
    torch.testing.assert_close(out.nan_to_num(-INF), right, rtol=1e-5, atol=1e-4)


@gluon.jit
def shares(OUT, B, T, parts, ROOM: gl.constexpr):
    """OUT int32 [programs, ROOM]: units of each program, in order."""
    sizes = (B, T, 0, parts, 0)
    for turn in range(hopper.rounds_of(sizes)):
        b, t, part = hopper.unit(turn, sizes)
        gl.store(OUT + gl.program_id(0) * ROOM + turn, (b * gl.cdiv(T, 4) + t) * parts + part)


@pytest.mark.parametrize("B, T, parts, programs", [(1, 400, 1, 12), (2, 90, 3, 12), (1, 50, 1, 13), (3, 20, 2, 7)])
def test_programs_share_the_work_evenly(B, T, parts, programs):
    tiles = -(-T // 4)
    out = torch.full((programs, 64), -1, dtype=torch.int32)
    launch(shares, (programs,), out, B, T, parts, 64)
    assert torch.equal(out[out >= 0].sort().values, torch.arange(B * tiles * parts, dtype=torch.int32))
    seen = torch.where(out >= 0, out // parts % tiles + 1, 0)  # as many as its last query
    assert bool((seen[:, :-1] >= seen[:, 1:]).all())
    apart = programs // (B * parts) + 1  # by how much tiles of a round differ, at most
    assert int(seen.sum(1).max() - seen.sum(1).min()) <= 2 * apart


@pytest.mark.parametrize("tiles, pages, programs", [(1, 1, 132), (96, 512, 132), (2048, 32, 132), (1, 4096, 132)])
def test_parts_fill_the_device(tiles, pages, programs):
    parts = triton_fp8.parts_of(tiles, pages, programs)
    rounds = -(-tiles * parts // programs)
    assert 1 <= parts <= min(pages, programs)
    assert tiles * parts >= 0.9 * rounds * min(programs, tiles * pages)


# Codes ----------------------------------------------------------------------------------------------------------------


def spread_out(*shape: int, exponents: tuple[float, ...] = (0.0, -14.0, -3.0, -9.0), seed: int = 1) -> torch.Tensor:
    """fp32 [..., 128]: E2M1 numbers, the largest of which is in each block of 32, times 2^exponents of the blocks."""
    g = torch.Generator().manual_seed(seed)
    x = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])[torch.randint(0, 8, (*shape, D), generator=g)]
    x[..., ::32] = 6.0
    x *= torch.randint(0, 2, x.shape, generator=g) * 2 - 1
    return x * torch.exp2(torch.tensor(exponents)).repeat_interleave(32)


@pytest.mark.parametrize("T", [1, 4, 7])
def test_codes_of_queries_are_the_queries(T):
    """Exact while the scales of a row differ by up to 2^14."""
    B, n = 2, 50
    q = spread_out(B, T + 1, H).bfloat16()
    q[0, 1, :4] *= torch.tensor([[0.0], [2.0**-90], [1.0], [2.0**90]])
    q[0, 0] = q[0, 1]
    q = q.to(DEVICE)[:, 1:] if T == 7 else q.to(DEVICE)[:, :T]
    weights = torch.randn(B, H, T, generator=torch.Generator().manual_seed(3)).to(DEVICE).transpose(1, 2)
    visible = torch.arange(2 * B * T, device=DEVICE).view(B, T, 2)[:, :, 0] * 5 - 3
    codes, factors, ends = triton_fp8.coded_queries(q, weights, visible, n, 6)
    assert codes.shape == (B, -(-T // 4) * 4, H, D) and factors.shape == codes.shape[:3]
    scale = 2 * factors[:, :T] / weights
    assert torch.equal(value(codes[:, :T], scale), q.float())
    largest = codes[:, :T].view(torch.float8_e4m3fn).float().abs().amax(-1)
    assert bool(((largest > 224) & (largest <= 448) | (q.float().abs().amax(-1) == 0)).all())
    assert torch.equal(ends[:, :T].long(), torch.where(visible > 6, visible.clamp(0, n), 0)) and not ends[:, T:].any()
    fewer = triton_fp8.coded_queries(q, weights, visible, n, 7)[2]
    assert torch.equal(fewer, torch.where(ends == 7, 0, ends)) and bool((ends == 7).any())
    assert not codes[:, T:].any() and not factors[:, T:].any()


def test_small_numbers_beside_large_ones_are_rounded():
    q = spread_out(1, 4, H, exponents=(0.0, -15.0, -18.0, -40.0))
    ones, visible = torch.ones(1, 4, H, device=DEVICE), torch.ones(1, 4, dtype=torch.int64, device=DEVICE)
    codes, factors, _ = triton_fp8.coded_queries(q.bfloat16().to(DEVICE), ones, visible, 1)
    off = (value(codes, 2 * factors).cpu() - q).abs()
    assert 0 < float((off / q.abs().amax(-1, keepdim=True)).max()) <= 2.0**-10 / 224


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_rows_that_are_not_finite_become_nan(bad):
    q, keys = drawn(1, 4, H, seed=1).bfloat16(), drawn(1, 70, seed=2).bfloat16()
    q[0, 2, 7, 50] = keys[0, 66, 3] = bad
    ones, visible = torch.ones(1, 4, H, device=DEVICE), torch.full((1, 4), 70, device=DEVICE)
    _, factors, _ = triton_fp8.coded_queries(q.to(DEVICE), ones, visible, 70)
    scales = triton_fp8.coded_keys(keys.to(DEVICE)).scales
    assert factors.isnan().nonzero().tolist() == [[0, 2, 7]] and scales.isnan().nonzero().tolist() == [[0, 66]]


@pytest.mark.parametrize("form", [None, *KEY_FORMATS], ids=lambda f: f.value if f else "plain")
@pytest.mark.parametrize("n", [1, 64, 130])
def test_codes_of_keys_are_the_keys(n, form):
    """Of packed keys those that exist; other bytes of a page are no numbers."""
    values = spread_out(3, n)
    values[0, 0], values[1, n - 1], values[2, 0] = 0.0, 2.0**-70, 1.875
    rows = pack(values.to(DEVICE), form) if form else values.bfloat16().to(DEVICE)
    given = rows._replace(data=rows.data[1:]) if form else rows.transpose(0, 1).contiguous().transpose(0, 1)[1:]
    found = triton_fp8.coded_keys(given)
    wanted = (decode_rows(rows) if form else rows.float())[1:]
    assert found.n == n and found.codes.shape == (2, -(-n // PAGE) * PAGE, D)
    got = value(found.codes, found.scales)
    if form in (None, RowFormat.INDEX_FP4, RowFormat.INDEX_FP8):
        assert torch.equal(got[:, :n], wanted)
    else:  # codes of 4 bits below the smallest normal number of E4M3
        assert bool(((got[:, :n] - wanted).abs() <= wanted.abs().amax(-1, keepdim=True) * 2.0**-10 / 224).all())
    assert not got[:, n:].any()


def test_a_key_with_a_scale_of_nan_is_nan():
    rows = pack(drawn(1, 3, seed=1).to(DEVICE), RowFormat.INDEX_FP4)
    rows.scales[0, 0, 1, 2] = 255
    assert triton_fp8.coded_keys(rows).scales[0, :3].isnan().tolist() == [False, True, False]


# Both -----------------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(DEVICE == "cuda", reason="other tests run the kernel itself")
@pytest.mark.parametrize("seed", SEEDS[:2])
@pytest.mark.parametrize("form", [None, *KEY_FORMATS], ids=lambda f: f.value if f else "plain")
@pytest.mark.parametrize(
    "B, T, scratch, how",
    [
        (1, 21, 8 * 4 * 320, None),
        (2, 5, 5 * 4 * 320, None),
        (1, 21, 5 * 4 * 320, None),
        (1, 21, 8 * 4 * 320, Plan("filter", 128, 0)),
        (1, 21, 8 * 4 * 320, Plan("descend", 512, 0)),
    ],
)
def test_selections_by_codes(B, T, scratch, how, form, seed, monkeypatch):
    """In chunks of whole rounds of two programs, of batch rows, and of parts; without scores of queries that see at
    most k."""
    n, k = 300, 20
    q, values = drawn(B, T, H, seed=1).bfloat16(), drawn(B, n, seed=2)
    keys = pack(values, form) if form else values.bfloat16()
    weights, visible = torch.randn(B, T, H, generator=torch.Generator().manual_seed(3)), causal(B, T, n)
    visible[0, 1] = k
    chunks = selecting_codes(monkeypatch, seed, scratch)
    if how:
        monkeypatch.setattr(triton, "plan", lambda *sizes: how)
    fresh_scores_are_infinite(monkeypatch)
    got = triton.select_entries(q, weights, keys, visible, k, True)
    wanted = reference.topk_entries(reference.index_scores(q, weights, keys, visible), k)
    assert torch.equal(got.sort(-1).values, wanted.sort(-1).values)
    assert len(chunks) > 1 and sum(chunks) == B * T


def fresh_scores_are_infinite(monkeypatch) -> None:
    """Of −∞ no entry is selected: a selection that reads scores that nobody wrote shows it."""
    empty = torch.empty
    infinite = lambda made: made.fill_(-INF) if made.dtype is torch.float32 else made
    monkeypatch.setattr(torch, "empty", lambda *given, **named: infinite(empty(*given, **named)))


def selecting_codes(monkeypatch, seed: int, scratch: int) -> list[int]:
    """Let `select_entries` take codes as on a GPU of two multiprocessors; gets the queries of each chunk."""
    chunks = []
    for name, found in (("processors", 2), ("dot_in_fp32", False), ("capability", (9, 0))):
        monkeypatch.setattr(triton_fp8, name, lambda x, found=found: found)
    monkeypatch.setattr(triton, "processors", lambda device: 2)
    monkeypatch.setattr(triton, "CODED_PAIRS", 1)
    monkeypatch.setattr(triton, "CODED_QUERIES", 1)
    monkeypatch.setattr(triton, "CODES_SCRATCH_BYTES", scratch)
    monkeypatch.setattr(hopper, "scores", OnCPU(hopper.scores, seed))
    launch = triton_fp8.launch_codes
    counted = lambda q, *given: (chunks.append(q.shape[0] * q.shape[1]), launch(q, *given))
    monkeypatch.setattr(triton_fp8, "launch_codes", counted)
    return chunks


@pytest.mark.parametrize(
    "what", ["not rounded", "few", "few pairs", "other heads", "fp32 keys", "fp32 queries", "no Hopper"]
)
def test_other_calls_multiply_no_codes(what, monkeypatch):
    few, heads = (3 if what == "few" else 4), (32 if what == "other heads" else H)
    q, keys = drawn(2, few, heads, seed=1).bfloat16(), drawn(2, 40, seed=2).bfloat16()
    given = [q, torch.ones(2, few, heads), keys, causal(2, few, 40)]
    chunks = selecting_codes(monkeypatch, 0, 1 << 20)
    monkeypatch.setattr(triton, "CODED_QUERIES", 4)
    monkeypatch.setattr(triton_fp8, "dot_in_fp32", lambda x: x.dtype is torch.float32)
    if what == "few pairs":
        monkeypatch.setattr(triton, "CODED_PAIRS", 4 * 40 + 1)
    if what == "fp32 queries":
        given[0] = q.float()
    if what == "fp32 keys":
        given[2] = keys.float()
    if what == "no Hopper":
        monkeypatch.setattr(triton_fp8, "capability", lambda device: (8, 0))
    triton.select_entries(*(x.to(DEVICE) for x in given), 8, what != "not rounded")
    assert not chunks
