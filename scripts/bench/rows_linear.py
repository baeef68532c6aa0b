"""Products with stored weights, experts and router at the shapes of V4-Flash.

Weights are random codes with scales that keep results near 1: speed does not depend on the values.
"""

from collections.abc import Iterator

import torch

from dsv4.kernels.experts import reference as experts_reference
from dsv4.kernels.experts import triton as experts
from dsv4.kernels.linear import reference as linear_reference
from dsv4.kernels.linear import triton as linear
from dsv4.kernels.linear import triton_fused
from dsv4.kernels.quantize import PackedWeight, WeightFormat
from dsv4.kernels.rms_norm.reference import rms_norm
from dsv4.kernels.rope import inverse_frequencies, rotate, rotation
from dsv4.kernels.router import reference as router_reference
from dsv4.kernels.router import triton as router
from scripts.bench.inputs import difference, generator, normal
from scripts.bench.row import BANDWIDTH, Row

HIDDEN, INTERMEDIATE, EXPERTS, CHOSEN, LIMIT, VOCABULARY = 4096, 2048, 256, 6, 10.0, 129280
BITS = {"bf16": 16, "fp8": 8, "mxfp4": 4.25, "nvfp4": 4.5}  # with FP4's scales; those of FP8 are one in 16384
ROUNDED = 1e-2  # of bf16 results
FP32 = 1e-4
SIMULATED = 3e-2  # a value on the edge between two FP8 codes may fall either way


def rows(device: str) -> Iterator[Row]:
    yield from _linear(device)
    yield from _fused(device)
    yield from _experts(device)
    yield from _router(device)


