"""What is audited, as plain data that a process of its own can resolve: a user's file or module, a Solution of
FlashInfer-Trace, an adapter of a public kernel, our own backends, or a plant of the self-test."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from dsv4.kernels.contract import tensors
from dsv4.kernels.contracts import contract_of
from dsv4.kernels.fusions import COMPOSITIONS
from dsv4.kernels.operations import GQA_OPERATIONS, OPERATIONS
from dsv4.probes.kernel_audit.errors import KernelAuditError

OURS = ("ours", "reference", "cpu", "triton", "honest")


@dataclass(frozen=True)
class SubjectSpec:
    """kernel: `file.py:function`, `package.module:function`, a Solution's JSON file, 'ours', a backend's name, 'honest'
    (the contract's honest kernel) or an adapter. plant: index in the list of planted faults, which are made of
    `kernel`. out_arguments: results are passed behind the arguments and written, not returned."""

    operation: str
    kernel: str
    device: str = "cpu"
    out_arguments: bool = False
    convention: str = "dsv4"
    accuracy: str = ""
    plant: str = ""

    @property
    def given(self) -> bool:
        """Whether the user named its function or file, or it is one of ours: not the adapter of a published kernel."""
        return ":" in self.kernel or self.kernel.endswith(".json") or self.kernel in OURS

    @property
    def without_state(self) -> bool:
        """Whether all results are new tensors, those too that the contract writes in place: a Solution has no state."""
        return self.out_arguments or self.kernel.endswith(".json")

    @property
    def title(self) -> str:
        return f"{self.kernel} with {self.plant!r}" if self.plant else self.kernel


def reference_of(operation: str) -> Callable:
    """The definition of an operation or a composition."""
    known = OPERATIONS | GQA_OPERATIONS
    if operation in known:
        return known[operation].implementations["reference"]
    if operation in COMPOSITIONS:
        from dsv4.kernels.dispatch import DispatchLedger, bind

        return partial(COMPOSITIONS[operation].default, bind(OPERATIONS, "reference", DispatchLedger()))
    raise KernelAuditError(f"{operation!r} is neither an operation nor a composition; see: dsv4 kernel list")


def resolve(spec: SubjectSpec) -> Callable:
    """The function to call with the contract's arguments. Runs the user's code: call it in the process of the
    subject."""
    function = _kernel(spec)
    if not spec.plant:
        return function
    from dsv4.probes.kernel_audit.controls import LIBERTIES
    from dsv4.probes.kernel_audit.plants import plants

    return next(p for p in (*plants(), *LIBERTIES) if p.operation == spec.operation and p.name == spec.plant).make(
        function
    )


def _kernel(spec: SubjectSpec) -> Callable:
    if spec.kernel == "honest":
        return partial(_honest, contract_of(spec.operation), spec.accuracy)
    if spec.kernel in OURS:
        return _own(spec)
    if spec.kernel.endswith(".json"):
        from dsv4.probes.kernel_audit.solutions import load_solution

        return load_solution(spec.kernel, spec.device)
    if ":" in spec.kernel:
        from dsv4.kernels.user import load_kernel

        function = load_kernel(spec.kernel)
        if spec.convention == "dsv4":
            return function
        from dsv4.probes.kernel_audit.adapters import adapter

        return adapter(spec.convention, spec.operation).convention(function, spec.device)
    adapters = importlib.import_module("dsv4.probes.kernel_audit.adapters")
    return adapters.adapter(spec.kernel, spec.operation).bind(spec.device)


def _honest(contract, accuracy: str, *arguments):
    """The contract's honest kernel of the class, or of the default of the arguments' dtype."""
    activation = next((t.dtype for t in tensors(arguments) if t.is_floating_point()), torch.float32)
    return contract.classes[accuracy or contract.default(activation)](*arguments)


def _own(spec: SubjectSpec) -> Callable:
    backend = spec.kernel if spec.kernel != "ours" else ("cpu" if spec.device == "cpu" else "triton")
    if spec.operation in OPERATIONS | GQA_OPERATIONS:
        return (OPERATIONS | GQA_OPERATIONS)[spec.operation].resolve(backend)[0]
    fused = COMPOSITIONS[spec.operation].implementations if spec.operation in COMPOSITIONS else {}
    return fused.get(backend) or reference_of(spec.operation)
