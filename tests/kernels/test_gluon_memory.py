"""Memory in the emulator of Gluon: global and shared, copied by loads, TMA and cp.async."""

import pytest
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tests.gluon import SEEDS, EmulationError, launch
from tests.gluon.accesses import Accesses

LINE = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
PLANE = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


def run(kernel, *args, grid=(1,), seed=0):
    launch(kernel, grid, *args, seed=seed)


@gluon.jit
def masked(X, Y, OUT, n, N: gl.constexpr, OTHER: gl.constexpr):
    i = gl.arange(0, N, LINE)
    pointer = gl.where(gl.program_id(0) == 0, X, Y) + i
    x = gl.load(pointer, mask=i < n, other=-5) if OTHER else gl.load(pointer, mask=i < n)
    gl.store(OUT + gl.program_id(0) * N + i, x)


@pytest.mark.parametrize("seed", SEEDS)
def test_loads_under_a_mask(seed):
    x, y, out = torch.arange(6.0), torch.arange(6.0) + 10, torch.zeros(2, 8)
    run(masked, x, y, out, 6, 8, True, grid=(2,), seed=seed)
    assert out.tolist() == [[*x, -5, -5], [*y, -5, -5]]
    run(masked, x, y, out, 6, 8, False, grid=(2,), seed=seed)
    assert bool(out[:, 6:].isnan().all()) and torch.equal(out[0, :6], x)


def test_an_access_beyond_a_tensor_is_refused():
    x, out = torch.arange(6.0), torch.zeros(2, 8)
    with pytest.raises(EmulationError, match="memory of no argument, 0 bytes beyond the end of X"):
        run(masked, x, x, out, 8, 8, False)


@gluon.jit
def word_at(BYTES, OUT, offset):
    gl.store(OUT, gl.load((BYTES + offset).to(gl.pointer_type(gl.int32), bitcast=True)))


def test_a_word_at_any_multiple_of_its_size():
    bytes, out = torch.arange(16, dtype=torch.uint8), torch.zeros(1, dtype=torch.int32)
    run(word_at, bytes, out, 4)
    assert out.item() == 0x07060504
    with pytest.raises(EmulationError, match="access to BYTES not aligned to 4 bytes"):
        run(word_at, bytes, out, 6)


@gluon.jit
def counted(COUNT, SEEN, N: gl.constexpr):
    i = gl.arange(0, N, LINE)
    before = gl.atomic_add(COUNT + i % 2, i, mask=i < 6, sem="relaxed", scope="gpu")
    gl.store(SEEN + i, before, mask=i < 6)


def test_atomics_add_to_one_place_again_and_again():
    count, seen = torch.tensor([100, 200], dtype=torch.int32), torch.zeros(8, dtype=torch.int32)
    run(counted, count, seen, 8)
    assert count.tolist() == [106, 209] and seen.tolist() == [100, 200, 100, 201, 102, 204, 0, 0]


@gluon.jit
def box(X, OUT, row, column, M: gl.constexpr, N: gl.constexpr, WAITS: gl.constexpr = True):
    shared = gl.allocate_shared_memory(X.dtype, [M, N], X.layout)
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, count=1)
    mbarrier.expect(full, X.block_type.nbytes)
    tma.async_copy_global_to_shared(X, [row, column], full, shared)
    if WAITS:
        mbarrier.wait(full, 0)
    tma.async_copy_shared_to_global(OUT, [row, column], shared)
    tma.store_wait(0)
    if not WAITS:
        mbarrier.wait(full, 0)


@pytest.mark.parametrize("row,column", [(0, 0), (-3, 8), (7, 16), (40, 0)])
def test_a_box_beyond_the_tensor_holds_zeros_and_leaves_memory(row, column):
    x, out = (
        torch.arange(240, dtype=torch.int16).view(torch.bfloat16).reshape(10, 24),
        torch.full((10, 24), 7.0).bfloat16(),
    )
    layout = gl.NVMMASharedLayout(32, 16, 2)
    boxes = [TensorDescriptor.from_tensor(t, [8, 16], layout) for t in (x, out)]
    run(box, *boxes, row, column, 8, 16)
    inside = torch.zeros(10, 24, dtype=torch.bool)
    inside[max(row, 0) : max(row + 8, 0), column : column + 16] = True
    assert torch.equal(out, torch.where(inside, x, torch.tensor(7.0).bfloat16()))


