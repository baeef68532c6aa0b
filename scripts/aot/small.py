"""Norm, rotation, Hadamard, quantisation, pooling, mHC and their compositions at V4-Flash shapes, to compile ahead of
time."""

from dsv4.kernels.compress import triton as compress
from dsv4.kernels.fusions import triton_compress, triton_heads
from dsv4.kernels.hadamard import triton as hadamard
from dsv4.kernels.hyper_connections import triton as mhc
from dsv4.kernels.hyper_connections import triton_merge, triton_statistics
from dsv4.kernels.quantize import triton as quantize
from dsv4.kernels.rms_norm import triton as rms_norm
from dsv4.kernels.rope import triton as rope
from dsv4.kernels.widths import FLASH

HIDDEN, STREAMS = FLASH.hidden_size, FLASH.hc_mult
PRODUCTS, PADDED = 2 * STREAMS + STREAMS**2, 32
BF16 = {"X", "Y", "W", "OUT", "H", "NEW", "WEIGHT", "PIECES"}
INT64 = {"SLOTS", "PHASE"}
INT8 = {"LIVE"}
COUNTS = {"M", "N"}
ONES = ("column", "kv_channel", "gate_channel", "slots_step", "phase_step", "live_step")  # a launch makes 1 a constant


def cases_for(capability: tuple[int, int]) -> list[tuple]:
    """(name, kernel, signature, constexprs, options) of each. Programmatic launches exist from capability 9.0 on."""
    pdl = {"PDL": capability >= (9, 0)}
    return [*_rows(pdl), *_heads(pdl), *_pools(pdl), *_mhc(pdl)]


def case(name: str, kernel, constexprs: dict, warps: int, pointers: dict | None = None, **options) -> tuple:
    """Pointers by their names (upper case), eps fp32, constants of the kernel's signature as given, everything else
    i32."""
    names = [p.name for p in kernel.params]
    constexprs = {**{p: 1 for p in ONES if p in names}, **constexprs}
    signature = {}
    for parameter in kernel.params:
        p = parameter.name
        if p in constexprs:
            signature[p] = "constexpr"
        elif p.isupper() and p not in COUNTS:
            kind = "bf16" if p in BF16 else "i64" if p in INT64 else "u8" if p in INT8 else "fp32"
            signature[p] = "*" + (pointers or {}).get(p, kind)
        else:
            signature[p] = "fp32" if "eps" in p else "i32"
    varying = {p.name for p in kernel.params if p.do_not_specialize}
    # strides, as launches find
    divisible = tuple(p for p, kind in signature.items() if kind == "i32" and p not in varying)
    return name, kernel, signature, constexprs, {"num_warps": warps, "divisible": divisible, **options}


