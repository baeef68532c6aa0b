"""Published kernels that a row can be timed against.

An adapter is a function make(row, i) registered for operations under the name that tables print. It builds input set i
at the row's shape (`row.facts`) and returns run, or (run, check) as a row does. It imports what it needs when it is
called and raises NotInstalled where that is missing. `scripts/peers.sh` fetches what does not come with torch into a
folder, which the environment variable PEERS names (several folders: joined by ':').
"""

import importlib
from collections.abc import Callable
from functools import cache, partial

from dsv4.probes.kernel_audit.adapters.installed import (
    NotInstalled,
    at_least,
    hopper,
    library,
    processors,
    require,
)
from scripts.bench.row import Row

__all__ = ["NotInstalled", "at_least", "for_row", "hopper", "library", "peer", "processors", "require"]

ADAPTERS: dict[str, dict[str, Callable]] = {}  # operation → name → make(row, i)
MODULES = (
    "peers_torch",
    "peers_attention",
    "peers_indexer",
    "peers_mhc",
    "peers_experts",
    "peers_w4a8",
    "peers_sdpa",
    "peers_deepgemm",
)


def peer(name: str, *ops: str, when: Callable[[dict], bool] = lambda facts: True):
    """Decorator: register make(row, i) as `name` for `ops`, for the rows whose facts satisfy `when`."""

    def register(make):
        make.when = when
        for op in ops:
            ADAPTERS.setdefault(op, {})[name] = make
        return make

    return register


@cache
def _load() -> None:
    for module in MODULES:
        importlib.import_module(f"scripts.bench.{module}")


def for_row(row: Row) -> dict[str, Callable]:
    """name → make(i) of every adapter that takes this row, installed or not."""
    _load()
    return {name: partial(make, row) for name, make in ADAPTERS.get(row.op, {}).items() if make.when(row.facts)}
