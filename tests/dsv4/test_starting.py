"""Imports of a command that runs a model: torch's libraries load beside others, and no garbage is collected."""

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


def test_libraries_load_without_torch_which_then_works():
    program = (
        "import sys; from dsv4.runtime import starting\n"
        "assert {'libc10.so', 'libtorch_cpu.so'} <= set(starting.load_libraries()) and 'torch' not in sys.modules\n"
        "assert 'libtorch_cpu.so' in open('/proc/self/maps').read()\n"
        "import torch; print(torch.ones(2).sum().item())"
    )
    assert said(program) == "2.0"


@pytest.mark.parametrize("where", [None, ["/nonexistent"]])
def test_without_libraries_nothing_is_loaded(monkeypatch, where):
    spec = where and type("Spec", (), {"submodule_search_locations": where})
    monkeypatch.setattr(starting, "find_spec", lambda name: spec)
    assert starting.load_libraries() == []


def test_what_is_imported_meanwhile_needs_neither_torch_nor_a_library():
    program = (
        "import gc, sys; from dsv4.runtime import starting\n"
        "libraries = lambda: {n for n, m in sys.modules.items() if (getattr(m, '__file__', 0) or '').endswith('.so')}\n"
        "starting._import(starting.NATIVE); before = libraries()\n"
        "starting._import(starting.PLAIN)\n"
        "print('torch' in sys.modules, libraries() - before, 'torchgen.model' in sys.modules)"
    )
    assert said(program) == "False set() True"


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
    monkeypatch.setattr(starting, "load_libraries", list)
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
