"""Planted faults by operation; `plants()` lists them."""

from importlib import import_module

from dsv4.probes.kernel_audit.plant import Plant

FILES = (
    "attention",
    "indexer",
    "process",
    "hyper_connections",
    "rotations",
    "composed_maps",
    "composed_rows",
    "grouped",
    "caches",
    "products",
    "experts",
    "routing",
    "formats",
    "pooling",
    "device",
)


def plants() -> list[Plant]:
    """Every plant, in the order of the files."""
    return [plant for file in FILES for plant in import_module(f"{__name__}.{file}").PLANTS]
