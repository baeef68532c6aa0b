"""The ledger sees every way in which tensors and parameters can fail to match."""

import re
from pathlib import Path

import pytest
import torch

from dsv4.loaders.errors import CheckpointError
from dsv4.loaders.files import DTYPE_NAMES, DTYPES, FileTensor
from dsv4.loaders.layouts import TRANSFORMERS, Source, canonical_sources
from dsv4.loaders.ledger import LoadLedger, Piece, keeps_value, poison, poisoned


def source(shape, dtype="F32", key="t"):
    tensor = FileTensor(
        key, dtype, shape, Path("model.safetensors"), 0, DTYPES[dtype].itemsize * torch.Size(shape).numel()
    )
    return Source(tensor, 0, shape)


def ledger_of(pieces, sources, parameters, reason=lambda name: None):
    ledger = LoadLedger()
    ledger.account(pieces, sources, {n: torch.empty(s, device="meta") for n, s in parameters.items()}, reason)
    return ledger


def raw(parameter, name, shape, *index):
    return Piece(parameter, {"raw": name}, index, shape)


def halves(first=slice(0, 2), second=slice(2, 4)):
    """Two experts of a stack [2, 4, 3], each of two tensors one above the other."""
    return [
        raw("w", f"{e}.{part}", (rows.stop - rows.start, 3), e, rows)
        for e in range(2)
        for part, rows in enumerate((first, second))
    ]


STACK = {f"{e}.{part}": source((2, 3)) for e in range(2) for part in range(2)}


def test_slices_of_a_stack_that_meet_exactly_are_in_order():
    ledger = ledger_of(halves(), STACK, {"w": (2, 4, 3)})
    assert ledger.problems() == [] and ledger.written["w"] == 24 and set(ledger.used) == set(STACK)
    ledger.check()


def test_slices_that_overlap_and_leave_a_gap_are_found_though_the_count_is_right():
    ledger = ledger_of(halves(slice(0, 2), slice(1, 3)), STACK, {"w": (2, 4, 3)})
    assert ledger.written["w"] == 24
    assert ledger.problems() == ["parameter w is written twice, at least in part"]
    with pytest.raises(CheckpointError, match=r"^1 problem\(s\).*written twice"):
        ledger.check()


@pytest.mark.parametrize(
    "pieces,sources,match",
    [
        ([raw("p", "a", (3,))], {}, "tensor a is not in the file; the config asks for it .parameter p"),
        (
            [raw("p", "a", (3,))],
            {"a": source((3,)), "b": source((2,), key="file.b")},
            r"tensor file.b .b. is in the file and nothing takes it",
        ),
        (
            [raw("p", "a", (3,)), raw("p", "b", (3,))],
            {"a": source((3,)), "b": source((3,))},
            "parameter p is written twice",
        ),
        ([raw("p", "a", (3,)), raw("q", "a", (3,))], {"a": source((3,))}, "tensor a is taken by both p and q"),
        ([], {}, "parameter p gets 0 of its 3 elements"),
        ([raw("p", "a", (2,), slice(0, 2))], {"a": source((2,))}, "parameter p gets 2 of its 3 elements"),
        ([raw("p", "a", (3,))], {"a": source((1, 3))}, r"tensor a has shape \[1, 3\]; the config asks for \[3\]"),
        ([raw("p", "a", (3,))], {"a": source((1,))}, r"tensor a has shape \[1\]; the config asks for \[3\]"),
        (
            [raw("p", "a", (3,))],
            {"a": source((3,), "F64")},
            "tensor a is F64 in the file and would have to become torch.float32",
        ),
        ([raw("p", "a", (3,))], {"a": source((3,), "F8_E4M3")}, "tensor a is F8_E4M3 .* would lose bits"),
    ],
    ids=[
        "a tensor is missing",
        "a tensor is left over",
        "a parameter is written twice",
        "a tensor is taken twice",
        "a parameter gets nothing",
        "a parameter gets a part",
        "another shape",
        "a shape that would broadcast",
        "a dtype that would be narrowed",
        "codes taken for values",
    ],
)
def test_what_does_not_match_is_a_problem(pieces, sources, match):
    problems = ledger_of(
        pieces, sources, {"p": (3,), **({"q": (3,)} if any(p.parameter == "q" for p in pieces) else {})}
    ).problems()
    assert any(re.search(match, problem) for problem in problems), problems


def quantised(weight, scale, **more):
    names = {
        "weight": "m.weight",
        "scale": "m.scale" if not more else "m.weight_scale",
        **({"global": "m.weight_scale_2"} if more else {}),
    }
    sources = {names["weight"]: weight, names["scale"]: scale} | (
        {names["global"]: more["global_scale"]} if more else {}
    )
    return [Piece("m.weight", names, (), (256, 320), (128, 128))], sources, {"m.weight": (256, 320)}


@pytest.mark.parametrize(
    "case",
    [
        quantised(source((256, 320), "F8_E4M3"), source((2, 3), "F8_E8M0")),
        quantised(source((256, 160), "I8"), source((256, 10), "F8_E8M0")),
        quantised(source((256, 160), "U8"), source((256, 20), "F8_E4M3"), global_scale=source(())),
        quantised(source((256, 160), "U8"), source((256, 20), "F8_E4M3"), global_scale=source((1,))),
    ],
    ids=["FP8", "MXFP4", "NVFP4", "NVFP4 with a scale of one element"],
)
def test_a_matrix_to_be_dequantised_matches_with_all_its_scales(case):
    assert ledger_of(*case).problems() == []


