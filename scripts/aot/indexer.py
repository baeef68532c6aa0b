"""Indexer kernels to compile ahead of time, at the shapes of V4-Flash and of the tiny model."""

from kernels.indexer import triton_scores as scores
from kernels.indexer import triton_topk as topk
from kernels.indexer.triton_choose import warps

DIVISIBLE = ("q_b", "q_t", "key_b", "key_row", "scale_b", "scale_row", "width", "maxima_width", "s_b", "s_t")
POINTERS = dict(VISIBLE="*i64", SCORES="*fp32", MAXIMA="*i32", TICKETS="*i32", COUNTS="*i32", LIST="*i64", FOUND="*i64", OUT="*i64")


def _case(name: str, kernel, constants: dict, warps: int, options: dict | None = None, **pointers: str) -> tuple:
    """The signature: constants, pointers by name, strides of batches as i64 and all else as i32."""
    kinds = dict.fromkeys(constants, "constexpr") | POINTERS | pointers
    signature = {arg: kinds.get(arg) or ("i64" if arg.endswith("_b") else "i32") for arg in kernel.arg_names}
    divisible = [arg for arg in DIVISIBLE if arg in kernel.arg_names]
    return name, kernel, signature, constants, dict(num_warps=warps, divisible=divisible) | (options or {})


def _scores(name: str, form: str, dtype: str, queries: int, groups: int, **more) -> tuple:
    constants = dict(H=64, D=128, DIMS=128, HEADS=64, FORMAT=("plain", "fp8", "fp4").index(form), FP32=dtype == "fp32",
                     PARTS=2 if form == "fp8" else 1, QUERIES=queries, GROUPS=groups, EVERY=False, GROUP=64, PDL=False) | more
    words = "*i32" if dtype == "bf16" else "*u8"
    keys = f"*{dtype}" if form == "plain" else words
    return _case(f"index_scores {name} {form} {dtype}", scores._scores, constants, 4, Q=f"*{dtype}", WEIGHTS="*fp32", KEYS=keys,
                 SCALES="*fp32" if form == "fp8" else keys)


def _selection(held: int, group: int, together: bool, chunk: int = 2048) -> tuple:
    constants = dict(SEEN=True, C=held, CLASSES=held // 4, GROUP=group, PDL=False)
    if together:
        return _case(f"select_entries together {held} of {chunk}, maxima of {group}", topk.choose_together,
                     constants | dict(CHUNK=chunk, CHUNKS=128), warps(max(chunk, held)))
    return _case(f"select_entries {held} held, maxima of {group}", topk.choose_rows, constants | dict(FILTER=held < 8192),
                 warps(held))


def cases_for(capability: tuple[int, int]) -> list[tuple]:
    rows = []
    for form in ("fp4", "fp8", "plain"):
        rows += [
            _scores("decode", form, "bf16", 1, 1),
            _scores("decode short", form, "bf16", 1, 1, GROUP=16),
            _scores("prefill", form, "bf16", 2, 2 if capability in scores.ROOMY else 1, GROUP=16),
            _scores("prefill of few", form, "bf16", 2, 1, GROUP=16),
            _scores("every", form, "bf16", 2, 1, EVERY=True, GROUP=0),
            _scores("tiny", form, "bf16", 1, 1, GROUP=0, H=8, D=64, DIMS=64, HEADS=16, PARTS=1),
            _scores("audit", form, "fp32", 1, 1, EVERY=True, GROUP=0),
        ]
    for held, group in ((512, 0), (2048, 0), (2048, 16), (2048, 64), (4096, 16), (8192, 0), (32768, 0)):
        rows.append(_selection(held, group, False))
    for held, group, chunk in ((2048, 16, 1024), (2048, 64, 2048), (2048, 64, 8192), (4096, 64, 2048)):
        rows.append(_selection(held, group, True, chunk))
    constants = dict(SEEN=True, GROUP=64, CHUNK=2048, PDL=False)
    rows.append(_case("topk_entries maxima", topk.maxima_of_rows, constants, 8))
    rows.append(_case("select_entries all visible", topk.visible_entries, dict(BLOCK=512), 4))
    return rows
