"""Products with stored weights, experts and router at the shapes of V4-Flash.

Weights are random codes with scales that keep results near 1: speed does not depend on the values.
"""

from collections.abc import Iterator
from functools import partial

import torch

from dsv4.kernels.contract import Production
from dsv4.kernels.contracts import productions
from dsv4.kernels.experts import reference as experts_reference
from dsv4.kernels.experts import triton as experts
from dsv4.kernels.fusions import compositions, triton_fused
from dsv4.kernels.fusions.maps_contract import kinds
from dsv4.kernels.linear import reference as linear_reference
from dsv4.kernels.linear import triton as linear
from dsv4.kernels.linear.drawn import DENSE, FP8, MXFP4, NVFP4
from dsv4.kernels.quantize.coded import plain
from dsv4.kernels.router import reference as router_reference
from dsv4.kernels.router import triton as router
from dsv4.kernels.widths import FLASH, VOCABULARY
from scripts.bench.inputs import REFERENCE, beside_definition, difference
from scripts.bench.row import BANDWIDTH, Row

HIDDEN, INTERMEDIATE = FLASH.hidden_size, FLASH.moe_intermediate_size
EXPERTS, CHOSEN = FLASH.n_routed_experts, FLASH.num_experts_per_tok
# bits of a number with FP4's scales; those of FP8 are one in 16384
BITS = {DENSE: 16, FP8: 8, MXFP4: 4.25, NVFP4: 4.5}
NAMES = {DENSE: "bf16", MXFP4: "fp4"}
ROUNDED = 1e-2  # of bf16 results
FP32 = 1e-4
# µs of official numerics, by rows and columns of the weight, or for experts, and tokens
CODED = {
    (4096, 4096): {16: 14, 64: 14, 256: 17, 4096: 105},
    (4096, 8192): {16: 21, 64: 23, 256: 28, 4096: 199},
    (32768, 1024): {16: 21, 64: 23, 256: 27, 4096: 240},
}
EXPERTS_CODED = {16: 400, 32: 640, 64: 940, 256: 1250, 4096: 2600}
FP4_MANY = {4096: 150}  # µs, of 4096 × 4096
SIMULATED = 3e-2  # a value on the edge between two FP8 codes may fall either way


def rows(device: str) -> Iterator[Row]:
    made = {
        "linear": _linear,
        "linears": _linears,
        "project_heads": _heads,
        "experts": _experts,
        "moe": _moe,
        "route_scored": _scored,
        "route_hashed": _hashed,
    }
    for operation, row in made.items():
        production = productions()[operation]
        yield from (row(production, sizes, device) for sizes in production.sizes(FLASH)["bench"])
    yield from (_heads(productions()["project_heads"], dict(tokens=n), device, True) for n in (32, 64))


def size(form: str, *shape: int) -> int:
    count = 1
    for n in shape:
        count *= n
    return int(count * BITS[form] / 8)


def tokens(n: int, simulate: bool) -> str:
    return f"{n} tokens{', x through FP8' if simulate else ''}"


def share(bytes_: int, fraction: float) -> float:
    """µs at that fraction of the bandwidth."""
    return bytes_ / BANDWIDTH / fraction * 1e6


def _linear(production: Production, sizes: dict, device: str) -> Row:
    form, O, K, n, simulate = (sizes[name] for name in ("form", "rows", "columns", "tokens", "simulate"))
    total, goal = size(form, O, K) + 2 * n * (O + K), None
    if not simulate and n <= 16:
        few = {MXFP4: 16, FP8: 8}.get(form, 0)
        goal = 0.75 if n <= few else 0.8 if (n, O) == (1, VOCABULARY) else None
    fixed = CODED.get((O, K), {}) if simulate and form == FP8 else FP4_MANY if form == MXFP4 else {}
    return Row(
        f"linear_{NAMES.get(form, form)}",
        f"{O}x{K}, {tokens(n, simulate)}",
        beside_definition(production, sizes, linear.linear, linear_reference.linear, ROUNDED, device),
        total,
        2 * n * O * K,
        fixed.get(n) if goal is None else share(total, goal),
        facts={"tokens": n, "out": O, "width": K},
    )