@pytest.mark.parametrize(
    "case,named",
    [
        (
            quantised(source((256, 320), "F8_E4M3"), source((4, 5), "F8_E8M0")),
            r"m.scale has shape \[4, 5\]; the config asks for \[2, 3\]",
        ),
        (quantised(source((256, 320), "F8_E4M3"), source((1, 1), "F8_E8M0")), r"m.scale has shape \[1, 1\]"),
        (
            quantised(source((1, 320), "F8_E4M3"), source((1, 3), "F8_E8M0")),
            r"m.weight has shape \[1, 320\]; the config asks for \[256, 320\]",
        ),
        (quantised(source((320, 256), "F8_E4M3"), source((3, 2), "F8_E8M0")), r"m.weight has shape \[320, 256\]"),
        (
            quantised(source((256, 320), "I8"), source((256, 10), "F8_E8M0")),
            r"m.weight has shape \[256, 320\]; the config asks for \[256, 160\]",
        ),
        (
            quantised(source((256, 160), "I8"), source((256, 20), "F8_E8M0")),
            r"m.scale has shape \[256, 20\]; the config asks for \[256, 10\]",
        ),
        (
            quantised(source((256, 160), "U8"), source((256, 10), "F8_E4M3"), global_scale=source(())),
            r"m.weight_scale has shape \[256, 10\]",
        ),
        (
            quantised(source((256, 160), "U8"), source((256, 20), "F8_E4M3"), global_scale=source((256,))),
            r"weight_scale_2 has shape \[256\]",
        ),
    ],
    ids=[
        "FP8 in finer blocks than the config's",
        "FP8 with one scale for all",
        "FP8 of one row, which would broadcast",
        "FP8 transposed",
        "MXFP4 that is not packed",
        "MXFP4 with scales of 16",
        "NVFP4 with scales of 32",
        "NVFP4 with a scale a row",
    ],
)
def test_a_matrix_to_be_dequantised_with_another_shape_is_a_problem(case, named):
    assert any(re.search(named, problem) for problem in ledger_of(*case).problems())


@pytest.mark.parametrize(
    "parameter,index,span",
    [
        ((5, 6), (), (0, 30)),
        ((5, 6), (2,), (12, 18)),
        ((2, 4, 3), (1, slice(2, 4)), (18, 24)),
        ((2, 2), (1, 0), (2, 3)),
        ((), (), (0, 1)),
    ],
    ids=["the whole", "one row", "rows of one expert", "one scalar of a stack", "a scalar"],
)
def test_the_span_of_a_piece_is_what_indexing_gives(parameter, index, span):
    elements = torch.arange(torch.Size(parameter).numel()).view(parameter)[index].flatten().tolist()
    assert Piece("p", {"raw": "a"}, index).span(parameter) == span == (elements[0], elements[-1] + 1)


def test_totals_casts_and_reasons_are_in_the_json():
    sources = {
        "a": source((4,), "BF16", "file.a"),
        "b": source((2,), "F32", "file.b"),
        "mtp.0.norm.weight": source((8,), "F32", "file.c"),
    }
    ledger = ledger_of(
        [raw("p", "a", (4,)), raw("q", "b", (2,))],
        sources,
        {"p": (4,), "q": (2,)},
        lambda name: "MTP is off" if name.startswith("mtp.") else None,
    )
    document = ledger.to_json()
    assert document["problems"] == []
    assert document["totals"] == {
        "file_tensors": 3,
        "consumed": 2,
        "listed": 1,
        "parameters": 2,
        "consumed_bytes_by_dtype": {"BF16": 8, "F32": 8},
        "listed_bytes_by_reason": {"MTP is off": 32},
        "casts": {"BF16 → float32": 1},
    }
    rows = {row["tensor"]: row for row in document["tensors"]}
    assert (rows["file.a"]["parameters"], rows["file.c"]["parameters"], rows["file.c"]["reasons"]) == (
        ["p"],
        [],
        ["MTP is off"],
    )


def test_a_stacked_tensor_is_one_row_with_every_official_name():
    key = "model.layers.0.mlp.experts.gate_up_proj"
    sources = canonical_sources({key: source((2, 4, 3), key=key).tensor}, TRANSFORMERS)
    pieces = [
        raw("w13", f"layers.0.ffn.experts.{e}.{w}.weight", (2, 3), e, rows)
        for e in range(2)
        for w, rows in (("w1", slice(0, 2)), ("w3", slice(2, 4)))
    ]
    (row,) = ledger_of(pieces, sources, {"w13": (2, 4, 3)}).to_json()["tensors"]
    assert (row["tensor"], len(row["official"]), row["parameters"], row["bytes"]) == (key, 4, ["w13"], 96)


def test_only_wider_dtypes_and_same_bytes_keep_values():
    kept = {
        (DTYPE_NAMES[a], DTYPE_NAMES[b])
        for a in DTYPES.values()
        for b in DTYPES.values()
        if a is not b and keeps_value(a, b)
    }
    assert kept == {("BF16", "F32"), ("F16", "F32"), ("I32", "I64"), ("I8", "U8")}


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_poison_shows_unless_every_byte_is_a_legal_code(dtype):
    tensor = (
        torch.zeros(6, dtype=torch.float32).to(dtype) if dtype is not torch.float8_e8m0fnu else torch.ones(6).to(dtype)
    )
    assert poisoned(tensor) == 0
    poison(tensor)
    packed = dtype in (torch.uint8, torch.int8)
    assert poisoned(tensor) == (0 if packed else 6)
    assert not packed or set(tensor.view(torch.uint8).tolist()) in ({0xA5}, {0xFF})
