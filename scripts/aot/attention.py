"""Attention and the writing of packed rows, to compile ahead of time, as their launchers launch them at V4-Flash's
shapes.

Tiles depend on the GPU: `cases()` are those that every generation takes, `cases_for(capability)` what one of them
launches.
"""

from dataclasses import replace
from unittest.mock import patch

from dsv4.kernels.attention import triton as attention
from dsv4.kernels.attention.contract import PAIRS
from dsv4.kernels.cache_rows import triton as cache_rows
from dsv4.kernels.contracts import contract_of
from dsv4.kernels.widths import FLASH
from scripts.aot.linear import MULTIPROCESSORS, launches

TINY = replace(FLASH, num_attention_heads=8, head_dim=64, sliding_window=64)


def cases() -> list[tuple]:
    """(name, kernel, signature, constexprs, options): what a GPU of 99 KB of shared memory without FP8 conversion
    launches."""
    return [*cases_for((8, 6)), *_written()]


def cases_for(capability: tuple[int, int]) -> list[tuple]:
    """What `sparse_attention` and `hca_attention` launch on a GPU of that capability."""
    found: dict = {}
    made = {name: contract_of(f"{name}_attention").production.sizes(FLASH)["compiled"] for name in ("sparse", "hca")}
    for pair in PAIRS:
        formats = f"{pair['window']}+{pair['kept']}"
        for sizes in (sizes for sizes in made["sparse"] if pair.items() <= sizes.items()):
            found |= _launched(f"csa {sizes['tokens']} {formats}", capability, "sparse_attention", FLASH, sizes)
        for sizes in (sizes for sizes in made["hca"] if pair.items() <= sizes.items()):
            shape = f"{sizes['batch']}x{sizes['tokens']} of {sizes['entries']}"
            found |= _launched(f"hca {shape} {formats}", capability, "hca_attention", FLASH, sizes)
    window_only = dict(tokens=1, window="bf16", kept=None)
    found |= _launched("window only", capability, "sparse_attention", FLASH, window_only)
    tiny = dict(batch=1, entries=33, window="bf16", kept="bf16")
    found |= _launched("tiny", capability, "hca_attention", TINY, tiny)
    return list(found.values())


def _launched(name: str, capability: tuple[int, int], operation: str, widths, sizes: dict) -> dict:
    """Cases by what makes them different: kernel, types and constants."""
    arguments = contract_of(operation).production.drawn(widths, 0, "meta", **sizes)

    def run():
        with patch.multiple(
            attention,
            capability=lambda _: capability,
            processors=lambda _: MULTIPROCESSORS,
            dependent_launch=lambda _: capability >= (9, 0),
            require_device=lambda *_: None,
        ):
            getattr(attention, operation)(*arguments)

    return {
        (kernel, *signature.items(), *sorted(constants.items()), options["num_warps"]): (
            label,
            kernel,
            signature,
            constants,
            options,
        )
        for label, kernel, signature, constants, options in launches(name, run)
    }


def _written() -> list[tuple]:
    found, production = [], contract_of("write_rows").production
    for sizes in production.sizes(FLASH)["compiled"]:
        arguments = production.drawn(FLASH, 0, "meta", **sizes)
        with patch.object(cache_rows, "require_device", lambda *_: None):
            found += launches(
                f"write_rows {sizes['form'].value} {sizes['width']} {str(sizes['dtype'])[6:]}",
                lambda: cache_rows.write_rows(*arguments),
            )
    return found
