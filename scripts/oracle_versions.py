#!/usr/bin/env python3
"""Run the parity and loading tests against several versions of transformers.

    .venv/bin/python scripts/oracle_versions.py 5.17.0 5.20.2 5.23.0 5.24.0 --into /tmp/transformers

Each version is installed into a folder of its own below --into (and kept there), with those of its requirements that
this environment does not meet; nothing of the environment changes. A line a version says what came of it. Exit code 1
if a version that could be installed fails a test.
"""

import argparse
import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
TESTS = (  # what compares with transformers, or reads what it writes
    "tests/dsv4/test_parity.py",
    "tests/dsv4/test_rope_forms.py",
    "tests/loaders/test_layouts.py",
    "tests/loaders/test_config_files.py",
    "tests/loaders/test_convert.py",
)
BRIEF = "not token_by_token and not any_step_size and not every_split and not rewinding"  # of the first file


def installed(version: str, into: Path) -> Path:
    """The folder with that version, installed if need be. Raises RuntimeError with pip's last line."""
    folder = into / version
    if not (folder / "transformers").is_dir():
        _pip(folder, "--no-deps", f"transformers=={version}")
    for requirement in _unmet(folder, version):
        _pip(folder, "--upgrade", requirement)
    return folder


def _pip(folder: Path, *arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(folder), *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or ["pip failed"])[-1])


def _unmet(folder: Path, version: str) -> list[str]:
    """Requirements of the version that neither its folder nor this environment meets."""
    from packaging.requirements import Requirement

    path = folder / f"transformers-{version}.dist-info" / "METADATA"
    lines = re.findall(r"^Requires-Dist: (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    unmet = []
    for requirement in map(Requirement, lines):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        mine = {d.name: d.version for d in importlib.metadata.distributions(path=[str(folder)])}
        name = requirement.name.replace("-", "_")
        found = mine.get(requirement.name) or mine.get(name) or _version_here(requirement.name)
        if found is None or not requirement.specifier.contains(found, prereleases=True):
            unmet.append(str(requirement))
    return unmet


def _version_here(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def tested(folder: Path, version: str, every: bool) -> tuple[bool, str]:
    """(whether all passed, pytest's summary or what failed first) with that version on the path."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}
    probe = "import transformers; from transformers import DeepseekV4ForCausalLM; print(transformers.__version__)"
    seen = subprocess.run([sys.executable, "-c", probe], env=env, cwd=ROOT, capture_output=True, text=True)
    if seen.returncode:
        return False, "does not have DeepseekV4ForCausalLM: " + seen.stderr.strip().splitlines()[-1]
    if seen.stdout.strip() != version:
        return False, f"Python imports transformers {seen.stdout.strip()} instead"
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-o", "addopts=", "-q", *TESTS]
    done = subprocess.run(
        [*command, *(() if every else ("-k", BRIEF))], env=env, cwd=ROOT, capture_output=True, text=True
    )
    lines = done.stdout.strip().splitlines() or [done.stderr.strip()[-200:]]
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return done.returncode == 0, "; ".join([lines[-1], *failed[:3]])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("versions", nargs="+")
    parser.add_argument("--into", type=Path, required=True, help="folder of the installed versions")
    parser.add_argument("--every", action="store_true", help="every step size, split and rewind too")
    options = parser.parse_args()
    wrong = False
    for version in options.versions:
        try:
            folder = installed(version, options.into.resolve())
        except RuntimeError as error:
            print(f"transformers {version}: cannot be installed ({error})", flush=True)
            continue
        ok, what = tested(folder, version, options.every)
        print(f"transformers {version}: {'ok' if ok else 'FAILED'}: {what}", flush=True)
        wrong |= not ok
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