def _linears(production: Production, sizes: dict, device: str) -> Row:
    kind, n, simulate = (sizes[name] for name in ("kind", "tokens", "simulate"))
    parts, width, normed = kinds(FLASH)[kind]
    total, goal = sum(size(form, O, width) for form, O in parts), {"maps of queries": 0.75, "head": 0.9}.get(kind, 0.78)
    tolerance, definition = SIMULATED if normed and simulate else ROUNDED, partial(compositions.linears, REFERENCE)
    return Row(
        "linears",
        f"{kind}, {tokens(n, simulate)}",
        beside_definition(production, sizes, triton_fused.linears, definition, tolerance, device),
        total,
        2 * n * width * sum(O for _, O in parts),
        None if simulate else share(total, goal),
        facts={"tokens": n},
    )


def _heads(production: Production, sizes: dict, device: str, coded: bool = False) -> Row:
    """coded: with the codes that an FP8 product takes."""
    n, groups, O = sizes["tokens"], FLASH.o_groups, FLASH.o_groups * FLASH.o_lora_rank

    def make(i: int):
        o, *rest = production.drawn(FLASH, i, device, **sizes)
        copy = o.clone()  # the operation may overwrite its input

        def check():
            wanted = compositions.project_heads(REFERENCE, copy.clone(), *rest)
            return difference(plain(triton_fused.project_heads(copy.clone(), *rest, coded)), wanted), ROUNDED

        return lambda: triton_fused.project_heads(o, *rest, coded), check

    total = size(FP8, O, HIDDEN)
    goal = share(total, 0.75) if n <= 8 else None
    shape = f"{groups} groups, {n} tokens{' with codes' if coded else ''}"
    return Row("project_heads", shape, make, total, 2 * n * O * HIDDEN, goal, facts={"tokens": n})


def _read(n: int) -> float:
    """Experts that n tokens are expected to list."""
    return EXPERTS * (1 - (1 - CHOSEN / EXPERTS) ** n)


def _experts(production: Production, sizes: dict, device: str) -> Row:
    form, n, simulate = (sizes[name] for name in ("form", "tokens", "simulate"))
    tolerance = SIMULATED if simulate else ROUNDED
    return Row(
        "experts" if form == MXFP4 else f"experts_{form}",
        tokens(n, simulate),
        beside_definition(production, sizes, experts.experts, experts_reference.experts, tolerance, device),
        int(_read(n) * (size(form, 2 * INTERMEDIATE, HIDDEN) + size(form, HIDDEN, INTERMEDIATE))),
        n * CHOSEN * 6 * HIDDEN * INTERMEDIATE,
        (EXPERTS_CODED if simulate else {1: 37.0, 8: 255.0, 64: 1110.0}).get(n) if form == MXFP4 else None,
        facts={"batch": n},
    )


def _moe(production: Production, sizes: dict, device: str) -> Row:
    n = sizes["tokens"]
    total = int(_read(n) * 3 * size(MXFP4, INTERMEDIATE, HIDDEN)) + 3 * size(FP8, INTERMEDIATE, HIDDEN)
    definition = partial(compositions.moe, REFERENCE)
    return Row(
        "moe",
        f"{n} tokens",
        beside_definition(production, sizes, experts.moe, definition, ROUNDED, device),
        total,
        n * (CHOSEN + 1) * 6 * HIDDEN * INTERMEDIATE,
        share(total, 0.72 if n == 1 else 0.77),
        facts={"batch": n},
    )


def _scored(production: Production, sizes: dict, device: str) -> Row:
    n = sizes["tokens"]

    def make(i: int):
        args = production.drawn(FLASH, i, device, **sizes)
        run = lambda: router.route_scored(*args)

        def check():
            spread = lambda index, value: torch.zeros(n, EXPERTS, device=device).scatter_(1, index, value)
            # two experts may be closer than sums in another order
            return difference(spread(*run()), spread(*router_reference.route_scored(*args))), 5e-2

        return run, check

    moved, shape = size(DENSE, EXPERTS, HIDDEN), f"{EXPERTS} experts, {n} tokens"
    return Row("route_scored", shape, make, moved, 2 * n * EXPERTS * HIDDEN, facts={"tokens": n})


def _hashed(production: Production, sizes: dict, device: str) -> Row:
    n = sizes["tokens"]

    def make(i: int):
        args = production.drawn(FLASH, i, device, **sizes)
        run = lambda: router.route_hashed(*args)
        return run, lambda: (difference(run()[1], router_reference.route_hashed(*args)[1]), FP32)

    moved = n * size(DENSE, CHOSEN, HIDDEN)
    return Row("route_hashed", f"{n} tokens", make, moved, 2 * n * CHOSEN * HIDDEN, facts={"tokens": n})
