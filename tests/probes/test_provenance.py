"""What a report says of where it comes from identifies it, and names no machine."""

import hashlib
import json
import time
from types import SimpleNamespace

import pytest

from dsv4.loaders.load import Inventory
from dsv4.probes.report import json_report
from dsv4.probes.report import provenance as origin
from dsv4.probes.report.document import Report, Section
from dsv4.probes.subject import Subject
from tests.probes.test_report import FULL


def subject_of(path, **more) -> Subject:
    subject = Subject()
    subject.name, subject.can, subject.numerics = "ours", frozenset({"run", "files"}), "fp32"
    for key, value in {"path": path, **more}.items():
        setattr(subject, key, value)
    return subject


def test_provenance_identifies_the_checkpoint_and_validates(official, tmp_path):
    started = time.time() - 2
    command = ["dsv4", "audit", str(official), f"--out={tmp_path}"]
    found = origin.provenance(subject_of(official), command, {"torch": 5}, started)
    assert found["checkpoint"]["name"] == official.name
    assert found["checkpoint"]["layout"] == Inventory.open(official).layout.name
    assert found["command"] == f"dsv4 audit {official.name} --out={tmp_path.name}" and found["seeds"] == {"torch": 5}
    as_module = origin.provenance(subject_of(official), [str(tmp_path / "dsv4" / "__main__.py"), "audit"], {}, started)
    assert as_module["command"] == "python -m dsv4 audit"
    assert found["seconds"] >= 2 and found["versions"]["torch"] and found["numerics"] == "fp32"
    assert str(official.parent) not in json.dumps(found) and str(tmp_path) not in json.dumps(found)
    json_report.valid(json_report.document(Report("r", found, [Section("P", "p", [FULL], 0.0)]), "s"), "it")


def test_the_hashes_see_config_and_header_and_not_the_data(copy_of, official):
    copy = copy_of(official)
    before = origin.checkpoint(copy)
    assert before["config_sha256"] == origin.checkpoint(official)["config_sha256"]
    shard = sorted(copy.glob("*.safetensors"))[0]
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    assert origin.checkpoint(copy)["headers_sha256"] == before["headers_sha256"]
    data[20] ^= 1
    shard.write_bytes(data)
    after = origin.checkpoint(copy)
    assert after["headers_sha256"] != before["headers_sha256"] and after["config_sha256"] == before["config_sha256"]
    assert after["layout"].startswith("unknown: ")  # a broken checkpoint is still identified
    (copy / "config.json").write_text("{}")
    assert origin.checkpoint(copy)["config_sha256"] != before["config_sha256"]


def test_our_model_gives_backend_device_and_what_ran(official):
    rows = [{"operation": name, "implementation": "cpu", "why": "w", "calls": n} for name, n in (("a", 3), ("b", 0))]
    ledger = SimpleNamespace(rows=lambda: rows)
    model = SimpleNamespace(inventory=Inventory.open(official), backend="cpu", device="cpu", dispatch=ledger)
    found = origin.provenance(subject_of(None, model=model), ["x"], {}, time.time())
    assert found["backend"] == "cpu" and found["dispatch"] == rows[:1] and found["checkpoint"]["name"] == official.name
    assert found["device"].startswith("cpu (")


def test_a_subject_without_a_checkpoint_says_so():
    found = origin.provenance(subject_of(None), ["x"], {}, time.time())
    assert (
        found["checkpoint"] is None
        and found["recorded"] is None
        and found["dispatch"] == []
        and found["backend"] is None
    )


def test_a_dump_is_identified_by_its_bytes(official, tmp_path):
    dump = tmp_path / "run.safetensors"
    found = []
    for content in (b"one", b"two"):
        dump.write_bytes(content)
        subject = subject_of(None, file=dump, provenance={"file": str(dump), "config": str(official)})
        found.append(origin.provenance(subject, ["x"], {}, time.time()))
    assert found[0]["recorded"] == {"name": "run.safetensors", "sha256": hashlib.sha256(b"one").hexdigest()}
    assert found[0]["recorded"] != found[1]["recorded"] and found[0]["checkpoint"] == found[1]["checkpoint"]
    assert found[0]["checkpoint"]["name"] == official.name and found[0]["about"]["file"] == "run.safetensors"


def test_the_inventory_of_a_subject_is_its_checkpoint(official):
    found = origin.provenance(subject_of(None, files=Inventory.open(official)), ["x"], {}, time.time())
    assert found["checkpoint"] == origin.checkpoint(official) and found["checkpoint"]["layout"] == "official"


def test_the_commit_may_be_given(monkeypatch):
    monkeypatch.setenv("DSV4_COMMIT", "f00d")
    assert origin.commit() == {"commit": "f00d", "dirty": None}
    monkeypatch.delenv("DSV4_COMMIT")
    monkeypatch.setattr(origin, "ROOT", origin.ROOT / "probes")  # not the top of its repository
    assert origin.commit() == {"commit": None, "dirty": None}


@pytest.mark.parametrize(
    "text,shown",
    [
        ("/data/models/flash", "flash"),
        ("/a b/c d", "c d"),
        ("--out=/tmp/x/y.md", "--out=y.md"),
        ("~/models/pro/", "pro"),
        ("in /data/models/flash: 3 tokens/s", "in flash: 3 tokens/s"),
        ("https://example.org/a/b", "https://example.org/a/b"),
        ("demo/sub", "demo/sub"),
        ("../demo", "../demo"),
        ("file '/x/y.json' is", "file 'y.json' is"),
    ],
)
def test_paths_are_cut_to_their_names(text, shown):
    assert origin.without_paths(text) == shown
    assert origin.without_paths({"k": [text]}) == {"k": [shown]}