def test_a_box_that_is_read_before_its_wait(monkeypatch):
    """Is refused; where the order of accesses is not looked at, it shows by the timing."""
    x, out = torch.ones(8, 16).bfloat16(), torch.zeros(8, 16).bfloat16()
    boxes = [TensorDescriptor.from_tensor(t, [8, 16], gl.NVMMASharedLayout(32, 16, 2)) for t in (x, out)]
    for seed in SEEDS:
        with pytest.raises(EmulationError, match="a TMA store of shared is not ordered after a TMA load of shared"):
            run(box, *boxes, 0, 0, 8, 16, False, seed=seed)
    monkeypatch.setattr(Accesses, "_known", lambda self, access: True)
    run(box, *boxes, 0, 0, 8, 16, False, seed=0)
    assert bool(out.isnan().all())
    run(box, *boxes, 0, 0, 8, 16, False, seed=1)
    assert torch.equal(out, x)


def test_a_box_that_does_not_begin_at_16_bytes_is_refused():
    boxes = [TensorDescriptor.from_tensor(torch.zeros(8, 16).bfloat16(), [8, 16], gl.NVMMASharedLayout(32, 16, 2))] * 2
    with pytest.raises(EmulationError, match="8 bytes of its innermost"):
        run(box, *boxes, 0, 4, 8, 16)


@gluon.jit
def views(OUT, WORDS, N: gl.constexpr):
    i = gl.arange(0, N, LINE)
    shared = gl.allocate_shared_memory(gl.int32, [4, N], FLAT)
    shared.index(2).store(i)
    shared.index(1).store(i + 100)
    gl.store(OUT + i, shared.index(2).load(LINE))
    flat = shared._reinterpret(gl.uint8, [16 * N], FLAT)
    gl.store(WORDS + gl.arange(0, 16 * N, LINE), flat.load(LINE))


def test_views_of_shared_memory_and_fresh_memory():
    out, words = torch.zeros(8, dtype=torch.int32), torch.zeros(4, 32, dtype=torch.uint8)
    run(views, out, words, 8)
    assert out.tolist() == list(range(8)) and words.view(torch.int32)[1].tolist() == list(range(100, 108))
    assert bool((words[[0, 3]] == 255).all())


# cp.async -------------------------------------------------------------------------------------------------------------


