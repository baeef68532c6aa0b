"""Dims, steps and shapes alone: each way to join ranks, each way that steps follow each other."""

import re
from pathlib import Path

import pytest
import torch

from dsv4.probes.subjects.engine_dumps import sglang, vllm
from dsv4.probes.subjects.engine_dumps.dims import ANY, join, parse
from dsv4.probes.subjects.engine_dumps.fit import Entries, rows, scores
from dsv4.probes.subjects.engine_dumps.names import Table
from dsv4.probes.subjects.engine_dumps.pieces import (
    EngineDumpError,
    MissingPieces,
    RanksDiffer,
    RenameError,
    WrongShape,
)
from dsv4.probes.subjects.engine_dumps.steps import Step, steps_of_run

PAGE = Path(__file__).parents[3] / "docs" / "engines.md"
WHOLE = torch.randn(6, 4, 8, generator=torch.Generator().manual_seed(0))


def ranks(axis: str, values) -> list:
    return [({axis: (i, len(values))}, value) for i, value in enumerate(values)]


@pytest.mark.parametrize(
    "words, parts",
    [
        ("t h[tp] d", ranks("tp", WHOLE.chunk(4, 1))),
        ("t h d[tp]", ranks("tp", WHOLE.chunk(2, 2))),
        ("t h[attn_tp] d", ranks(ANY, WHOLE.chunk(2, 1))),
        ("t h d[tp:partial]", ranks("tp", [WHOLE * 0.25, WHOLE * 0.75])),
        ("t[sp] h d", ranks("sp", WHOLE.chunk(3, 0))),
        ("t h d # tp:replicated", ranks("tp", [WHOLE, WHOLE.clone()])),
        ("", ranks("tp", [WHOLE, WHOLE.clone()])),
        ("t h[ep,tp] d", [
            ({"ep": (e, 2), "tp": (t, 2)}, part)
            for e, half in enumerate(WHOLE.chunk(2, 1)) for t, part in enumerate(half.chunk(2, 1))
        ]),
        ("t h[tp] d", [  # of each part a replica
            ({"tp": (t, 2), "dp": (r, 2)}, part) for r in range(2) for t, part in enumerate(WHOLE.chunk(2, 1))
        ]),
    ],
    ids=["heads", "width", "rank alone", "sum", "tokens", "said equal", "equal", "two axes", "replicas"],
)  # fmt: skip
def test_parts_make_the_whole(words, parts):
    found = join("x", parts, parse(words))
    assert torch.equal(found, WHOLE) if "partial" not in words else torch.allclose(found, WHOLE)


@pytest.mark.parametrize(
    "words, parts, error, said",
    [
        ("", ranks("tp", [WHOLE, WHOLE - 1e-7]), RanksDiffer, "differs between ranks"),
        ("", ranks("tp", [torch.zeros(2, 2), -torch.zeros(2, 2)]), RanksDiffer, "differs between ranks"),
        ("", ranks("tp", [WHOLE, WHOLE.view(4, 6, 8)]), RanksDiffer, "differs between ranks"),
        ("t h[tp] d", ranks("tp", WHOLE.chunk(4, 1))[:3], MissingPieces, "rank 3 of 4"),
        ("", ranks("tp", [WHOLE, WHOLE])[:1], MissingPieces, "tp rank 1 of 2"),
        ("t h d[tp:partial]", ranks("tp", [WHOLE, WHOLE]), RanksDiffer, "summed already"),
        ("t h[tp] d", ranks("tp", [WHOLE[:, :2], WHOLE[:5, 2:]]), RanksDiffer, "make no row"),
        ("t d", ranks("tp", [WHOLE]), EngineDumpError, "dims name 2 dimensions"),
        ("t h[tp] d", ranks("tp", [WHOLE[:, :2], WHOLE[:, 2:].half()]), RanksDiffer, "one dtype"),
    ],
)
def test_parts_that_do_not_fit_are_refused(words, parts, error, said):
    with pytest.raises(error, match=said):
        join("x", parts, parse(words))


@pytest.mark.parametrize(
    "words",
    ["t[cp:zigzag] d", "t d[tp:zigzag]", "t[cp] d", "t h{tp} d", "t d # dp:=moe_dp", "# tp:replicated", "t[tp] d[tp]"],
)
def test_dims_that_are_not_understood_are_refused(words):
    with pytest.raises(EngineDumpError, match="dims"):
        parse(words)


# ---- steps -----------------------------------------------------------------------------------------


def step(number: int, start: int, n: int, add: int = 0) -> Step:
    at = torch.arange(start, start + n)
    return Step(number, n, at + 10 + add, at)


def test_steps_go_back_and_begin_anew():
    run = steps_of_run([step(0, 0, 4), step(1, 4, 3), step(2, 5, 2, add=50), step(3, 7, 1)], None)
    assert run.schedule == [4, 3, -2, 2, 1] and run.ids.tolist() == [[10, 11, 12, 13, 14, 65, 66, 17]]
    run = steps_of_run([step(0, 0, 4), step(1, 0, 3, add=1), step(2, 3, 1, add=1)], None)
    assert run.schedule == [3, 1] and run.left_out == {0: "an earlier run"}
    run = steps_of_run([step(0, 0, 4), step(1, 0, 3, add=1), step(2, 4, 1)], torch.arange(10, 15).unsqueeze(0))
    assert run.schedule == [4, 1] and run.left_out == {1: "other tokens than --ids"}


