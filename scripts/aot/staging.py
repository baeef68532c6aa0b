"""Staging from host memory at the shapes of Qwen2.5-7B, Llama-3.1-8B and a V4 model's entries, to compile ahead of
time."""

from dsv4.kernels.staging import triton as staging
from dsv4.kernels.staging.table import OLDEST
from scripts.aot.small import case

LISTS = {
    "FOUND": "i32",
    "MISSING": "i32",
    "WANTED": "i32",
    "START": "i64",
    "HELD": "i32",
    "USED": "i64",
    "CLOCK": "i64",
    "COUNT": "i64",
    "WHERE": "i32",
    "ORDER": "i32",
}
WORDS = dict.fromkeys(("A", "A_TO", "B", "B_TO"), "i64")
# items: words of 8 bytes of each part of an item, and how many stand in one page
ITEMS = (
    ("blocks of 128", 4096, 1, 4096, 1),
    ("blocks of 16", 512, 1, 512, 1),
    ("bf16 entries", 128, 1, 0, 1),
    ("fp8 entries", 72, 64, 1, 64),
    ("blocks of 16, head_dim 64", 256, 1, 256, 1),
)


def cases_for(capability: tuple[int, int]) -> list[tuple]:
    """(name, kernel, signature, constexprs, options) of each. Programmatic launches exist from capability 9.0 on."""
    pdl, found = {"PDL": capability >= (9, 0)}, []
    for n, slots, tail in ((32, 64, True), (32, 256, True), (256, 1024, True), (512, 1024, False), (512, 4096, False)):
        found.append(
            case(
                f"staging place {n} in {slots}{' + tail' * tail}",
                staging._place,
                {"NP": n, "LP": slots, "TAIL": tail, "OLDEST": OLDEST, **pdl},
                staging.place_warps(max(n, slots)),
                LISTS,
            )
        )
    for name, a, a_per, b, b_per in ITEMS:
        chunks = [min(staging.CHUNK, 1 << (w - 1).bit_length()) for w in (a, b or a)]
        parts = [-(-w // chunk) for w, chunk in zip((a, b or a), chunks)]
        found.append(
            case(
                f"staging copy {name}",
                staging._copy,
                {
                    "A_PER": a_per,
                    "A_WIDTH": a,
                    "A_CHUNK": chunks[0],
                    "A_PARTS": parts[0],
                    "B_PER": b_per,
                    "B_WIDTH": b or a,
                    "B_CHUNK": chunks[1],
                    "TWO": b > 0,
                    "BOTH": b > 0 and parts == [1, 1],
                    **pdl,
                },
                max(1, min(4, max(chunks) // 256)),
                LISTS | WORDS,
            )
        )
    for kind in ("bf16", "fp32"):
        for block, extremes, pooled in ((128, True, False), (128, False, True), (16, True, False), (128, False, False)):
            rows = dict.fromkeys(("KEYS", "VALUES", "HOST_KEYS", "HOST_VALUES", "LOW", "HIGH", "MEAN"), kind)
            name = f"staging write_back {kind} {block}{' extremes' * extremes}{' mean' * pooled}"
            found.append(
                case(
                    name,
                    staging._write_back,
                    {"D": 128, "BD": staging.CHANNELS, "BLOCK": block, "EXTREMES": extremes, "POOLED": pooled, **pdl},
                    4,
                    rows | {"START": "i64", "CURRENT": "i32"},
                )
            )
    return found
