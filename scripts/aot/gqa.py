"""Rotation, rows and MLP gates of GQA models at the shapes of Qwen2.5-7B, Llama-3.1-8B and the demo, to compile ahead
of time."""

from dsv4.kernels.grouped_attention.exact import sizes
from dsv4.kernels.rotary_rows import triton as rotary_rows
from dsv4.kernels.silu_mul import triton as silu_mul
from dsv4.kernels.widths import LLAMA, QWEN, Widths
from scripts.aot.small import case

SHAPES = (
    ("qwen2.5", QWEN, True),
    ("llama3.1", LLAMA, False),
    ("small heads", Widths(256, 8, 64, moe_intermediate_size=704, num_key_value_heads=2), True),
)


def cases_for(capability: tuple[int, int]) -> list[tuple]:
    """(name, kernel, signature, constexprs, options) of each. Programmatic launches exist from capability 9.0 on."""
    pdl, found = {"PDL": capability >= (9, 0)}, []
    for name, w, biased in SHAPES:
        (H, KV, D), width = sizes(w), w.moe_intermediate_size
        for kind in ("bf16", "fp32"):
            rows = dict.fromkeys(("Q", "K", "V", "BQ", "BK", "BV", "KEYS", "VALUES", "OUT"), kind) | {
                "CIS": "fp32",
                "START": "i64",
            }
            for R in (1, rotary_rows.ROWS):
                found.append(
                    case(
                        f"rotary_rows {name} {kind} x{R}",
                        rotary_rows._rotary_rows,
                        {"H": H, "KV": KV, "D": D, "BIASED": biased, "R": R, "P": D // 2, **pdl},
                        max(1, min(4, R * D // 128)),
                        rows,
                    )
                )
            gates = dict.fromkeys(("GATE", "UP", "BG", "BU", "OUT"), kind)
            found.append(
                case(
                    f"silu_mul {name} {kind}",
                    silu_mul._silu_mul,
                    {"WIDTH": width, "BIASED": biased, "B": silu_mul.BLOCK, **pdl},
                    4,
                    gates,
                )
            )
    return found
