"""The wheel: everything that the code reads is in it, and it runs from a folder outside of the repository."""

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = {"dsv4": "dsv4", "kernels": "dsv4/kernels", "loaders": "dsv4/loaders", "probes": "dsv4/probes"}
STUB = b"stand-in for weights"


def build(into: Path, weights: bool) -> Path:
    """The wheel of a copy of the checkout, which building would litter. weights: those of the demo, or stand-ins."""
    tree = into / "tree"
    leave = shutil.ignore_patterns("__pycache__", *(() if weights else ("*.safetensors",)))
    for name in (*FOLDERS, "demo"):
        shutil.copytree(ROOT / name, tree / name, ignore=leave)
    for path in () if weights else (ROOT / "demo").glob("*.safetensors"):
        (tree / "demo" / path.name).write_bytes(STUB)
    for name in ("LICENSE", "README.md", "pyproject.toml", "setup.py"):
        shutil.copy(ROOT / name, tree)
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", into, tree)
    (wheel,) = into.glob("*.whl")
    return wheel


def pip(*arguments) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PIP_NO_INDEX": "1"})
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def names(tmp_path_factory) -> set[str]:
    with zipfile.ZipFile(build(tmp_path_factory.mktemp("wheel"), weights=False)) as wheel:
        return set(wheel.namelist())


def files(pattern: str) -> list[tuple[Path, str]]:
    """(file of the checkout, its name in the wheel) of the four folders."""
    return [
        (path, f"{inside}/{path.relative_to(ROOT / folder).as_posix()}")
        for folder, inside in FOLDERS.items()
        for path in (ROOT / folder).rglob(pattern)
    ]


def test_every_module_and_every_json_is_in_the_wheel(names):
    wanted = {name for pattern in ("*.py", "*.json") for _, name in files(pattern)}
    assert wanted <= names, sorted(wanted - names)
    assert "dsv4/py.typed" in names and len(wanted) > 300


def test_the_page_of_every_probe_is_in_the_wheel(names):
    pages = {name for path, name in files("*.md") if name.startswith("dsv4/probes/")}
    assert pages <= names and len(pages) > 25


def test_the_demo_checkpoint_is_in_the_wheel(names):
    wanted = {f"dsv4/demo_checkpoint/{path.name}" for path in (ROOT / "demo").iterdir()}
    assert wanted <= names and any(name.endswith(".safetensors") for name in wanted)


def test_the_wheel_has_nothing_at_its_top_but_dsv4_and_its_licence(names):
    tops = {name.split("/")[0] for name in names}
    metadata = next(top for top in tops if top.endswith(".dist-info"))
    assert tops == {"dsv4", metadata}
    assert f"{metadata}/licenses/LICENSE" in names


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Function: run a command where the wheel is installed beside a distribution called `kernels`, outside of the
    checkout."""
    folder = tmp_path_factory.mktemp("installed")
    site, other = folder / "site", folder / "other"
    (other / "kernels").mkdir(parents=True)
    (other / "kernels" / "__init__.py").write_text("name = 'stand-in'\n")
    (other / "pyproject.toml").write_text("[project]\nname = 'kernels'\nversion = '1.0'\n")
    (folder / "wheels").mkdir()
    (folder / "elsewhere").mkdir()
    install = ("install", "--no-deps", "--no-build-isolation", "--target", site)
    pip(*install, other)
    pip(*install, build(folder / "wheels", weights=True))
    shared = sysconfig.get_path("purelib")
    # in isolated mode neither the working directory nor PYTHONPATH is looked at; then the wheel, then what it needs
    start = f"import sys; sys.path[:0] = [{str(site)!r}]; sys.path.append({shared!r})\n"

    def run(code: str, *arguments: str) -> subprocess.CompletedProcess:
        command = [sys.executable, "-I", "-c", start + code, *arguments]
        return subprocess.run(command, capture_output=True, text=True, cwd=folder / "elsewhere", timeout=600)

    return run


MAIN = "import sys; from dsv4.commands.cli import main; sys.argv[0] = 'dsv4'; sys.exit(main())"


@pytest.mark.sweep
def test_the_wheel_runs_outside_of_the_repository(installed):
    found = installed("import dsv4, dsv4.probes, dsv4.kernels; print(dsv4.__file__, dsv4.probes.__file__)")
    assert found.returncode == 0 and str(ROOT) not in found.stdout, found
    version = installed(MAIN, "--version")
    assert (version.returncode, version.stdout.strip()) == (0, "dsv4 0.2.0"), version
    where = installed(MAIN, "demo", "--where")
    checkpoint = Path(where.stdout.strip())
    assert checkpoint.name == "demo_checkpoint" and (checkpoint / "config.json").is_file(), where
    said = installed(MAIN, "demo", "--max-new-tokens", "4")
    assert said.returncode == 0 and "Paris" in said.stdout, said
    inspected = installed(MAIN, "inspect", str(checkpoint))
    assert inspected.returncode == 0, inspected


@pytest.mark.sweep
def test_a_distribution_called_kernels_stays_what_it_is(installed):
    found = installed("import kernels, dsv4.kernels; print(kernels.name, dsv4.kernels.__name__)")
    assert found.stdout.split() == ["stand-in", "dsv4.kernels"], found