@gluon.jit
def rotated(X, OUT, tiles, GROUPS: gl.constexpr, FENCED: gl.constexpr, N: gl.constexpr):
    ring = gl.allocate_shared_memory(gl.bfloat16, [3, 64, N], gl.NVMMASharedLayout(128, 16, 2))
    row, column = gl.arange(0, 64, gl.SliceLayout(1, PLANE)), gl.arange(0, N, gl.SliceLayout(0, PLANE))
    at = row[:, None] * N + column[None, :]
    for tile in range(2):
        async_copy.async_copy_global_to_shared(ring.index(tile), X + tile * 64 * N + at)
        async_copy.commit_group()
    acc = gl.zeros([64, 64], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
    for tile in range(tiles):
        async_copy.wait_group(GROUPS)
        if FENCED:
            fence_async_shared()
        k = ring.index(tile % 3)
        acc = warpgroup_mma(k, k.permute([1, 0]), acc)
        live = (row < 64 * (tile + 2 < tiles))[:, None]
        async_copy.async_copy_global_to_shared(ring.index((tile + 2) % 3), X + (tile + 2) * 64 * N + at, mask=live)
        async_copy.commit_group()
    async_copy.wait_group(0)
    out = OUT + row[:, None] * 64 + gl.arange(0, 64, gl.SliceLayout(0, PLANE))[None, :]
    gl.store(out, gl.convert_layout(acc, PLANE))


@pytest.mark.parametrize("seed", SEEDS)
def test_groups_of_copies(seed):
    x, out = torch.randint(-3, 4, (5, 64, 64)).bfloat16(), torch.zeros(64, 64)
    run(rotated, x, out, 5, 1, True, 64, seed=seed)
    assert torch.equal(out, (x.float() @ x.float().mT).sum(0))
    with pytest.raises(EmulationError, match="an asynchronous copy of ring.0. by the kernel, which is under way"):
        run(rotated, x, out, 5, 2, True, 64, seed=seed)
    with pytest.raises(EmulationError, match="without fence_async_shared"):
        run(rotated, x, out, 5, 1, False, 64, seed=seed)


@gluon.jit
def summed(X, OUT, WAITED: gl.constexpr, READ: gl.constexpr):
    i = gl.arange(0, 128, LINE)
    copied = gl.allocate_shared_memory(gl.float32, [128], FLAT)
    async_copy.async_copy_global_to_shared(copied, X + i)
    async_copy.commit_group()
    if WAITED:
        async_copy.wait_group(0)
    total = gl.sum(gl.load(X + i), 0)
    async_copy.wait_group(0)
    gl.store(OUT + i, total + (copied.load(LINE) if READ else i))


@pytest.mark.parametrize("seed", SEEDS)
def test_copies_to_what_may_be_scratch_memory(seed):
    """Memory that is used later is of its own; a sum may be made in that of a copy that nothing reads."""
    x, out = torch.arange(128.0), torch.zeros(128)
    for waited, read in ((True, True), (False, True), (True, False)):
        run(summed, x, out, waited, read, seed=seed)
        assert torch.equal(out, 8128 + x)
    with pytest.raises(EmulationError, match="sum while an asynchronous copy to copied is under way"):
        run(summed, x, out, False, False, seed=seed)


# Operands in registers ------------------------------------------------------------------------------------------------

NIBBLES = gl.constexpr("""
and.b32 $0, $2, 0x0f0f0f0f;
shr.b32 $1, $2, 4;
and.b32 $1, $1, 0x0f0f0f0f;""")


@gluon.jit
def of_nibbles(CODES, X, OUT, K: gl.constexpr):
    row, column = gl.arange(0, 64, gl.SliceLayout(1, PLANE)), gl.arange(0, K // 2, gl.SliceLayout(0, PLANE))
    packed = gl.load(CODES + row[:, None] * (K // 2) + column[None, :])
    low, high = gl.inline_asm_elementwise(NIBBLES, "=r,=r,r", [packed], (gl.uint8, gl.uint8), is_pure=True, pack=4)
    codes = gl.reshape(gl.join(low, high), [64, K]).to(gl.float8e4nv, bitcast=True)
    PRODUCT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 32])
    codes = gl.convert_layout(codes, gl.DotOperandLayout(0, PRODUCT, 4))
    x = gl.allocate_shared_memory(gl.float8e4nv, [32, K], X.layout)
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, count=1)
    mbarrier.expect(full, X.block_type.nbytes)
    tma.async_copy_global_to_shared(X, [0, 0], full, x)
    mbarrier.wait(full, 0)
    twice = warpgroup_mma_init(gl.zeros([64, 32], gl.float32, PRODUCT))
    twice = warpgroup_mma(codes, x.permute([1, 0]), twice, use_acc=False, is_async=True)
    twice = warpgroup_mma(codes, x.permute([1, 0]), twice, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[twice])
    row, column = gl.arange(0, 64, gl.SliceLayout(1, PRODUCT)), gl.arange(0, 32, gl.SliceLayout(0, PRODUCT))
    gl.store(OUT + row[:, None] * 32 + column[None, :], acc)


@pytest.mark.parametrize("seed", SEEDS)
def test_codes_of_four_bits_become_an_operand_in_registers(seed):
    """The nibble n is the E4M3 code of n / 512."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (64, 32), dtype=torch.uint8, generator=generator)
    x, out = torch.randint(-8, 9, (32, 64), generator=generator).to(torch.float8_e4m3fn), torch.zeros(64, 32)
    box = TensorDescriptor.from_tensor(x, [32, 64], gl.NVMMASharedLayout(64, 8, 2))
    launch(of_nibbles, (1,), codes, box, out, 64, seed=seed, asm={NIBBLES.value: lambda b: (b & 15, b >> 4)})
    weights = torch.stack((codes & 15, codes >> 4), -1).reshape(64, 64).float() / 512
    assert torch.equal(out, 2 * weights @ x.float().T)
