"""audits/: every file says where it comes from, lies in its place, is small, and is in the table."""

import json
import re
import shutil
from collections import Counter

import pytest

from scripts import audits_table, places
from scripts.audits_table import AUDITS, COLUMNS, HISTORY, Unmarked

FILES = audits_table.files()
LARGEST, ALL = 500_000, 6_000_000  # bytes


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.relative_to(AUDITS).as_posix())
def test_every_file_names_its_command_commit_device_and_versions(path):
    found = audits_table.header(path)
    assert re.fullmatch(r"[0-9a-f]{7,40}", found.commit), found
    assert re.search(r"torch \S+", found.versions) and found.device and found.command, found
    assert not re.search(r"(^|[ =])/\w", found.command), f"{found.command} names a path of one machine"


def test_files_lie_in_their_places_and_are_small():
    for path in FILES:
        kind, *subject, folder, name = path.relative_to(AUDITS).parts
        assert len(subject) == 1 or (kind == "kernels" and len(subject) == 2), f"{path}: kernels/<operation>/<kernel>/"
        device = audits_table.header(path).device
        assert folder == ("cpu" if "cpu" in device.lower() else places.device_slug(device)), path
        assert path.stat().st_size <= LARGEST, f"{path} has {path.stat().st_size} bytes"
    assert sum(f.stat().st_size for f in AUDITS.rglob("*") if f.is_file()) <= ALL


def test_every_file_has_one_entry_and_every_entry_a_file():
    entries = audits_table.index()
    owners = {path: audits_table.entry_of(path, entries) for path in FILES}
    assert [path for path, owner in owners.items() if owner is None] == []
    assert set(Counter(owners.values())) == set(entries)


def test_every_picture_and_file_that_a_report_links_is_there():
    for path in AUDITS.rglob("*.md"):
        for target in re.findall(r"\]\(([^)#]+)", path.read_text()):
            assert target.startswith("http") or (path.parent / target).exists(), f"{path}: {target}"


def test_the_table_is_what_the_script_writes():
    """All of it but the columns that need history, which a shallow clone has not."""
    standing, found = audits_table.standing(), audits_table.rows(audits_table.standing())
    assert {key: row[:-HISTORY] for key, row in standing.items()} == {key: row[:-HISTORY] for key, row in found.items()}
    for key, row in standing.items():
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", row[-2]) and re.fullmatch(r"no|\d+ commits?, \S+", row[-1]), (key, row)
    assert (AUDITS / "README.md").read_text() == audits_table.table(standing)


def test_without_history_the_table_stays_as_it_is(monkeypatch):
    monkeypatch.setattr(audits_table, "git", lambda *given: None)
    assert audits_table.table(audits_table.rows(audits_table.standing())) == (AUDITS / "README.md").read_text()


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """audits/ with one report of its own, whose provenance is in its JSON only."""
    monkeypatch.setattr(audits_table, "AUDITS", tmp_path)
    report = tmp_path / "recall" / "demo" / "cpu" / "recall.json"
    report.parent.mkdir(parents=True)
    shutil.copy(AUDITS / "recall" / "demo" / "cpu" / "recall.json", report)
    report.with_suffix(".md").write_text("# Recall\n\nfigures\n")
    entry = {"recall/demo/cpu/recall": {"shows": "recall", "measures": ["kernels"]}}
    (tmp_path / "index.json").write_text(json.dumps(entry))
    (tmp_path / "README.md").write_text("")
    return tmp_path


def test_a_report_gets_the_header_of_its_json(folder):
    assert audits_table.main([]) == 0
    report = folder / "recall" / "demo" / "cpu" / "recall.md"
    said = audits_table.header(report.with_suffix(".json"))
    found = audits_table.header(report)
    assert (found.command, found.commit) == (said.command, said.commit[:7])
    assert report.read_text().endswith("\nfigures\n")
    before = report.read_text()
    assert audits_table.main([]) == 0 and report.read_text() == before
    assert len(audits_table.standing()["recall/demo/cpu/recall"]) == len(COLUMNS)


def test_without_a_json_the_report_is_the_header_of_its_pictures(folder):
    report = folder / "recall" / "demo" / "cpu" / "recall.json"
    assert audits_table.main([]) == 0
    with_json, page = audits_table.header(report), report.with_suffix(".md")
    picture = report.with_name("recall-by-layer.svg")
    picture.write_text("<svg/>")
    report.unlink()
    page.write_text(page.read_text() + "\n| seconds | 12.5 |\n")
    found = audits_table.header(picture)
    assert (found.command, found.device, found.date) == (with_json.command, with_json.device, with_json.date)
    assert found.seconds == 12.5 and audits_table.header(page) == found
    page.unlink()
    with pytest.raises(Unmarked, match="no JSON or report beside it"):
        audits_table.header(picture)


def test_seconds_are_summed_by_device(folder):
    """Of the header, or of the parts of a run; a row that records none is counted apart."""
    report = folder / "recall" / "demo" / "cpu" / "recall.json"
    document = json.loads(report.read_text())
    places = {"a": 90, "b": {"one": 20.25, "two": 10}, "c": None}
    for name, seconds in places.items():
        document["provenance"] |= {"seconds": seconds, "device": "NVIDIA H100 80GB HBM3"}
        document["provenance"] = {k: v for k, v in document["provenance"].items() if (k, v) != ("seconds", None)}
        document.pop("seconds", None)
        (report.parent / f"{name}.json").write_text(json.dumps(document))
    entries = json.loads((folder / "index.json").read_text())
    entry = next(iter(entries.values()))
    (folder / "index.json").write_text(json.dumps(entries | {f"recall/demo/cpu/{name}": entry for name in places}))
    assert audits_table.main([]) == 0
    text = (folder / "README.md").read_text()
    assert "Recorded in all: CPU 1,391 s in 1 of 1 rows; NVIDIA H100 80GB HBM3 120 s in 2 of 3 rows." in text
    assert [row[COLUMNS.index("seconds")] for row in audits_table.standing().values()] == ["90", "30", "–", "1,391"]


@pytest.mark.parametrize("missing", ["command", "commit", "device", "versions"])
def test_a_file_without_a_header_is_an_error(folder, missing, capsys):
    report = folder / "recall" / "demo" / "cpu" / "recall.json"
    document = json.loads(report.read_text())
    document["provenance"].pop(missing)
    report.write_text(json.dumps(document))
    with pytest.raises(Unmarked, match="recall.json"):
        audits_table.header(report)
    assert audits_table.main([]) == 2 and "recall.json" in capsys.readouterr().err


def test_places_follow_kind_subject_and_device(tmp_path):
    found = places.folder(None, "kernels", "Flash", "NVIDIA H100 80GB HBM3")
    assert found.as_posix() == "audits/kernels/flash/h100"
    assert places.folder(tmp_path, "kernels", "flash", "cpu") == tmp_path
