"""What SGLang writes, read as it lies: files of `dumper.dump`, and of `--debug-tensor-dump-output-folder`.

`dumper.py` of 0.5.5 to 0.5.23 gives a tensor a file, whose name is its tags, `key=value` joined by `___`: always name,
rank, dump_index and the number of the pass (`step`, until 0.5.9 `forward_pass_id`), and what the caller adds, such as
layer_id. Until 0.5.8 the file is the tensor; since then it is {"value", "meta"}, with tags, `dims` and the ranks of
each parallel axis in meta. `tensor_dump_forward_hook.py` gives a rank a folder and a pass a file of many tensors.
"""

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from dsv4.probes.subject import POINTS
from dsv4.probes.subjects.engine_dumps.dims import ANY
from dsv4.probes.subjects.engine_dumps.pieces import EngineDumpError, Loaded, Piece, read_pt

HOOKED = "non_intrusive__model.layers.{layer}."  # DUMPER_NON_INTRUSIVE_MODE=all, by the modules of deepseek_v4.py
NAMES = {
    "input_ids": "ids",
    "positions": "positions",
    HOOKED + "self_attn.inputs.x": "attn_in",
    HOOKED + "self_attn.output": "attn_out",
    HOOKED + "mlp.output": "ffn_out",
    HOOKED + "output": "streams",
    "model.forward_batch_info.input_ids": "ids",
    "model.forward_batch_info.positions": "positions",
    "model.layers.{layer}.input_layernorm": "attn_in",
    "model.layers.{layer}.self_attn.wo_b": "attn_out",
    **{point: point for point in POINTS},  # dumper.dump("q_after_rope", q, layer_id=…, dims="t h[attn_tp] d")
}
PASS = re.compile(r"Pass(\d+)\.pt")
FOLDER = re.compile(r"TP(\d+)_PP(\d+)_Rank(\d+)_pid\d+")
INFOS = ("sglang_parallel_info", "megatron_parallel_info")
LOOKED_FOR = (
    "files of SGLang's dumper, NAME=…___rank=…___step=….pt, or folders TP…_PP…_Rank…_pid… of "
    "--debug-tensor-dump-output-folder"
)


def pieces_of(folder: Path) -> tuple[list[Piece], dict[str, str]]:
    """(every dumped tensor under `folder`, file → why it is none). Raises EngineDumpError."""
    files, others = sorted(p for p in folder.rglob("*") if p.is_file()), {}
    tagged, passes = {}, []
    for file in files:
        tags = _tags(file)
        if tags is not None:
            tagged[file] = tags
        elif PASS.fullmatch(file.name) and FOLDER.fullmatch(file.parent.name):
            passes.append(file)
        else:
            others[str(file.relative_to(folder))] = "not a name that SGLang gives"
    if bool(tagged) == bool(passes):
        found = f"both kinds of {LOOKED_FOR}" if tagged else f"no {LOOKED_FOR}"
        raise EngineDumpError(f"{folder.name} holds {found}; give the folder of one run")
    homes = sorted({file.parent.name for file in tagged})
    if len(homes) > 1:
        raise EngineDumpError(f"{folder.name} holds {len(homes)} runs ({', '.join(homes[:3])}); give the folder of one")
    return list(_of_passes(passes) if passes else _of_tags(tagged)), others


# ---- dumper.dump ------------------------------------------------------------------------------


def _tags(file: Path) -> dict[str, str] | None:
    if file.suffix != ".pt":
        return None
    tags = dict(part.partition("=")[::2] for part in file.name.removesuffix(".pt").split("___") if "=" in part)
    number = tags.get("step", tags.get("forward_pass_id", ""))
    numbers = (number, tags.get("rank", ""), tags.get("dump_index", ""), tags.get("layer_id", "0"))
    return tags if "name" in tags and all(n.isdigit() for n in numbers) else None


def _of_tags(tagged: dict[Path, dict[str, str]]) -> Iterator[Piece]:
    ranks = 1 + max(int(tags["rank"]) for tags in tagged.values())
    for file, tags in sorted(tagged.items(), key=lambda item: int(item[1]["dump_index"])):
        name = re.search(r"(?:^|___)name=(.*?)___(?:\w+=|$)|(?:^|___)name=(.*)\.pt$", file.name)
        name = next(group for group in name.groups() if group is not None)
        yield Piece(
            file,
            name,
            int(tags["layer_id"]) if "layer_id" in tags else None,
            int(tags.get("step", tags.get("forward_pass_id"))),
            int(tags["rank"]),
            partial(_load, file, tags, ranks),
            _unwanted(name, tags),
        )


def _unwanted(name: str, tags: dict[str, str]) -> str:
    if name.startswith("grad__"):
        return "a gradient"
    if name.startswith("param__"):
        return "a parameter"
    return "recomputed for the backward pass" if tags.get("recompute_status") == "recompute" else ""


def _load(file: Path, tags: dict[str, str], ranks: int) -> Loaded:
    found = read_pt(file)
    if not (isinstance(found, dict) and "value" in found):
        return Loaded(found, {ANY: (int(tags["rank"]), ranks)} if ranks > 1 else {})
    meta = found.get("meta", {})
    for key in ("rank", "step", "forward_pass_id", "layer_id", "dump_index"):
        if key in tags and key in meta and str(meta[key]) != tags[key]:
            raise EngineDumpError(
                f"{file.name} was written as {key} {meta[key]}; its name has been changed: give the files as the "
                "dumper wrote them"
            )
    return Loaded(found["value"], _axes(meta, int(tags["rank"]), ranks), str(meta.get("dims") or ""))


def _axes(meta: dict, rank: int, ranks: int) -> dict[str, tuple[int, int]]:
    """Parallel axes of more than one rank; by the process's rank where the engine said nothing."""
    for key in INFOS:
        info = meta.get(key) or {}
        sizes = {name.removesuffix("_size"): size for name, size in info.items() if name.endswith("_size")}
        axes = {n: (info[f"{n}_rank"], size) for n, size in sizes.items() if size > 1 and f"{n}_rank" in info}
        if sizes and not any(name.endswith("_error") for name in info):
            return axes
    size = max(int(meta.get("world_size", 1)), ranks)
    return {ANY: (int(meta.get("world_rank", rank)), size)} if size > 1 else {}


# ---- --debug-tensor-dump-output-folder --------------------------------------------------------


def _of_passes(files: list[Path]) -> Iterator[Piece]:
    places = {file: tuple(map(int, FOLDER.fullmatch(file.parent.name).groups())) for file in files}
    if len({file.parent for file in files}) > len({place[2] for place in places.values()}):
        raise EngineDumpError("two folders are of one rank: they are of different processes; give those of one run")
    tp, pp = (1 + max(place[i] for place in places.values()) for i in (0, 1))
    for file in files:
        at, stage, rank = places[file]
        axes = {name: (i, n) for name, i, n in (("tp", at, tp), ("pp", stage, pp)) if n > 1}
        found = read_pt(file)
        if not isinstance(found, dict):
            raise EngineDumpError(
                f"{file.name} holds a {type(found).__name__}; expected a dictionary of tensors by name"
            )
        for name in found:
            step = int(PASS.fullmatch(file.name)[1])
            yield Piece(file, str(name), None, step, rank, lambda f=file, n=name, a=axes: Loaded(read_pt(f)[n], a))
