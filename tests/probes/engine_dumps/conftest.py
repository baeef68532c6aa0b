"""A recorded run of a small checkpoint, and importing what a test makes of it."""

import json
import tarfile
from pathlib import Path

import pytest

from dsv4.probes.catalogue.recorded import Recorded
from dsv4.probes.compare import tokens
from dsv4.probes.probe import execute
from dsv4.probes.subject import POINTS
from dsv4.probes.subjects.dump import DumpSubject
from dsv4.probes.subjects.ours import OurSubject
from tests import checkpoints

T = 300
SAMPLES = Path(__file__).parent / "samples.tar.xz"
TOY = dict(num_hidden_layers=2, compress_ratios=[0, 4, 0], hidden_size=16, num_attention_heads=4, head_dim=4)


@pytest.fixture(scope="package")
def live(official):
    """(subject, ids [1, T], its capture in one step)."""
    subject = OurSubject(official)
    ids = tokens(subject, T, 0)
    return subject, ids, subject.run(ids, want=tuple(POINTS))


@pytest.fixture
def imported(run, official, tmp_path):
    """Function: (engine, folder, renaming table as text, further words) → (exit code, what was said, file)."""

    def call(engine, folder, table=None, *words):
        out = tmp_path / "imported.safetensors"
        if table is not None:
            (tmp_path / "names.toml").write_text(table)
            words = (*words, "--rename", tmp_path / "names.toml")
        code, said = run("import", engine, folder, "--config", official, "--out", out, *words)
        return code, said, out

    return call


@pytest.fixture
def refused(imported, tmp_path):
    """Function: as `imported`; the one line that it says. Nothing is written, not even in part."""

    def call(*args):
        (out := tmp_path / "imported.safetensors").unlink(missing_ok=True)
        code, said, out = imported(*args)
        lines = said.strip().splitlines()
        assert code == 2 and len(lines) == 1, said
        assert not out.exists() and not [f for f in out.parent.iterdir() if f.name.startswith(".")]
        return lines[0]

    return call


@pytest.fixture
def judged(official):
    """Function: the checks of `recorded` on a file."""
    return lambda file: execute(Recorded(), DumpSubject(file, official))[0]


@pytest.fixture
def ids_file(live, tmp_path):
    file = tmp_path / "ids.json"
    file.write_text(json.dumps(live[1][0].tolist()))
    return file


@pytest.fixture(scope="package")
def samples(tmp_path_factory):
    """Folder with what the engines' own code wrote, a folder a version, and the config of its toy model."""
    folder = tmp_path_factory.mktemp("samples")
    with tarfile.open(SAMPLES) as archive:
        archive.extractall(folder, filter="data")
    config = checkpoints.SMALL | TOY | dict(hc_mult=2, qk_rope_head_dim=2, num_hash_layers=0)
    (folder / "config.json").write_text(json.dumps(config))
    return folder
