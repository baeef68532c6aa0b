"""What `dsv4 audit conform` says of a subject: what is given, missing and wrong, and which probes wait for what."""

import sys
from types import SimpleNamespace

import pytest
import torch

from dsv4.errors import InputError
from dsv4.probes.compare import tokens
from dsv4.probes.probe import CATALOGUE, execute, probe_named
from dsv4.probes.subject import POINTS, Capture
from dsv4.probes.subjects.conform import conformance
from dsv4.probes.subjects.foreign import ForeignSubject, is_foreign, open_foreign
from dsv4.probes.subjects.hooks import Hooks, tensor
from dsv4.probes.subjects.ours import OurSubject

T = 140  # one HCA entry


@pytest.fixture(scope="module")
def ours(official):
    return OurSubject(official)


@pytest.fixture(scope="module")
def ids(ours):
    return tokens(ours, T, 0)


@pytest.fixture(scope="module")
def captures(ours, ids):
    """Function: what our model gives, each schedule run once."""
    kept: dict = {}

    def call(schedule=()):
        if tuple(schedule) not in kept:
            kept[tuple(schedule)] = ours.run(ids, schedule, tuple(POINTS))
        return kept[tuple(schedule)]

    return call


@pytest.fixture
def subject(official, captures):
    """Function: a subject whose `run` gives what `shape(capture)` makes of our model's."""

    def call(shape=lambda capture: capture, **more):
        made = SimpleNamespace(run=lambda ids, schedule=(), want=(): shape(captures(schedule)), numerics="fp32", **more)
        return ForeignSubject("engine:x", made, official)

    return call


def changed(key, value):
    """Function: a capture with another value of one point."""
    return lambda c: Capture(c.logits, {k: value(v) if k == key else v for k, v in c.points.items()})


other = lambda v: v.double() if v.is_floating_point() else v.int()


# ---- forms -------------------------------------------------------------------------------------

