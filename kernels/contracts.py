"""Every contract by the name of its operation."""

from functools import cache
from importlib import import_module

from dsv4.kernels.contract import Contract, Production
from dsv4.kernels.errors import UnsupportedInput

FOLDERS = (
    "attention",
    "block_choice",
    "block_summaries",
    "cache_rows",
    "chunked_prefill",
    "commit_rows",
    "compress",
    "draft_sizes",
    "experts",
    "fusions",
    "gather_attention",
    "grouped_attention",
    "hadamard",
    "hyper_connections",
    "indexer",
    "linear",
    "quantize",
    "rms_norm",
    "rope",
    "rotary_rows",
    "router",
    "silu_mul",
    "staging",
)


@cache
def contracts() -> dict[str, Contract]:
    """Operation → contract, in the order of the folders."""
    return {contract.operation: contract for group in _of_folders("CONTRACTS", ()) for contract in group}


@cache
def productions() -> dict[str, Production]:
    """Production calls by the name of what is called: of every contract, and of what has none, of which the folder's
    `contract.py` says why."""
    found = {name: contract.production for name, contract in contracts().items() if contract.production}
    return found | {name: made for group in _of_folders("PRODUCTIONS", {}) for name, made in group.items()}


def _of_folders(attribute: str, absent) -> list:
    return [getattr(import_module(f"dsv4.kernels.{folder}.contract"), attribute, absent) for folder in FOLDERS]


def contract_of(operation: str) -> Contract:
    """Raises UnsupportedInput for an unknown name."""
    known = contracts()
    if operation not in known:
        raise UnsupportedInput(f"operation {operation!r} has no contract; expected one of {', '.join(known)}")
    return known[operation]
