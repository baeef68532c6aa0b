"""CUDA graphs that repeat on the device: a WHILE node whose body chooses, each time, which captured graphs run.

A captured graph has no branches. A conditional node (CUDA 12.4; with several bodies 12.8) holds graphs of its own, and
a kernel says which of them runs and whether the loop goes on. torch captures the graphs; cuda-bindings, which torch's
CUDA wheels require, adds the nodes. The kernel is compiled here by NVRTC and linked by nvJitLink with the device's
runtime library, because `cudaGraphSetConditional` lives there: all three come with torch, and nvcc is not needed.
"""

import ctypes
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch

from dsv4.errors import Dsv4Error

DRIVER = 12080  # the first CUDA version of a driver that has nodes with several bodies


class ConditionalError(Dsv4Error):
    """A graph that repeats on the device cannot be built here; the message says what is missing."""


@dataclass(frozen=True)
class Kernel:
    """A kernel of one block that sets conditions. source: CUDA C++, which includes nothing; name: of its `extern "C"`
    function, whose first parameters are the handles of all conditions (unsigned long long each)."""

    source: str
    name: str
    threads: int = 128


def missing(device: torch.device | str) -> str:
    """What keeps graphs from repeating on this device, in words; '' if nothing does."""
    if not str(device).startswith("cuda"):
        return f"the model is on {device}, and a graph that repeats needs a CUDA device"
    try:
        from cuda.bindings import driver, nvjitlink, nvrtc  # noqa: F401
        from cuda.pathfinder import find_static_lib
    except ImportError as error:
        return f"cuda-bindings cannot be imported ({error}); install cuda-bindings"
    version = _done(driver.cuDriverGetVersion())
    if version < DRIVER:
        return f"the driver is of CUDA {version // 1000}.{version % 1000 // 10}; nodes with several bodies need 12.8"
    try:
        find_static_lib("cudadevrt")
    except Exception as error:
        return f"libcudadevrt.a was not found ({type(error).__name__}); install nvidia-cuda-runtime"
    try:
        torch.cuda.CUDAGraph(keep_graph=True)
    except TypeError:
        return f"torch {torch.__version__} does not keep captured graphs; 2.8 does"
    return ""


@cache
def compiled(source: str, capability: tuple[int, int]) -> bytes:
    """The cubin of CUDA C++ source for a device of that capability, linked with the device's runtime. Needs no device.
    Raises ConditionalError with the compiler's words."""
    from cuda.bindings import nvjitlink, nvrtc
    from cuda.pathfinder import find_static_lib

    arch = "sm_{}{}".format(*capability)
    program = _done(nvrtc.nvrtcCreateProgram(source.encode(), b"conditional.cu", 0, None, None))
    options = [f"--gpu-architecture={arch}".encode(), b"--relocatable-device-code=true"]
    code = nvrtc.nvrtcCompileProgram(program, len(options), options)[0]
    if int(code):
        said = b" " * _done(nvrtc.nvrtcGetProgramLogSize(program))
        _done(nvrtc.nvrtcGetProgramLog(program, said))
        raise ConditionalError(f"a kernel that sets conditions did not compile for {arch}: {said.decode().strip()}")
    made = b" " * _done(nvrtc.nvrtcGetCUBINSize(program))
    _done(nvrtc.nvrtcGetCUBIN(program, made))
    _done(nvrtc.nvrtcDestroyProgram(program))
    linker = nvjitlink.create(1, [f"-arch={arch}"])
    try:
        nvjitlink.add_data(linker, nvjitlink.InputType.CUBIN, made, len(made), "conditional")
        nvjitlink.add_file(linker, nvjitlink.InputType.LIBRARY, find_static_lib("cudadevrt"))
        nvjitlink.complete(linker)
        linked = bytearray(nvjitlink.get_linked_cubin_size(linker))
        nvjitlink.get_linked_cubin(linker, linked)
    except nvjitlink.nvJitLinkError as error:
        raise ConditionalError(f"a kernel that sets conditions could not be linked for {arch}: {error}") from error
    finally:
        nvjitlink.destroy(linker)
    return bytes(linked)


