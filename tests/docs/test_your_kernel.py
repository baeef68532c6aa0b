"""docs/your_kernel.md: its kernel is audited as it stands there, and its bug is named. docs/kernel.md: its clauses."""

import json
import re
from pathlib import Path

from dsv4.probes.kernel_audit.plant import CLAUSES

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "your_kernel.md").read_text()
KERNEL, BUG = re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S)
GREEN, RED = re.findall(r"^```text\n(.*?)^```", PAGE, re.M | re.S)


def plain(text: str) -> str:
    """Without the name of the processor."""
    return re.sub(r"· cpu \([^)]*\) ·", "· cpu ·", text)


def test_the_kernel_of_the_page_is_green(command_line, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(KERNEL)
    code, out, _ = command_line("kernel", "audit", "sparse_attention", "--kernel", f"{file}:attention", "--seed", 1)
    assert code == 0 and plain(GREEN).strip() in plain(out)


def test_the_bug_of_the_page_is_named_as_the_page_says(command_line, tmp_path):
    file, line = tmp_path / "mine.py", re.compile(r"^    weights = .*\n", re.M)
    assert len(line.findall(KERNEL)) == 1
    file.write_text(line.sub(lambda _: BUG, KERNEL))
    words = ("kernel", "audit", "sparse_attention", "--kernel", f"{file}:attention", "--seed", 1)
    code, out, _ = command_line(*words, "--clause", "calls", "--out", tmp_path / "found")
    shown, wanted = plain(out).strip().split("\n"), plain(RED).strip().split("\n")
    assert code == 1 and shown[:2] == wanted[:2]
    assert shown[2].split(", ")[:4] == wanted[2].split(", ")[:4]  # the error's last digits are the machine's
    assert json.loads((tmp_path / "found" / "audit.json").read_text())["looks_like"] == ["the sink is ignored"]


def test_the_page_of_clauses_lists_every_clause():
    page = (ROOT / "docs" / "kernel.md").read_text()
    table = page[page.index("## What each clause asks") : page.index("## How a result is accepted")]
    assert re.findall(r"^\| (\w+) \| .*\?", table, re.M) == list(CLAUSES)
