"""Running an audit: open a subject, run the probes within a budget, write the report."""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from types import MappingProxyType

from dsv4.errors import InputError
from dsv4.kernels.replacing import Replacement
from dsv4.model.numerics import NUMERICS
from dsv4.model.ranks import here
from dsv4.probes.joint import agreed, joint, ranks_of
from dsv4.probes.probe import BESIDE, CATALOGUE, Probe, execute, left_out, probe_named
from dsv4.probes.report import json_report
from dsv4.probes.report.difference import difference
from dsv4.probes.report.document import Report, Section
from dsv4.probes.report.files import write
from dsv4.probes.report.provenance import provenance
from dsv4.probes.result import Check, Status, vacuous
from dsv4.probes.subject import Subject
from dsv4.probes.subjects.foreign import is_foreign, open_foreign
from dsv4.runtime import user_kernels
from dsv4.runtime.threads import limited_threads

KERNELS, LEDGER = "user_kernels", "the dispatch ledger: what never ran was not audited"
SUBJECTS = (
    "ours[:NUMERICS[:BACKEND]]",
    "files",
    "transformers",
    "a recorded dump (FILE.safetensors or dump:FILE)",
    "PACKAGE.MODULE:FACTORY",
)


def open_subject(
    checkpoint: Path,
    kind: str,
    numerics: str = "fp32",
    backend: str = "auto",
    device: str = "cpu",
    cache: str = "auto",
    index_cache: str = "auto",
    kernels: Mapping[str, Replacement] = MappingProxyType({}),
) -> Subject:
    """The subject of that kind; 'ours:native:reference' says numerics and backend itself.

    cache, index_cache: how this project's model holds its caches (`load_model`). kernels: of the user's, in the place
    of its operations. Raises InputError for an unknown kind or format, and for a format or kernel asked of another
    subject; CheckpointError for a broken checkpoint; KernelError.
    """
    foreign, (kind, _, rest) = is_foreign(kind), kind.partition(":")
    if here().size > 1 and kind != "ours":
        raise InputError(
            f"subject {kind!r} was given to {here().size} ranks, which share this project's model only; audit ours"
        )
    if kernels and kind != "ours":
        raise InputError(f"--kernel would change nothing of subject {kind!r}; leave it out, or audit ours")
    if (cache, index_cache) != ("auto", "auto") and kind != "ours":
        raise InputError(
            f"--cache and --index-cache would change nothing of subject {kind!r}; leave them out, or audit ours"
        )
    if kind == "dump" or not rest and kind.endswith(".safetensors"):
        from dsv4.probes.subjects.dump import DumpSubject

        return DumpSubject(rest or kind, checkpoint)
    if foreign:
        return open_foreign(f"{kind}:{rest}", checkpoint)
    match kind:
        case "ours":
            from dsv4.probes.subjects.opening import open_ours

            parts = parts_of(rest, numerics, backend)
            return open_ours(checkpoint, *parts, device, cache, index_cache, kernels=kernels)
        case _ if rest:
            kind = f"{kind}:{rest}"
        case "files":
            from dsv4.probes.subjects.files import FilesSubject

            return FilesSubject(checkpoint)
        case "transformers":
            from dsv4.probes.subjects.opening import open_theirs

            return open_theirs(checkpoint)
    raise InputError(f"subject {kind!r} is unknown; expected one of {', '.join(SUBJECTS)}")


def parts_of(rest: str, numerics: str, backend: str) -> tuple[str, str]:
    """'native:cpu' or 'qat:fp32:cpu' as numerics and backend; missing parts keep their defaults."""
    if not rest:
        return numerics, backend
    if rest in NUMERICS:
        return rest, backend
    first, _, last = rest.rpartition(":")
    return (first, last) if first in NUMERICS else (rest, backend)


def subject_words(kind: str) -> str:
    """A subject's kind as part of a file name."""
    return Path(kind).stem if kind.endswith(".safetensors") else kind.replace(":", "-")


