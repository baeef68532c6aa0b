"""Planted faulty kernels: each must be found by the clause that is named for it, and honest kernels must stay green."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass

import torch

from dsv4.kernels.contracts import contract_of
from dsv4.probes.journal import Kept
from dsv4.probes.kernel_audit.audit import audit_kernel
from dsv4.probes.kernel_audit.clauses import ORDER
from dsv4.probes.kernel_audit.controls import Control, controls
from dsv4.probes.kernel_audit.document import finding_line
from dsv4.probes.kernel_audit.errors import KernelAuditError
from dsv4.probes.kernel_audit.plant import CLAUSES, Plant
from dsv4.probes.kernel_audit.plants import plants
from dsv4.probes.kernel_audit.subject import SubjectSpec
from dsv4.probes.report.provenance import commit, device, versions


@dataclass(frozen=True)
class Outcome:
    """One audit of the self-test. clause: '' for a control; caught: clauses with a finding."""

    name: str
    operation: str
    clause: str
    entry: int
    caught: tuple[str, ...]
    first: str
    seconds: float

    @property
    def verdict(self) -> str:
        """caught, by luck (by another clause alone), missed; of a control green or accused."""
        if not self.clause:
            return "accused" if self.caught else "green"
        return "caught" if self.clause in self.caught else "by luck" if self.caught else "missed"


def chosen(operation: str | None, name: str | None, clause: str | None, device: str) -> list[Plant | Control]:
    """Plants and controls that the options ask for; plants that need CUDA only there."""
    fits = lambda x: (not operation or x.operation == operation) and (not name or name in x.name)
    found = [p for p in plants() if fits(p) and (not clause or p.clause == clause)]
    found = [p for p in found if p.device == "any" or device.startswith(p.device)]
    return found + ([] if clause else [c for c in controls(device) if fits(c)])


def run(
    what: list[Plant | Control],
    device: str = "cpu",
    jobs: int = 1,
    without: tuple[str, ...] = (),
    seed: int = 1,
    kernel: str = "reference",
    journal: Kept | None = None,
) -> Iterator[Outcome]:
    """Outcomes as they come, those that the journal holds first. without: clauses that are switched off (ablation)."""
    journal = journal or Kept(None, {})
    held = {_key(o): o for o in (Outcome(**{**line[1], "caught": tuple(line[1]["caught"])}) for line in journal.held)}
    yield from (held[_key(item)] for item in what if _key(item) in held)
    with ThreadPoolExecutor(jobs) as pool:
        waiting = [pool.submit(one, item, device, without, seed, kernel) for item in what if _key(item) not in held]
        for done in as_completed(waiting):
            journal.append("done", asdict(done.result()))
            yield done.result()


def _key(item: Plant | Control | Outcome) -> tuple[str, str, str]:
    """What a plant, a control and the outcome of either are known by."""
    return item.operation, item.name, "" if isinstance(item, Control) else item.clause


def one(item: Plant | Control, device: str, without: tuple[str, ...], seed: int, kernel: str = "reference") -> Outcome:
    """One audit, of activations in one dtype."""
    if isinstance(item, Plant):
        spec, clause, entry = SubjectSpec(item.operation, kernel, device, plant=item.name), item.clause, item.entry
    else:
        spec = SubjectSpec(item.operation, item.kernel, device, accuracy=item.accuracy, plant=item.liberty)
        clause, entry = "", 0
    contract, started = contract_of(item.operation), time.monotonic()
    usual = contract.dtypes[0] if torch.bfloat16 not in contract.dtypes else torch.bfloat16
    dtype = getattr(item, "dtype", None) or usual
    slow = {"sanitizer", "shared"} - {clause}  # a minute of each audit; processes that slow down all others
    only = tuple(c for c in ORDER if c not in (*without, *slow))
    try:
        found = audit_kernel(spec, seed=seed, dtypes=(dtype,), only=only, repeats=12, limit=120)
        caught, first = tuple(found.caught), finding_line(found.findings[0]) if found.findings else ""
    except KernelAuditError as error:
        caught, first = ("gate",), f"it could not be loaded: {error}"
    return Outcome(item.name, item.operation, clause, entry, caught, first, round(time.monotonic() - started, 1))


def gaps(outcomes: list[Outcome]) -> list[str]:
    """What is wrong: plants that their clause did not find, accused controls."""
    return [
        f"{o.verdict}: {o.operation}: {o.name}" + (f" (by {', '.join(o.caught)})" if o.caught else "")
        for o in outcomes
        if o.verdict in ("missed", "by luck", "accused")
    ]


def by_clause(outcomes: list[Outcome]) -> list[dict]:
    """One row a clause: plants, caught by it, plants that it alone finds: those that go unnoticed without it."""
    rows = []
    for clause in CLAUSES:
        mine = [o for o in outcomes if o.clause == clause]
        alone = [o for o in outcomes if o.clause and o.caught == (clause,)]
        rows.append(
            {
                "clause": clause,
                "plants": len(mine),
                "caught": sum(o.verdict == "caught" for o in mine),
                "by it alone": len(alone),
            }
        )
    return rows


def document(outcomes: list[Outcome]) -> dict:
    """The matrix as JSON values."""
    listed = sorted(outcomes, key=lambda o: (not o.clause, o.operation, o.entry, o.name))
    return {
        "plants": sum(bool(o.clause) for o in outcomes),
        "operations": len({o.operation for o in outcomes if o.clause}),
        "entries": sorted({o.entry for o in outcomes if o.clause}),
        "controls": sum(not o.clause for o in outcomes),
        "gaps": gaps(listed),
        "clauses": by_clause(outcomes),
        "outcomes": [asdict(o) | {"verdict": o.verdict} for o in listed],
    }


def about(command: str, day: str, where: str) -> dict:
    """Where a matrix comes from."""
    name = device(torch.device(where))
    return {"command": command, "date": day, "device": name, "versions": versions(), **commit()}


def markdown(found: dict) -> str:
    """The matrix as a page."""
    entries, of = ", ".join(map(str, found["entries"])), found["about"]
    known = ", ".join(f"{k} {v}" for k, v in of["versions"].items() if v)
    lines = [
        f"# Self-test of the kernel audit: {len(found['gaps'])} gaps",
        "",
        f"{of['device']}, {known}, commit {of['commit']}, {of['date']}.",
        "",
        f"    {of['command']}",
        "",
        f"{found['plants']} planted faults over {found['operations']} operations, {found['controls']} honest controls. "
        f"Entries of the catalogue: {entries}.",
        "",
        *(f"- {gap}" for gap in found["gaps"]),
        "",
        "| clause | plants | caught by it | found by no other clause in this run |",
        "|---|---|---|---|",
        *(f"| {r['clause']} | {r['plants']} | {r['caught']} | {r['by it alone']} |" for r in found["clauses"]),
        "",
        "| operation | fault | entry | clause | caught by |",
        "|---|---|---|---|---|",
    ]
    for o in found["outcomes"]:
        row = o["operation"], o["name"], o["entry"] or "", o["clause"] or "control", ", ".join(o["caught"]) or "green"
        lines.append("| " + " | ".join(map(str, row)) + " |")
    return "\n".join(lines) + "\n"
