"""Old names of modules give the same objects as the new ones."""

import importlib
import subprocess
import sys

import pytest

from dsv4.moved import MOVED, new_name


@pytest.mark.parametrize(
    "old", [*MOVED, "dsv4.gqa.cache", "dsv4.host_tier.entries", "dsv4.probes.recall.text", "dsv4.probes.rope"]
)
def test_an_old_name_is_the_same_module(old):
    new = new_name(old)
    with pytest.warns(DeprecationWarning, match=f"{old} is {new} now"):
        found = importlib.import_module(old)
    assert found is importlib.import_module(new) and found.__spec__.name == found.__name__ == new


PACKAGES = [
    ("dsv4.model", "Model", "dsv4.model.deepseek_v4"),
    ("dsv4.cache", "Cache", "dsv4.cache.cache"),
    ("dsv4.cache", "LayerCache", "dsv4.cache.layer"),
    ("dsv4.cache", "CompressorCache", "dsv4.cache.layer"),
    ("dsv4.cache", "Ring", "dsv4.cache.rows"),
    ("dsv4.probes.report", "write_files", "dsv4.probes.report.files"),
]


def test_packages_with_the_names_of_modules_have_their_names():
    """Each as the first import of this project in a process: modules of the one before are forgotten."""
    code = f"""
import sys
from importlib import import_module

for package, name, home in {PACKAGES}:
    for module in [m for m in sys.modules if m.split(".")[0] == "dsv4"]:
        del sys.modules[module]
    assert getattr(import_module(package), name) is getattr(import_module(home), name), (package, name)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    "module,name",
    [
        *(("dsv4.memory", name) for name in ("parse_count", "count_named", "format_bytes", "UNITS")),
        ("dsv4.graph", "capacity"),
        *(("dsv4.load", name) for name in ("pieces_of", "plan_model")),
        *(("dsv4.speculation.policy", name) for name in ("LARGEST", "PRESSURE_PERCENT", "under_pressure")),
        ("dsv4.speculation.resident", "generate_resident"),
        *(("dsv4.speculation.loop", name) for name in ("generate_speculative", "check_can_speculate")),
        ("dsv4.engine.work", "Work"),
        *(("dsv4.engine.requests", name) for name in ("Request", "Result", "percentiles")),
        *(("dsv4.engine.generate", name) for name in ("Sampling", "sample", "weights", "distribution", "HOTTEST")),
        *(("dsv4.engine.generate", name) for name in ("Generation", "check_ids", "context_full", "context_needed")),
        *(("dsv4.probes.measure.recall.needles", name) for name in ("Asked", "Limits", "reach", "replies_by")),
        *(("dsv4.probes.measure.recall.plots", name) for name in ("MISSING", "available", "legend", "svg")),
        ("dsv4.probes.measure.fidelity.document", "ModelSubject"),
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_name_that_left_its_module_is_still_there(module, name):
    assert hasattr(importlib.import_module(module), name)


def test_what_never_was_is_not_found():
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("dsv4.gqa.nothing")
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("dsv4.never")


def test_a_probe_runs_by_its_old_name():
    done = subprocess.run([sys.executable, "-m", "dsv4.probes.rope", "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and "dsv4.probes.catalogue.rope" in done.stdout
