"""Indexer kernels to compile ahead of time, at the shapes of V4-Flash and of the tiny model."""

from dsv4.kernels.cache_rows import STREAM_FORMATS
from dsv4.kernels.cache_rows.formats import PLAIN_FORM
from dsv4.kernels.indexer import triton_scores as scores
from dsv4.kernels.indexer import triton_topk as topk
from dsv4.kernels.indexer.triton_filter import filter_rows
from dsv4.kernels.indexer.triton_hierarchical import hierarchical_topk
from dsv4.kernels.widths import FLASH

DIVISIBLE = (
    "q_b",
    "q_t",
    "key_b",
    "key_row",
    "scale_b",
    "scale_row",
    "width",
    "maxima_width",
    "maxima_second",
    "s_b",
    "s_t",
)
POINTERS = dict(VISIBLE="*i64", SCORES="*fp32", MAXIMA="*i32", COUNT="*i32", LIST="*i32", FOUND="*i64", OUT="*i64")


def _case(name: str, kernel, constants: dict, warps: int, options: dict | None = None, **pointers: str) -> tuple:
    """The signature: constants, pointers by name, strides of batches as i64 and all else as i32."""
    kinds = dict.fromkeys(constants, "constexpr") | POINTERS | pointers
    signature = {arg: kinds.get(arg) or ("i64" if arg.endswith("_b") else "i32") for arg in kernel.arg_names}
    divisible = [arg for arg in DIVISIBLE if arg in kernel.arg_names]
    return name, kernel, signature, constants, dict(num_warps=warps, divisible=divisible) | (options or {})


def _scores(name: str, form: str, dtype: str, queries: int, groups: int, **more) -> tuple:
    packed = STREAM_FORMATS["index"].get(form)
    constants = (
        dict(
            H=FLASH.index_n_heads,
            D=FLASH.index_head_dim,
            DIMS=FLASH.index_head_dim,
            HEADS=FLASH.index_n_heads,
            FORMAT=packed.form if packed else PLAIN_FORM,
            FP32=dtype == "fp32",
            PARTS=packed.bits // 4 if packed else 1,
            QUERIES=queries,
            GROUPS=groups,
            EVERY=False,
            LEVELS=2,
            PDL=False,
        )
        | more
    )
    words = "*i32" if dtype == "bf16" else "*u8"
    keys = words if packed else f"*{dtype}"
    return _case(
        f"index_scores {name} {form} {dtype}",
        scores._scores,
        constants,
        4,
        Q=f"*{dtype}",
        WEIGHTS="*fp32",
        KEYS=keys,
        SCALES="*fp32" if packed and not packed.block else keys,
    )


def _selection(candidates: int, levels: int) -> list[tuple]:
    name, classes = f"{candidates} candidates, {levels} levels", candidates // 8 if levels else 0
    constants = dict(SEEN=True, CLASSES=classes, CANDIDATES=candidates, LEVELS=levels, PDL=False)
    cases = [
        _case(
            f"topk_entries descend {name}",
            topk.topk_of_rows,
            constants,
            min(16, max(4, candidates // 256)),
            dict(maxnreg=64) if candidates == 4096 else None,
        )
    ]
    if levels:
        cases.append(_case(f"topk_entries collect {name}", topk.collect, constants | dict(ROOM=8192, CHUNK=2048), 8))
        cases.append(
            _case(
                f"topk_entries rank {name}",
                topk.rank_candidates,
                constants | dict(ALL=False, ROOM=8192, K=classes, MINE=16, OTHERS=1024),
                4 if candidates <= 4096 else 8,
            )
        )
    return cases


def cases_for(capability: tuple[int, int]) -> list[tuple]:
    rows, two = [], (2, 2 if capability in scores.ROOMY else 1)
    many = (4, 1) if capability == (9, 0) else two, two  # of packed keys, of plain ones
    for form in (*(name for name, packed in STREAM_FORMATS["index"].items() if packed), "plain"):
        rows += [
            _scores("decode", form, "bf16", 1, 1),
            _scores("decode short", form, "bf16", 1, 1, LEVELS=2),
            _scores("prefill", form, "bf16", *many[form == "plain"], LEVELS=0),
            _scores("prefill of few", form, "bf16", 2, 1, LEVELS=2),
            _scores("every", form, "bf16", 2, 1, EVERY=True, LEVELS=0),
            _scores("tiny", form, "bf16", 1, 1, LEVELS=0, H=8, D=64, DIMS=64, HEADS=16, PARTS=1),
            _scores("audit", form, "fp32", 1, 1, EVERY=True, LEVELS=0),
        ]
    for candidates, levels in ((512, 0), (512, 1), (4096, 0), (4096, 1), (4096, 2), (8192, 2), (32768, 0)):
        rows += _selection(candidates, levels)
    for levels in (1, 2):
        constants = dict(SEEN=True, LEVELS=levels, CHUNK=2048, PDL=False)
        rows.append(_case(f"topk_entries maxima, {levels} levels", topk.maxima_of_rows, constants, 8))
    constants = dict(
        SEEN=False, ALL=True, CLASSES=512, CANDIDATES=2048, LEVELS=0, ROOM=8192, K=512, MINE=16, OTHERS=1024, PDL=False
    )
    rows.append(_case("topk_entries rank all", topk.rank_candidates, constants, 4, MAXIMA="*i64"))
    for held, levels, mine in ((8192, 1, 16), (8192, 2, 8), (8192, 2, 16), (16384, 2, 16)):
        constants = dict(SEEN=True, LEVELS=levels, ROOM=held // 8, MINE=mine, PDL=False)
        rows.append(
            _case(
                f"topk_entries hierarchical {held} keys, {levels} levels, {mine} at once",
                hierarchical_topk,
                constants,
                16,
            )
        )
    constants = dict(SEEN=True, C=2048, CLASSES=512, PDL=False)
    rows.append(_case("topk_entries filter", filter_rows, constants, 8, dict(maxnreg=80), LIST="*i64"))
    rows.append(_case("select_entries all visible", topk.visible_entries, dict(BLOCK=512), 4))
    return rows
