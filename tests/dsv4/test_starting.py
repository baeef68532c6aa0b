"""Imports of a command that runs a model: no garbage is collected meanwhile."""

import gc
import subprocess
import sys

import pytest

from dsv4.runtime import driver, starting


def said(program: str) -> str:
    """Output of a new process."""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_garbage_is_collected_after_the_imports_and_not_among_them():
    program = (
        "import gc; from dsv4.runtime.starting import importing\n"
        "with importing() as took:\n"
        "    import sys; assert not gc.isenabled() and 'torch' in sys.modules\n"
        "print(gc.isenabled(), gc.get_freeze_count() > 10_000, 0 < took.torch < took.all)"
    )
    assert said(program) == "True True True"


def test_imports_that_fail_leave_the_collector_on(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.setattr(starting, "import_module", lambda name: None)
    monkeypatch.setattr(gc, "freeze", lambda: pytest.fail("frozen"))
    with pytest.raises(ImportError), starting.importing("cpu"):
        assert not gc.isenabled()
        raise ImportError
    assert gc.isenabled()


def test_where_torch_is_imported_only_the_driver_starts(monkeypatch):
    begun = []
    monkeypatch.setattr(gc, "freeze", lambda: pytest.fail("frozen"))
    monkeypatch.setattr(driver, "start", begun.append)
    with starting.importing("cuda:1"):
        assert gc.isenabled()
    assert begun == ["cuda:1"]
