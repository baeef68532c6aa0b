"""Probes on whole runs: green on a sound model, red on one that is not."""

from types import SimpleNamespace

import pytest
import torch

from dsv4.cache.layer import CompressorCache
from dsv4.probes.catalogue.backend_matrix import BackendMatrix
from dsv4.probes.catalogue.edges import Edges
from dsv4.probes.catalogue.isolation import Isolation
from dsv4.probes.catalogue.mhc import HyperConnections
from dsv4.probes.catalogue.moe_edges import MoEEdges
from dsv4.probes.catalogue.poison import Poison
from dsv4.probes.catalogue.rollback import PLACES, Rollback, places
from dsv4.probes.catalogue.schedules import Schedules
from dsv4.probes.probe import execute
from dsv4.probes.result import Status, worst
from dsv4.probes.subject import Subject
from dsv4.probes.subjects.ours import OurSubject


@pytest.fixture(scope="module")
def subject(brief_official):
    return OurSubject(brief_official, "fp32")


@pytest.mark.parametrize(
    "probe, rewound",
    [
        pytest.param(Schedules(effort=0.25), PLACES, id="schedules"),
        pytest.param(Rollback(), (5, 128), id="rollback"),  # and the window's end
        pytest.param(Rollback(), PLACES, id="rollback at all places", marks=pytest.mark.sweep),
        pytest.param(Isolation(), PLACES, id="isolation"),
    ],
)
def test_green_on_our_model(subject, monkeypatch, probe, rewound):
    """Up to 5 s: each schedule, and each place to rewind to, is a run of the whole model."""
    monkeypatch.setattr("dsv4.probes.catalogue.rollback.PLACES", rewound)
    checks, _ = execute(probe, subject)
    assert worst(checks) is Status.PASS, [c for c in checks if c.status is not Status.PASS][:2]
    assert all(c.samples > 0 and c.source for c in checks)


@pytest.mark.parametrize("probe", [Schedules(), Rollback(), Isolation()], ids=lambda p: p.name)
def test_vacuous_where_nothing_can_run(probe):
    assert worst(execute(probe, Subject())[0]) is Status.VACUOUS


def test_an_overlap_row_lost_at_a_cut_is_seen(subject, monkeypatch):
    """The window before is forgotten whenever a step begins inside a window. 6 s: schedules of single tokens."""
    real = CompressorCache._window_rows

    def forgetful(self, step):
        rows = real(self, step)
        if self.overlap == 2 and step.starts[0]:
            rows[0, : self.ratio] = -1
        return rows

    monkeypatch.setattr(CompressorCache, "_window_rows", forgetful)
    checks, _ = execute(Schedules(effort=0.25), subject)
    assert worst(checks) is Status.FAIL and "position" in next(c for c in checks if c.status is Status.FAIL).note


@pytest.fixture
def two_places(monkeypatch):
    """Rows are forgotten early, across 128 and at the window's end: a third of the time."""
    monkeypatch.setattr("dsv4.probes.catalogue.rollback.PLACES", (5, 128))


def test_a_rewind_that_stops_short_is_seen(subject, monkeypatch, two_places):
    from dsv4.cache.cache import Cache

    real = Cache.rewind
    monkeypatch.setattr(Cache, "rewind", lambda self, counts: real(self, [max(0, n - 1) for n in counts]))
    assert worst(execute(Rollback(), subject)[0]) in (Status.FAIL, Status.ERROR)


@pytest.mark.few(beside=[0])
@pytest.mark.parametrize("beside", [-1, 0, 1])
def test_a_rewind_that_stops_short_at_the_window_s_end_alone_is_seen(subject, monkeypatch, two_places, beside):
    from dsv4.cache.cache import Cache

    real, edge = Cache.rewind, subject.config.sliding_window + beside
    monkeypatch.setattr(
        Cache,
        "rewind",
        lambda self, counts: real(
            self,
            [
                n - (n > 0 and now - n == edge)
                for now, n in zip(self.lengths, [counts] * self.batch if isinstance(counts, int) else counts)
            ],
        ),
    )
    found = [c for c in execute(Rollback(), subject)[0] if c.status is not Status.PASS]
    assert found and all(c.where.endswith(f" at {edge}") for c in found), found[:2]


