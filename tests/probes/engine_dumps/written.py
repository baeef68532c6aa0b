"""Dumps for tests: a run of this project's model in the files of SGLang and vLLM, cut over ranks and steps."""

from collections.abc import Callable
from itertools import count
from pathlib import Path

import torch

from dsv4.probes.subjects.dump import steps_of

INDEX = count(1)
POSITIONS = torch.arange(9)
NUMBER = {"attn_in": 1, "q_after_rope": 2, "attn_out": 3, "ffn_out": 4, "streams": 5}
SHAPE = {"attn_in": (16,), "q_after_rope": (4, 4), "attn_out": (16,), "ffn_out": (16,), "streams": (2, 16)}
DIMS = {"q_after_rope": "t h[attn_tp] d"}


def part(point: str, value: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """What a rank holds of [n, …]: its heads, or everything."""
    return value.chunk(ranks, 1)[rank].contiguous() if point in DIMS else value


def of_step(capture, config, key, start: int, n: int) -> torch.Tensor:
    """A point's rows of one step: of its tokens, or the entries that the step completes."""
    value = capture.points[key][0]
    if key[1] in ("compressed_kv", "index_keys"):
        ratio = config.compress_ratios[key[0]]
        return value[start // ratio : (start + n) // ratio]
    return value[start : start + n]


def sglang_file(folder: Path, name: str, value, rank=0, ranks=1, step=0, layer=None, dims=None, **more):
    """One file as `dumper.dump` of 0.5.23 writes it."""
    tags = {"step": step, "rank": rank, "dump_index": next(INDEX), "name": name, "recompute_status": "disabled"}
    tags |= {} if layer is None else {"layer_id": layer}
    info = {
        f"{axis}_{word}": (rank if word == "rank" else ranks) for axis in ("tp", "attn_tp") for word in ("rank", "size")
    }
    meta = tags | {"world_rank": rank, "world_size": ranks, "sglang_parallel_info": info} | more
    file = folder / ("___".join(f"{k}={v}" for k, v in tags.items()) + ".pt")
    file.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"value": value, "meta": meta | ({} if dims is None else {"dims": dims})}, file)
    return file


def as_sglang(folder: Path, capture, ids, config, schedule=(), ranks=1, change: Callable | None = None) -> Path:
    """A whole run. change(key, value, rank, step) → another value, or None for a file that is not written."""
    for step, (start, n) in enumerate(steps_of(ids.shape[1], schedule)):
        for rank in range(ranks):
            place = dict(rank=rank, ranks=ranks, step=step)
            sglang_file(folder, "input_ids", ids[0, start : start + n].clone(), **place)
            sglang_file(folder, "positions", torch.arange(start, start + n), **place)
            for key in capture.points:
                value = part(key[1], of_step(capture, config, key, start, n).clone(), rank, ranks)
                value = value if change is None else change(key, value, rank, step)
                if value is not None:
                    sglang_file(folder, key[1], value, layer=key[0], dims=DIMS.get(key[1]), **place)
    return folder


VLLM = {"attn_in": "attn_norm_out", "attn_out": "attn_block_out", "ffn_out": "ffn_block_out", "streams": "output"}


def as_vllm(folder: Path, capture, ids) -> Path:
    """One step of one rank, with what vLLM's fork has dump points of."""
    folder.mkdir(parents=True)
    tensors = {"model.input.input_ids": ids[0].clone(), "model.input.positions": torch.arange(ids.shape[1])}
    for (layer, point), value in capture.points.items():
        if point in VLLM:
            tensors[f"model.layers.{layer}.layer.{VLLM[point]}"] = value[0].clone()
    for i, (tag, value) in enumerate(tensors.items()):
        torch.save(value, folder / f"{i:05d}__{tag}.pt")
    return folder


def formula(layer: int, point: str) -> torch.Tensor:
    """What the toy model has at a point, [1, 9, …]."""
    n = torch.Size(SHAPE[point]).numel()
    value = (layer * 7 + NUMBER[point] * 3 + POSITIONS.unsqueeze(1) * 13 + torch.arange(n) * 5) % 61 / 8
    return value.view(1, 9, *SHAPE[point])
