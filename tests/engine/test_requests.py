"""Requests as `dsv4 batch` reads them: from a file or standard input, and what results of lines say that are none."""

import io
import json
import sys
from functools import partial

import pytest

from dsv4.engine import Request, read_requests
from dsv4.engine.state import Result
from dsv4.errors import InputError

GOOD = '{"id": "a", "token_ids": [1, 2], "max_tokens": 2}'


@pytest.fixture
def run(command_line, brief_golden):
    return partial(command_line, "batch", "--checkpoint", brief_golden, "--numerics", "fp32", "--rows", "2", "-q")


def results(out: str) -> dict[str, dict]:
    found = [json.loads(line) for line in out.splitlines()]
    assert len({d.get("id", "figures") for d in found}) == len(found), "no result hides another"
    return {d.get("id", "figures"): d for d in found}


@pytest.mark.parametrize(
    "first, second, message",
    [
        (GOOD, GOOD, "line 2 has the id 'a', which was used before"),
        (GOOD, '{"id": "line 1", "token_ids": [1]}', "line 2 has the id 'line 1', which names another line"),
        (GOOD, '{"id": "line 3", "token_ids": [1]}', "line 2 has the id 'line 3', which names another line"),
        ('{"token_ids": [1]}', '{"id": "line 1", "token_ids": [1]}', "which was used before"),
    ],
)
def test_the_error_of_a_taken_id_leaves_the_good_request_its_id(first, second, message):
    good, bad = read_requests([first, second], encode=None)
    assert (
        isinstance(good, Request)
        and isinstance(bad, Result)
        and bad.id == "line 2" != good.id
        and message in str(bad.error)
    )


def test_ids_of_results_are_unique(run, tmp_path):
    """Line 3 has no id and cannot be read: its name is its own, whatever line 1 calls itself."""
    file = tmp_path / "r.jsonl"
    file.write_text('{"id": "line 3", "token_ids": [1], "max_tokens": 1}\n' + GOOD + "\nnot JSON\n")
    code, out, err = run(file)
    found = results(out)
    assert code == 1 and err == "" and set(found) == {"line 1", "a", "line 3", "figures"}
    assert found["a"]["error"] is None and "not JSON" in found["line 3"]["error"]["message"]


def test_a_request_may_be_called_after_its_own_line():
    assert [r.id for r in read_requests(['{"id": "line 1", "token_ids": [1]}', GOOD], encode=None)] == ["line 1", "a"]


@pytest.mark.parametrize(
    "line, message",
    [
        ('{"prompt": null}', "line 1 has prompt null; expected a string"),
        ('{"prompt": [1]}', "prompt [1]; expected a string"),
        ('{"token_ids": "é"}', "expected a list"),
        ('{"token_ids": [1], "max_tokens": true}', "max_tokens true; expected an integer"),
        ('{"token_ids": [1], "max_tokens": 1.5}', "max_tokens 1.5; expected an integer"),
        ('{"token_ids": [1], "top_p": {}}', "top_p {}; expected a number"),
        ('{"token_ids": [1], "top_p": NaN}', "top_p NaN; expected a number"),
        ("null", "line 1 is null; expected an object"),
        ('"' + 90 * "x" + '"', "line 1 is a string; expected an object"),
    ],
)
def test_errors_are_in_the_words_of_json(line, message):
    [bad] = read_requests([line], encode=None)
    assert message in str(bad.error) and "None" not in str(bad.error)


@pytest.mark.parametrize(
    "key, value, message",
    [
        ("temperature", "1" + 400 * "0", "line 1: temperature 1000"),
        ("temperature", "1000001", "expected 0 (greedy), or 1e-06 to 1000000"),
        ("temperature", "1e-300", "temperature 1e-300"),
        ("temperature", "-1", "temperature -1"),
        ("top_p", "1" + 400 * "0", "line 1: top_p 1000"),
        ("seed", 99 * "9", "line 1: seed 9999"),
        ("max_tokens", "-" + 400 * "9", "max_tokens -9999"),
        ("top_p", "0", "top_p 0 was asked for"),
    ],
)
def test_numbers_without_bound_are_a_short_line(key, value, message):
    [bad] = read_requests([f'{{"token_ids": [1], "{key}": {value}}}'], encode=None)
    assert isinstance(bad.error, InputError) and message in str(bad.error) and len(str(bad.error)) < 150