class WhileGraph:
    """Runs `kernel` and then, of each of `choices`, the one graph that it chose, until it ends the loop: all in one
    launch.

    choices: lists of graphs that torch captured with keep_graph=True; they run in this order. arguments: what the
    kernel gets after the handles of the loop and of each list: tensors of the device (their addresses) and whole
    numbers (long long). The kernel must set every handle each time: the loop's to 0 or 1, a list's to the number of a
    graph, or to the list's length for none. An empty list has handle 0, which is not to be set. Tensors and graphs are
    held as long as this object lives. Raises ConditionalError if the driver refuses a graph.
    """

    def __init__(
        self,
        kernel: Kernel,
        choices: Sequence[Sequence[torch.cuda.CUDAGraph]],
        arguments: Sequence[torch.Tensor | int],
        device: torch.device,
    ):
        from cuda.bindings import driver

        if reason := missing(device):
            raise ConditionalError(f"no loop on the device: {reason}")

        self._held = [list(graphs) for graphs in choices], list(arguments)
        kinds = driver.CUgraphConditionalNodeType
        with torch.cuda.device(device):
            torch.cuda.synchronize()
            context, parent = _done(driver.cuCtxGetCurrent()), _done(driver.cuGraphCreate(0))
            loop = _handle(parent, context, 1)
            [body] = _conditional(parent, [], context, loop, kinds.CU_GRAPH_COND_TYPE_WHILE, 1)[1]
            handles = [_handle(body, context) if graphs else 0 for graphs in choices]
            module = _module(kernel.source, torch.cuda.get_device_capability(device), int(context))
            last = _kernel_node(body, module, kernel, [int(loop), *map(int, handles), *arguments])
            for handle, graphs in zip(handles, choices):
                if not graphs:
                    continue
                last, bodies = _conditional(body, [last], context, handle, kinds.CU_GRAPH_COND_TYPE_SWITCH, len(graphs))
                for part, graph in zip(bodies, graphs):
                    _done(driver.cuGraphAddChildGraphNode(part, None, 0, driver.CUgraph(graph.raw_cuda_graph())))
            self._run = _done(driver.cuGraphInstantiate(parent, 0))
        # a graph that is still running is freed when it has ended
        self.close = weakref.finalize(self, _freed, self._run, parent)
        self.close.atexit = False  # the driver has gone by then, with all graphs

    def launch(self) -> None:
        """Run the loop on the current stream, behind what was launched before. Does not wait."""
        from cuda.bindings import driver

        _done(driver.cuGraphLaunch(self._run, torch.cuda.current_stream().cuda_stream))


@cache
def _module(source: str, capability: tuple[int, int], context: int):
    """The compiled source as a module of the current context. It stays loaded: loops may run it at any time."""
    from cuda.bindings import driver

    return _done(driver.cuModuleLoadData(compiled(source, capability)))


def _freed(run, graph) -> None:
    from cuda.bindings import driver

    _done(driver.cuGraphExecDestroy(run))
    _done(driver.cuGraphDestroy(graph))


def _handle(graph, context, start: int | None = None):
    """A handle of a node of `graph`. start: its value when the whole graph is launched; None: undefined until a kernel
    sets it."""
    from cuda.bindings import driver

    how = (0, 0) if start is None else (start, driver.CU_GRAPH_COND_ASSIGN_DEFAULT)
    return _done(driver.cuGraphConditionalHandleCreate(graph, context, *how))


def _conditional(graph, after: list, context, handle, kind, bodies: int):
    """Add a conditional node; returns it and the graphs of its bodies, which are empty."""
    from cuda.bindings import driver

    node = driver.CUgraphNodeParams()
    node.type = driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_CONDITIONAL
    node.conditional.handle, node.conditional.type = handle, kind
    node.conditional.size, node.conditional.ctx = bodies, context
    added = _done(driver.cuGraphAddNode(graph, after, None, len(after), node))
    return added, list(node.conditional.phGraph_out)


def _kernel_node(graph, module, kernel: Kernel, arguments: Sequence[torch.Tensor | int]):
    """Add a launch of one block of `kernel`, after nothing."""
    from cuda.bindings import driver

    node = driver.CUDA_KERNEL_NODE_PARAMS()
    node.func = _done(driver.cuModuleGetFunction(module, kernel.name.encode()))
    node.gridDimX = node.gridDimY = node.gridDimZ = node.blockDimY = node.blockDimZ = 1
    node.blockDimX, node.sharedMemBytes = kernel.threads, 0
    values = tuple(a.data_ptr() if isinstance(a, torch.Tensor) else a for a in arguments)
    node.kernelParams = (values, (ctypes.c_longlong,) * len(values))
    return _done(driver.cuGraphAddKernelNode(graph, None, 0, node))


def _done(result: tuple):
    """What a call of cuda-bindings returned, without its code. Raises ConditionalError for a code other than 0."""
    code, *values = result
    if int(code):
        raise ConditionalError(f"no loop on the device: the driver answered {code.name} ({int(code)})")
    return values[0] if len(values) == 1 else values
