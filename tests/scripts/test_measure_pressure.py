"""What drafts do to pools under pressure is measured over the same requests for every policy."""

import json

from scripts import measure_pressure


def test_policies_and_pools_have_a_row_each(monkeypatch, tmp_path):
    asked = tmp_path / "asked.jsonl"
    lines = [{"id": name, "token_ids": [5 + n, 6, 7] * 4, "max_tokens": 6} for n, name in enumerate("abc")]
    asked.write_text("\n".join(map(json.dumps, lines)))
    words = ["--requests", str(asked), "--pool-tokens", "256,512", "--policies", "off", "4", "--rows", "2"]
    monkeypatch.setattr("sys.argv", ["measure_pressure.py", *words, "--speculate", "mtp", "--out", str(tmp_path)])
    assert measure_pressure.main() == 0
    found = json.loads((tmp_path / "pressure_cpu.json").read_text())
    assert [(r["pool"], r["policy"]) for r in found["rows"]] == [(256, "4"), (256, "off"), (512, "4"), (512, "off")]
    assert all(r["tokens"] == 18 and 0 <= r["fragmentation"] < 1 for r in found["rows"])
    assert {r["size_high"] + r["size_low"] > 0 for r in found["rows"] if r["policy"] == "4"} == {True}
    assert {r["size_high"] + r["size_low"] for r in found["rows"] if r["policy"] == "off"} == {0}
    text = (tmp_path / "pressure_cpu.md").read_text()
    assert "3 requests of asked.jsonl, 2 rows, drafts of mtp" in text and "| 512 | off |" in text
