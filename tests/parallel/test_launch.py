"""Ranks as processes: the text of one process, and what is said when one of them fails."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.parallel.held import alike

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "tests" / "golden" / "tiny_fp32"
ASKED = ("generate", str(TINY), "--numerics", "fp32", "--token-ids", ",".join(map(str, range(3, 43))))
TWO = ("--tensor-parallel-size", "2")


def start(*arguments: str, module: tuple = ("-m", "dsv4"), **environment: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, *module, *arguments], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | environment,
    )  # fmt: skip


def ended(process: subprocess.Popen) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def children(pid: int) -> list[int]:
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True).stdout
    return sorted(map(int, found.split()))


# Over 5 s: processes that import torch.
def test_text_is_that_of_one_process():
    runs = [
        start(*ASKED, "--max-new-tokens", "12", "--json"),
        start(*ASKED, "--max-new-tokens", "12", "--json", *TWO),
        start(
            *("--nproc-per-node", "2", "--master-port", "29641", "-m", "dsv4"),
            *(*ASKED, "--max-new-tokens", "12", "--json"),
            module=("-m", "torch.distributed.run"),
        ),
    ]
    found = [ended(run) for run in runs]
    assert [code for code, *_ in found] == [0, 0, 0], found
    said = [json.loads(out)["token_ids"] for _, out, _ in found]
    assert said[0] == said[1] == said[2] and len(said[0]) == 12


# Over 5 s: processes that import torch.
def test_random_weights_give_the_text_of_one_process():
    """Of Flash thinned to small layers, which each process is told."""
    thinned = (
        "from dsv4.commands import cli\nfrom dsv4.model import dummy\nfrom tests.checkpoints import SMALL\n"
        "dummy.preset = lambda name: dict(SMALL)\ncli.main()"
    )
    asked = ("generate", "--dummy-weights", "flash", "--layers", "3", "--numerics", "fp32", "--prompt-tokens", "40")
    asked = (*asked, "--max-new-tokens", "12", "--json")
    ranks = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29643"}
    runs = [start(*asked, module=("-c", thinned))]
    runs += [start(*asked, *TWO, module=("-c", thinned), RANK=str(rank), **ranks) for rank in (0, 1)]
    (code, alone, _), (first, shared, err), (second, quiet, _) = map(ended, runs)
    assert (code, first, second, quiet) == (0, 0, 0, ""), err
    said, ours = json.loads(shared), json.loads(alone)
    assert said["token_ids"] == ours["token_ids"] and len(said["token_ids"]) == 12
    assert said["bytes"]["weights"] < ours["bytes"]["weights"] and "random weights" in said["checkpoint"]


# Over 5 s: a rank must have begun to run before it is killed.
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_ends_all_and_is_named(rank):
    asked = ("generate", str(ROOT / "demo"), *ASKED[2:], "--max-new-tokens", "100000", "--max-context", "128K")
    parent = start(*asked, *TWO)
    try:
        deadline = time.monotonic() + 60
        while len(found := children(parent.pid)) < 2 and time.monotonic() < deadline:
            time.sleep(0.1)
        time.sleep(6)
        os.kill(found[rank], signal.SIGKILL)
        begun = time.monotonic()
        code, _, err = ended(parent)
    finally:
        parent.kill()
    lines = [line for line in err.splitlines() if line.startswith("error: ")]
    assert code == 2 and lines == [f"error: rank {rank} of 2 died of SIGKILL; all ranks were ended"], err
    assert time.monotonic() - begun < 30 and not any(Path(f"/proc/{pid}").exists() for pid in found)


def test_ranks_of_different_options_are_refused():
    same = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29642"}
    other = [*ASKED[:3], "native", *ASKED[4:]]
    runs = [start(*ASKED, **same, RANK="0"), start(*other, **same, RANK="1")]
    (code, out, err), (_, quiet, theirs) = map(ended, runs)
    assert code == 2 and out == quiet == "" and err.count("\n") == 1
    assert "ranks differ in options" in err and "rank 1 has" in err and "error: " in theirs


@pytest.mark.parametrize(
    "given, said",
    [
        (("--tensor-parallel-size", "3"), "3 ranks cannot share equally"),
        (("--tensor-parallel-size", "2", "--temperature", "-1"), "temperature"),
        (("--tensor-parallel-size", "0"), "--tensor-parallel-size"),
    ],
    ids=lambda given: given if isinstance(given, str) else given[-1],
)
def test_bad_input_is_one_line(given, said):
    code, out, err = ended(start(*ASKED, *given))
    assert code == 2 and out == "" and said in err and len(re.findall("error: ", err)) == 1, err


def test_a_rank_that_is_told_another_number_is_refused():
    code, _, err = ended(start(*ASKED, *TWO, RANK="0", WORLD_SIZE="4"))
    assert code == 2 and "given to one of 4 ranks" in err
    code, _, err = ended(start(*ASKED, RANK="x", WORLD_SIZE="4"))
    assert code == 2 and "are no numbers" in err


def test_commands_of_one_process_refuse_ranks():
    for command in (("audit", "selftest"), ("audit", "bisect", str(TINY)), ("plan", "flash")):
        code, out, err = ended(start(*command, RANK="0", WORLD_SIZE="2"))
        named = " ".join(command[: 1 + (command[0] == "audit")])
        assert code == 2 and out == "" and f"{named!r} runs in one process" in err


# Over 5 s: processes that import torch.
def test_an_audit_is_written_once(tmp_path):
    asked = ("audit", str(TINY), "--probe", "load_ledger", "--probe", "dtype_ledger")
    code, out, err = ended(start(*asked, "--out", str(tmp_path), *TWO))
    assert code == 0 and out == "" and "error: " not in err and err.count("exit code 0") == 1, err
    assert sorted(f.suffix for f in tmp_path.iterdir()) == [".html", ".json", ".md", ".sarif", ".xml"]
    (file,) = tmp_path.glob("*.json")
    report = json.loads(file.read_text())
    assert report["provenance"]["ranks"] == "2 ranks, experts by width, exchanging by gloo"
    assert report["title"].count("2 ranks") == 1
    # what depends on a clock is rank 0's; other ranks have not failed where there are findings
    code, out, err = ended(start(*asked, "--budget", "0.001s", "--fail-on", "vacuous", *TWO))
    assert code == 1 and "error: " not in err and "exit code 1" in err, err


# Over 5 s: processes that import torch and read a text.
@pytest.mark.parametrize(
    "command, more", [("recall", ("--k", "8")), ("fidelity", ("--topk", "8", "--tail", "16", "--new-tokens", "4"))]
)
def test_a_measurement_is_that_of_one_process(tmp_path, command, more):
    asked = (command, str(ROOT / "demo"), "--rows", "1", "--context", "512", "--queries", "16", "--numerics", "fp32")
    asked = (*asked, "--needles", "0", "--json", *more)
    runs = [start(*asked), start(*asked, *TWO, "--out", str(tmp_path))]
    (code, alone, _), (other, shared, err) = map(ended, runs)
    assert code == other == 0 and "error: " not in err, err
    wanted, found = json.loads(alone), json.loads(shared)
    assert found["provenance"]["ranks"].startswith("2 ranks") and "2 ranks" in found["title"]
    for key in ("seconds", "provenance", "title"):
        wanted.pop(key), found.pop(key)
    # logits of size 10 err by δ = 1e-4, and a divergence KL by √(2 KL) δ: 3e-5 of the largest here
    assert alike(found, wanted, 1e-5 if command == "fidelity" else 1e-12) and len(list(tmp_path.glob("*.json"))) == 1
