"""Every contract by the name of its operation."""

from functools import cache
from importlib import import_module

from dsv4.kernels.contract import Contract
from dsv4.kernels.errors import UnsupportedInput

FOLDERS = (
    "attention",
    "block_choice",
    "block_summaries",
    "cache_rows",
    "compress",
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
)


@cache
def contracts() -> dict[str, Contract]:
    """Operation → contract, in the order of the folders."""
    found = [import_module(f"dsv4.kernels.{folder}.contract").CONTRACTS for folder in FOLDERS]
    return {contract.operation: contract for group in found for contract in group}


def contract_of(operation: str) -> Contract:
    """Raises UnsupportedInput for an unknown name."""
    known = contracts()
    if operation not in known:
        raise UnsupportedInput(f"operation {operation!r} has no contract; expected one of {', '.join(known)}")
    return known[operation]
