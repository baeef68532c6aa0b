"""Adapters of published kernels, as far as a machine without any of them can tell: reasons, refusals, layouts."""

from functools import cache

import pytest
import torch

from dsv4.kernels.cache_rows import PAGE, RowFormat, pack_layout
from dsv4.kernels.contracts import contract_of
from dsv4.kernels.drawing import Draw
from dsv4.kernels.quantize import WeightFormat, decode_e8m0, to_float, unpack_e2m1
from dsv4.kernels.quantize.exact import simulated_fp8
from dsv4.kernels.widths import WIDTHS
from dsv4.probes.kernel_audit.adapters import (
    adapter,
    adapters,
    attention,
    experts,
    hyper_connections,
    known,
    linear,
    marlin,
    small,
)
from dsv4.probes.kernel_audit.adapters.indexer import pages_of
from dsv4.probes.kernel_audit.audit import audit_kernel
from dsv4.probes.kernel_audit.subject import SubjectSpec

OPERATIONS = sorted({a.operation for a in adapters()})


@cache
def cases(operation: str, shapes: str, dtype: torch.dtype) -> list:
    return list(contract_of(operation).cases(WIDTHS[shapes], Draw(1, dtype)))


def dtypes(operation: str):
    return contract_of(operation).dtypes


@pytest.mark.parametrize("operation", OPERATIONS)
def test_each_adapter_is_listed_with_what_it_is_or_why_it_is_not_here(operation, monkeypatch):
    monkeypatch.setenv("PEERS", "")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    listed = known(operation)
    assert [name for name, _, _ in listed] == [a.name for a in adapters() if a.operation == operation]
    for name, here, about in listed:
        assert "\n" not in about and (here or "not here: " in about), (name, about)


def test_names_classes_and_operations_are_known():
    assert len({(a.operation, a.name) for a in adapters()}) == len(adapters())
    for found in adapters():
        assert found.accuracy in ("", *contract_of(found.operation).classes), (found.operation, found.name)
        assert ":" not in found.name and "/" not in found.name


@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_small_case_is_taken_or_refused_in_words(operation):
    _ask(operation, "small")


@pytest.mark.sweep
@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_flash_case_is_taken_or_refused_in_words(operation):
    """Each adapter takes some case of the widths that it was made for."""
    takes = _ask(operation, "flash")
    assert [name for name, some in takes.items() if not some] == []


def _ask(operation: str, shapes: str) -> dict[str, bool]:
    takes = {}
    for found in (a for a in adapters() if a.operation == operation):
        for dtype in dtypes(operation)[: 1 if shapes == "flash" else None]:
            for case in cases(operation, shapes, dtype):
                why = found.takes(case)
                assert why is None or len(why.split()) > 2, (found.name, case.label, why)
                takes[found.name] = takes.get(found.name, False) or why is None
    return takes


@pytest.mark.parametrize("operation", ("rms_norm", "linear", "grouped_linear", "grouped_attention"))
def test_torch_adapters_are_right_where_they_run(operation):
    spec = SubjectSpec(operation, "torch", "cpu", accuracy=adapter("torch", operation).accuracy)
    found = audit_kernel(spec, "small", 3, dtypes=(torch.float32,), only=("gate", "empty"))
    assert found.verdict.startswith("PASS"), found.findings[:3]


# ---- layouts ----------------------------------------------------------------------------------


def test_lists_are_padded_with_minus_one():
    index = torch.arange(3 * 70).view(3, 70)
    out = attention.listed(index)
    assert out.shape == (3, 1, 128) and out.dtype is torch.int32
    assert out[:, 0, :70].equal(index.int()) and (out[:, 0, 70:] == -1).all()


def test_pages_are_seen_by_the_bytes_of_a_row():
    """Byte b of row r of page p stands at p·page + r·576 + b for payloads."""
    layout = pack_layout(RowFormat.KV_FP8, 512, 64)
    case = next(c for c in cases("sparse_attention", "flash", torch.bfloat16) if attention.packed_only(c) is None)
    rows = case.arguments[1]
    view = attention.cache_view(rows)
    flat = rows.data.flatten(0, -2)
    assert view.shape == (flat.shape[0], PAGE, 1, layout.row) and view.stride(0) == flat.shape[1]
    for page, row, byte in ((0, 0, 0), (0, 63, 583), (flat.shape[0] - 1, 17, 5)):
        assert view[page, row, 0, byte] == flat[page, row * layout.row + byte]


