"""MXFP4 experts on FP8 tensor cores: on Hopper, or emulated on a CPU, where Triton's interpreter runs what is before
them."""

import numpy as np
import pytest
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from dsv4.kernels.experts import hopper, hopper_codes, hopper_launch, reference, triton
from dsv4.kernels.experts.hopper_launch import multiply_codes, tile_tokens, unfit
from dsv4.kernels.experts.hopper_order import arrange, place_of, rows_of, sort_and_arrange
from dsv4.kernels.experts.triton_order import blocks_of, sort_pairs
from dsv4.kernels.experts.triton_stream import Routed
from dsv4.kernels.linear.hopper_weights import Unfit, largest_scales
from dsv4.kernels.linear.triton_weights import hold
from dsv4.kernels.quantize import PackedWeight, WeightFormat, quantize_mxfp4
from dsv4.kernels.quantize.formats import decode_e2m1
from dsv4.kernels.quantize.reference import simulate_fp8_blocks
from tests.gluon import SEEDS, EmulationError, OnCPU, launch
from tests.kernels.products import CUDA, DEVICE, needs_gpu, poison, randn  # noqa: F401
from tests.kernels.ptx import U32, run

HOPPER = CUDA and torch.cuda.get_device_capability()[0] == 9
pytestmark = pytest.mark.skipif(CUDA and not HOPPER, reason="needs a GPU of capability 9, or none")
LIMIT, PROGRAMS = 7.0, 3
D, I = 512, 512  # the smallest shapes
KERNEL = hopper.product


def words(*values):
    """The PTX itself, which the emulator leaves to tests."""
    made = run(hopper_codes.E2M1_E4M3.value, 2, *(v.numpy().view(U32) for v in values))
    return tuple(torch.from_numpy(np.ascontiguousarray(w).view(np.int32)) for w in made)


def tables(four, byte, base, small, large):
    """As `words`, of tensors [128, 4]: the shuffle between the lanes of warps, of which lane 4r + q has group q of rows
    r and r + 8."""
    up = run("{ prmt.b32 $0, $1, 0, $2; add.u32 $0, $0, $3; }", 1, *(t.numpy().view(U32) for t in (four, byte, base)))[
        0
    ]
    lane = torch.from_numpy((up & U32(31)).astype(np.int64)).view(-1, 32)
    return tuple(t.reshape(-1, 32).gather(1, lane).view(four.shape) for t in (small, large))


@pytest.fixture
def emulated(monkeypatch):
    """emulated(seed, stages): without a GPU, products run in the emulator, as of a GPU with few multiprocessors."""

    def start(seed: int = 0, stages: int = 8) -> None:
        monkeypatch.setattr(hopper_launch, "STAGES", dict.fromkeys(hopper_launch.TOKENS, stages))
        if not CUDA:
            asm = {hopper_codes.E2M1_E4M3.value: words, hopper_codes.TABLES.value: tables}
            monkeypatch.setattr(hopper, "product", OnCPU(KERNEL, seed, asm))

    if not CUDA:
        monkeypatch.setattr(hopper_launch, "capability", lambda device: (9, 0))
        monkeypatch.setattr(hopper_launch, "processors", lambda device: PROGRAMS)
    return start


