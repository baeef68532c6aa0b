"""`dsv4 audit import`: a run that an engine dumped as the file that `dsv4 audit run --subject FILE` reads."""

import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path

from dsv4.errors import InputError
from dsv4.probes.report.provenance import commit
from dsv4.probes.subject import POINTS
from dsv4.probes.subjects.dump import config_of
from dsv4.probes.subjects.engine_dumps import sglang, vllm
from dsv4.probes.subjects.engine_dumps.assemble import Imported, assemble
from dsv4.probes.subjects.engine_dumps.names import Table
from dsv4.probes.subjects.engine_dumps.pieces import Piece, read_pt
from dsv4.probes.subjects.engine_dumps.steps import read_ids
from dsv4.probes.subjects.record import write_whole

ENGINES = {"sglang": sglang, "vllm": vllm}
NUMERICS = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def run(
    engine: str,
    folder: Path,
    config: Path,
    ids: Path | None,
    rename: Path | None,
    out: Path,
    numerics: str | None,
    account: Path | None,
    say: Callable[[str], None],
) -> int:
    """Import, say what became of every file, write. Raises InputError (EngineDumpError, RenameError) and WriteError."""
    if out.suffix != ".safetensors":
        raise InputError(f"--out is {out.name!r}; expected a name that ends in .safetensors")
    if not folder.is_dir():
        raise InputError(f"{folder} is no folder; expected the folder that {engine} dumped to")
    wanted = None if ids is None else read_ids(ids)
    try:
        pieces, others = ENGINES[engine].pieces_of(folder)
        found = assemble(pieces, Table(ENGINES[engine].NAMES, rename), config_of(config), wanted)
    finally:
        read_pt.cache_clear()  # files are mapped, and may be replaced before the next import of this process
    about = _about(engine, folder, found, numerics)
    for line in _lines(found, pieces, others):
        say(line)
    file, size = write_whole(found.capture, found.run.ids, out, about)
    say(f"wrote {file} ({size:,} B)")
    if account is not None:
        account.write_text(json.dumps(_account(folder, found, pieces, others), indent=1) + "\n")
        say(f"wrote {account}")
    return 0


def _about(engine: str, folder: Path, found: Imported, numerics: str | None) -> dict:
    kind = found.dtypes.get("attn_out", next(iter(found.dtypes.values())))
    schedule = found.run.schedule
    return {
        "name": f"imported from {engine}: {folder.resolve().name}",
        "numerics": numerics or NUMERICS.get(kind, kind),
        "engine": engine,
        "dtypes": found.dtypes,
        **({"schedule": schedule} if len(schedule) > 1 else {}),
        **commit(),
    }


def _lines(found: Imported, pieces: list[Piece], others: dict[str, str]) -> list[str]:
    """What was imported, what is not there, and what was left out, each engine name once."""
    tokens, steps = found.run.ids.shape[1], len(found.run.parts)
    lines = [f"{tokens} tokens in {steps} step{'s' * (steps != 1)}"]
    for point, kind in found.dtypes.items():
        layers = sorted(i for i, p in found.capture.points if p == point)
        if layers:
            how = f", {found.shared[point]}" if found.shared[point] else ""
            lines.append(f"{point:14} {len(layers)} layers ({_ranges(layers)}), {kind}{how}")
    if missing := [p for p in POINTS if not any(p == q for _, q in found.capture.points)]:
        lines.append(f"not in the dump: {', '.join(missing)}; what an audit asks of them will be VACUOUS")
    reasons: dict[str, Counter] = defaultdict(Counter)
    for piece, fate in zip(pieces, found.fates):
        if not fate.startswith("layers.") and fate not in ("ids", "positions"):
            reasons[re.sub(r"\d+", "…", fate) if " shape " in fate else fate][_template(piece.name)] += 1
    for file, why in others.items():
        reasons[why][file] += 1
    for why, names in reasons.items():
        told = ", ".join(f"{name} ({count})" for name, count in names.items())
        lines.append(f"left out, {why}: {told}")
    return lines


def _account(folder: Path, found: Imported, pieces: list[Piece], others: dict[str, str]) -> dict:
    """file → engine's name → what it became."""
    account: dict[str, dict[str, str] | str] = dict(others)
    for piece, fate in zip(pieces, found.fates):
        account.setdefault(str(piece.file.relative_to(folder)), {})[piece.name] = fate
    return dict(sorted(account.items()))


def _template(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.)", "{layer}", name)


def _ranges(numbers: list[int]) -> str:
    """'0–3, 5' of [0, 1, 2, 3, 5]."""
    found: list[list[int]] = []
    for n in numbers:
        if found and n == found[-1][1] + 1:
            found[-1][1] = n
        else:
            found.append([n, n])
    return ", ".join(str(a) if a == b else f"{a}–{b}" for a, b in found)
