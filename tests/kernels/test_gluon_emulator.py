"""The emulator of Gluon: a product in partitions is right at every timing, and each planted mistake is caught."""

import pytest
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tests.gluon import SEEDS, Deadlock, EmulationError, launch
from tests.gluon.accesses import Accesses

ROWS, COLUMNS, DEPTH, STAGES = 64, 32, 64, 3  # of a tile
KINDS = {torch.bfloat16: gl.bfloat16, torch.float8_e4m3fn: gl.float8e4nv, torch.float32: gl.float32}
at_every_timing = pytest.mark.parametrize("seed", SEEDS)


# A product with a producer and a consumer -----------------------------------------------------------------------------


@gluon.jit
def produce(A, B, rings, MISTAKE: gl.constexpr):
    a, b, full, empty, tiles = rings
    stages: gl.constexpr = a.shape[0]
    depth: gl.constexpr = A.block_shape[1]
    bytes: gl.constexpr = A.block_type.nbytes + B.block_type.nbytes
    for tile in range(tiles):
        stage, phase = tile % stages, tile // stages & 1
        if MISTAKE != "no wait for an empty stage":
            mbarrier.wait(empty.index(stage), phase if MISTAKE == "deadlock" else phase ^ 1)
        mbarrier.expect(full.index(stage), bytes // 2 if MISTAKE == "too few bytes" else bytes)
        row = gl.program_id(0) * a.shape[1]
        tma.async_copy_global_to_shared(A, [row, tile * depth], full.index(stage), a.index(stage))
        if MISTAKE != "a copy is missing":
            tma.async_copy_global_to_shared(B, [gl.program_id(1) * 32, tile * depth], full.index(stage), b.index(stage))


@gluon.jit
def consume(C, rings, HALF: gl.constexpr, MISTAKE: gl.constexpr):
    a, b, full, empty, tiles = rings
    stages: gl.constexpr = a.shape[0]
    depth: gl.constexpr = 256 // a.dtype.primitive_bitwidth
    L: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, depth])
    acc = gl.zeros([64, 32], gl.float32, L)
    for tile in range(tiles):
        stage, phase = tile % stages, tile // stages & 1
        mbarrier.wait(full.index(stage), phase ^ 1 if MISTAKE == "wrong phase" else phase)
        rows = a.index(stage).slice(64 * HALF, 64)
        acc = warpgroup_mma(rows, b.index(stage).permute([1, 0]), acc, is_async=True)
        if MISTAKE == "released before the product is complete":
            mbarrier.arrive(empty.index(stage))
        if MISTAKE == "accumulator read early":
            acc = acc * 1.0
        acc = warpgroup_mma_wait(0, deps=[acc])
        if MISTAKE == "released twice":
            mbarrier.arrive(empty.index(stage))
        if MISTAKE != "released before the product is complete":
            mbarrier.arrive(empty.index(stage))
    c = gl.allocate_shared_memory(C.dtype, [64, 32], C.layout)
    c.store(acc)
    if MISTAKE != "no fence":
        fence_async_shared()
    row = gl.program_id(0) * a.shape[1] + 64 * HALF
    tma.async_copy_shared_to_global(C, [row, gl.program_id(1) * 32], c)
    if MISTAKE != "no wait for the store":
        tma.store_wait(0)


@gluon.jit
def multiply(A, B, C, tiles, STAGES: gl.constexpr, MISTAKE: gl.constexpr):
    consumers: gl.constexpr = A.block_shape[0] // 64
    a = gl.allocate_shared_memory(A.dtype, [STAGES, A.block_shape[0], A.block_shape[1]], A.layout)
    b = gl.allocate_shared_memory(B.dtype, [STAGES, 32, B.block_shape[1]], B.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=consumers)
    rings = (a, b, full, empty, tiles)
    if consumers == 1:
        gl.warp_specialize(
            [(consume, (C, rings, 0, MISTAKE)), (produce, (A, B, rings, MISTAKE))],
            [1],
            [24],
        )
    else:
        gl.warp_specialize(
            [(consume, (C, rings, 0, MISTAKE)), (consume, (C, rings, 1, MISTAKE)), (produce, (A, B, rings, MISTAKE))],
            [4, 1],
            [168, 24],
        )


def descriptor(t: torch.Tensor, *block: int) -> TensorDescriptor:
    layout = gl.NVMMASharedLayout.get_default_for(list(block), KINDS[t.dtype])
    return TensorDescriptor.from_tensor(t, list(block), layout)


def whole_numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed + sum(shape))).float()


def multiplied(seed: int, mistake: str = "", dtype=torch.bfloat16, rows=ROWS, M=150, N=48, K=336) -> tuple:
    """(product by the kernel, product), both fp32 [M, N]; tiles of `rows` rows, 64 a consumer."""
    x, w, out = whole_numbers(M, K).to(dtype), whole_numbers(N, K, seed=1).to(dtype), torch.full((M, N), float("nan"))
    blocks = descriptor(x, rows, DEPTH), descriptor(w, COLUMNS, DEPTH), descriptor(out, ROWS, COLUMNS)
    launch(multiply, (-(-M // rows), -(-N // COLUMNS)), *blocks, -(-K // DEPTH), STAGES, mistake, seed=seed)
    return out, x.float() @ w.float().T


@at_every_timing
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=["bf16", "e4m3"])
@pytest.mark.parametrize("rows", [ROWS, 2 * ROWS], ids=["a consumer", "two consumers"])
def test_a_product_in_partitions(rows, dtype, seed):
    assert torch.equal(*multiplied(seed, dtype=dtype, rows=rows))


# Mistakes -------------------------------------------------------------------------------------------------------------

ORDER = "produce: a TMA load of a.0. is not ordered after "
REFUSED = {  # at every timing, with this message
    "no wait for an empty stage": rf"{ORDER}a TMA load of a.0.|full.*: more arrivals in phase 0",
    "released before the product is complete": rf"{ORDER}wgmma of a.0. by consume",
    "wrong phase": r"consume: wgmma of a.0. is not ordered after a TMA load of a.0.|every partition waits",
    "no fence": "a TMA store reads c after a store of c by consume, without fence_async_shared",
    "too few bytes": r"full.*: \d+ bytes came in phase 0, and 6144 were expected",
    "a copy is missing": r"consume waits for full.0., phase 0 \(0 of 1 arrivals and 4096 of 12288 bytes missing",
    "accumulator read early": "an accumulator is used .* before warpgroup_mma_wait",
    "no wait for the store": "consume ends with 1 TMA stores under way: tma.store_wait",
    "deadlock": r"consume waits for full.0., phase 0 .*; produce waits for empty.0., phase 0 \(1 of 1 arrivals",
}


@at_every_timing
@pytest.mark.parametrize("mistake", REFUSED)
def test_a_mistake_is_refused_at_every_timing(mistake, seed):
    with pytest.raises(EmulationError, match=REFUSED[mistake]) as refusal:
        multiplied(seed, mistake)
    assert mistake != "deadlock" or isinstance(refusal.value, Deadlock)


def test_a_stage_released_twice_is_refused_at_some_timing():
    """The second arrival completes a phase of its own unless the producer comes between."""
    with pytest.raises(EmulationError):
        for seed in SEEDS:
            multiplied(seed, "released twice")


def test_timing_alone_gives_wrong_values(monkeypatch):
    """Where the order of accesses is not looked at: a stage is refilled while it is multiplied."""
    monkeypatch.setattr(Accesses, "_known", lambda self, access: True)
    assert torch.equal(*multiplied(2))
    assert not torch.equal(*multiplied(2, "released before the product is complete"))
