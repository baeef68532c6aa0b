"""Policies by name, and that the command line runs the one it was asked for."""

import json
import sys

import pytest

from dsv4.errors import InputError
from dsv4.speculation import Adaptive, AdaptiveParameters, CostAware, Static
from dsv4.speculation.choice import policy_named
from scripts.bench.speculation_costs import moe
from tests.test_names import ROOT


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


@pytest.mark.parametrize("text,match", [
    ("9", "expected 1 to 8, adaptive or cost-aware"), ("cost-aware", "add --draft-costs FILE"), ("adaptive:speed=1", "'speed=1'; expected each of weight, start"),
    ("adaptive:weight=1,weight=1", "once at most"), ("adaptive:weight=x", "expected numbers"), ("adaptive:sizes=1/2.5/3", "expected whole numbers"),
    ("adaptive:weight=0.1/0.2", "expected one number"), ("adaptive:weight=2", "0 < weight <= 1"), ("static:3", "expected 1 to 8"),
])
def test_what_is_no_policy(text, match):
    with pytest.raises(InputError, match=match):
        policy_named(text)


def test_costs_are_of_the_rows_that_share_a_pass(costs):
    with pytest.raises(InputError, match="only cost-aware weighs costs"):
        policy_named("adaptive", costs)
    with pytest.raises(InputError, match="batch"):
        policy_named("cost-aware", costs, 3)


@pytest.mark.parametrize("command", ["generate", "batch"])
@pytest.mark.parametrize("drafts", ["cost-aware", "adaptive:sizes=2/3/5,start=0.9"])
def test_the_command_line_takes_the_policys_sizes(command, drafts, costs, tmp_path, monkeypatch, capsys):
    """What the policy by itself chooses after each pass's acceptance, cut to what is left of the request."""
    from dsv4.cli import main
    ids, new = [1, 5, 9, 4, 7, 2], 20
    (tmp_path / "r.jsonl").write_text(json.dumps({"token_ids": ids, "max_tokens": new}))
    given = ["generate", str(ROOT / "demo"), "--token-ids", ",".join(map(str, ids)), "--max-new-tokens", str(new), "--json"] \
        if command == "generate" else ["batch", str(tmp_path / "r.jsonl"), "--checkpoint", str(ROOT / "demo"), "--max-context", "64"]
    table = ["--draft-costs", str(costs)] * (drafts == "cost-aware")
    monkeypatch.setattr(sys, "argv", ["dsv4", *given, "--numerics", "fp32", "--speculate", "mtp", "--draft-tokens", drafts, *table])
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