def test_steps_without_positions_lie_end_to_end():
    ids = torch.arange(7).unsqueeze(0)
    run = steps_of_run([Step(3, 4), Step(5, 3)], ids)
    assert run.parts == [(3, 0, 4), (5, 4, 3)] and torch.equal(run.ids, ids)
    with pytest.raises(EngineDumpError, match="give all tokens that were run"):
        steps_of_run([Step(3, 4), Step(5, 4)], ids)
    with pytest.raises(EngineDumpError, match="no token ids"):
        steps_of_run([Step(3, 4)], None)


@pytest.mark.parametrize(
    "steps, wanted, error, said",
    [
        ([step(0, 0, 4), step(2, 6, 2)], None, MissingPieces, "positions 4 to 5 are of no step"),
        ([step(0, 0, 4), step(2, 6, 2)], 8, MissingPieces, "positions 4 to 5 are of no step"),
        ([step(0, 128, 4)], None, MissingPieces, "positions 0 to 127 are of no step"),
        ([step(0, 0, 4)], 6, MissingPieces, "ran 4 of the 6 tokens"),
        ([Step(0, 4, torch.arange(4), torch.tensor([0, 1, 0, 1]))], None, EngineDumpError, "several requests"),
        ([Step(0, 4, torch.arange(3), torch.arange(4))], None, EngineDumpError, "3 token ids and 4 positions"),
    ],
)  # fmt: skip
def test_steps_that_make_no_run_are_refused(steps, wanted, error, said):
    with pytest.raises(error, match=said):
        steps_of_run(steps, None if wanted is None else torch.arange(10, 10 + wanted).unsqueeze(0))


# ---- shapes and names ------------------------------------------------------------------------------


def test_rows_with_a_batch_flat_or_in_another_order():
    for value, names in (
        (WHOLE, ()),
        (WHOLE.unsqueeze(0), ()),
        (WHOLE.flatten(1), ()),
        (WHOLE.transpose(0, 1), ("h", "t", "d")),
        (WHOLE.unsqueeze(1), ("s", "b", "h", "d")),
        (WHOLE.flatten(1), ("t", "(h*d)")),
    ):
        assert torch.equal(rows("x", "q_after_rope", value, 6, (4, 8), names), WHOLE.unsqueeze(0))
    for value, n, names in ((WHOLE, 5, "thd"), (WHOLE, 5, ""), (WHOLE.transpose(1, 2), 6, ""), (WHOLE[:, :3], 6, "")):
        with pytest.raises(WrongShape, match="expected"):
            rows("x", "q_after_rope", value, n, (4, 8), tuple(names))


def test_scores_behind_the_last_entry_are_cut_off_only_if_invisible():
    value = torch.zeros(1, 2, 5)
    assert scores(value, 3).shape == value.shape
    value[..., 3:] = float("-inf")
    assert scores(value, 3).shape == (1, 2, 3)


def test_entries_of_steps_and_of_the_whole_cache():
    value = torch.arange(10.0).view(5, 2)
    found = Entries(4)
    for rows_of, start, n in ((value[:1], 0, 7), (value[1:2], 7, 1), (value, 8, 14), (value[4:], 18, 2)):
        found.add("x", rows_of, start, n)
    assert torch.equal(found.held, value)
    with pytest.raises(WrongShape, match="expected 6 rows, all entries, or 1"):
        found.add("x", value[:3], 20, 4)


def test_the_table_of_the_page_is_one(tmp_path):
    (text,) = re.findall(r"^```toml\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    (tmp_path / "t.toml").write_text(text)
    table = Table({"a": "streams"}, tmp_path / "t.toml")
    assert [(rule.point, rule.own) for rule in table.rules] == [
        ("q_after_rope", True), ("streams", True), (None, True), ("ids", True), ("streams", False)
    ]  # fmt: skip
    assert table.match("model.layers.12.attn.q_rotated")[1] == 12


def test_the_default_names_are_those_of_the_page():
    for names in (sglang.NAMES, vllm.NAMES):
        own = {name for name, point in names.items() if name.startswith(("non_", "model.i")) or "layer." in name}
        assert len(own) > 3 and all(f"`{name}`" in PAGE.read_text() for name in own)


@pytest.mark.parametrize(
    "text",
    ["names = 3", "[names\n", "[other]\na = 'attn_in'", "[names]\na = 'x'",
     "[names]\na = { point = 'attn_in', dim = 't' }",
     "[names]\na = { point = 'attn_in', dims = 't{' }", "[names]\n'{layer}.{layer}' = 'attn_in'", "[names]\na = 3"],
)  # fmt: skip
def test_tables_that_are_none_are_refused(tmp_path, text):
    (tmp_path / "t.toml").write_text(text)
    with pytest.raises(RenameError, match="expected"):
        Table({}, tmp_path / "t.toml")