@pytest.mark.parametrize(
    "family,config,found",
    [
        ("deepseek_v4", {"sliding_window": 64}, [63, 64, 65]),
        ("deepseek_v4", {"sliding_window": 1}, [1, 2]),
        ("deepseek_v4", {"sliding_window": 160}, [159, 160]),
        ("deepseek_v4", {"sliding_window": 4096}, []),
        ("gqa", {"windows": (None, None)}, []),
        ("gqa", {"windows": (None, 33, 50, 33)}, [32, 33, 34, 49, 50, 51]),
    ],
)
def test_windows_that_end_within_the_run_are_places(family, config, found):
    assert sorted(set(places(SimpleNamespace(family=family, **config))) - set(PLACES)) == found


def test_a_neighbour_that_leaks_is_seen(subject, monkeypatch):
    from dsv4.cache.rows import Entries

    real = Entries.chosen

    def leaky(self, step, entry, op):
        pool, rows = real(self, step, entry, op)
        # every row reads row 0's entries
        return pool, torch.where(rows >= self.buffer.shape[1], rows - self.buffer.shape[1], rows)

    monkeypatch.setattr(Entries, "chosen", leaky)
    assert worst(execute(Isolation(), subject)[0]) is Status.FAIL


def test_hyper_connections_are_held_against_the_oracle(official):
    """With 20 of Sinkhorn's steps, as models have: after a few, columns do not sum to 1 yet."""
    checks, _ = execute(HyperConnections(), OurSubject(official, "fp32"))
    assert worst(checks) is Status.PASS, [c for c in checks if c.status is not Status.PASS][:2]


@pytest.mark.few(fault=["iterations"])
@pytest.mark.parametrize("fault", ["transposed", "iterations", "unscaled head"])
def test_a_wrong_hyper_connection_is_seen(official, fault):
    broken = OurSubject(official, "fp32")
    op = broken.model.layers[2].op
    post, pre = op.mhc_post, op.mhc_pre
    if fault == "transposed":
        op.mhc_post = lambda out, streams, p, comb: post(out, streams, p, comb.transpose(1, 2))
    elif fault == "iterations":
        op.mhc_pre = lambda streams, fn, scale, base, iters, *rest: pre(streams, fn, scale, base, 2, *rest)
    else:
        head = op.mhc_head
        op.mhc_head = lambda streams, fn, scale, *rest: head(streams, fn, scale * 0, *rest)
    checks, _ = execute(HyperConnections(), broken)
    found = {c.part for c in checks if c.status is Status.FAIL}
    assert {"transposed": "mHC comb", "iterations": "mHC comb", "unscaled head": "head"}[fault] in found


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("probe", [MoEEdges(), Poison(effort=0.2)], ids=lambda p: p.name)
def test_edges_are_green_on_every_backend(brief_official, probe, backend):
    checks, _ = execute(probe, OurSubject(brief_official, "fp32", backend))
    assert worst(checks) is Status.PASS, [c for c in checks if c.status is not Status.PASS][:2]


