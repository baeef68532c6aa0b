"""Indexer kernels to compile ahead of time, at the shapes of V4-Flash and of the tiny model."""

from kernels.indexer import triton_scores as scores
from kernels.indexer import triton_topk as topk

DIVISIBLE = ["q_b", "q_t", "key_b", "key_row", "scale_b", "scale_row", "width", "maxima_width", "maxima_second", "s_b", "s_t", "k"]
POINTERS = dict(VISIBLE="*i64", SCORES="*fp32", MAXIMA="*i32", COUNT="*i32", LIST="*i32", FOUND="*i64", OUT="*i64")


def _case(name: str, kernel, constants: dict, warps: int, **pointers: str) -> tuple:
    """The signature: constants, pointers by name, strides of batches as i64 and all else as i32."""
    signature = {}
    for arg in kernel.arg_names:
        if arg in constants:
            signature[arg] = "constexpr"
        else:
            signature[arg] = (pointers | POINTERS if arg not in pointers else pointers).get(arg) or ("i64" if arg.endswith("_b") else "i32")
    return name, kernel, signature, constants, dict(num_warps=warps, divisible=[a for a in DIVISIBLE if a in kernel.arg_names])


def _scores(name: str, form: str, dtype: str, queries: int, groups: int, tile: int, stages: int, **more) -> tuple:
    constants = dict(H=64, D=128, DIMS=128, HEADS=64, FORMAT=("plain", "fp8", "fp4").index(form), FP32=dtype == "fp32", QUERIES=queries,
                     GROUPS=groups, TILE=tile, EVERY=False, LEVELS=2, STAGES=stages) | more
    keys = f"*{dtype}" if form == "plain" else "*u8"
    return _case(f"index_scores {name} {form} {dtype}", scores._scores, constants, 4, Q="*i32" if form == "fp4" and dtype == "bf16" else
                 f"*{dtype}", WEIGHTS="*fp32", KEYS=keys, SCALES="*fp32" if form == "fp8" else keys)


def cases() -> list[tuple]:
    rows = []
    for form in ("fp4", "fp8", "plain"):
        rows += [
            _scores("decode", form, "bf16", 1, 1, 64, 3),
            _scores("decode long", form, "bf16", 1, 1, 128, 3),
            _scores("prefill", form, "bf16", 2, 2, 64, 3),
            _scores("prefill small", form, "bf16", 2, 1, 64, 3),
            _scores("every", form, "bf16", 2, 1, 64, 3, EVERY=True, LEVELS=0),
            _scores("tiny", form, "bf16", 1, 1, 64, 3, LEVELS=0, H=8, D=64, DIMS=64, HEADS=16),
            _scores("audit", form, "fp32", 1, 1, 64, 1, EVERY=True, LEVELS=0),
        ]
    for candidates, warps, levels in ((512, 4, 0), (512, 4, 1), (4096, 8, 0), (4096, 8, 1), (4096, 8, 2), (8192, 16, 2), (32768, 16, 0)):
        rows.append(_case(f"topk_entries descend {candidates} {levels}", topk._descend_rows, dict(
            SEEN=True, CLASSES=candidates // 8 if levels else 0, CANDIDATES=candidates, LEVELS=levels), warps))
    for candidates, levels in ((512, 1), (4096, 1), (4096, 2), (8192, 2)):
        constants = dict(SEEN=True, CLASSES=candidates // 8, CANDIDATES=candidates, LEVELS=levels, ROOM=8192)
        rows.append(_case(f"topk_entries collect {candidates} {levels}", topk._collect, constants | dict(CHUNK=2048), 8))
        rows.append(_case(f"topk_entries rank {candidates} {levels}", topk._rank, constants | dict(
            ALL=False, K=candidates // 8, MINE=16, OTHERS=1024), 4))
        rows.append(_case(f"topk_entries maxima {candidates} {levels}", topk._maxima, dict(SEEN=True, LEVELS=levels, CHUNK=2048), 8))
    rows.append(_case("topk_entries rank all", topk._rank, dict(
        SEEN=False, ALL=True, CLASSES=512, CANDIDATES=2048, LEVELS=0, ROOM=8192, K=512, MINE=16, OTHERS=1024), 4, FOUND="*i64"))
    return rows
