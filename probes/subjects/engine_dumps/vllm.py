"""What vLLM writes with VLLM_DSV4_DUMP_DIR set: NNNNN__TAG.pt, a tensor each, numbered as they came.

The variable is read by `vllm/model_executor/models/deepseek_v4.py` of ROCm's fork (pull request 894 there, April 2026);
no other source of it was found. The process ends after its first forward pass, and files do not say their rank. So
several passes and ranks are folders that whoever runs the engine names: `step0/rank0/…`; what is missing counts as 0.
"""

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from dsv4.probes.subject import POINTS
from dsv4.probes.subjects.engine_dumps.dims import ANY
from dsv4.probes.subjects.engine_dumps.pieces import EngineDumpError, Loaded, Piece, read_pt

LAYER = "model.layers.{layer}.layer."
NAMES = {
    "model.input.input_ids": "ids",
    "model.input.positions": "positions",
    LAYER + "attn_norm_out": "attn_in",
    LAYER + "attn_block_out": "attn_out",
    LAYER + "ffn_block_out": "ffn_out",
    LAYER + "output": "streams",
    **{f"model.layers.{{layer}}.{point}": point for point in POINTS},
}
FILE = re.compile(r"(\d{5,})__(.+)\.pt")


def pieces_of(folder: Path) -> tuple[list[Piece], dict[str, str]]:
    """(every dumped tensor under `folder`, file → why it is none). Raises EngineDumpError."""
    files, others = {}, {}
    for file in sorted(p for p in folder.rglob("*") if p.is_file()):
        found = FILE.fullmatch(file.name)
        if found:
            files[file] = (int(found[1]), found[2])
        else:
            others[str(file.relative_to(folder))] = "not a name that vLLM gives"
    if not files:
        raise EngineDumpError(
            f"{folder.name} holds no files NNNNN__TAG.pt, which ROCm's vLLM writes where VLLM_DSV4_DUMP_DIR says; no "
            "other layout of that variable is known: give such a folder, or rename the files so"
        )
    return list(_pieces(folder, files)), others


def _pieces(folder: Path, files: dict[Path, tuple[int, str]]) -> Iterator[Piece]:
    places = {file: tuple(_number(folder, file, word) for word in ("step", "rank")) for file in files}
    ranks = 1 + max(rank for _, rank in places.values())
    for file, (_, tag) in sorted(files.items(), key=lambda item: item[1][0]):
        step, rank = places[file]
        axes = {ANY: (rank, ranks)} if ranks > 1 else {}
        yield Piece(file, tag, None, step, rank, partial(_load, file, axes))


def _load(file: Path, axes: dict) -> Loaded:
    return Loaded(read_pt(file), axes)


def _number(folder: Path, file: Path, word: str) -> int:
    """n of a folder called `word`n above the file."""
    found = [re.fullmatch(rf"{word}_?(\d+)", part) for part in file.relative_to(folder).parts[:-1]]
    return next((int(m[1]) for m in found if m), 0)
