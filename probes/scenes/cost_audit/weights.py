"""Bytes of weights that a step reads, from the tree of modules that holds them, and the experts that its router
chose."""

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from dsv4.model.gqa.model import TiedHead
from dsv4.model.moe import Gate


@contextmanager
def routed(model) -> Iterator[dict[str, set[int]]]:
    """Name of the module that holds experts → the experts that its router chose while the `with` block lasts; MTP does
    not run."""
    chosen: dict[str, set[int]] = {}
    with ExitStack() as undo:
        for name, module in model.named_modules():
            if isinstance(module, Gate):
                into = chosen.setdefault(f"{name.rpartition('.')[0]}.experts", set())
                undo.callback(
                    module.register_forward_hook(
                        lambda _, args, out, into=into: into.update(out[0].flatten().tolist())
                    ).remove
                )
        yield chosen


def counted(model, tokens: int, chosen: dict[str, set[int]]) -> dict[str, int]:
    """Part → bytes of a step of so many tokens: every parameter of the tree once, but of the embedding and of tables by
    token id a row a token, of experts those that were chosen, and nothing of drafts."""
    found, seen = Counter(), set()
    for name, module in model.named_modules():
        for leaf, p in module._parameters.items():
            if p is None or p.data_ptr() in seen or name.split(".")[0] == "mtp":
                continue
            seen.add(p.data_ptr())
            owner = next((o for o in chosen if f"{name}.".startswith(f"{o}.")), None)
            if module is model.embed:
                tied = isinstance(model.head, TiedHead) and model.head.packed().weight.data_ptr() == p.data_ptr()
                found["output head" if tied else "embedding"] += p.nbytes if tied else tokens * p[0].nbytes
            elif owner is not None:
                found["routed experts"] += len(chosen[owner]) * p[0].nbytes
            elif leaf == "tid2eid":
                found["hash tables"] += tokens * p[0].nbytes
            else:
                found["output head" if module is model.head else "layers and norms"] += p.nbytes
    return dict(found)
