"""`--kv-memory host` on the command line, and that the plan has the bytes that caches take."""

import json
from pathlib import Path

import pytest

from dsv4 import load_model
from dsv4.cache.host_tier import memory
from dsv4.cache.host_tier.choice import HostMemory
from dsv4.model.gqa.choice import attention_named

ROOT = Path(__file__).resolve().parents[2]
FP32 = ("--numerics", "fp32")  # bf16 products take several times as long on many processors
PROMPT = ",".join(str(7 + i % 50) for i in range(90))


def planned(command_line, *args) -> dict:
    code, out, err = command_line("plan", *args, "--kv-memory", "host", "--json")
    assert code == 0, err
    return json.loads(out)


@pytest.mark.few(staged=[40])
@pytest.mark.parametrize("staged", [None, 40])
def test_the_plan_of_a_gqa_cache_is_what_it_takes(command_line, staged):
    more = [] if staged is None else ["--staged-blocks", staged]
    plan = planned(
        command_line,
        ROOT / "demo_gqa",
        "--max-context",
        "3000",
        "--batch",
        2,
        "--attention",
        "page-bound",
        "--attention-tokens",
        "512",
        *more,
    )
    model = load_model(ROOT / "demo_gqa", attention=attention_named("page-bound", 512), kv_memory=HostMemory(staged))
    cache = model.new_cache(2, 3000)
    assert cache.nbytes == plan["cache_bytes"] + plan["staging_bytes"] and cache.host_bytes == plan["pinned_bytes"] > 0
    assert plan["total_bytes"] == plan["weights_bytes"] + cache.nbytes and cache.far[0].slots == (staged or 64)
    assert {row["group"] for row in plan["rows"]} == {"weights", "cache", "staging", "pinned"} and all(
        row["formula"] for row in plan["rows"]
    )


@pytest.mark.parametrize("formats", [{}, {"cache": "fp8", "index_cache": "fp4"}], ids=str)
def test_the_plan_of_entries_is_what_they_take(command_line, formats):
    options = [text for name, value in formats.items() for text in ("--" + name.replace("_", "-"), value)]
    plan = planned(command_line, ROOT / "demo", "--max-context", "3000", *options)
    model = load_model(ROOT / "demo", kv_memory=HostMemory(), **formats)
    cache = model.new_cache(1, 3000)
    assert cache.nbytes == plan["cache_bytes"] + plan["staging_bytes"] and cache.host_bytes == plan["pinned_bytes"] > 0


@pytest.mark.parametrize(
    "checkpoint, options", [("demo_gqa", ["--attention", "page-bound", "--attention-tokens", "64"]), ("demo", [])]
)
def test_the_same_text(command_line, checkpoint, options):
    ask = ["generate", ROOT / checkpoint, "--token-ids", PROMPT, "--max-new-tokens", "4", "--json", *options, *FP32]
    (code, plain, _), (other, tier, err) = command_line(*ask), command_line(*ask, "--kv-memory", "host")
    assert code == other == 0, err
    plain, tier = json.loads(plain), json.loads(tier)
    assert plain["token_ids"] == tier["token_ids"] and plain["host_memory"] is None
    assert tier["host_memory"]["misses"] > 0 and any(
        row["operation"] == "fetch" and row["calls"] for row in tier["dispatch"]
    )
    code, out, err = command_line(*(a for a in ask if a != "--json"), "--kv-memory", "host", "--verbose")
    assert code == 0 and "pinned" in err and "fetched as they were chosen" in err


