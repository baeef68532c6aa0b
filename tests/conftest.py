"""Shared fixtures. Models are loaded once a session and not changed by tests."""

import gc
import os
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

os.environ.setdefault("OMP_NUM_THREADS", "1")  # of the processes that tests start, for the reason of `one_thread`
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is defined, so before anything that imports one

from dsv4 import load_model
from tests import checkpoints, oracle
from tests.commands import exit_code
from tests.sweep import mark_sweeps

if os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton"):
    from tests.interpreter import lighten

    lighten()

ROOT = Path(__file__).resolve().parents[1]  # of the checkout
GOLDEN = Path(__file__).parent / "golden" / "tiny_fp32"
TOLERANCE = 2e-4  # of fp32 logits of size 10, between implementations that order their sums differently


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers():
    """Processes of `-n auto`: the processors that this container may use, each of which takes 1 to 2 GB."""
    from dsv4.probes.machine import usable_processors

    return min(8, usable_processors())


@pytest.hookimpl(tryfirst=True)  # before `-m` looks at marks
def pytest_collection_modifyitems(items):
    mark_sweeps(items)
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def pytest_collection_finish():
    """What was made until here stays: the garbage collector need not go through it again and again, nor through what
    is made now after every 700 objects."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000)


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """Tensors are small: threads would wait for each other, and `make test` has a process a processor."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def golden_path() -> Path:
    return GOLDEN


@pytest.fixture(scope="session")
def brief_golden(tmp_path_factory) -> Path:
    """The golden checkpoint with a layer of each kind and its MTP block, for tests of what is built on a model: half
    the operations a token."""
    return checkpoints.write_first_layers(tmp_path_factory.mktemp("golden") / "brief", GOLDEN, 3, hc_sinkhorn_iters=4)


@pytest.fixture(scope="session", params=list(oracle.CONFIGS))
def pair(request, tmp_path_factory):
    """(our model, transformers' model, ids [1, 310], its logits) of one randomised config."""
    config = oracle.CONFIGS[request.param]
    theirs = oracle.randomised(config)
    folder = oracle.save_in_memory_names(theirs, config, tmp_path_factory.mktemp("oracle"))
    ids = torch.randint(0, config["vocab_size"], (1, 310), generator=torch.Generator().manual_seed(1))
    return load_model(folder, numerics="fp32"), theirs, ids, oracle.logits(theirs, ids)


@pytest.fixture(scope="session")
def official(tmp_path_factory) -> Path:
    """A small official checkpoint: FP8, MXFP4 experts, sharded, with MTP."""
    return checkpoints.write_official(tmp_path_factory.mktemp("checkpoint") / "official")


@pytest.fixture(scope="session")
def brief_official(tmp_path_factory) -> Path:
    """That with a layer of each kind: half the operations a token."""
    return checkpoints.write_official(tmp_path_factory.mktemp("checkpoint") / "brief", checkpoints.BRIEF)


@pytest.fixture
def command_line(capsys):
    """Function: run `dsv4 …` in this process → (exit code, stdout, stderr)."""

    return lambda *words: (exit_code(*words), *capsys.readouterr())


@pytest.fixture
def copy_of(tmp_path):
    """Function: a private copy of a checkpoint directory, to be damaged."""
    import shutil

    def copy(path: Path) -> Path:
        return Path(shutil.copytree(path, tmp_path / "copy"))

    return copy
