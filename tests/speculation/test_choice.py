"""Policies by name, and that the command line runs the one it was asked for."""

import json
import sys
from dataclasses import fields

import pytest

from dsv4 import load_model
from dsv4.cache.paged import new_paged_cache
from dsv4.commands.batch import Options
from dsv4.commands.generate import Request
from dsv4.engine import BatchEngine
from dsv4.engine.generate import generate_on_device, generate_speculative
from dsv4.errors import InputError
from dsv4.speculation import Adaptive, AdaptiveParameters, CostAware, Static, read_costs
from dsv4.speculation.choice import PARAMETERS, policy_named
from dsv4.speculation.draft import LookupDrafter, MTPDrafter
from scripts.bench.speculation_costs import moe
from tests.conftest import ROOT


@pytest.fixture
def costs(tmp_path):
    """A table for batches of 1 and 8 in which the first draft costs little and every other one much."""
    document = moe().document()
    dear = [1.0, 1.1] + [4.0 + k for k in range(7)]
    document["batches"] = {n: {"draft": 0.01, "verify": dear, "measured": [True] * 9} for n in ("1", "8")}
    (tmp_path / "costs.json").write_text(json.dumps(document))
    return tmp_path / "costs.json"


def test_names(costs):
    assert isinstance(policy_named("3"), Static) and policy_named("3").size == 3
    assert policy_named("adaptive").parameters == AdaptiveParameters()
    found = policy_named("adaptive:weight=0.5,thresholds=0.4,sizes=2/5,pressure_cap=1").parameters
    assert found == AdaptiveParameters(0.5, 0.8, (0.4,), (2, 5), 1)
    assert isinstance(policy_named("cost-aware", costs), CostAware) and policy_named("cost-aware", costs, 8).batch == 8


@pytest.mark.parametrize(
    "text,match",
    [
        ("9", "expected 1 to 8, adaptive or cost-aware"),
        ("cost-aware", "add --draft-costs FILE"),
        ("adaptive:speed=1", "'speed=1'; expected each of weight, start"),
        ("adaptive:weight=1,weight=1", "at most once"),
        ("adaptive:weight=x", "expected weight= and a number"),
        ("adaptive:sizes=1/2.5/3", "expected sizes= and whole numbers"),
        ("adaptive:weight=0.1/0.2", "expected weight= and a number"),
        ("adaptive:weight=2", "--draft-tokens adaptive: weight 2.0"),
        ("adaptive:sizes=1/2", "adaptive: sizes are"),
        ("adaptive:weight=nan", "adaptive: weight nan"),
        ("adaptive:pressure_cap=0.5", "and a whole number"),
        ("adaptive:", "expected 1 to 8"),
        ("static:3", "expected 1 to 8"),
        ("", "expected 1 to 8"),
        ("9" * 5000, "9…'; expected 1 to 8"),
        ("²", "expected 1 to 8"),
    ],
)
def test_what_is_no_policy(text, match):
    with pytest.raises(InputError, match=match) as refused:
        policy_named(text)
    assert len(str(refused.value)) < 250


def test_parameters_have_their_names():
    assert list(PARAMETERS) == [field.name for field in fields(AdaptiveParameters)]
    assert (
        policy_named(
            "adaptive:weight=0.2,start=0.8,thresholds=0.5/0.8,sizes=1/4/8,pressure_cap=2,undrafted=keep"
        ).parameters
        == AdaptiveParameters()
    )


def test_costs_are_of_the_rows_that_share_a_pass(costs):
    with pytest.raises(InputError, match="only cost-aware weighs costs"):
        policy_named("adaptive", costs)
    with pytest.raises(InputError, match="batch"):
        policy_named("cost-aware", costs, 3)