def _rows(pdl: dict):
    for D, R, warps in ((4096, 1, 8), (1024, 1, 2), (1024, 2, 4), (512, 1, 1), (512, 4, 4), (256, 1, 1)):
        yield case(f"rms_norm {R}x{D}", rms_norm._rms_norm, {"D": D, "WEIGHED": True, "R": R, "B": D, **pdl}, warps)
    for R, half in ((8, 32), (16, 16)):
        yield case(
            f"rotate {half} pairs",
            rope._rotate,
            {"D": 512, "HALF": half, "CONJUGATE": False, "R": R, "P": half, **pdl},
            1,
        )
    for D in (64, 128):
        yield case(f"hadamard {D}", hadamard._hadamard, {"D": D, "STEPS": D.bit_length() - 1, "R": 512 // D, **pdl}, 1)
    for name, K, keep, block in (("fp8 128", 4096, 0, 128), ("fp8 64", 512, 64, 64), ("fp4 32", 128, 0, 32)):
        rounded, kept = -(-(K - keep) // block), -(-keep // block)
        constexprs = {
            "K": K,
            "KEEP": keep,
            "BLOCK": block,
            "ROUNDED": rounded,
            "TOTAL": rounded + kept,
            "FP4": "fp4" in name,
            "R": 1024 // block,
            "B": block,
        }
        yield case(f"simulate {name}", quantize._blocks, constexprs, 2)
    for S, slots, warps in ((8, 8, 1), (128, 32, 4)):
        yield case(
            f"gated_pool {S}",
            compress._gated_pool,
            {"S": S, "D": 512, "SLOTS": slots, "B": 128, **pdl},
            warps,
            {"KV": "fp32", "GATE": "fp32", "Y": "fp32"},
        )


def _heads(pdl: dict):
    for name, D, turned, norm, weighed, simulation, R in (
        ("query_heads", 512, 64, True, False, 0, 1),
        ("query_heads", 512, 64, True, False, 0, 2),
        ("latent", 512, 64, True, True, 1, 1),
        ("index_queries", 128, 64, False, False, 2, 1),
        ("index_queries", 128, 64, False, False, 2, 8),
    ):
        constexprs = {
            "D": D,
            "TURNED": turned,
            "CONJUGATE": False,
            "NORM": norm,
            "WEIGHED": weighed,
            "SIMULATION": simulation,
            "STEPS": D.bit_length() - 1,
            "R": R,
            "B": D,
            **pdl,
        }
        yield case(f"{name} x{R}", triton_heads._rows, constexprs, 1)


def _pools(pdl: dict):
    for name, D, simulation, warps in (("CSA entries", 512, 1, 4), ("index keys", 128, 2, 1)):
        constexprs = {
            "S": 8,
            "OVERLAP": 2,
            "D": D,
            "TURNED": 64,
            "CONJUGATE": False,
            "SIMULATION": simulation,
            "STEPS": D.bit_length() - 1,
            "SKIPS": True,
            "TILE": 8,
            "B": D,
            **pdl,
        }
        yield case(f"pool_entries {name}", triton_compress._pool_entries, constexprs, warps)
    constexprs = {"S": 128, "OVERLAP": 1, "D": 512, "SKIPS": True, "P": 128, "TILE": 128, "B": 32, **pdl}
    yield case("pool_entries HCA entries", triton_compress._pool, constexprs, 4)


def _mhc(pdl: dict):
    common = {"d": HIDDEN, "n": STREAMS, "M": PRODUCTS, "MP": PADDED, **pdl}
    yield case("mhc_post", mhc._post, {"d": HIDDEN, "n": STREAMS, "B": 1024, **pdl}, 4)
    for T in (1, 2):
        yield case(
            f"mhc statistics, {T} tokens",
            triton_statistics._statistics_few,
            {**common, "MERGES": True, "T": T, "C": 64},
            4,
        )
    for merges in (True, False):
        yield case(
            f"mhc statistics, many tokens, bf16, merges={merges}",
            triton_statistics._statistics_bf16,
            {**common, "MERGES": merges, "T": 64, "C": 32},
            8,
            num_stages=2,
        )
    yield case(
        "mhc statistics, many tokens, fp32",
        triton_statistics._statistics_many,
        {**common, "MERGES": True, "T": 64, "C": 32},
        8,
        dict.fromkeys(("OUT", "H", "NEW"), "fp32"),
        num_stages=1,
    )
    yield case(
        "mhc split weights",
        triton_statistics._split_weights,
        {"d": HIDDEN, "M": PRODUCTS, "MP": PADDED, "B": 256, **pdl},
        4,
    )
    for mixed, collapsed, T in ((64, 64, 1), (4, 8, 32)):
        yield case(
            f"mhc merge, {T} tokens of Sinkhorn's",
            triton_merge._merge,
            {
                **common,
                "MIXED": mixed,
                "COLLAPSED": collapsed,
                "T": T,
                "B": HIDDEN,
                "HOLDS": True,
                "MIXES": True,
                "NORM": True,
            },
            4,
        )