def test_the_hottest_and_the_coldest_are_requests():
    hot, cold = read_requests([f'{{"token_ids": [1], "temperature": {t}}}' for t in (1_000_000, 0.001)], encode=None)
    assert (hot.sampling.temperature, cold.sampling.temperature) == (1_000_000, 0.001)


def test_what_no_model_has_or_holds_harms_nobody_else(run, tmp_path):
    """Ids and counts over 64 bits, and what --max-context helps or not."""
    file = tmp_path / "r.jsonl"
    asked = {
        "a": {},
        "long": {"max_tokens": 1024},
        "longer": {"max_tokens": 10**400},
        "given": {"max_tokens": 20},
        "id": {"token_ids": [1, 10**30]},
    }
    file.write_text(
        "\n".join(json.dumps({"id": id, "token_ids": [1, 2], "max_tokens": 2} | fields) for id, fields in asked.items())
    )
    code, out, err = run(file, "--max-context", "16")
    found = results(out)
    assert code == 1 and err == "" and found.pop("figures") and found.pop("a")["error"] is None
    said = {id: d["error"]["message"] for id, d in found.items()}
    assert all(
        "1024 (max_position_embeddings) that the checkpoint takes; shorten it, or lower max_tokens" in said[id]
        for id in ("long", "longer")
    )
    assert "max_context of 16" in said["given"] and "raise --max-context (at most 1024)" in said["given"]
    assert (
        "token id 1000" in said["id"]
        and "outside the vocabulary of" in said["id"]
        and all(len(text) < 240 for text in said.values())
    )


@pytest.mark.parametrize(
    "options, method", [((), "off"), (("--speculate", "lookup"), "lookup"), (("--speculate", "mtp"), "mtp")]
)
def test_results_of_bad_lines_say_how_the_run_drafts(run, tmp_path, options, method):
    file = tmp_path / "r.jsonl"
    file.write_text(f"not JSON\n{GOOD}\n{GOOD}\n")
    found = results(run(file, *options)[1])
    assert [found[name]["speculation"] for name in ("line 1", "a", "line 3")] == [method] * 3
    assert found["a"]["error"] is None and found["line 3"]["error"] is not None


@pytest.mark.few(between=[b"\n"])
@pytest.mark.parametrize("before, between", [(b"\xef\xbb\xbf", b"\n"), (b"", b"\r\n")])
def test_standard_input_is_read_as_a_file_is(run, tmp_path, monkeypatch, before, between):
    """With a byte order mark or without, and whether or not lines end as on Windows."""
    raw = before + between.join((GOOD.encode(), b'{"id": "b\xff", "token_ids": [1], "max_tokens": 1}', b""))
    file = tmp_path / "r.jsonl"
    file.write_bytes(raw)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(raw), encoding="ascii"))
    for source in (file, "-"):
        code, out, err = run(source, "--report", tmp_path)
        found = results(out)
        assert code == 0 and err == "" and len(found) == 3 and found["a"]["error"] is None
    for name, called in (("r", "r.jsonl"), ("stdin", "-")):
        report = json.loads((tmp_path / f"batch_{name}.json").read_text())
        assert report["about"]["requests"] == called and len(report["requests"]) == 2


def test_standard_input_that_cannot_be_read_is_one_line(run, monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)  # what Python makes of a closed one
    code, out, err = run("-")
    assert code == 2 and out == "" and err.count("\n") == 1 and "standard input: it is closed" in err