@pytest.mark.parametrize(
    "args, message",
    [
        (
            ["plan", "demo_gqa", "--kv-memory", "device", "--staged-blocks", "4", "--max-context", "1K"],
            "is there already; add --kv-memory host",
        ),
        (
            ["plan", "demo_gqa", "--kv-memory", "host", "--staged-blocks", "4", "--max-context", "1K"],
            "dense attention chooses no blocks",
        ),
        (
            [
                "plan",
                "demo_gqa",
                "--kv-memory",
                "host",
                "--attention",
                "block-bound",
                "--staged-blocks",
                "4",
                "--max-context",
                "1K",
            ],
            "32 blocks.*4 slots",
        ),
        (["plan", "flash", "--kv-memory", "host", "--staged-blocks", "100"], "512 entries.*100 rows"),
        (["generate", "demo_gqa", "--prompt", "a", "--guess-ahead"], "on the device already; add --kv-memory host"),
        (
            ["generate", "demo_gqa", "--prompt", "a", "--kv-memory", "host", "--guess-ahead"],
            "none are chosen here.*add --attention block-bound",
        ),
        (
            ["generate", "demo", "--prompt", "a", "--kv-memory", "host", "--guess-ahead"],
            "entries of CSA layers are not guessed",
        ),
        (["batch", "r.jsonl", "--checkpoint", "demo", "--kv-memory", "host"], "share the pages of one pool"),
        (
            ["generate", "demo", "--prompt", "a", "--kv-memory", "host", "--device-map", "auto"],
            "--device-map were given",
        ),
    ],
    ids=lambda x: str(x)[:30],
)
def test_refusals_are_one_line(command_line, args, message, monkeypatch):
    import re

    monkeypatch.chdir(ROOT)
    code, out, err = command_line(*args)
    assert code == 2 and out == "" and err.count("\n") == 1 and re.search(message, err), err


def test_nothing_is_guessed_unless_asked_for(command_line, monkeypatch):
    from dsv4.model.gqa import layout

    made, real = [], layout.Ahead
    monkeypatch.setattr(layout, "Ahead", lambda device: made.append(device) or real(device))
    ask = [
        "generate",
        ROOT / "demo_gqa",
        "--token-ids",
        PROMPT,
        "--max-new-tokens",
        "4",
        "--attention",
        "page-bound",
        "--attention-tokens",
        "64",
        "--kv-memory",
        "host",
        "--json",
        *FP32,
    ]
    runs = {
        options: json.loads(command_line(*ask, *options)[1])
        for options in ((), ("--no-guess-ahead",), ("--guess-ahead",))
    }
    assert [run["host_memory"]["guessed_bytes"] > 0 for run in runs.values()] == [False, False, True] and len(made) == 1
    assert len({str(run["token_ids"]) for run in runs.values()}) == 1
    assert HostMemory().ahead is False  # on a GPU too, which this one default serves


def test_missing_memory_is_an_error_with_the_bytes(command_line, monkeypatch):
    """What the control group allows is asked for the whole cache; what the system refuses of a buffer says how much
    there was before."""
    monkeypatch.setattr(memory, "_limit", lambda: 5000)
    ask = ["generate", ROOT / "demo_gqa", "--token-ids", PROMPT, "--max-new-tokens", "4", "--kv-memory", "host"]
    code, _, err = command_line(*ask)
    assert code == 2 and "393216 bytes of host memory" in err and "more than the 5000" in err
    monkeypatch.setattr(memory, "_limit", lambda: None)
    real, made = memory._pages, []

    def pages(nbytes):
        if len(made) == 3:
            raise memory.PinnedMemoryError(f"{nbytes} are not to be had")
        made.append(nbytes)
        return real(nbytes)

    monkeypatch.setattr(memory, "_pages", pages)
    code, _, err = command_line(*ask)
    assert (
        code == 2
        and "the cache keeps 393216 bytes in pinned host memory, of which 65536 were had: 32768 are not to be had"
        in err
    )


def test_a_system_that_stays_short_of_pages(monkeypatch):
    found = iter([100, 100, 300])
    monkeypatch.setattr(memory, "_free", lambda: next(found, 100))
    monkeypatch.setattr(memory, "PAUSE", 0)
    memory._await_room(200)  # it grew
    with pytest.raises(memory.PinnedMemoryError, match="200 bytes.*100 bytes available"):
        memory._await_room(200)
