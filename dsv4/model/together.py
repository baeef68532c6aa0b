"""What ranks hold against each other: before they load, that all were asked for the same; after it, that all parts
together are the checkpoint."""

import hashlib
import json
import math
import zlib
from dataclasses import replace

import torch

from dsv4.errors import InputError
from dsv4.loaders.cuts import Cut, joint_problems
from dsv4.loaders.errors import CheckpointError
from dsv4.loaders.files import Progress, some
from dsv4.loaders.load import Inventory
from dsv4.model.causal import CausalLM
from dsv4.model.linear import Matrix
from dsv4.model.moe import Experts
from dsv4.model.official import ELSEWHERE
from dsv4.model.ranks import Ranks
from dsv4.version import __version__

KINDS = torch.float32, torch.int64  # dtypes of tensors that `whole_of` joins
ACCOUNT = 12  # numbers that say which part of a tensor a rank has: dtype, axis, start, stop, whole, dimensions, shape


def check_alike(ranks: Ranks, inventory: Inventory | None, *choices) -> None:
    """Raises InputError where ranks differ in versions, config.json, the checkpoint's headers or `choices`. inventory:
    None without a checkpoint."""
    if ranks.group is None:
        return
    tensors = inventory.files.tensors.values() if inventory else ()
    headers = sorted((t.key, t.dtype, t.shape, t.offset, t.file.name) for t in tensors)
    mine = {
        "dsv4": __version__,
        "torch": torch.__version__,
        "number of ranks": ranks.size,
        "config.json": _digest(inventory and inventory.config),
        "the checkpoint's tensors": _digest(headers),
        "options": str((*choices, ranks.by_expert)),
    }
    said = [json.loads(one) for one in ranks.group.exchange("what was asked for", json.dumps(mine).encode())]
    for rank, other in enumerate(said):
        for what, value in mine.items():
            if other[what] != value:
                raise InputError(
                    f"ranks differ in {what}: rank {ranks.rank} has {value}, rank {rank} has {other[what]}; start all "
                    "with the same versions, checkpoint and options"
                )


def part_of(model: CausalLM, parameter: str) -> Cut | None:
    """Which part of the whole model's parameter of that name a rank's is, as it is stored; None if it is all of it."""
    base, _, leaf = parameter.rpartition(".")
    above = model.get_submodule(base.rpartition(".")[0])
    stack = above.part.partial if isinstance(above, Experts) else None
    return stack or model.get_submodule(base).cuts.get(leaf)


def viewed(model: CausalLM, parameter: str, p: torch.Tensor) -> tuple[torch.Tensor, Cut | None]:
    """A parameter in a form in which it is one part of the whole model's, and that part (None: all). A stack of experts
    that are cut by width is [E, matrices of an expert, rows, columns]."""
    module, cut = model.get_submodule(parameter.rpartition(".")[0]), part_of(model, parameter)
    if cut is None or not isinstance(module, Matrix) or p.dim() != 3 or module.cut is None:
        return p, cut
    matrices = len(module.stacked)
    return p.unflatten(1, (matrices, p.shape[1] // matrices)), replace(cut, axis=cut.axis + 2)


def check_whole(ranks: Ranks, model: CausalLM) -> None:
    """Raises CheckpointError unless the parts of all ranks are each tensor once, or all of it everywhere."""
    if ranks.group is None:
        return
    held = {
        name: None if cut is None else (cut.axis, cut.start, cut.stop, cut.whole)
        for name, cut in model.ledger.held.items()
    }
    mine = zlib.compress(json.dumps(held).encode())
    accounts = [
        {name: cut and Cut(*cut) for name, cut in json.loads(zlib.decompress(said)).items()}
        for said in ranks.group.exchange("the parts that were loaded", mine)
    ]
    elsewhere = [name for name, reason in model.ledger.listed.items() if reason == ELSEWHERE]
    problems = joint_problems(accounts, [*model.ledger.used, *elsewhere])
    if problems:
        raise CheckpointError(f"{len(problems)} problem(s) between the parts of {ranks.size} ranks: {some(problems)}")


def whole_of(
    ranks: Ranks, part: torch.Tensor | None, cut: Cut | None, device: torch.device | str = "cpu"
) -> torch.Tensor | None:
    """All of a tensor (fp32 or int64, on the host) of which this rank has `part` (None: nothing), which is its part
    `cut` (None: all of it); None where no rank has any. Every rank calls it for the same tensor. device: where ranks
    exchange."""
    if ranks.size == 1 or ranks.group is None:
        return part
    account = [-1] * ACCOUNT
    if part is not None:
        place = (-1,) * 4 if cut is None else (cut.axis, cut.start, cut.stop, cut.whole)
        account = [KINDS.index(part.dtype), *place, part.dim(), *part.shape, *account[6 + part.dim() :]]
    accounts = [one.tolist() for one in ranks.group.all_gather(torch.tensor(account, device=device))]
    held = [one for one in accounts if one[0] >= 0]
    if all(one[1] < 0 for one in held) and len(held) in (0, ranks.size):
        return part
    shape = lambda one: tuple(one[6 : 6 + one[5]])
    flat = torch.zeros(max(math.prod(shape(one)) for one in held), dtype=KINDS[held[0][0]], device=device)
    if part is not None:
        flat[: part.numel()] = part.flatten()
    parts = zip(accounts, ranks.group.all_gather(flat))
    found = [(one, p[: math.prod(shape(one))].view(shape(one))) for one, p in parts if one[0] >= 0]
    for one, value in found:
        if one[1] < 0:
            return value.cpu()
    whole = torch.zeros(Cut(*held[0][1:5]).of(shape(held[0])), dtype=flat.dtype)
    for (_, axis, start, stop, *_), value in found:
        if stop > start:
            whole.narrow(axis, start, stop - start).copy_(value)
    return whole


def telling(ranks: Ranks, progress: Progress | None) -> Progress | None:
    """`progress`, which also tells the other ranks that this one goes on."""
    group = ranks.group
    if group is None:
        return progress

    def told(done: int, total: int) -> None:
        group.beat()
        if progress is not None:
            progress(done, total)

    return told


def _digest(value) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]