def weight(form: str, *shape: int, seed: int, device: str, parts: int = 1) -> PackedWeight:
    """Random codes, scaled so that a row's norm is near 1."""
    *lead, O, K = shape
    g = generator(device, seed)
    if form == "bf16":
        return PackedWeight(WeightFormat.DENSE, (torch.randn(*shape, device=device, generator=g) * K**-0.5).bfloat16())
    bytes_of = lambda *size, low=0, high=256: torch.randint(
        low, high, size, device=device, generator=g, dtype=torch.uint8
    )
    exponent = 127 - round(torch.tensor(float(K)).log2().item() / 2)  # of K^-0.5
    if form == "fp8":
        codes = bytes_of(*shape, high=120) | (bytes_of(*shape, high=2) << 7)  # not NaN
        scale = bytes_of(*lead, -(-O // 128), -(-K // 128), low=exponent - 7, high=exponent - 5)
        return PackedWeight(WeightFormat.FP8, codes.view(torch.float8_e4m3fn), scale.view(torch.float8_e8m0fnu))
    codes = bytes_of(*lead, O, K // 2)
    if form == "mxfp4":
        scale = bytes_of(*lead, O, K // 32, low=exponent - 2, high=exponent)
        return PackedWeight(WeightFormat.MXFP4, codes, scale.view(torch.float8_e8m0fnu))
    scale = bytes_of(*lead, O, K // 16, low=0x30, high=0x40).view(torch.float8_e4m3fn)
    return PackedWeight(WeightFormat.NVFP4, codes, scale, torch.full((*lead, parts), 0.3 * K**-0.5, device=device))


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


def _linear(device: str) -> Iterator[Row]:
    shapes = [("mxfp4", 4096, 4096, n, False, 0.75) for n in (1, 2, 4, 8, 16)]
    shapes += [("mxfp4", 4096, 4096, n, True, None) for n in (1, 8)] + [
        ("nvfp4", 4096, 4096, n, False, None) for n in (1, 8)
    ]
    shapes += [
        ("fp8", O, K, n, simulate, 0.75 if n <= 8 and not simulate else None)
        for O, K in ((32768, 1024), (4096, 8192), (4096, 4096))
        for n in (1, 8, 16, 64)
        for simulate in (False, True)
    ]
    shapes += [("bf16", VOCABULARY, 4096, n, False, 0.8 if n == 1 else None) for n in (1, 8)]
    shapes += [("bf16", 2048, 4096, 1, False, None)]
    shapes += [(form, 4096, 4096, 4096, False, None) for form in ("mxfp4", "fp8", "bf16")]
    for form, O, K, n, simulate, goal in shapes:

        def make(i, form=form, O=O, K=K, n=n, simulate=simulate):
            w, x = weight(form, O, K, seed=i, device=device), normal(100 + i, n, K, device=device)
            run = lambda: linear.linear(x, w, simulate)
            return run, lambda: (difference(run(), linear_reference.linear(x, w, simulate)), ROUNDED)

        total = size(form, O, K) + 2 * n * (O + K)
        yield Row(
            f"linear_{form.removeprefix('mx')}",
            f"{O}x{K}, {tokens(n, simulate)}",
            make,
            total,
            2 * n * O * K,
            None if goal is None else share(total, goal),
            facts={"tokens": n, "out": O, "width": K},
        )


def _fused(device: str) -> Iterator[Row]:
    kinds = {
        "maps of a CSA layer": (
            (("fp8", 1024), ("fp8", 512), ("bf16", 2048), ("bf16", 512), ("bf16", 64)),
            HIDDEN,
            False,
            0.78,
        ),
        "compressor projections": ((("bf16", 2048), ("bf16", 512)), HIDDEN, False, 0.78),
        "maps of queries": ((("fp8", 32768), ("fp8", 8192)), 1024, True, 0.75),
        "head": ((("bf16", VOCABULARY),), HIDDEN, False, 0.9),
    }
    for kind, (parts, width, normed, goal) in kinds.items():
        for n in (1, 8):
            for simulate in (False, True):
                if simulate and all(form == "bf16" for form, _ in parts):
                    continue
                flags = tuple(simulate and form == "fp8" for form, _ in parts)
                dtypes = tuple(torch.float32 if form == "bf16" and O > 64 else None for form, O in parts)

                def make(i, parts=parts, width=width, n=n, normed=normed, flags=flags, dtypes=dtypes):
                    ws = tuple(
                        weight(form, O, width, seed=10 * i + j, device=device) for j, (form, O) in enumerate(parts)
                    )
                    x = normal(100 + i, n, width, device=device)
                    norm = normal(200 + i, width, device=device) if normed else None
                    run = lambda: triton_fused.linears(x, norm, 1e-6, ws, flags, dtypes)

                    def check():
                        y = rms_norm(x, norm, 1e-6) if normed else x
                        wanted = [
                            linear_reference.linear(y if d is None else y.to(d), w, f)
                            for w, f, d in zip(ws, flags, dtypes)
                        ]
                        worst = max(difference(a, b) for a, b in zip(run(), wanted))
                        return worst, SIMULATED if normed and any(flags) else ROUNDED

                    return run, check

                total = sum(size(form, O, width) for form, O in parts)
                yield Row(
                    "linears",
                    f"{kind}, {tokens(n, simulate)}",
                    make,
                    total,
                    2 * n * width * sum(O for _, O in parts),
                    None if simulate else share(total, goal),
                    facts={"tokens": n},
                )
    for n in (1, 8, 512):

        def make(i, n=n):
            w, o = weight("fp8", 8192, HIDDEN, seed=i, device=device), normal(100 + i, n, 64, 512, device=device)
            cis = rotation(torch.arange(n, device=device) + 1000, inverse_frequencies(64, 10000.0).to(device))
            cis, copy = cis.conj().resolve_conj(), o.clone()  # the operation may overwrite its input

            def check():
                turned = rotate(copy.clone(), cis.unsqueeze(1)).view(n, 8, -1)
                got = triton_fused.project_heads(copy.clone(), cis, w, 8)
                return difference(got, linear_reference.grouped_linear(turned, w).flatten(1)), ROUNDED

            return lambda: triton_fused.project_heads(o, cis, w, 8), check

        total = size("fp8", 8192, HIDDEN)
        yield Row(
            "project_heads",
            f"8 groups, {n} tokens",
            make,
            total,
            2 * n * 8192 * HIDDEN,
            share(total, 0.75) if n <= 8 else None,
            facts={"tokens": n},
        )


def _experts(device: str) -> Iterator[Row]:
    goals = {1: 37.0, 8: 255.0, 64: 1110.0}

    def inputs(i, n, form):
        w13 = weight(form, EXPERTS, 2 * INTERMEDIATE, HIDDEN, seed=i, device=device, parts=2)
        w2 = weight(form, EXPERTS, HIDDEN, INTERMEDIATE, seed=50 + i, device=device)
        indices = torch.rand(n, EXPERTS, device=device, generator=generator(device, 7 + i)).topk(CHOSEN, -1).indices
        routing = torch.rand(n, CHOSEN, device=device, generator=generator(device, 9 + i)) / 3
        return normal(100 + i, n, HIDDEN, device=device), indices, routing, w13, w2

    for form in ("mxfp4", "nvfp4"):
        for n in (1, 2, 4, 8, 16, 32, 64, 256, 4096) if form == "mxfp4" else (1, 8):
            for simulate in (False, True):

                def make(i, n=n, form=form, simulate=simulate):
                    args = inputs(i, n, form)
                    run = lambda: experts.experts(*args, LIMIT, simulate)
                    return run, lambda: (
                        difference(run(), experts_reference.experts(*args, LIMIT, simulate)),
                        SIMULATED if simulate else ROUNDED,
                    )

                read = EXPERTS * (1 - (1 - CHOSEN / EXPERTS) ** n)
                total = int(read * (size(form, 2 * INTERMEDIATE, HIDDEN) + size(form, HIDDEN, INTERMEDIATE)))
                name = "experts" if form == "mxfp4" else f"experts_{form}"
                yield Row(
                    name,
                    tokens(n, simulate),
                    make,
                    total,
                    n * CHOSEN * 6 * HIDDEN * INTERMEDIATE,
                    goals.get(n) if form == "mxfp4" and not simulate else None,
                    facts={"batch": n},
                )
    for n in (1, 8):

        def make(i, n=n):
            args = inputs(i, n, "mxfp4")
            shared = tuple(
                weight("fp8", *shape, seed=80 + i + j, device=device)
                for j, shape in enumerate(((INTERMEDIATE, HIDDEN), (INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE)))
            )
            run = lambda: experts.moe(*args, shared, LIMIT, False, False)
            return run, lambda: (
                difference(
                    run(),
                    experts_reference.experts(*args, LIMIT, False)
                    + experts_reference.shared_expert(args[0], *shared, LIMIT, False),
                ),
                ROUNDED,
            )

        read = EXPERTS * (1 - (1 - CHOSEN / EXPERTS) ** n)
        total = int(read * 3 * size("mxfp4", INTERMEDIATE, HIDDEN)) + 3 * size("fp8", INTERMEDIATE, HIDDEN)
        yield Row(
            "moe",
            f"{n} tokens",
            make,
            total,
            n * (CHOSEN + 1) * 6 * HIDDEN * INTERMEDIATE,
            share(total, 0.72 if n == 1 else 0.77),
            facts={"batch": n},
        )


def _router(device: str) -> Iterator[Row]:
    for n in (1, 8, 64, 4096):

        def make(i, n=n):
            x, W = normal(100 + i, n, HIDDEN, device=device), normal(i, EXPERTS, HIDDEN, device=device) / 64
            bias = torch.rand(EXPERTS, device=device, generator=generator(device, 3 + i)) / 10
            run = lambda: router.route_scored(x, W, bias, CHOSEN, 1.5)

            def check():
                (a, u), (b, v) = run(), router_reference.route_scored(x, W, bias, CHOSEN, 1.5)
                spread = lambda index, value: torch.zeros(n, EXPERTS, device=device).scatter_(1, index, value)
                # two experts may be closer than sums in another order
                return difference(spread(a, u), spread(b, v)), 5e-2

            return run, check

        yield Row(
            "route_scored",
            f"{EXPERTS} experts, {n} tokens",
            make,
            size("bf16", EXPERTS, HIDDEN),
            2 * n * EXPERTS * HIDDEN,
            facts={"tokens": n},
        )
    for n in (1, 8):

        def make(i, n=n):
            x, W = normal(100 + i, n, HIDDEN, device=device), normal(i, EXPERTS, HIDDEN, device=device) / 64
            table = torch.rand(1000, EXPERTS, device=device, generator=generator(device, i)).topk(CHOSEN, -1).indices
            ids = torch.arange(n, device=device) * 13
            run = lambda: router.route_hashed(x, W, table, ids, 1.5)
            return run, lambda: (difference(run()[1], router_reference.route_hashed(x, W, table, ids, 1.5)[1]), FP32)

        yield Row(
            "route_hashed",
            f"{n} tokens",
            make,
            n * size("bf16", CHOSEN, HIDDEN),
            2 * n * CHOSEN * HIDDEN,
            facts={"tokens": n},
        )
