"""What `dsv4 plan` says that a decode step reads, against products written out here."""

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CSA, HCA, ALL = 21, 20, 43  # layers of V4-Flash


@pytest.fixture
def step(command_line):
    def call(*args) -> dict[str, int]:
        code, out, err = command_line("plan", *args, "--json")
        assert code in (0, 1) and not err, err  # 1: it does not fit this machine
        return {row["name"]: row["nbytes"] for row in json.loads(out)["step"] if row["formula"]}

    return call


def test_flash_at_a_million_tokens(step):
    found = step(
        "flash", "--max-context", "1M", "--batch", 2, "--numerics", "qat", "--cache", "fp8", "--index-cache", "fp4"
    )
    entries = (1 << 20) // 4
    assert {
        name: found[name]
        for name in ("window", "csa entries", "hca entries", "index keys", "index scores", "index queries")
    } == {
        "window": ALL * 2 * 128 * 584,
        "csa entries": CSA * 2 * 512 * 584,
        "hca entries": HCA * 2 * 8192 * 584,
        "index keys": CSA * 2 * entries * 68,
        "index scores": CSA * 2 * entries * 8,
        "index queries": CSA * 2 * 64 * 128 * 2,
    }
    one = step("flash", "--max-context", "1M", "--numerics", "qat", "--cache", "fp8", "--index-cache", "fp4")
    assert (
        found["routed experts"] == 2 * one["routed experts"]
        and found["embedding"] == 2 * 4096 * 2 == 2 * one["embedding"]
    )
    assert (
        found["layers and norms"] == one["layers and norms"]
        and found["output head"] == one["output head"] == 129280 * 4096 * 2
    )


def test_a_gqa_model_under_a_policy_and_without(step):
    dense = step(ROOT / "demo_gqa", "--max-context", "8K")
    # tied
    assert (
        dense["keys"] == dense["values"] == 6 * 8192 * 2 * 64 * 2
        and "block summaries" not in dense
        and "embedding" not in dense
    )
    some = step(ROOT / "demo_gqa", "--max-context", "8K", "--attention", "block-bound", "--attention-tokens", "2K")
    scored = 8192 // 128 - 3  # not the sink, nor two local blocks
    assert some["keys"] == 6 * 2048 * 2 * 64 * 2 and some["block summaries"] == 6 * scored * 2 * 2 * 64 * 2


def test_the_table_sums_it(command_line):
    _, out, _ = command_line("plan", ROOT / "demo", "--max-context", "2K")
    table = out[out.index("a decode step of all rows reads") :].split("\n\n")[0].splitlines()[2:]
    numbers = [int(line.split()[0]) for line in table if line.split() and line.split()[0].isdigit()]
    assert len(numbers) > 8 and sum(numbers[:-1]) == numbers[-1]
