"""Pools so large that offsets of live rows are beyond 2 GiB and 4 GiB."""

from collections.abc import Iterator

import torch

from dsv4.kernels.cache_rows import PAGE, PackedRows
from dsv4.probes.kernel_audit.clauses.layout import asked
from dsv4.probes.kernel_audit.harness import raw
from dsv4.probes.kernel_audit.scene import Scene, check, not_run
from dsv4.probes.result import Check

BEYOND = {"2 GiB": (1 << 31) + (1 << 20), "4 GiB": (1 << 32) + (1 << 20)}


def far(harness, arguments, templates, pools: dict, offset: int):
    """Results with the live rows of each pool `offset` bytes behind its start. pools: number of the pool → number of
    its index list, or −1 where the pool is one run a batch row, whose last row then lies there."""
    placed = list(harness.place(arguments))
    for pool, index in pools.items():
        rows = placed[pool]
        if rows is None:
            continue
        if index < 0:
            placed[pool] = _spread(rows, offset)
            continue
        data = rows.data if isinstance(rows, PackedRows) else rows
        skip = -(-offset // (data.stride(0) * data.element_size()))
        big = torch.zeros((skip + data.shape[0]) * data.stride(0), dtype=data.dtype, device=data.device)
        whole = big.as_strided((skip + data.shape[0], *data.shape[1:]), data.stride())
        whole[skip:] = data
        first = skip * (PAGE if isinstance(rows, PackedRows) else 1)
        placed[pool] = rows._replace(data=whole, count=rows.count + first) if isinstance(rows, PackedRows) else whole
        placed[index] = torch.where(placed[index] >= 0, placed[index] + first, placed[index])
    return raw(harness.call(tuple(placed), templates))


def _spread(rows, offset: int):
    """One run a batch row, the last of which lies `offset` bytes behind the first."""
    data = rows.data if isinstance(rows, PackedRows) else rows
    step = -(-offset // (max(1, data.shape[0] - 1) * data.element_size() * 64)) * 64
    size = step * (data.shape[0] - 1) + data[0].numel()
    big = torch.zeros(size, dtype=data.dtype, device=data.device)
    whole = big.as_strided(data.shape, (step, *data[0].contiguous().stride())).copy_(data)
    return rows._replace(data=whole) if isinstance(rows, PackedRows) else whole


def run(scene: Scene) -> Iterator[Check]:
    """A few cases, on CUDA, for contracts with pools."""
    if not scene.device.startswith("cuda"):
        yield not_run("addresses", "pools of several GiB need a CUDA device")
        return
    if not scene.contract.pools:
        yield not_run("addresses", "the contract has no pool")
        return
    pools = {
        scene.contract.number(pool): -1 if index is None else scene.contract.number(index)
        for pool, index in scene.contract.pools.items()
    }
    for truth in scene.few(4):
        for name, offset in BEYOND.items():
            statement = f"rows beyond {name} of a pool are read"
            found, failure = asked(scene, "addresses", statement, truth, far, pools, offset)
            yield failure or check("addresses", statement, scene.label(truth), truth.judge(found))
