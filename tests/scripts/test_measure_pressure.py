"""What drafts do to pools under pressure is measured over the same requests for every policy."""

import json

from scripts import measure_pressure


def test_policies_and_pools_have_a_row_each(monkeypatch, tmp_path):
    asked = tmp_path / "asked.jsonl"
    lines = [{"id": name, "token_ids": [5 + n, 6, 7] * 4, "max_tokens": 6} for n, name in enumerate("abc")]
    asked.write_text("\n".join(map(json.dumps, lines)))
    words = ["--requests", str(asked), "--pool-tokens", "256,512", "--policies", "off", "4", "4,dropped", "--rows", "2"]
    monkeypatch.setattr("sys.argv", ["measure_pressure.py", *words, "--speculate", "mtp", "--out", str(tmp_path)])
    assert measure_pressure.main() == 0
    found = json.loads((tmp_path / "pressure_cpu.json").read_text())
    ran = [(pool, policy) for pool in (256, 512) for policy in ("4", "off", "4,dropped")]
    assert [(r["pool"], r["policy"]) for r in found["rows"]] == ran
    assert all(r["tokens"] == 18 and 0 < r["fragmentation"] < 1 for r in found["rows"])
    drafted = [r for r in found["rows"] if r["policy"] != "off"]
    assert all(r["size_high"] + r["size_low"] > 0 and r["by_page"]["8"]["for_drafts"] > 0 for r in drafted)
    off = [r for r in found["rows"] if r["policy"] == "off"]
    assert all(r["size_high"] + r["size_low"] == r["by_page"]["8"]["for_drafts"] == 0 for r in off)
    text = (tmp_path / "pressure_cpu.md").read_text()
    assert "3 requests of asked.jsonl, 2 rows, drafts of mtp" in text and "| 512 | off |" in text
    assert "between tokens, ms" in text and "by the costs of speculation_costs_h100.json" in text


def test_without_drafts_a_token_comes_a_pass_apart(monkeypatch, tmp_path):
    """Two requests alone in their passes: each token waits for its own pass and the other's, by the table."""
    asked = tmp_path / "asked.jsonl"
    asked.write_text("\n".join(json.dumps({"id": i, "token_ids": [5, 6], "max_tokens": 9}) for i in "ab"))
    words = ["--requests", str(asked), "--pool-tokens", "512", "--policies", "off", "--rows", "2"]
    words += ["--out", str(tmp_path)]
    monkeypatch.setattr("sys.argv", ["measure_pressure.py", *words])
    assert measure_pressure.main() == 0
    [row] = json.loads((tmp_path / "pressure_cpu.json").read_text())["rows"]
    cost = json.loads(measure_pressure.COSTS.read_text())["batches"]["1"]
    share = measure_pressure.read_costs(measure_pressure.COSTS).uniform(1, 0)
    assert share >= cost["verify"][0] and abs(row["gap_ms"]["p50"] - 2e3 * share) < 1e-6


def test_pages_that_drafts_need():
    """By hand: 7 tokens and pages of 4; passes of 4 drafts of which 1 stays, and of none."""
    rows = [{"prompt": 7, "drafted": [4, 0], "accepted": [1, 0]}]
    # 12 and 10 tokens in the running passes, 9 and 10 after them: pages 3 + 3, and 3 + 3
    assert measure_pressure.by_page(rows, 4) == {"for_drafts": 0.0, "fragmentation": 1 - 19 / 24}
    # pages of 2: 6 + 5, and 5 + 5
    assert measure_pressure.by_page(rows, 2) == {"for_drafts": 1 - 10 / 11, "fragmentation": 1 - 19 / 20}
