"""What a killed conversion leaves is named, resumed or discarded; what is asked to end leaves nothing."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dsv4.loaders import partial
from dsv4.loaders.convert import convert
from dsv4.loaders.errors import WriteError
from dsv4.loaders.stopping import Stopped, stopped_by_signals
from dsv4.model.config import ModelConfig
from tests import checkpoints

CONFIG = ModelConfig.from_official(checkpoints.SMALL)
SHARD = 200_000
# A conversion that stops itself by a signal as soon as `shards` shards are recorded and the next one is begun.
CHILD = """
import os, sys
from pathlib import Path
from dsv4.loaders import partial, write
source, out, shards, number = sys.argv[1:]
real, record = write._bytes, Path(out).parent / ".out.partial" / partial.RECORD
def stop(name, value, dtype, shape):
    if record.exists() and len(partial.json.loads(record.read_text())["shards"]) == int(shards):
        os.kill(os.getpid(), int(number))
    return real(name, value, dtype, shape)
write._bytes = stop
sys.argv = ["dsv4", "convert", source, out, "--to", "nvfp4", "--max-shard", "200000"]
from dsv4.commands.cli import main
main()
"""


def stopped(official: Path, out: Path, number: int, shards: int = 2) -> subprocess.CompletedProcess:
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", CHILD, str(official), str(out), str(shards), str(int(number))]
    return subprocess.run(
        command, cwd=root, env=os.environ | {"PYTHONPATH": str(root)}, capture_output=True, text=True, timeout=300
    )


@pytest.fixture(scope="module")
def killed(official, tmp_path_factory) -> Path:
    """A directory in which a conversion to `out` was killed after two shards."""
    folder = tmp_path_factory.mktemp("killed")
    assert stopped(official, folder / "out", signal.SIGKILL).returncode == -signal.SIGKILL
    assert [p.name for p in folder.iterdir()] == [".out.partial"]
    return folder


@pytest.fixture
def left(killed, copy_of) -> Path:
    """A private copy of that directory."""
    return copy_of(killed)


def contents(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.iterdir()}


def test_a_process_that_is_asked_to_end_leaves_nothing(official, tmp_path):
    done = stopped(official, tmp_path / "out", signal.SIGTERM)
    assert list(tmp_path.iterdir()) == [] and "Traceback" not in done.stderr
    assert done.returncode == 128 + signal.SIGTERM


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT, signal.SIGTERM])
def test_each_signal_raises_once_and_its_handler_comes_back(number, request):
    # whoever started the tests may ignore it, as a shell does for what it puts into the background
    before = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
    found = signal.signal(number, before)
    request.addfinalizer(lambda: signal.signal(number, found))
    with pytest.raises((Stopped, KeyboardInterrupt)) as caught, stopped_by_signals():
        try:
            os.kill(os.getpid(), number)
        finally:
            os.kill(os.getpid(), number)  # while the first is being cleaned up after
    assert signal.getsignal(number) is before
    assert number == signal.SIGINT or caught.value.code == 128 + number


def test_what_a_kill_left_is_named_with_its_size_and_both_ways_out(official, left, command_line):
    before = contents(left / ".out.partial")
    code, _, err = command_line("convert", official, left / "out", "--to", "nvfp4", "--max-shard", SHARD)
    size = sum(len(data) for data in before.values())
    assert code == 2 and err.count("\n") == 1 and f"holds {size} bytes" in err
    assert "--resume" in err and "--discard-partial" in err
    assert contents(left / ".out.partial") == before


def test_a_resumed_conversion_equals_one_that_was_never_killed(official, left, tmp_path, command_line):
    reads = contents(left / ".out.partial")
    code, out, _ = command_line(
        "convert", official, left / "out", "--to", "nvfp4", "--max-shard", SHARD, "--resume", "--json"
    )
    assert code == 0 and [p.name for p in left.iterdir()] == ["out"]
    summary = convert(official, tmp_path / "whole", "nvfp4", CONFIG, max_shard_bytes=SHARD)
    assert contents(left / "out") == contents(tmp_path / "whole")
    assert json.loads(out)["actions"] == dict(summary.actions)  # what the killed run converted counts too
    assert sum(name.endswith(".safetensors") for name in reads) == 3  # two complete, one begun


def test_shards_that_are_complete_are_not_converted_again(official, left, monkeypatch):
    from dsv4.loaders import converter

    seen, real = [], converter.Converter.value
    monkeypatch.setattr(converter.Converter, "value", lambda self, name: seen.append(name) or real(self, name))
    convert(official, left / "out", "nvfp4", CONFIG, max_shard_bytes=SHARD, leftover="resume")
    kept = json.loads((left / "out" / "model.safetensors.index.json").read_text())["weight_map"]
    assert seen and not {kept[name][:11] for name in seen} & {"model-00001", "model-00002"}


def test_a_shard_that_was_damaged_is_written_anew(official, left, tmp_path):
    first = next((left / ".out.partial").glob("model-00001-*"))
    data = bytearray(first.read_bytes())
    data[-1] ^= 1
    first.write_bytes(data)
    convert(official, left / "out", "nvfp4", CONFIG, max_shard_bytes=SHARD, leftover="resume")
    convert(official, tmp_path / "whole", "nvfp4", CONFIG, max_shard_bytes=SHARD)
    assert contents(left / "out") == contents(tmp_path / "whole")


@pytest.mark.parametrize("to,shard", [("official", SHARD), ("nvfp4", 2 * SHARD)])
def test_another_conversion_does_not_take_the_shards_over(official, left, to, shard):
    before = contents(left / ".out.partial")
    with pytest.raises(WriteError, match="is of another conversion"):
        convert(official, left / "out", to, CONFIG, max_shard_bytes=shard, leftover="resume")
    assert contents(left / ".out.partial") == before


def test_a_damaged_record_is_not_trusted(official, left):
    (left / ".out.partial" / partial.RECORD).write_text("{")
    with pytest.raises(WriteError, match="damaged.*--discard-partial"):
        convert(official, left / "out", "nvfp4", CONFIG, max_shard_bytes=SHARD, leftover="resume")


def test_discarding_starts_anew(official, left):
    convert(official, left / "out", "bf16", CONFIG, leftover="discard")
    assert [p.name for p in left.iterdir()] == ["out"]


def test_leftovers_of_earlier_versions_are_recognised_too(official, tmp_path):
    (tmp_path / ".out.partial-k3_x9abc").mkdir()
    (tmp_path / ".out.partial-k3_x9abc" / "model.safetensors").write_bytes(b"x" * 77)
    with pytest.raises(WriteError, match="holds 77 bytes"):
        convert(official, tmp_path / "out", "bf16", CONFIG)
    convert(official, tmp_path / "out", "bf16", CONFIG, leftover="discard")
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_nothing_to_resume_is_said(official, tmp_path):
    with pytest.raises(WriteError, match="--resume was given, and no killed run"):
        convert(official, tmp_path / "out", "bf16", CONFIG, leftover="resume")


def test_a_directory_that_is_being_written_is_no_leftover(official, tmp_path):
    def another(done, total):
        with pytest.raises(WriteError, match="another process is writing"):
            convert(official, tmp_path / "out", "bf16", CONFIG, leftover="discard")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(official, tmp_path / "out", "bf16", CONFIG, progress=another)


@pytest.mark.parametrize(
    "place,message",
    [("there", "exists already"), ("no/such/place", "does not exist"), ("x" * 300, "File name too long")],
)
def test_the_place_is_tried_before_the_source_is_opened(tmp_path, place, message):
    (tmp_path / "there").mkdir()
    with pytest.raises(WriteError, match=message):
        convert(tmp_path / "no checkpoint", tmp_path / place, "bf16", CONFIG)


def test_a_disk_that_is_too_small_is_refused_before_the_work(official, tmp_path, monkeypatch):
    usage = partial.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(partial.shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(WriteError, match="more bytes, 1000 are free"):
        convert(official, tmp_path / "out", "bf16", CONFIG)
    assert list(tmp_path.iterdir()) == []