def test_tables_name_each_run_of_pages_once_a_token():
    case = next(c for c in cases("index_scores", "flash", torch.bfloat16) if hasattr(c.arguments[2], "format"))
    q, _, keys, _ = case.arguments
    pages, table = pages_of(keys, q.shape[1])
    B, T = q.shape[:2]
    for n in range(B * T):
        assert pages[table[n].long()].equal(keys.data[n // T])


def weight_of(O: int, K: int):
    return Draw(5).weight(WeightFormat.MXFP4, Draw(5).matrix(O, K))


def test_words_of_codes_unpack_to_the_weight():
    w = weight_of(64, 128)
    words = marlin.as_words(w.weight)
    assert words.shape == (128 // 8, 64)
    nibbles = torch.stack([(words >> 4 * i) & 15 for i in range(8)], 1).flatten(0, 1)  # [K, O]
    low, high = w.weight & 15, w.weight >> 4
    assert nibbles.T.equal(torch.stack((low, high), -1).flatten(1).int())


def test_scales_in_marlins_order_unpack_to_the_scales():
    """Place p of a run of 64 rows, after the pairs are undone, holds the scale of row 8·(p mod 8) + p div 8."""
    scale = torch.randint(0, 255, (3, 128, 5), dtype=torch.uint8)
    found = marlin.permuted_scales(scale).view(torch.uint8)
    assert found.shape == (3, 5, 128)
    back = torch.empty_like(scale)
    for place in range(128):
        run, p = divmod(place, 64)
        four, pair = divmod(p, 4)
        before = 4 * four + (0, 2, 1, 3)[pair]
        back[:, 64 * run + before // 8 + 8 * (before % 8)] = found[:, :, place]
    assert back.equal(scale)


def test_rows_are_padded_with_zeros_of_scale_one():
    w = weight_of(72, 64)
    codes, scale = marlin.padded_rows(w, 128)
    value = unpack_e2m1(codes).unflatten(-1, (-1, 32)) * decode_e8m0(scale.view(torch.float8_e8m0fnu)).unsqueeze(-1)
    assert value.flatten(-2)[:72].equal(to_float(w)) and not value[72:].any() and (scale[72:] == 127).all()


def test_a_stack_is_repacked_matrix_by_matrix():
    codes = torch.randint(0, 256, (3, 64, 32), dtype=torch.uint8)
    asked = []

    def repack(words, K, O, bits, wide):
        asked.append((K, O, bits, wide))
        return words

    found = marlin.repacked(repack, codes)
    assert asked == [(64, 64, 4, False)] * 3 and found[1].equal(marlin.as_words(codes[1]))


def test_activations_in_blocks_are_those_of_the_contract():
    x = torch.cat((Draw(2).rand(6, 256) * 2.0 ** torch.arange(-30, 30, 10).view(6, 1), torch.zeros(1, 256)))
    x = torch.cat((x, torch.full((1, 256), 448.0), torch.full((1, 256), 449.0))).bfloat16()
    codes, scale = linear.in_blocks(x)
    assert (
        (codes.double().unflatten(-1, (-1, 128)) * scale.double().unsqueeze(-1))
        .flatten(-2)
        .equal(simulated_fp8(x, 128))
    )


def test_fp8_rows_are_padded_to_whole_blocks():
    w = Draw(4).weight(WeightFormat.FP8, Draw(4).matrix(200, 256))
    codes, scale = linear.rows_of_blocks(w)
    assert codes.shape == (256, 256) and scale.shape == (2, 2) and scale.dtype is torch.float32
    value = codes.float() * scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
    assert value[:200].equal(to_float(w)) and not value[200:].any()


@pytest.mark.parametrize("pairs, experts_, tile", [(6, 8, 8), (66, 8, 16), (600, 8, 64), (6, 256, 8)])
def test_tiles_of_experts_hold_the_worst_list(pairs, experts_, tile):
    """Every pair has a slot even if each expert's list ends in a tile with one pair."""
    found, slots = experts.tile_of(pairs, experts_)
    live = min(pairs, experts_)
    assert found == tile and slots >= pairs - live + live * tile


@pytest.mark.parametrize("tokens", (1, 9, 64, 65, 4096))
def test_pieces_of_a_product_leave_each_enough_work(tokens):
    found = hyper_connections.pieces(tokens, 16384, 132)
    assert found in hyper_connections.PIECES and 16384 // found >= 4 * 64
    assert hyper_connections.pieces(4096 * 64, 16384, 132) == 1


@pytest.mark.parametrize("window", (None, 1, 3))
def test_a_mask_shows_keys_up_to_the_own_position(window):
    start, T = torch.tensor([0, 4]), 3
    seen = small.visible_keys(8, start, T, window)
    for b, t, slot in ((b, t, s) for b in range(2) for t in range(T) for s in range(8)):
        own = int(start[b]) + t
        assert seen[b, 0, t, slot] == (slot <= own and (window is None or slot > own - window))