FORMS = {
    "capture": lambda c: c,
    "tuple": lambda c: (c.logits, c.points),
    "tuple, points first": lambda c: (c.points, (c.logits, None)),
    "names": lambda c: {"logits": c.logits} | {f"layers.{i}.{p}": v for (i, p), v in c.points.items()},
    "points by name": lambda c: {"logits": c.logits, "points": {(p, i): v for (i, p), v in c.points.items()}},
    "lists": lambda c: {"logits": c.logits} | {p: [c.points.get((i, p)) for i in range(5)] for p in POINTS},
    "tuples": lambda c: Capture((c.logits, None), {k: (v, None) for k, v in c.points.items()}),
    "one row": lambda c: Capture(c.logits[0], {k: v[0] for k, v in c.points.items()}),
    "double": lambda c: Capture(c.logits.double(), {k: other(v) for k, v in c.points.items()}),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_points_come_in_any_form(subject, captures, ids, form):
    found = subject(FORMS[form])
    got, wanted = found.run(ids), captures()
    assert got.points.keys() == wanted.points.keys() and list(got.points) == list(wanted.points)
    assert all(torch.equal(v, wanted.points[k]) and v.dtype == wanted.points[k].dtype for k, v in got.points.items())
    assert torch.equal(got.logits, wanted.logits) and not conformance(found, ids).wrong


@pytest.mark.parametrize(
    "run",
    [
        lambda c: lambda input_ids, schedule=(), want=(): c(schedule),
        lambda c: lambda *, tokens, schedule=(): c(schedule),
        lambda c: lambda ids, **words: c(words.get("schedule", ())),
    ],
    ids=["another name", "keyword only", "any words"],
)
def test_run_may_call_its_arguments_what_it_likes(official, captures, ids, run):
    found = ForeignSubject("engine:x", SimpleNamespace(run=run(captures)), official)
    assert not conformance(found, ids).wrong


def test_modules_may_be_called_by_keyword_and_return_tuples():
    class Module(torch.nn.Module):
        def forward(self, positions, hidden_states=None, extra=None):
            return {"out": (hidden_states * 2, None), "other": extra}

    class Odd(torch.nn.Module):
        def forward(self, *, activations):
            return activations

    seen, x, module = [], torch.ones(2, 3), Module()
    with Hooks() as hooks:
        hooks.input(odd := Odd(), seen.append)
        odd(activations=x)
    assert seen.pop() is x
    with Hooks() as hooks:
        hooks.input(module, seen.append)
        hooks.input(module, seen.append, "hidden_states")
        hooks.output(module, seen.append)
        hooks.output(module, seen.append, "other")
        module(torch.arange(2), hidden_states=x, extra=x * 3)
        module(torch.arange(2), x, x * 3)
    module(torch.arange(2), x, x)
    assert [v.mean().item() for v in seen] == [1, 1, 2, 3] * 2
    with Hooks() as hooks, pytest.raises(InputError, match="called with 1 by position, extra"):
        hooks.input(module, seen.append, "hidden")
        module(torch.arange(2), extra=x)
    with pytest.raises(InputError, match="a tuple of 1 tensors"):
        tensor((x, None), 1)


# ---- what is wrong -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape, said",
    [
        (changed((1, "attn_in"), lambda v: v[:, 1:]), r"attn_in of layer 1: of shape \[1, 139, 128\]; expected"),
        (changed((1, "selection"), lambda v: v.float()), "selection of layer 1: float32; expected int64"),
        (changed((1, "selection"), lambda v: v > 0), "selection of layer 1: bool; expected int64"),
        (changed((2, "streams"), lambda v: v > 0), "streams of layer 2: bool; expected float32"),
        (changed((2, "ffn_out"), lambda v: v.index_fill(1, torch.tensor([3]), float("nan"))), "1 of 140 rows hold NaN"),
        (changed((1, "index_scores"), torch.zeros_like), "entries that a query does not see yet have scores"),
        (changed((1, "selection"), lambda v: torch.full_like(v, 34)), "picks that are no visible"),
        (lambda c: c.points | {(0, "index_keys"): c.points[1, "index_keys"]}, "layer 0, which has none"),
        (lambda c: c.points | {(5, "attn_in"): c.points[1, "attn_in"]}, "of layer 5; the model has 5 layers"),
        (lambda c: c.points | {"layers.0.attn_input": c.logits}, "is no .layer, point.; .* such as 'attn_in'"),
        (lambda c: c.points | {(0, "attn_in"): "no tensor"}, "a str without a tensor"),
        (lambda c: (c.logits[:, -1:], c.points), r"logits: \[1, 1, 320\]; expected fp32 \[1, 140, 320\]"),
        (lambda c: 3, "run returns a int; expected"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said_and_raised(subject, ids, shape, said):
    import re

    found = subject(shape)
    wrong = conformance(found, ids).wrong
    assert re.search(said, wrong[0]), wrong
    if "NaN" not in said and "entries that" not in said and "picks" not in said:  # a run may compute nonsense
        with pytest.raises(InputError, match=said):
            found.run(ids)


def test_a_run_in_steps_that_is_otherwise_is_said(official, captures, ids):
    part = lambda schedule, c: Capture(
        c.logits, {k: v for k, v in c.points.items() if k != (3, "attn_out") or not schedule}
    )
    made = SimpleNamespace(run=lambda ids, schedule=(), want=(): part(schedule, captures(schedule)))
    wrong = conformance(ForeignSubject("engine:x", made, official), ids).wrong
    assert wrong == ["in steps: attn_out of layer 3: missing; expected as in one step"]
    made = SimpleNamespace(run=lambda ids, want=(): captures())
    wrong = conformance(ForeignSubject("engine:x", made, official), ids).wrong
    assert len(wrong) == 1 and "takes no schedule" in wrong[0]


def test_what_a_run_raises_is_one_line(official, ids):
    def broken(ids, want=()):
        raise RuntimeError("out of memory\nsecond line")

    with pytest.raises(InputError, match="cannot run 140 tokens in one step .RuntimeError: out of memory.$"):
        conformance(ForeignSubject("engine:x", SimpleNamespace(run=broken), official), ids)


# ---- what is missing, and what it would unlock -------------------------------------------------


def test_what_is_missing_names_the_probes_that_wait_for_it(subject, ids):
    left = lambda c: {k: v for k, v in c.points.items() if k[1] != "kv_window" and k != (2, "attn_in")}
    found = conformance(subject(left), ids)
    assert found.missing == {"attn_in": [2], "kv_window": [0, 1, 2, 3, 4]} and not found.logits
    assert found.unlocks["attn_in"][:2] == ["moe_edges", "mhc"]
    assert found.unlocks["kv_window"] == ["recorded (after dsv4 audit record)"]
    assert found.unlocks["layer"] == ["rope", "index_oracle", "influence"]
    assert found.unlocks["rewind"] == ["rollback"] and found.unlocks["batch"] == ["isolation"]
    more = conformance(subject(left, can={"run", "layer"}), ids)
    assert more.unlocks["kv_window"][0] == "rope" and "layer" not in more.unlocks


class Asked(Exception):
    """A probe has asked for its points."""


def test_probes_read_the_points_that_they_say(official, monkeypatch):
    """Each probe that another implementation can be asked, up to its first question."""
    subject = OurSubject(official)
    monkeypatch.setattr(subject, "can", frozenset({"files", "run", "layer", "batch", "rewind"}))
    seen: dict[str, set] = {}

    def asked(ids, schedule=(), want=()):
        seen[name] = set(want)
        raise Asked

    monkeypatch.setattr(subject, "run", asked)
    monkeypatch.setattr(subject, "attention", lambda i, x, *rest: asked(*rest))
    for name in CATALOGUE:
        probe = probe_named(name)
        if probe.needs <= subject.can and probe.needs & {"run", "layer"}:
            execute(probe(), subject)
    assert seen.keys() >= {
        "rope",
        "index_oracle",
        "influence",
        "schedules",
        "isolation",
        "rollback",
        "mhc",
        "moe_edges",
    }
    seen["influence"].add("attn_out")  # which `attention` gives unasked
    assert seen == {name: set(probe_named(name).reads) for name in seen}


# ---- factories ---------------------------------------------------------------------------------


def test_what_is_a_factory():
    assert is_foreign("my_engine:factory") and is_foreign("a.b.c:make") and is_foreign("trainings:x")
    assert not any(
        map(is_foreign, ("ours", "ours:fp32", "ours:qat:fp32", "dump:file", "files", "a:b:c", "run.safetensors"))
    )


@pytest.mark.parametrize(
    "code, name, said",
    [
        ("import no_such_module_here", "factory", "ModuleNotFoundError"),
        ("factory = (", "factory", "SyntaxError"),
        ("x = 1", "factory", "has no function 'factory'"),
        ("factory = 3", "factory", "has no function 'factory'"),
        ("def factory(path):\n    raise ValueError('no GPU\\nsecond')", "factory", "ValueError: no GPU"),
        ("def factory(path):\n    return 3", "factory", "returns a int without `run`"),
        ("class factory:\n    can = {'fly'}\n    __init__ = run = lambda s, x: None", "factory", "can 'fly'"),
    ],
)  # fmt: skip
def test_factories_that_make_no_subject_are_refused(run, official, tmp_path, monkeypatch, code, name, said):
    (tmp_path / "tried.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    sys.modules.pop("tried", None)
    status, err = run("conform", f"tried:{name}", official)
    sys.modules.pop("tried", None)
    assert status == 2 and said in err and "second" not in err and len(err.strip().splitlines()) == 1


def test_conform_takes_what_runs_such_a_model(run, official):
    assert run("conform", "ours", official, "--tokens", 20)[0] == 0
    status, err = run("conform", "files", official)
    assert status == 2 and "conform takes PACKAGE.MODULE:FACTORY" in err
    with pytest.raises(InputError, match="cannot be imported"):
        open_foreign("no_such_module:factory", official)
