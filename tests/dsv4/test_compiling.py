"""Kernels are compiled before they are launched: what is found is what a whole model launches, and caches may move.

Each case runs in a process without Triton's interpreter, in which the other tests run."""

import os
import subprocess
import sys
import threading
from pathlib import Path
from shutil import move

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "demo"
BEGIN = """
import sys
from functools import partial
from dsv4.kernels.launch import GPU
from dsv4.model.dummy import plan_dummy
from dsv4.runtime import compiling, launches
from dsv4.runtime.launches import Work

HOPPER = GPU((9, 0), 132)
def found(work, name="flash", gpu=HOPPER, layers=8, numerics="native"):
    mtp = name == "flash"
    model = plan_dummy(name, layers, numerics, "triton", mtp=mtp)
    model.max_context = None
    return {(launch.kernel.__name__, launch.key) for launch in launches.launches(model, gpu, work)}
"""


def run(*arguments: str, cache: Path) -> subprocess.CompletedProcess:
    given = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    given |= {"PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(cache)}
    return subprocess.run([sys.executable, *arguments], env=given, capture_output=True, text=True, timeout=120)


def said(script: str, cache: Path, *arguments: str) -> str:
    ran = run("-c", BEGIN + script, *arguments, cache=cache)
    assert ran.returncode == 0, ran.stderr[-3000:]
    return ran.stdout.strip()


def test_one_layer_of_each_kind_launches_what_all_do(tmp_path):
    """And drafts, other lengths, another chip and other numerics launch other kernels."""
    script = """
short, drafts = Work(300, 4096), Work(300, 4096, drafts=(3,))
few = found(short), found(drafts), found(short, "llama-8b", layers=4), found(drafts, numerics="qat")
launches.keep_kinds = lambda model, cache: None
assert few == (found(short), found(drafts), found(short, "llama-8b", layers=4), found(drafts, numerics="qat"))
assert few[0] < few[1] and len(few[0]) > 50 and few[1] != few[3]
assert found(short, gpu=GPU((8, 0), 108)) != few[0]
# a prompt whose middle chunks are left out launches what the whole one does
long = found(Work(21 * 4096 + 100, 98304), layers=4)
launches.pieces = lambda prompt, chunk: [(chunk, 0)] * (prompt // chunk) + [(prompt % chunk, 0)]
assert long == found(Work(21 * 4096 + 100, 98304), layers=4)
print("equal")
"""
    assert said(script, tmp_path) == "equal"


def test_ranks_launch_their_exchanges_too(tmp_path):
    script = """
from dsv4.parallel.planned import planned_ranks
def of_ranks(size, by_expert=False):
    ranks = planned_ranks(0, size, by_expert, HOPPER)
    model = plan_dummy("flash", 4, mtp=True, ranks=ranks)
    model.max_context = None
    return {launch.kernel.__name__ for launch in launches.launches(model, HOPPER, Work(3000, 4096, drafts=(1,)))}
alone = {name for name, _ in found(Work(3000, 4096, drafts=(1,)), layers=4)}
for ranks in (of_ranks(2), of_ranks(4, True)):
    print(sorted(ranks - alone), "_statistics_few" in ranks)
"""
    assert said(script, tmp_path).splitlines() == ["['_by_shares', '_exchange'] True"] * 2


COMPILE = """
real = launches.launches
compiling.launches = lambda *given: [one for one in real(*given) if one.kernel.__name__ in ("_rms_norm", "_embed")][:2]
if sys.argv[1:] == ["of triton"]:
    from triton import knobs
    from triton.runtime.cache import FileCacheManager
    knobs.cache.manager_class = FileCacheManager
def plan():
    model = plan_dummy("llama-8b", 1)
    model.max_context = None
    return model
def run(subject):
    begun = compiling.Compiling(plan, subject, Work(20, 64), HOPPER, jobs=2)
    shown = []
    done = begun.wait(lambda *progress: shown.append(progress))
    assert not shown or shown[-1] == (done.kernels, done.kernels), shown
    return begun.needed, done.kernels, done.new, done.failed
first = run("a"), run("a")
compiling.triton_key = None  # another request that launches the same needs no process that compiles
print(*first, run("b"))
"""


def test_a_cache_is_found_again_where_it_was_moved_and_a_request_that_it_has_needs_nothing(tmp_path):
    first, moved = tmp_path / "first", tmp_path / "moved"
    assert said(COMPILE, first) == "(True, 1, 1, 0) (False, 0, 0, 0) (True, 1, 0, 0)"
    move(first, moved)
    for mark in (moved / "dsv4").iterdir():
        mark.unlink()
    assert said(COMPILE, moved) == "(True, 1, 0, 0) (False, 0, 0, 0) (True, 1, 0, 0)"
    for mark in (moved / "dsv4").iterdir():
        mark.unlink()
    assert said(COMPILE, moved, "of triton").startswith("(True, 1, 1, 0)")  # by Triton's own, nothing was there


def test_what_cannot_be_found_is_told_and_left_to_the_launches(tmp_path):
    script = """
def plan():
    raise RuntimeError("no such model")
begun = compiling.Compiling(plan, "x", Work(20, 64), HOPPER)
print(begun.wait())
compiling.launches = lambda *given: sys.exit(3)
print(compiling.Compiling(lambda: None, "y", Work(20, 64), HOPPER).wait())
"""
    assert said(script, tmp_path).splitlines() == [
        "kernels are compiled as they are launched: RuntimeError: no such model",
        "kernels are compiled as they are launched: the process that was to compile them ended early",
    ]
    assert not (tmp_path / "dsv4").exists()


def warm(*arguments: str, cache: Path):
    return run("-m", "dsv4", "warm", *arguments, cache=cache)


@pytest.mark.parametrize(
    "arguments, why",
    [
        ([str(DEMO), "--device", "h1000"], "--device 'h1000' is unknown; expected cuda or cuda:N of this machine"),
        (["--device", "h100"], "a checkpoint directory or --dummy-weights is needed, and not both"),
        ([str(DEMO), "--device", "h100", "--prompt-tokens", "1K", "--max-context", "512"], "a prompt of 1024 tokens"),
        (
            [str(DEMO), "--device", "h100", "--tensor-parallel-size", "3"],
            "error: nothing was compiled: num_attention_heads is 8, which 3 ranks cannot share equally",
        ),
    ],
    ids=["card", "nothing", "context", "ranks"],
)
def test_what_warm_refuses(arguments, why, tmp_path):
    ran = warm(*arguments, cache=tmp_path)
    assert ran.returncode == 2 and ran.stderr.startswith("error: ") and why in ran.stderr and not ran.stdout


def test_triton_hashes_its_files_beside_the_loading_and_before_a_launch(monkeypatch):
    """Seen from the second of two ranks, which compiles nothing."""
    from dsv4.commands import warm
    from dsv4.runtime import compiling

    loaded, hashed = threading.Event(), []
    monkeypatch.setattr(compiling, "triton_key", lambda: loaded.wait(10) and hashed.append("whole"))
    monkeypatch.setattr(warm, "asked", lambda: (1, 2))
    with warm.compiling(None, None, None) as finish:
        assert not hashed
        loaded.set()
        finish()
        assert hashed == ["whole"]
    with warm.compiling(None, None, None, launches=False) as finish:
        finish()
        assert hashed == ["whole"], "who only compiles needs no hash"