def audit(
    subject: Subject,
    names: Sequence[str] = (),
    seed: int = 0,
    effort: float = 1.0,
    budget: float | None = None,
    command: list[str] | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Report:
    """Run the named probes (the whole catalogue if empty) and report.

    budget: seconds; a probe that would begin after it is VACUOUS, not silently left out. Probes that do not apply to
    such a model are left out, with the reason in the report. Of several ranks, all run every probe and get one report.
    """
    with limited_threads(subject.config.hidden_size):
        return _audit(subject, names, seed, effort, budget, command, say)


def _audit(
    subject: Subject,
    names: Sequence[str],
    seed: int,
    effort: float,
    budget: float | None,
    command: list[str] | None,
    say: Callable[[str], None],
) -> Report:
    started, ranks, sections, others = time.time(), ranks_of(subject), [], {}
    for name in names or (*CATALOGUE, *(beside for beside, can in BESIDE.items() if can in subject.can)):
        probe: Probe = probe_named(name)(seed=seed, effort=effort)
        if why := left_out(probe, subject):
            others[name] = why
            say(f"{'–':8} {name:16} {why}")
            continue
        if budget is not None and agreed(ranks, time.time() - started > budget):
            checks, seconds = [vacuous(probe.title, f"the budget of {budget:.0f} s was spent before it began")], 0.0
        else:
            checks, seconds = execute(probe, subject)
            checks = joint(ranks, checks)
        sections.append(Section(name, probe.title, checks, seconds, probe.text(checks)))
        say(f"{sections[-1].status.value:8} {name:16} {len(checks):4} checks  {seconds:6.1f} s")
    if replaced(subject):
        sections.append(Section(KERNELS, "what ran through the user's kernels", kernel_checks(subject), 0.0))
    about = provenance(subject, command or sys.argv, {"probes": seed}, started)
    return Report(f"Audit of {subject.name}", about, sections, others)


@dataclass(frozen=True)
class Shown:
    """The outputs of a report. fail_on: the mildest status that is a finding; baseline: an older report, a document of
    `json_report.load`; out: the folder of the files, None for none."""

    fail_on: Status = Status.FAIL
    baseline: dict | None = None
    out: Path | None = None


def run(
    checkpoint: Path,
    kind: str,
    numerics: str,
    backend: str,
    device: str,
    names: Sequence[str],
    budget: float | None,
    shown: Shown,
    say: Callable[[str], None],
    cache: str = "auto",
    index_cache: str = "auto",
    kernels: Mapping[str, Replacement] = MappingProxyType({}),
) -> int:
    """`dsv4 audit`: the exit code (0 no findings, 1 findings, 2 nothing was measured). Raises KernelNotReached, after
    the report is written, where the model never ran through a kernel of the user's."""
    subject = open_subject(checkpoint, kind, numerics, backend, device, cache, index_cache, kernels)
    for line in user_kernels.before(subject.model) if replaced(subject) else ():
        say(line)
    report = audit(subject, names, budget=budget, say=say)
    said = f"ours:{numerics}" if kind == "ours" else kind
    stem = f"{checkpoint.resolve().name}_{subject_words(said).replace('-', '_', kind.startswith('ours'))}"
    ran = subject.model.backend if kind.startswith("ours") else "cpu"
    stem += "".join(f"_{form}" for form in (cache, index_cache) if form != "auto") + ("" if ran == "cpu" else f"_{ran}")
    stem += "".join(f"_with_{operation}" for operation in kernels)
    code = publish(report, shown, stem, say)
    if replaced(subject):
        for line in user_kernels.after(subject.model):
            say(line)
        user_kernels.check_reached(subject.model)
    return code


def replaced(subject: Subject) -> bool:
    """Whether kernels of the user's stand for operations of the subject's model."""
    return bool(getattr(getattr(subject, "model", None), "replacements", None))


def kernel_checks(subject: Subject) -> list[Check]:
    """Of each operation that a user's kernel stands for: that the model ran through it, and through nothing else."""
    found = []
    for a in user_kernels.accounts(subject.model):
        about = dict(part=a.operation, measured=a.calls, unit="calls", samples=a.calls)
        note = a.missing or f"kernel {a.kernel}, sha256 {a.sha256}"
        status = Status.ERROR if a.missing else Status.PASS
        found.append(Check("the model ran through the user's kernel alone", status, note=note, source=LEDGER, **about))
    return found


def publish(report: Report, shown: Shown, stem: str, say: Callable[[str], None]) -> int:
    """Print the verdict, and write the files called `stem` if they are wanted. Returns the exit code."""
    report.fail_on = shown.fail_on
    if shown.baseline is not None:
        report.baseline = difference(shown.baseline, json_report.document(report, stem), [], date.today())
    totals = ", ".join(f"{count} {status.value}" for status, count in report.totals.items() if count)
    why = f": {report.not_shown}" if report.not_shown else ""
    say(f"{report.verdict}{why}; {totals or 'no checks'}; exit code {report.exit_code}")
    if shown.out is not None:
        for file in write(report, shown.out, stem):
            say(f"wrote {file}")
    return report.exit_code


def seconds(text: str) -> float:
    """'60s', '2m' or '90' as seconds. Raises InputError."""
    unit = {"s": 1, "m": 60, "h": 3600}.get(text[-1:], None)
    try:
        value = float(text[:-1] if unit else text) * (unit or 1)
    except ValueError:
        value = float("nan")
    if not value > 0:
        raise InputError(f"--budget is {text!r}; expected seconds such as 60s, or 2m")
    return value
