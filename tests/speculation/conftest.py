"""A loop of the device on a CPU: the kernel's own source, compiled as C++, decides; a thread is the device."""

import ctypes
import itertools
import shutil
import subprocess
import tempfile
import threading
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from dsv4.speculation import host_loop, one_launch
from dsv4.speculation.one_launch import OneLaunch
from tests.capturing import Refusing

CXX = shutil.which("g++") or shutil.which("clang++")
ON_HOST = """
#define __global__
#define __device__
struct Places { int x; };
static Places threadIdx{0}, blockDim{1};
static void __syncthreads() {}
static void __threadfence_system() {}
extern "C" { unsigned int chosen[3]; }
%s
extern "C" void cudaGraphSetConditional(Handle handle, unsigned int value) { chosen[handle] = value; }
"""


@cache
def on_host(source: str):
    """A kernel as a function of the host, and what it chose: of the loop, of waiting tokens, of the round."""
    with tempfile.TemporaryDirectory() as folder:
        program, library = Path(folder) / "turn.cpp", Path(folder) / "turn.so"
        program.write_text(ON_HOST % source)
        subprocess.run([CXX, "-shared", "-fPIC", "-O1", "-o", library, program], check=True, capture_output=True)
        loaded = ctypes.CDLL(str(library))
    return loaded.turn, (ctypes.c_uint * 3).in_dll(loaded, "chosen")


@pytest.fixture
def on_a_thread(monkeypatch):
    """Loops run on a thread of the host. late: an Event that the thread waits for when it has published a round.
    change: changes what the kernel chose."""
    if CXX is None:
        pytest.skip("no C++ compiler")
    control = SimpleNamespace(late=None, change=lambda chosen: None, threads=[])

    class OnThread:
        def __init__(self, kernel, choices, arguments, device):
            (self.kernel, self.chosen), self.choices = on_host(kernel.source), choices
            self.values = [ctypes.c_longlong(a.data_ptr() if isinstance(a, torch.Tensor) else a) for a in arguments]
            self.held = arguments

        def launch(self):
            control.threads.append(threading.Thread(target=self.repeat))
            control.threads[-1].start()

        def repeat(self):
            for turns in itertools.count():
                self.kernel(*map(ctypes.c_ulonglong, range(3)), *self.values)
                control.change(self.chosen)
                picked = list(self.chosen)
                if turns and control.late is not None:
                    control.late.wait(30)
                for graphs, which in zip(self.choices, picked[1:]):
                    if picked[0] and graphs and which < len(graphs):
                        graphs[which].replay()
                if not picked[0]:
                    return

    monkeypatch.setattr(one_launch, "WhileGraph", OnThread)
    monkeypatch.setattr(host_loop, "captured_graph", _captured)
    monkeypatch.setattr(
        OneLaunch, "_mark", lambda self: SimpleNamespace(query=lambda: not control.threads[-1].is_alive())
    )
    # as if captured, but without streams and pools
    monkeypatch.setattr(OneLaunch, "prepare", _as_captured(OneLaunch.prepare))
    return control


def _captured(run, *how, **more):
    """A graph whose capture is refused where a GPU refuses it; a replay runs the steps again."""
    with Refusing(but="kernels"):
        run()
    return SimpleNamespace(replay=run)


def _as_captured(prepare):
    def prepared(rounds):
        rounds.captures = True
        prepare(rounds)

    return prepared
