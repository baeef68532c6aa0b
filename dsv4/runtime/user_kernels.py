"""Kernels of users within a model: what the command line says of them, and the proof by the dispatch ledger that they
ran."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dsv4.errors import InputError, KernelNotReached
from dsv4.kernels.fusions import COMPOSITIONS
from dsv4.kernels.replacing import Replacement
from dsv4.kernels.user import parse_binding
from dsv4.model.causal import CausalLM

LONGER = "only where a query sees more entries than it selects: take a longer text"
SIMULATED = "only in the simulated numerics qat and qat:fp32"
SEARCHED = "only where decoding reads by a policy: --attention"
WHEN = {  # operation → when a model calls it, where that is not always
    "index_scores": LONGER,
    "topk_entries": LONGER,
    "simulate_fp8_blocks": SIMULATED,
    "simulate_fp4_blocks": SIMULATED,
    "hadamard": SIMULATED,
    "write_rows": "only with packed caches: --cache fp8, or a packed --index-cache",
    "hca_attention": "only in HCA layers",
    "sparse_attention": "only in window and CSA layers",
    "gated_pool": "only where a compressor's window is complete: take a longer text",
    "route_hashed": "only in the layers that route by token id",
    "route_scored": "only in the layers that route by score",
    "choose_blocks": SEARCHED,
    "gather_attention": SEARCHED,
    "summarise_blocks": "only where decoding searches blocks: --attention page-bound, block-bound or block-mean",
    "chunked_prefill": "only where prompts are read in chunks: --prefill-chunks",
    "fetch": "only with --kv-memory host, once decoding fetches what it reads",
    "write_back": "only with --kv-memory host, once decoding writes behind a prompt",
}
# products that these operations make by themselves
BESIDE = {"linear": ("experts", "shared_expert", "grouped_linear")}


def kernels_named(bindings: Sequence[str] | None) -> dict[str, Replacement]:
    """`--kernel OPERATION=SPEC` as given, loaded: operation → Replacement. Raises KernelNotLoaded, and InputError for
    an operation that is named twice."""
    found: dict[str, Replacement] = {}
    for text in bindings or ():
        operation, spec = parse_binding(text)
        if operation in found:
            raise InputError(f"--kernel names {operation} twice; expected one kernel for an operation")
        found[operation] = Replacement.of(spec.text)
    return found


@dataclass(frozen=True)
class Account:
    """What the ledger says of one replaced operation: calls through the kernel, and through anything else. unfused:
    compositions that would have computed it in a kernel of their own and were taken apart; dropped: optional arguments
    that the kernel does not take; idle: whether the model ran no operation at all."""

    operation: str
    kernel: str
    sha256: str | None
    calls: int
    other_calls: int
    unfused: tuple[str, ...]
    dropped: tuple[str, ...]
    idle: bool

    def document(self) -> dict:
        """As JSON values."""
        return {
            "kernel": self.kernel,
            "sha256": self.sha256,
            "calls": self.calls,
            "other_calls": self.other_calls,
            "unfused": list(self.unfused),
            "dropped": list(self.dropped),
        }

    @property
    def missing(self) -> str:
        """Why it is not shown that the model ran through the kernel alone; '' if it is."""
        if self.other_calls:
            return (
                f"{self.operation} ran {self.other_calls} times through something else than kernel {self.kernel}; this "
                "is a bug of dsv4"
            )
        if self.calls:
            return ""
        if self.idle:
            return f"kernel {self.kernel} of {self.operation} never ran in the model, which ran no step here"
        when = WHEN.get(self.operation, "in none of the layers that ran")
        return f"kernel {self.kernel} never ran: the model calls {self.operation} {when}"


def accounts(model: CausalLM) -> list[Account]:
    """Of every operation that a user's kernel stands for, in the order that they were given."""
    rows, found = model.dispatch.rows(), []
    idle = not any(row["calls"] for row in rows)
    for name, kernel in model.op.replaced.items():
        holds = lambda composition: composition in COMPOSITIONS and name in COMPOSITIONS[composition].parts
        mine = [r for r in rows if (r["operation"], r["implementation"]) == (name, kernel.shown)]
        others = [r for r in rows if (r["operation"] == name or holds(r["operation"])) and r not in mine]
        calls, other = (sum(r["calls"] for r in group) for group in (mine, others))
        unfused = tuple(c for c in model.op.unfused if holds(c))
        found.append(Account(name, kernel.shown, kernel.given.sha256, calls, other, unfused, kernel.dropped, idle))
    return found


def documents(model: CausalLM) -> dict[str, dict]:
    """`accounts` as JSON values, by operation."""
    return {account.operation: account.document() for account in accounts(model)}


def before(model: CausalLM) -> list[str]:
    """What a reader has to know before a run, a line for each kernel."""
    return [
        f"kernel: {a.operation} runs {a.kernel}"
        + (f"; taken apart for it: {', '.join(a.unfused)}" if a.unfused else "")
        + (f"; without the arguments {', '.join(a.dropped)}" if a.dropped else "")
        + (f"; {', '.join(BESIDE[a.operation])} multiply by themselves" if a.operation in BESIDE else "")
        + ("; steps are not captured" if model.backend == "triton" and model.device.type == "cuda" else "")
        for a in accounts(model)
    ]


def after(model: CausalLM) -> list[str]:
    """What the ledger says after a run, a line for each kernel that ran, and through which alone its operation did."""
    return [
        f"kernel: {a.operation} ran {a.calls:,} times through {a.kernel}, and through nothing else"
        for a in accounts(model)
        if not a.missing
    ]


def check_reached(model: CausalLM) -> None:
    """Raises KernelNotReached for kernels through which the model did not run."""
    missing = [account.missing for account in accounts(model) if account.missing]
    if missing:
        raise KernelNotReached("; ".join(missing))


def asked(replacements: Mapping[str, Replacement]) -> dict[str, str]:
    """Operation → spec, for another process. Raises InputError for a kernel that was given as a function."""
    for name, each in replacements.items():
        if each.portable is None:
            raise InputError(
                f"the kernel of {name} was given as a function, which no other process can load; give its spec, such "
                "as file.py:function"
            )
    return {name: str(each.portable) for name, each in replacements.items()}