@pytest.mark.few(each=lambda p: p["part"])
@pytest.mark.parametrize(
    "fault,part", [("naive softplus", "router"), ("weighing bias", "router"), ("no clamp", "experts")]
)
def test_a_wrong_expert_operation_is_seen(subject, monkeypatch, fault, part):
    from dsv4.kernels.experts import reference as experts
    from dsv4.kernels.router import cpu, reference

    if fault == "naive softplus":
        naive = lambda x, weight: torch.log(1 + torch.exp(x.float() @ weight.float().T)).sqrt()
        monkeypatch.setattr(reference, "router_scores", lambda x, weight: naive(x, weight).double())
        monkeypatch.setattr(cpu, "MAX_EXPERTS", 0)
    elif fault == "weighing bias":
        real = reference.route_scored
        wrong = lambda x, weight, bias, k, f: (
            real(x, weight, bias, k, f)[0],
            real(x, weight, bias, k, f)[1] * (1 + 1e-3 * bias.abs().sum()),
        )
        monkeypatch.setattr(
            type(subject), "operations", property(lambda self: {"route_scored": wrong, **_others(self)})
        )
    else:
        monkeypatch.setattr(experts, "clamped_swiglu", lambda gate, up, limit: torch.nn.functional.silu(gate) * up)
        monkeypatch.setattr("dsv4.kernels.experts.cpu.clamped_swiglu", experts.clamped_swiglu)
    checks, _ = execute(MoEEdges(), subject)
    assert part in {c.part for c in checks if c.status is Status.FAIL}


def _others(subject) -> dict:
    from dsv4.kernels.operations import OPERATIONS

    return {name: op.resolve(subject.model.backend)[0] for name, op in OPERATIONS.items() if name != "route_scored"}


def test_rows_that_nobody_wrote_are_seen(subject, monkeypatch):
    """Overlap rows of the window before the first taken from the ring instead of being left out."""
    real = CompressorCache._window_rows

    def unwritten(self, step):
        rows = real(self, step)
        return torch.where(rows < 0, self.raw.rows.R - 1, rows)

    monkeypatch.setattr(CompressorCache, "_window_rows", unwritten)
    assert worst(execute(Poison(effort=0.1), subject)[0]) in (Status.FAIL, Status.ERROR)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_operations_are_sound_on_every_backend(brief_official, backend):
    for probe in (Edges(), BackendMatrix()):
        checks, _ = execute(probe, OurSubject(brief_official, "fp32", backend))
        assert worst(checks) is Status.PASS, [c for c in checks if c.status is not Status.PASS][:2]


@pytest.mark.few(name=["sparse_attention", "topk_entries"])
@pytest.mark.parametrize(
    "name,part",
    [
        ("sparse_attention", "sink"),
        ("hca_attention", "HCA attention"),
        ("topk_entries", "selection"),
        ("index_scores", "index scores"),
    ],
)
def test_a_wrong_operation_is_seen_at_its_edges(subject, monkeypatch, name, part):
    real = OurSubject.operations.fget
    faults = {
        # sink twice
        "sparse_attention": lambda f: lambda q, w, wi, e, ei, sink, *rest: f(q, w, wi, e, ei, sink + 0.7, *rest),
        # one entry late
        "hca_attention": lambda f: lambda q, w, wi, e, seen, *rest: f(q, w, wi, e, (seen - 1).clamp(min=0), *rest),
        # highest wins
        "topk_entries": lambda f: lambda scores, k: scores.shape[-1] - 1 - f(scores.flip(-1), k),
        # weights' sign
        "index_scores": lambda f: lambda q, w, keys, seen: f(q, w.abs(), keys, seen),
    }
    monkeypatch.setattr(
        OurSubject, "operations", property(lambda self: real(self) | {name: faults[name](real(self)[name])})
    )
    checks, _ = execute(Edges(), subject)
    assert {c.part for c in checks if c.status in (Status.FAIL, Status.ERROR)} == {part}


def test_a_backend_that_differs_is_named(subject, monkeypatch):
    from dsv4.kernels.hyper_connections import cpu

    real = cpu._row
    # a row scaled as a whole would not show
    monkeypatch.setattr(cpu, "_row", lambda *args: tuple(x**1.01 for x in real(*args)))
    checks, _ = execute(BackendMatrix(), subject)
    assert {c.part for c in checks if c.status is Status.FAIL} == {"mhc_pre"}