@pytest.mark.parametrize("command", ["generate", "batch"])
@pytest.mark.parametrize("drafts", ["cost-aware", "adaptive:sizes=2/3/5,start=0.9"])
def test_the_command_line_takes_the_policys_sizes(command, drafts, costs, tmp_path, monkeypatch, capsys):
    """What the policy by itself chooses after each pass's acceptance, cut to what is left of the request."""
    from dsv4.commands.cli import main

    ids, new = [1, 5, 9, 4, 7, 2], 20
    (tmp_path / "r.jsonl").write_text(json.dumps({"token_ids": ids, "max_tokens": new}))
    given = (
        ["generate", str(ROOT / "demo"), "--token-ids", ",".join(map(str, ids)), "--max-new-tokens", str(new), "--json"]
        if command == "generate"
        else ["batch", str(tmp_path / "r.jsonl"), "--checkpoint", str(ROOT / "demo"), "--max-context", "64"]
    )
    table = ["--draft-costs", str(costs)] * (drafts == "cost-aware")
    monkeypatch.setattr(
        sys, "argv", ["dsv4", *given, "--numerics", "fp32", "--speculate", "mtp", "--draft-tokens", drafts, *table]
    )
    with pytest.raises(SystemExit) as stopped:
        main()
    out = capsys.readouterr().out
    assert stopped.value.code in (None, 0)
    found = json.loads(out)["speculation"] if command == "generate" else json.loads(out.splitlines()[0])
    policy = policy_named(drafts, costs if drafts == "cost-aware" else None)
    state, left = policy.initial(), new - 1
    for drafted, accepted in zip(found["block_size_history"], found["accepted_history"], strict=True):
        assert drafted == min(policy.choose([state])[0], max(0, left - 1))
        state, left = policy.observe(state, accepted, drafted), left - accepted - 1
    assert len(found["block_size_history"]) > 3 and isinstance(policy, Adaptive | CostAware)


def refused(command_line, command: str, *options) -> str:
    """The one line of a command that ends before it reads requests or a checkpoint: there is none."""
    given = (
        ("generate", "/no/checkpoint", "--prompt", "a")
        if command == "generate"
        else ("batch", "-", "--checkpoint", "/no/checkpoint")
    )
    code, out, err = command_line(*given, *options)
    assert code == 2 and out == "" and err.startswith("error: ") and err.count("\n") == 1 and len(err) < 400
    return err


@pytest.mark.parametrize("command", ["generate", "batch"])
@pytest.mark.parametrize(
    "options, message",
    [
        (["--speculate", "mtp", "--draft-tokens", "9"], "expected 1 to 8"),
        (["--speculate", "mtp", "--draft-tokens", "adaptive:speed=1"], "'speed=1'"),
        (["--speculate", "mtp", "--draft-tokens", "cost-aware"], "add --draft-costs FILE"),
        (["--draft-tokens", "3"], "nothing is drafted"),
        (
            ["--speculate", "mtp", "--draft-tokens", "cost-aware", "--draft-costs", "/no/costs"],
            "/no/costs cannot be read",
        ),
        (
            ["--speculate", "mtp", "--draft-tokens", "cost-aware", "--draft-costs", ROOT / "demo" / "config.json"],
            "expected a cost table",
        ),
        (["--max-context", "many"], "--max-context: 'many' is not a size"),
        (["--terminate", "--terminate-rule", "p=5"], "expected each of tau, phi"),
    ],
)
def test_options_are_read_before_a_checkpoint(command_line, command, options, message):
    assert message in refused(command_line, command, *options)


def test_options_of_one_command_are_read_before_a_checkpoint(command_line, tmp_path, monkeypatch):
    (tmp_path / "file").write_text('{"prompt": "x"}\n')
    assert "--pool-tokens: 'x' is not a size" in refused(command_line, "batch", "--pool-tokens", "x")
    monkeypatch.setattr(sys, "stdin", None)
    assert "standard input: it is closed" in refused(command_line, "batch")
    code, _, err = command_line(
        "batch", tmp_path / "file", "--checkpoint", "/no/checkpoint", "--report", tmp_path / "file" / "in"
    )
    assert code == 2 and "--report" in err and "cannot be written" in err
    for options, message in (
        (["--token-ids", "1,x"], "expected numbers separated by commas"),
        (["--prompt", "a", "--top-p", "2"], "top_p 2.0"),
        (["--prompt", "a", "--max-memory", "cpu=1G,cpu=2G"], "each at most once"),
        ([], "there is no prompt"),
    ):
        code, _, err = command_line("generate", "/no/checkpoint", *options)
        assert code == 2 and err.count("\n") == 1 and message in err


