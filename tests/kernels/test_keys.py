"""A kernel has one key in Triton's cache, whatever ran before it in its process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
KEYS = """
import random, sys
from dsv4.kernels import fusions, operations
from triton.runtime.jit import JITCallable
modules = [(name, module) for name, module in sys.modules.items() if name.startswith("dsv4.kernels.")]
found = [f for name, module in modules for f in vars(module).values() if isinstance(f, JITCallable)]
found = [*{f"{f.fn.__module__}.{f.fn.__name__}": f for f in found}.items()]
random.Random(SEED).shuffle(found)
print("\\n".join(sorted(f"{name} {f.cache_key}" for name, f in found)))
"""
UNSETTLED = """
from triton.runtime.jit import JITCallable
of_triton = JITCallable.cache_key
from dsv4.kernels import fusions, operations
from dsv4.kernels.linear import triton, triton_streams
JITCallable.cache_key = of_triton
first, second = (triton._grouped, triton_streams._streamed)[::{}]
first.cache_key, second.cache_key
print(triton_streams._streamed.cache_key)
"""


def said(program: str) -> str:
    """Output of a process that does not interpret, as on a GPU."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True).stdout


# Over 5 s: two new processes import every kernel.
def test_keys_do_not_depend_on_the_order_of_launches():
    one, other = (said(KEYS.replace("SEED", seed)) for seed in "12")
    assert one == other and len(one.splitlines()) > 150


@pytest.mark.sweep  # whether Triton still needs it, not whether it works: two processes
def test_what_this_is_for():
    """Where this fails, Triton has mended it: `dsv4.kernels.keys` can go."""
    assert said(UNSETTLED.format(1)) != said(UNSETTLED.format(-1))


# Over 5 s: a new process imports every probe.
def test_imports_ask_for_no_device():
    """Self-test processes are forked from one that has imported everything; CUDA asked for there is refused to them."""
    asked = "import torch\nfrom torch import cuda\ndef no(*a): raise AssertionError('asked for a device')\n"
    asked += "torch.backends.cuda.is_built = lambda: True\ncuda.is_available = cuda.device_count = cuda.init = no\n"
    out = subprocess.run(
        [
            sys.executable,
            "-c",
            asked + "from dsv4.probes.selftest.run import preloaded\nfrom importlib import import_module\n"
            "for name in preloaded(): import_module(name)\nprint('imported')",
        ],
        capture_output=True,
        text=True,
    )
    assert out.stdout == "imported\n", out.stderr
