"""`dsv4 audit conform`: what a subject gives, what it lacks, what of it is wrong, and which probes wait for what."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from dsv4.errors import Dsv4Error, InputError
from dsv4.probes import families
from dsv4.probes.audit import open_subject
from dsv4.probes.inputs import ids_for
from dsv4.probes.probe import BESIDE, CATALOGUE, applying, probe_named
from dsv4.probes.subject import CAPABILITIES, POINTS, Subject
from dsv4.probes.subjects.answers import Answer, answer_of
from dsv4.probes.subjects.engine_dumps.fit import layers_of

TELLABLE = ("files", "run", "layer", "block", "rewind", "batch", "cache")  # what another implementation can have
RECORDED = "recorded (after dsv4 audit record)"
STEPS = 3  # tokens that are run one by one, after all others in one step


@dataclass
class Conformance:
    """given: point → layers that have it; missing: point → layers that should; wrong: what is not as it should be;
    notes: point → what was put right; unlocks: missing point or capability → probes; logits: whether there are any."""

    given: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    missing: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    wrong: list[str] = field(default_factory=list)
    notes: dict[str, str] = field(default_factory=dict)
    unlocks: dict[str, list[str]] = field(default_factory=dict)
    logits: bool = False


def run(checkpoint: Path, kind: str, tokens: int | None, say: Callable[[str], None]) -> int:
    """The exit code: 0 if all that is given is right, 1 if not. Raises InputError where nothing can be run."""
    subject = open_subject(checkpoint, kind)
    families.of(subject).check_command("conform", subject.name)
    if "run" not in subject.can:
        raise InputError(
            f"{subject.name} is no subject that runs a DeepSeek-V4 model; conform takes PACKAGE.MODULE:FACTORY, ours "
            "or transformers"
        )
    ids = ids_for(subject, checkpoint, None, tokens)
    found = conformance(subject, ids)
    for line in lines(subject, ids, found):
        say(line)
    return 1 if found.wrong else 0


def conformance(subject: Subject, ids: torch.Tensor) -> Conformance:
    """Of one run of ids int64 [1, T] with every point, and of one in steps. Raises InputError if the first fails."""
    found, config = Conformance(), subject.config
    try:
        answer = _asked(subject, ids, ())
    except Exception as error:  # an implementation may raise anything
        raise InputError(f"{subject.name} cannot run {ids.shape[1]} tokens in one step ({_first(error)})") from error
    _wrong(found, answer, "")
    found.logits = answer.capture.logits is not None
    for key, note in answer.notes.items():
        found.notes[key[1]] = note
    for (layer, point), value in answer.capture.points.items():
        if said := unlikely(point, value, config.compress_ratios[layer]):
            found.wrong.append(f"{point} of layer {layer}: {said}")
    for point in POINTS:
        for layer in range(config.num_hidden_layers):
            if layers_of(point, config.compress_ratios[layer]):
                (found.given if (layer, point) in answer.capture.points else found.missing)[point].append(layer)
    _in_steps(subject, ids, answer, found)
    for point in found.missing:
        found.unlocks[point] = readers(point, subject)
    for name in TELLABLE:
        if name not in subject.can:
            found.unlocks[name] = waiting(name, subject)
    return found


def unlikely(point: str, value: torch.Tensor, ratio: int) -> str:
    """What no implementation can mean by these values [1, T or n, …]; '' if nothing is amiss."""
    rows = int(value.flatten(2).isnan().any(-1).sum()) if value.is_floating_point() else 0
    if rows:
        return f"{rows} of {value.shape[1]} rows hold NaN; expected a value of every position"
    visible = (torch.arange(value.shape[1]) + 1) // ratio if ratio else None
    if point == "index_scores":
        beyond = value > float("-inf")
        if bool((beyond & (torch.arange(value.shape[2]) >= visible.unsqueeze(1))).any()):
            return "entries that a query does not see yet have scores; expected -inf"
    if point == "selection" and bool(((value < -1) | (value >= visible.clamp(min=1).view(1, -1, 1))).any()):
        return "picks that are no visible entries; expected entry numbers below (t + 1) // ratio, and -1 where absent"
    return ""


def _in_steps(subject: Subject, ids: torch.Tensor, whole: Answer, found: Conformance) -> None:
    """A prompt and some tokens one by one must give the same points, of the same shapes."""
    try:
        answer = _asked(subject, ids, (ids.shape[1] - STEPS, *[1] * STEPS))
    except Exception as error:  # an implementation may raise anything
        found.wrong.append(
            f"in steps: it cannot be run ({_first(error)}); expected points of all positions, however cut"
        )
        return
    known = set(found.wrong)
    _wrong(found, answer, "in steps: ", known)
    for layer, point in sorted(
        whole.capture.points.keys() - answer.capture.points.keys() - {p.key for p in answer.problems}
    ):
        found.wrong.append(f"in steps: {point} of layer {layer}: missing; expected as in one step")


def _first(error: Exception) -> str:
    said = (str(error).splitlines() or [""])[0][:120]
    return said if isinstance(error, Dsv4Error) else f"{type(error).__name__}: {said}"


def _asked(subject: Subject, ids: torch.Tensor, schedule: tuple[int, ...]) -> Answer:
    if hasattr(subject, "answer"):
        return subject.answer(ids, schedule, tuple(POINTS))
    return answer_of(subject.run(ids, schedule, tuple(POINTS)), subject.config, *ids.shape)


def _wrong(found: Conformance, answer: Answer, before: str, known: set[str] = frozenset()) -> None:
    for problem in answer.problems:
        where = ""
        if problem.key is not None:
            where = "logits: " if problem.key[0] < 0 else f"{problem.key[1]} of layer {problem.key[0]}: "
        if where + problem.said not in known:
            found.wrong.append(before + where + problem.said)


# ---- which probes wait for what ----------------------------------------------------------------


def readers(point: str, subject: Subject) -> list[str]:
    """Probes that ask for the point and lack nothing else; and the probe of dumps, which any run can be."""
    names = [
        n for n in applying(subject, CATALOGUE) if point in probe_named(n).reads and probe_named(n).needs <= subject.can
    ]
    return [*names, RECORDED]


def waiting(capability: str, subject: Subject) -> list[str]:
    """Probes that need the capability; with what they need beside it, if the subject lacks that too."""
    found = []
    for name in applying(subject, (*CATALOGUE, *BESIDE)):
        lacks = probe_named(name).needs - subject.can
        if capability in lacks and lacks <= set(TELLABLE):
            others = sorted(lacks - {capability})
            found.append(f"{name} (with {' and '.join(others)})" if others else name)
    return found


def lines(subject: Subject, ids: torch.Tensor, found: Conformance) -> list[str]:
    """For the reader: points, capabilities, then what is wrong."""
    said = [f"{subject.name}: {ids.shape[1]} tokens, {subject.config.num_hidden_layers} layers"]
    for point in POINTS:
        given, missing = found.given.get(point, []), found.missing.get(point, [])
        note = f"; taken as fp32 or int64 from {found.notes[point]}" if point in found.notes else ""
        if given and not missing:
            said.append(f"  {point:14} given{note}")
        elif missing:
            where = "" if not given else f" in layers {', '.join(map(str, missing))}"
            said.append(f"  {point:14} missing{where}; would unlock {', '.join(found.unlocks[point])}{note}")
    said.append(f"  {'logits':14} {'given' if found.logits else 'missing; schedules, isolation and mhc read them'}")
    said.append(f"can {', '.join(sorted(subject.can))}")
    for name in TELLABLE:
        if name not in subject.can and found.unlocks[name]:
            said.append(f"  {name:14} {CAPABILITIES[name]}; would unlock {', '.join(found.unlocks[name])}")
    return said + [f"wrong: {text}" for text in found.wrong]