def mxfp4(*shape: int, seed: int, scales=(114, 123)) -> PackedWeight:
    """Every code, and every scale from the first byte to the last."""
    g = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (*shape[:-1], shape[-1] // 2), generator=g, dtype=torch.uint8)
    scale = torch.randint(scales[0], scales[1] + 1, (*shape[:-1], shape[-1] // 32), generator=g, dtype=torch.uint8)
    return PackedWeight(WeightFormat.MXFP4, codes.to(DEVICE), scale.to(DEVICE).view(torch.float8_e8m0fnu))


def weights(E: int, d: int = D, inner: int = I, **about) -> tuple[PackedWeight, PackedWeight]:
    return mxfp4(E, 2 * inner, d, seed=1, **about), mxfp4(E, d, inner, seed=2, **about)


def choices(N: int, k: int, E: int) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(N)
    indices = torch.stack([torch.randperm(E, generator=g)[:k] for _ in range(N)])
    return indices.to(DEVICE), torch.rand(N, k, generator=g).to(DEVICE)


def held(indices, routing, w13, w2) -> Routed:
    return Routed(indices, routing, hold("experts", w13), hold("experts", w2))


def each_pair(x, indices, routing, w13, w2) -> torch.Tensor:
    """Rows of the pairs [P, D] by the reference."""
    alone = (
        reference.experts(x, i.unsqueeze(1), r.unsqueeze(1), w13, w2, LIMIT, True)
        for i, r in zip(indices.unbind(1), routing.unbind(1))
    )
    return torch.stack(tuple(alone), 1).flatten(0, 1)


def assert_close(y, right) -> None:
    """Results are bf16. Sums in another order move a few of them by a step, and a few codes of what is between the
    products.

    Tensor cores keep some 13 bits of a sum. Of the codes between the products, those move by a whole step of E4M3, 2^-3
    of a value at most, whose sums fall on the other side of a rounding. Each element of a row adds up some such moves,
    so on a GPU the bounds are those of `within_moves`.
    """
    if CUDA:
        assert within_moves(y, right)
    else:
        size = right.abs().amax(1, keepdim=True)
        assert bool(((y.float() - right).abs() <= 2**-6 * size).all())
        assert float((y.float() == right).float().mean()) > 0.98


def within_moves(y, right) -> bool:
    """Whether every row is right to 2^-5 as a relative L2, and each element to 2^-4 of the largest of its row.

    On a host, sums of Flash's widths that were off by 2^-13 of their terms moved rows by up to 0.023 and elements by up
    to 0.024: a block whose largest value falls on the other side of a power of two is rounded anew. One block with a
    wrong scale moves a row by 0.18 and more.
    """
    off = (y.float() - right).abs()
    rows = off.norm(dim=1) <= 2**-5 * right.norm(dim=1)
    return bool(rows.all()) and bool((off <= 2**-4 * right.abs().amax(1, keepdim=True)).all())


# Codes ----------------------------------------------------------------------------------------------------------------


@gluon.jit
def _magnitudes(SMALL, LARGE):
    up = gl.arange(0, 16, gl.BlockedLayout([1], [32], [1], [0]))
    small, large = hopper_codes.magnitudes(up)
    gl.store(SMALL + up, small)
    gl.store(LARGE + up, large)


@pytest.mark.skipif(CUDA, reason="emulated")
def test_codes_are_exact_over_fourteen_exponents():
    """Each code at each place of a word, beside every other."""
    small, large = torch.zeros(16, dtype=torch.int32), torch.zeros(16, dtype=torch.int32)
    launch(_magnitudes, (1,), small, large, num_warps=1)
    byte = np.arange(1 << 16, dtype=U32)
    word = byte | (byte ^ U32(0x5A5A)) << U32(16)
    for up in range(hopper_codes.SPREAD.value + 1):
        tables = small.numpy().view(U32)[up], large.numpy().view(U32)[up]
        made = run(hopper_codes.E2M1_E4M3.value, 2, word, *tables)
        for i in range(8):
            code = torch.from_numpy((word >> U32(4 * i) & U32(15)).astype(np.uint8))
            found = torch.from_numpy((made[i // 4] >> U32(8 * (i % 4)) & U32(255)).astype(np.uint8))
            found, right = found.view(torch.float8_e4m3fn).float(), decode_e2m1(code) * 2.0 ** (up - 7)
            assert torch.equal(found, right) and torch.equal(found.signbit(), right.signbit()), (up, i)


def test_places_are_those_that_a_thread_reads():
    """Instruction j multiplies places 32j …; of these, thread q of four has 4q … 4q + 3 and 16 + 4q … of its own 32
    columns."""
    place = place_of(torch.arange(128))
    assert sorted(place.tolist()) == list(range(128))
    assert bool((place // 4 % 4 == torch.arange(128) // 32).all())
    assert place[:16].tolist() == [0, 1, 2, 3, 16, 17, 18, 19, 32, 33, 34, 35, 48, 49, 50, 51]


# Tokens ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "N, k, E, T", [(1, 6, 9, 8), (2, 2, 4, 8), (19, 3, 5, 8), (130, 5, 7, 32), (70, 2, 40, 16), (300, 2, 3, 128)]
)
def test_tokens_are_arranged(N, k, E, T):
    """Codes of each pair are those of its token, in places, and blocks of no expert are gone."""
    x, (indices, _) = (
        (randn(N, D) * torch.exp2(4 * randn(N, D // 128)).repeat_interleave(128, 1)).bfloat16(),
        choices(N, k, E),
    )
    x[0, :4] = torch.tensor([0.0, -0.0, 448.0, -1e-9])
    indices[N // 2 :, 0] = -1
    order, table, _ = sort_pairs(indices, E, T) if N > 1 else (None, None, None)
    codes, scales, listed = (t.cpu() for t in arrange(x, indices, order, table, T)[:3])
    order = torch.arange(k) if order is None else order.cpu()
    right, place = simulate_fp8_blocks(x, 128).float().cpu(), place_of(torch.arange(128))
    assert scales.shape == (D // 128, rows_of(N * k, blocks_of(N * k, E, T) if N > 1 else k))
    found, (e, first, count, row) = int(listed[0]), listed[1:].view(4, -1)
    assert int(count[:found].sum()) == int((indices >= 0).sum()) and bool((row[:found] % 4 == 0).all())
    used = torch.zeros(len(codes), dtype=torch.bool)
    for b in range(found):
        pair, at = order[first[b] : first[b] + count[b]], torch.arange(row[b], row[b] + count[b])
        assert bool((indices.cpu().flatten()[pair] == e[b]).all()) and not bool(used[at].any())
        used[at] = True
        value = codes[at].float().unflatten(1, (-1, 128))[..., place].flatten(1)
        assert torch.equal(value * scales[:, at].t().repeat_interleave(128, 1), right[pair // k])


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("N, k, E, T", [(2, 2, 4, 8), (19, 3, 5, 8), (33, 6, 256, 8), (170, 3, 7, 32), (40, 1, 2, 16)])
def test_pairs_are_sorted_in_the_launch_that_arranges_them(N, k, E, T, beside):
    """With what two launches give."""
    x, (indices, _) = randn(N, D).bfloat16(), choices(N, k, E)
    indices[N // 2 :, 0] = -1
    got = sort_and_arrange(x, indices, E, T, beside)
    order, table, _ = sort_pairs(indices, E, T)
    codes, scales, listed, own = arrange(x, indices, order, table, T, beside)
    none, found = int((indices < 0).sum()), int(listed[0])
    assert torch.equal(got.order[none:], order[none:]) and got.own == own and got.table[0] == found
    (e, first, count, row), again = listed[1:].view(4, -1)[:, :found].cpu(), got.table[1:].view(4, -1)[:, :found].cpu()
    assert torch.equal(again, torch.stack((e, first, count, row)))
    used = [torch.arange(int(r), int(r + c)) for r, c in zip(row, count)]
    used = torch.cat((*used, torch.arange(own, own + N * beside))).to(DEVICE)
    raw = lambda t: t.view(torch.uint8)[used]
    assert torch.equal(raw(got.codes), raw(codes)) and torch.equal(got.scales[:, used], scales[:, used])


def test_tiles_grow_with_the_tokens_of_an_expert():
    sizes = [tile_tokens(P, 256) for P in range(1, 30000, 5)]
    assert sizes == sorted(sizes) and set(sizes) == set(hopper_launch.TOKENS)


# Products -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "N, k, E, T, seed", [(1, 3, 4, 8, 0), (19, 3, 5, 16, 3), *((11, 2, 3, 8, seed) for seed in SEEDS)]
)
def test_experts_are_those_of_the_reference(emulated, monkeypatch, N, k, E, T, seed):
    """Ragged and empty experts, tiles that are not full, programs without a tile and with several."""
    emulated(seed)
    monkeypatch.setattr(hopper_launch, "tile_tokens", lambda P, E: T)
    x, given = randn(N, D).bfloat16(), (*choices(N, k, E), *weights(E))
    assert unfit(x, held(*given)) is None
    assert_close(multiply_codes(x, held(*given), LIMIT)[0], each_pair(x, *given))


def shares(*counts: int) -> torch.Tensor:
    """Experts of tokens that choose one each, for so many tokens an expert."""
    indices = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    return indices[torch.randperm(len(indices), generator=torch.Generator().manual_seed(7))].unsqueeze(1).to(DEVICE)


@pytest.mark.parametrize("seed", SEEDS)
def test_tiles_of_two_groups(emulated, monkeypatch, seed):
    """Tiles whose second group is full, has one token or some, or none."""
    emulated(seed, 3)
    monkeypatch.setattr(hopper_launch, "tile_tokens", lambda P, E: 128)
    indices = shares(128 + 1, 64 + 1, 0, 64, 100)
    x = (randn(len(indices), D) * torch.exp2(4 * randn(len(indices), D // 128)).repeat_interleave(128, 1)).bfloat16()
    given = indices, torch.rand(indices.shape, device=DEVICE), *weights(5)
    assert_close(multiply_codes(x, held(*given), LIMIT)[0], each_pair(x, *given))


@pytest.mark.parametrize("T, stages", [(8, 8), (8, 12), (8, 16), (128, 2), (128, 3), (128, 6)])
def test_any_number_of_stages_will_do(emulated, monkeypatch, T, stages):
    """Also more than a tile has, which the down projection fills before it waits for its tokens."""
    emulated(2, stages)
    monkeypatch.setattr(hopper_launch, "tile_tokens", lambda P, E: T)
    x, given = randn(9, D).bfloat16(), (*choices(9, 2, 3), *weights(3))
    assert_close(multiply_codes(x, held(*given), LIMIT)[0], each_pair(x, *given))


@pytest.mark.skipif(CUDA, reason="emulated")
def test_copies_to_shared_memory_begin_at_multiples_of_128_bytes(emulated, monkeypatch):
    """The emulator refuses scales of 8 tokens a stage, side by side."""
    emulated()
    monkeypatch.setattr(hopper_launch, "ALIGNED", 8)
    given = held(*choices(2, 1, 2), *weights(2))
    with pytest.raises(EmulationError, match="factors.*no multiple of 128"):
        multiply_codes(randn(2, D).bfloat16(), given, LIMIT)


@pytest.mark.parametrize("T", [8, 128])
def test_longer_sums(emulated, monkeypatch, T):
    emulated(1, 8 if T == 8 else 4)
    monkeypatch.setattr(hopper_launch, "tile_tokens", lambda P, E: T)
    x, given = randn(3, 1024).bfloat16(), (*choices(3, 2, 2), *weights(2, 1024, 512))
    assert_close(multiply_codes(x, held(*given), LIMIT)[0], each_pair(x, *given))


def test_experts_of_another_rank_are_left_out(emulated):
    emulated()
    x, (indices, routing) = randn(6, D).bfloat16(), choices(6, 2, 3)
    indices[::2, 0] = -1
    given = held(indices, routing, *weights(3))
    y, mine = multiply_codes(x, given, LIMIT)[0], indices.flatten() >= 0
    assert_close(y[mine], each_pair(x, indices.clamp(min=0), *given[1:2], *weights(3))[mine])


def test_bits_repeat_and_do_not_depend_on_other_tokens(emulated, monkeypatch):
    emulated(1)
    x, (indices, routing), both = randn(20, D).bfloat16(), choices(20, 2, 3), weights(3)
    y = multiply_codes(x, held(indices, routing, *both), LIMIT)[0]
    emulated(3)
    assert torch.equal(multiply_codes(x, held(indices, routing, *both), LIMIT)[0], y)
    some = slice(7, 10)
    for T in (32, 128):
        monkeypatch.setattr(hopper_launch, "tile_tokens", lambda P, E: T)
        alone = multiply_codes(x[some], held(indices[some], routing[some], *both), LIMIT)[0]
        assert torch.equal(alone, y.view(20, 2, D)[some].flatten(0, 1))


def test_clamps_zeros_and_rows_of_zeros(emulated):
    """Gates and up rows beyond the limit, tokens of zeros, and a row of zeros whose scales are the smallest."""
    emulated()
    x, (indices, routing), (w13, w2) = randn(8, D).bfloat16() * 20, choices(8, 2, 2), weights(2)
    x[::3] = 0
    w13.weight[0, 5] = 0x80
    w13.scale.view(torch.uint8)[0, 5] = 0
    y, right = (
        f(x, indices, routing, w13, w2) for f in (lambda x, *g: multiply_codes(x, held(*g), LIMIT)[0], each_pair)
    )
    assert_close(y, right)
    assert bool((y.view(8, 2, D)[::3] == 0).all())


@pytest.mark.skipif(CUDA, reason="emulated")
@pytest.mark.parametrize("which, block", [(0, 5), (1, 1)])
def test_bounds_of_a_gpu_see_one_wrong_scale(emulated, monkeypatch, which, block):
    """Twice the scale of one block of 128 channels is too far off: of a token, of which Flash has 32, or of what is
    between the products."""
    emulated()
    d, inner = ((4096, 512), (512, 2048))[which]
    x, given, right = randn(2, d).bfloat16(), (*choices(2, 1, 2), *weights(2, d, inner)), hopper_launch._product
    assert within_moves(multiply_codes(x, held(*given), LIMIT)[0], each_pair(x, *given))
    made = []

    def wrong(codes, scales, *rest):
        if len(made) == which:
            scales[block] *= 2
        made.append(right(codes, scales, *rest))

    monkeypatch.setattr(hopper_launch, "_product", wrong)
    assert not within_moves(multiply_codes(x, held(*given), LIMIT)[0], each_pair(x, *given))


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("N", [1, 8, 64, 100, 300, 1500])
def test_flash(N):
    """Widths of Flash, fewer experts, weights as a checkpoint has them."""
    pack = lambda *shape: PackedWeight(WeightFormat.MXFP4, *quantize_mxfp4(randn(*shape) * 0.02))
    x, given = randn(N, 4096).bfloat16(), (*choices(N, 6, 32), pack(32, 4096, 4096), pack(32, 4096, 2048))
    y = multiply_codes(x, held(*given), LIMIT)[0]
    assert_close(y, each_pair(x, *given))
    assert torch.equal(multiply_codes(x, held(*given), LIMIT)[0], y)


@needs_gpu
@pytest.mark.gpu
def test_a_token_alone_has_the_bits_that_it_has_among_others():
    """Of a pass with drafts as of plain decoding; tiles of all sizes."""
    pack = lambda *shape: PackedWeight(WeightFormat.MXFP4, *quantize_mxfp4(randn(*shape) * 0.02))
    x, (indices, routing), stacks = randn(2000, 4096).bfloat16(), choices(2000, 6, 32), (pack(32, 4096, 4096),)
    stacks += (pack(32, 4096, 2048),)
    rows = lambda n: multiply_codes(x[:n], held(indices[:n], routing[:n], *stacks), LIMIT)[0]
    alone = rows(1)
    for n in (2, 3, 9, 16, 64, 100, 300, 2000):
        assert torch.equal(rows(n)[:6], alone), n


# Choice ---------------------------------------------------------------------------------------------------------------


def spread(by: int) -> PackedWeight:
    """Scales of one row differ by that many powers of two; groups of zeros differ by more, which does not matter."""
    w = mxfp4(2, 256, 512, seed=3, scales=(100, 100))
    scale = w.scale.view(torch.uint8)
    scale[1, 70, 3] += by
    w.weight[1, 70, 16 * 5 : 16 * 7] = 0x80
    scale[1, 70, 5], scale[1, 70, 6] = 250, 3
    return w


def test_scales_that_span_fourteen_exponents(emulated):
    emulated()
    w13, w2 = weights(2)
    for w in (w13, w2):
        scale = w.scale.view(torch.uint8)
        scale[:] = torch.randint(107, 121, scale.shape, generator=torch.Generator().manual_seed(5)).to(scale)
        scale[..., 0], scale[..., 1] = 107, 120
    x, given = randn(4, D).bfloat16(), (*choices(4, 2, 2), w13, w2)
    assert unfit(x, held(*given)) is None
    assert_close(multiply_codes(x, held(*given), LIMIT)[0], each_pair(x, *given))


def test_largest_scales():
    top = largest_scales(hold("experts", spread(13)))
    assert top[1, 70] == 113 and int((top != 100).sum()) == 1
    found = largest_scales(hold("experts", spread(14)))
    assert found == Unfit("exponents of the scales of a row differ by 14; E4M3 codes of one base span 13")


def test_other_weights_tokens_and_devices_are_refused(emulated, monkeypatch):
    x, good = randn(2, D).bfloat16(), weights(2)
    said = lambda w13, w2, x=x: unfit(x, held(*choices(2, 1, 2), w13, w2)).reason
    nan = mxfp4(2, D, I, seed=4)
    nan.scale.view(torch.uint8)[0, 0, 0] = 255
    tiny = mxfp4(2, D, I, seed=5, scales=(1, 6))
    assert said(good[0], nan) == "a scale is NaN"
    assert said(good[0], tiny) == "all scales of a row are below 2^-120"
    assert said(good[0], good[1]._replace(of=9)) == "the weight is a pool of slots, whose matrices change"
    assert "are not multiples of 256 and 512" in said(good[0], mxfp4(2, 384, I, seed=6))
    assert said(good[0], PackedWeight(WeightFormat.DENSE, randn(2, D, I))) == "the weight is in fp32"
    assert said(*good, x.float()) == "x is in torch.float32"
    monkeypatch.setattr(hopper_launch, "capability", lambda device: (10, 0))
    assert said(*good) == "the device is not of capability 9"


def test_a_weight_is_read_once():
    w = hold("experts", spread(2))
    assert largest_scales(w) is largest_scales(w)
    for by in range(3, 9):  # memory of a weight that is gone may become another's
        w = hold("experts", spread(by))
        assert int(largest_scales(w)[1, 70]) == 100 + by


@pytest.mark.parametrize("simulate", [True, False])
def test_experts_use_it_only_in_official_numerics(emulated, monkeypatch, simulate):
    made = []
    rows = lambda name: (
        lambda x, *_: (made.append(name) or torch.zeros(2 * len(x), D, dtype=x.dtype, device=DEVICE), None)
    )
    monkeypatch.setattr(hopper_launch, "multiply_codes", rows("codes"))
    monkeypatch.setattr(triton, "stream_experts", rows("words"))
    for N in (1, 3):
        triton.experts(randn(N, D).bfloat16(), *choices(N, 2, 2), *weights(2), LIMIT, simulate)
    assert made == 2 * ["codes" if simulate else "words"]
