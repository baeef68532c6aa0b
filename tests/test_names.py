"""Every name that code reads is defined: where only a GPU runs it, no other test would say so."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def undefined(text: str, name: str = "a file") -> list[str]:
    from pyflakes.checker import Checker  # a machine with a GPU collects this file too, to select tests of it, and may lack pyflakes
    from pyflakes.messages import UndefinedExport, UndefinedLocal, UndefinedName
    return [str(m) for m in Checker(ast.parse(text, name), name).messages if isinstance(m, (UndefinedName, UndefinedLocal, UndefinedExport))]


@pytest.mark.parametrize("folder", ("dsv4", "kernels", "loaders", "probes", "scripts", "tests"))
def test_every_name_is_defined(folder):
    files = sorted((ROOT / folder).rglob("*.py"))
    found = [line for file in files for line in undefined(file.read_text(), str(file.relative_to(ROOT)))]
    assert files and not found, "\n".join(found)


def test_a_name_whose_import_is_gone_is_found():
    assert undefined("from a import b\ndef f():\n    return b(c)\n") == ["a file:3:14: undefined name 'c'"]
