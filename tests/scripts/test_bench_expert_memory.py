"""The bench of experts in host memory, run on a host processor."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.bench.expert_memory import Row, markdown

ROOT = Path(__file__).resolve().parents[2]


def test_a_report_of_the_demo(tmp_path):
    options = "--device cpu --resident-experts 8 --prompt 40 --tokens 3 --batch 1,2".split()
    command = [sys.executable, "scripts/bench_expert_memory.py", "demo", *options, "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    [file] = tmp_path.glob("*.json")
    found = json.loads(file.read_text())
    assert len(found["rows"]) == 5 and "not measured on a CPU" in file.with_suffix(".md").read_text()
    assert [row["tokens"] for row in found["rows"]] == [40, 3, 3, 6, 6]  # a step of two rows has two tokens
    again = next(row for row in found["rows"] if row["name"] == "batch 1, one token again")
    assert again["misses"] < again["hits"] and found["experts"]["resident"] == 8


def test_what_the_link_allows():
    row = Row("x", tokens=4, seconds=2.0, hits=1, misses=3, fetched=400, layers=2, link=1000.0)
    d = row.document(whole=4)
    assert (d["token_ms"], d["link_ms"], d["hit_rate"]) == (500.0, 100.0, 0.25)
    assert d["tokens_per_second"] == 2 and d["whole_tokens_per_second"] == 1
    assert d["whole_link_tokens_per_second"] == pytest.approx(5)
    about = {"device": "h100", "torch": "1", "triton": "1", "commit": "x", "command": "y"}
    held = dict(resident=1, of=2, layers=2, whole_layers=4, pinned_bytes=1, device_bytes=1, link_bytes_per_second=1e9)
    text = markdown({"about": about, "experts": held, "rows": [d]})
    assert "| x | 25.0% | 100.0 B | 500.000 | 100.000 | 1.0 | 5.0 |" in text and "1.0 GB/s" in text
    assert "\n    y\n" in text