@pytest.mark.parametrize(
    "where, found, message",
    [
        (("batches", "1", "draft"), "NaN", "draft of batch 1 is nan; expected seconds"),
        (("batches", "1", "draft"), "-1", "draft of batch 1 is -1"),
        (("batches", "1", "draft"), "1e999", "draft of batch 1 is inf"),
        (("batches", "1", "draft"), "1" + 400 * "0", "draft of batch 1 is 1000"),
        (("batches", "1", "draft"), "true", "draft of batch 1 is True"),
        (("batches", "1", "draft"), None, "draft of batch 1 is None"),
        (("batches", "1", "verify"), "[0.1]", "expected 9 positive numbers"),
        (("batches", "1", "verify"), "[1e-300,1,1,1,1,1,1,1,1]", "expected 9 positive"),
        (("batches", "1", "measured"), '"yes"', "measured of batch 1 is yes"),
        (("batches", "1"), "3", "draft of batch 1 is None"),
        (("batches",), "[]", "batches is not an object"),
        (("batches",), '{"0": 1}', "batches is not an object"),
        (("padding",), "2", "padding is 2"),
        (("unit",), '"ms"', "unit is ms; expected 'seconds'"),
        (("version",), "7", "version 7"),
        (("provenance",), None, "provenance is None"),
        ((), "[]", "found a list; expected a cost table"),
        ((), "{", "is not JSON"),
        ((), "[" * 100_000, "is not JSON"),
        ((), "\udcff", "is not JSON"),
        ((), "", "is not JSON"),
    ],
)
def test_a_damaged_table_is_one_line_that_says_what_was_found(command_line, costs, where, found, message):
    """found: JSON in place of a field, or of the whole file; None: the field is missing."""
    document, text = json.loads(costs.read_text()), found
    if where:
        *above, last = where
        inner = document
        for key in above:
            inner = inner[key]
        inner.pop(last) if found is None else inner.update({last: "HERE"})
        text = json.dumps(document).replace('"HERE"', found or "")
    costs.write_text(text, errors="surrogateescape")
    err = refused(
        command_line, "generate", "--speculate", "mtp", "--draft-tokens", "cost-aware", "--draft-costs", costs
    )
    assert message in err and str(costs) in err and "name a table as scripts/bench_speculation.py writes it" in err


@pytest.mark.parametrize("command", ["generate", "batch"])
def test_a_table_is_read_once_and_named_by_the_report(command_line, command, costs, tmp_path, monkeypatch):
    """Once: it may be a pipe."""
    (tmp_path / "r.jsonl").write_text('{"token_ids": [1, 5, 9], "max_tokens": 4}')
    given = (
        ["generate", ROOT / "demo", "--token-ids", "1,5,9", "--max-new-tokens", "4"]
        if command == "generate"
        else ["batch", tmp_path / "r.jsonl", "--checkpoint", ROOT / "demo", "--report", tmp_path]
    )
    table, paths = read_costs(costs), []
    monkeypatch.setattr("dsv4.speculation.choice.read_costs", lambda path: paths.append(path) or table)
    code, _, err = command_line(
        *given, "--numerics", "fp32", "--speculate", "mtp", "--draft-tokens", "cost-aware", "--draft-costs", costs
    )
    assert code == 0 and paths == [costs], err
    if command == "batch":
        about = json.loads((tmp_path / "batch_r.json").read_text())["about"]
        assert (about["draft tokens"], about["draft costs"]) == ("cost-aware", "costs.json")
        assert "draft costs costs.json" in (tmp_path / "batch_r.md").read_text()


def test_what_is_drafted_where_nothing_is_asked_for(brief_golden):
    """One draft of the block, three that are looked up: by the command line, by either decoder and in the engine."""
    for name, drafter, size in (("mtp", MTPDrafter(), 1), ("lookup", LookupDrafter(1, 1), 3)):
        assert Request("a", speculate=name).policy.sizes[-1] == size == drafter.draft_tokens
        assert Request("a", speculate=name, draft_tokens="2").policy.size == 2
        assert Options(speculate=name).policy.size == size
    assert Request("a").policy is None and Options().policy is None
    model = load_model(brief_golden, numerics="fp32", mtp=True)
    ids = list(range(model.config.vocab_size))
    for decode in (generate_speculative, generate_on_device):
        for drafter in (MTPDrafter(), LookupDrafter(1, 1)):
            assert max(decode(model, [ids], 12, drafter)[0].speculation.block_size_history) == drafter.draft_tokens
    cache = new_paged_cache(model, 1, 64, max_rewind=9)
    assert BatchEngine(model, cache, drafter=MTPDrafter()).policy.size == 1
