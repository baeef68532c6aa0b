"""The report of several GPUs, from rows that were not measured."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from scripts.bench.parallel_report import document, markdown, red
from scripts.bench.timing import Machine
from scripts.bench_parallel import PARTS, arguments, embedding_memory

ROOT = Path(__file__).resolve().parents[2]
ABOUT = {"device": "NVIDIA H100 80GB HBM3", "torch": "2", "triton": "3", "commit": "abc", "command": "python x"}
MACHINE = Machine("NVIDIA H100 80GB HBM3", 3e12, 8e14, 2.0, 1.0)


def step(ranks, batch, context, ms, part="part", **more):
    return {
        "kind": "step", "part": part, "ranks": ranks, "layers": 16, "batch": batch, "context": context, "step_ms": ms,
        "floor_ms": 1.0, "share_of_floor": 1 / ms, "weight_bytes": 1e9, "cache_bytes": 1e8, "peak_bytes": 2e9,
        "outside_bytes": 5e8, "by_expert": False, "finite": True, "compiles": 0, "syncs": 0, **more,
    }  # fmt: skip


ROWS = [
    step(1, 1, 8192, 3.2),
    step(2, 1, 8192, 2.0),
    {"kind": "kernels", "part": "part", "ranks": 2, "layers": 16, "batch": 1, "context": 8192, "kernels": 3,
     "by_kernel": [("gemv", 3, 7.5)]},
    {"kind": "kernels", "part": "whole", "ranks": 2, "layers": 43, "batch": 1, "context": 65536, "chunk": 4096,
     "span_ms": 301.25, "kernels": 4, "by_kernel": [("gemm", 4, 9.5)]},
    {"kind": "step", "part": "whole", "ranks": 2, "layers": 43, "batch": 32, "context": 8192, "why": "no room: none"},
    step(1, 8, 8192, 5.0),
    step(2, 8, 8192, 3.0),
    step(2, 1, 8192, 4.3, "whole"),
    {"kind": "drafts", "part": "whole", "ranks": 2, "layers": 43, "context": 8192, "drafts": 2, "trace": "code",
     "tokens_per_second": 260.0, "by_expert": False},
    {"kind": "exchange", "part": "exchange", "ranks": 2, "shape": [1, 4096], "bits": True, "ours_us": 3.1,
     "nccl_us": 13.8},
    {"kind": "boundary", "part": "exchange", "ranks": 2, "after": "experts", "tokens": 1, "bits": True,
     "deferred_us": 7.25, "alone_us": 11.5},
]  # fmt: skip


def test_goals_are_judged_by_the_rows_they_name():
    found = {
        row["what"]: (row["verdict"], row["measured"]) for row in document(ROWS, MACHINE, ABOUT, "flash", [])["goals"]
    }
    assert found == {
        "ms a token, batch 1 at 8K": ("met", 4.3),
        "ms a token, batch 1 at 1M": ("not measured", None),
        "tokens/s with MTP drafts, the best number": ("MISSED", 260.0),
        "tokens/s of a prompt of 128K": ("not measured", None),
        "two ranks against one at 16 layers, batch 1: times as fast": ("met", 1.6),
        "two ranks against one at 16 layers, batch 8: times as fast": ("MISSED", pytest.approx(5 / 3)),
    }


def test_the_page_has_every_row():
    text = markdown(document(ROWS, MACHINE, ABOUT, "flash", ["long"]))
    assert "| 2 | 16 | 1 | 8192 | 2.000 | 1.000 | 50% | 1.00 | 0.10 | 2.00 | 0.50 |" in text
    assert "| 2 | 1 × 4096 | 3.10 | 13.8 | equal |" in text and "| gemv | 3 | 7.50 |" in text
    assert "| 2 | experts | 1 | 7.25 | 11.5 | equal |" in text
    assert "The 4 kernels of a chunk of 4096 tokens, 301.2 ms: 2 ranks, 43 layers, batch 1 at 65536" in text
    assert "- 2 ranks, batch 32 at 8192: no room: none" in text
    assert "- failed: long ended with an error" in text and "| 2 | 43 | 8192 | 2 | code | 260 |" in text


def test_the_embedding_is_in_host_memory_where_the_caches_are_long(monkeypatch):
    for given, where in (((), "host"), (("--embedding-memory", "device"), "device")):
        monkeypatch.setattr(sys, "argv", ["bench_parallel.py", *given])
        found = {part: embedding_memory(arguments(), part) for part in PARTS}
        assert found == {"exchange": "device", "part": "device", "whole": "device", "long": where}
    rows = [*ROWS, step(2, 1, 1 << 20, 4.8, "long", embedding_memory="host")]
    rows += [step(2, 1, 8192, 1.0, embedding_memory="host")]
    rows += [dict(kind="step", part="long", ranks=2, batch=8, context=4, embedding_memory="host", why="no room")]
    found = document(rows, MACHINE, ABOUT, "flash", [])
    measured = {row["what"]: row["measured"] for row in found["goals"]}
    assert measured["ms a token, batch 1 at 1M"] == 4.8
    assert measured["two ranks against one at 16 layers, batch 1: times as fast"] == 1.6  # both on the device
    text = markdown(found)
    assert "| 2, embedding in host memory | 16 | 1 | 1048576 | 4.800 |" in text
    assert "- 2 ranks, embedding in host memory, batch 8 at 4: no room" in text and "of a step: 2 ranks, 16" in text


@pytest.mark.parametrize(
    "row",
    [step(2, 1, 8192, 1.0, finite=False), step(2, 1, 8192, 1.0, compiles=1), {"kind": "exchange", "bits": False}],
    ids=["not finite", "compiled", "wrong bits"],
)
def test_what_is_wrong_is_red(row):
    assert red([*ROWS, row]) and not red(ROWS)


@pytest.mark.skipif(torch.cuda.is_available(), reason="it runs where there are GPUs")
def test_without_gpus_it_says_so():
    ran = subprocess.run([sys.executable, "scripts/bench_parallel.py"], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 2 and ran.stderr == "error: 2 ranks need as many GPUs; found 0\n"
