"""Probes of tiles, of layers that lie elsewhere, and of new processes: green where sound, and each planted fault
named."""

import shutil

import pytest
import torch

from dsv4.probes import families
from dsv4.probes.catalogue import fresh_process, placement, tiles
from dsv4.probes.catalogue.gqa.placement import GQAPlacement
from dsv4.probes.faults import Site, catalogue, profile
from dsv4.probes.probe import execute, probe_named
from dsv4.probes.result import Status
from dsv4.probes.scenes.control import attempted_all
from dsv4.probes.selftest import run as selftest
from dsv4.probes.subject import Subject
from dsv4.probes.subjects.opening import open_ours
from dsv4.probes.subjects.ours import OurSubject

BY_NAME = {m.name: m for m in catalogue()}
RED = (Status.FAIL, Status.ERROR)
TILES = [
    ("last partial tile is not scored", "last tile of index scores"),
    ("tiles of scores read from the first", "tiles of index scores"),
    ("running maximum is not carried", "tiles of sparse attention"),
    ("lanes of the last chunk are stale", "tiles of sparse attention"),
    ("last queries of hca get stale rows", "last tile of HCA attention"),
    ("last queries of a piece are not written", "last tile of grouped attention"),
]
PLACES = [
    ("every placed layer gets the first sinks", "placement, sink"),
    ("experts of another placed layer", "placement, experts"),
    ("a placed layers bias is not moved", "placement, router"),
    ("biases of the keys of another placed layer", "placement, QKV bias"),
    ("a tied head gets other rows than its embedding", "placement, logits"),
]
ON_GPUS = [  # the part, and the readings of the cache that are red; all of them where the first ends in an error
    ("positions stay on the first device", "placement, positions", {"dense"}),
    ("the residual stream is not moved", "placement, streams", {*GQAPlacement.readings}),
    ("caches of all layers on the first device", "placement, caches", {"dense"}),
    ("summaries are written to a copy", "placement, low in the cache", {"page bounds", "block means"}),
    ("a prompt is none on the second device", "placement, page bounds", {*GQAPlacement.readings} - {"dense", "chunks"}),
    ("chunks of a prompt on the first device only", "placement, chunks", {"chunks"}),
]


@pytest.fixture(scope="module")
def llama3(tmp_path_factory):
    return profile.write(tmp_path_factory.mktemp("gqa") / "llama3", "llama3")


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory):
    return profile.write(tmp_path_factory.mktemp("gqa") / "qwen2", "qwen2")


@pytest.fixture
def planted(official, llama3, qwen2, tmp_path):
    """Function: a subject with a fault, by name."""
    sites = []

    def plant(name: str):
        mutation = BY_NAME[name]
        root = {"llama3": llama3, "qwen2": qwen2}.get(mutation.profile, official)
        sites.append(Site(shutil.copytree(root, tmp_path / "copy")))
        mutation.plant(sites[-1])
        return open_ours(sites[-1].checkpoint, mutation.numerics)

    yield plant
    for site in sites:
        site.undo()


def operations(subject):
    return [check for case in families.of(subject).tile_cases(0) for check in tiles.one(subject, case)]


def parts(checks) -> set[str]:
    return {c.part for c in checks if c.status in RED}


# ---- tiles --------------------------------------------------------------------------------


@pytest.mark.parametrize("fault, part", TILES, ids=lambda value: value.replace(" ", "-"))
def test_a_fault_of_tiles_is_named_and_nothing_else(planted, fault, part):
    assert parts(operations(planted(fault))) == {part}


@pytest.mark.few(each=lambda p: "the first")
@pytest.mark.parametrize("fault, part", TILES[:5], ids=lambda value: value.replace(" ", "-"))
def test_other_probes_of_operations_do_not_see_it(planted, fault, part):
    """Their inputs fit one tile: that is why there is a probe for tiles."""
    assert not parts(execute(probe_named("edges")(), planted(fault))[0])


@pytest.mark.few(numerics=["native"])
@pytest.mark.parametrize("numerics, backend", [("fp32", "reference"), ("native", "cpu"), ("qat", "cpu")])
def test_tiles_are_green(official, llama3, numerics, backend):
    for root in (official, *([llama3] if numerics != "qat" else [])):
        subject = open_ours(root, numerics, backend)
        found = [*operations(subject), *tiles.whole(subject, 0)]
        assert {c.status for c in found} == {Status.PASS}, [c for c in found if c.status is not Status.PASS]


def test_cases_have_several_tiles_and_a_part_of_one():
    for family in families.FAMILIES.values():
        for case in family.tile_cases(0):
            n = case.wanted.shape[case.axis]
            assert case.operation == "grouped_linear" or n > 2 * case.tile and n % case.tile, case.label


def test_new_memory_holds_nothing_that_could_pass_for_a_number():
    with tiles.unwritten():
        assert torch.empty(3).isnan().all() and torch.empty_like(torch.zeros(2, dtype=torch.bfloat16)).isnan().all()
        assert (torch.empty(2, dtype=torch.int64) > 1 << 60).all() and torch.empty(2, device="meta").is_meta
    assert torch.empty.__name__ == "empty" and not isinstance(torch.empty, type(lambda: 0))


# ---- layers that lie elsewhere ------------------------------------------------------------


@pytest.mark.few(each=lambda p: "the first")
@pytest.mark.parametrize("fault, part", PLACES, ids=lambda value: value.replace(" ", "-"))
def test_a_fault_of_placement_is_named(planted, fault, part):
    subject = planted(fault)
    found = parts(placement.compared(subject, subject.model, placement.placed(subject, 0), "here", 0))
    assert part in found and all("cache" in other or other == "placement, logits" for other in found - {part}), found


@pytest.mark.parametrize("fault, part, readings", ON_GPUS, ids=[fault.replace(" ", "-") for fault, *_ in ON_GPUS])
def test_a_fault_between_gpus_is_named_and_seen_nowhere_else(planted, fault, part, readings):
    found = [c for c in execute(placement.Placement(), planted(fault))[0] if c.status in RED]
    assert part in parts(found)
    where = {c.where for c in found if c.status is not Status.ERROR}
    assert where == {f"two simulated GPUs, {reading}" for reading in readings}


def test_layers_from_the_file_are_green_and_are_really_read_there(official, qwen2):
    for root in (official, qwen2):
        subject = open_ours(root, "native")
        spread = placement.placed(subject, 1)
        assert "disk" in spread.placement.values() and "cpu" in spread.placement.values()
        found = [*placement.compared(subject, subject.model, spread, "here", 0)]
        assert {c.status for c in found} == {Status.PASS}, [c for c in found if c.status is not Status.PASS]
        assert sum(c.unit == "tensors" for c in found) == len(subject.model.layers) + len(subject.model.mtp)


def test_layers_on_simulated_gpus_are_green_in_every_reading(official, qwen2):
    for root in (official, qwen2):
        found = execute(placement.Placement(), open_ours(root, "native"))[0]
        assert {c.status for c in found} == {Status.PASS}, [c for c in found if c.status is not Status.PASS]
        where = {c.where.removeprefix("two simulated GPUs, ") for c in found if "GPU" in c.where}
        assert "layer 0" in {place.rpartition(", ")[2] for place in where}
        assert root == official or set(GQAPlacement.readings) <= where


def test_what_placement_cannot_look_at_is_vacuous(official):
    subject = OurSubject(official)
    [check] = placement.Placement(effort=1e-9).run(subject)
    assert check.status is Status.VACUOUS and "would be loaded again" in check.note


# ---- new processes ------------------------------------------------------------------------


def test_a_new_process_is_green_and_counts_what_it_compares(official):
    """Two new processes, each of which imports everything: 8 s, and about as many in the test after it."""
    checks, _ = execute(fresh_process.FreshProcess(), OurSubject(official))
    assert {c.status for c in checks} == {Status.PASS}, [c for c in checks if c.status is not Status.PASS]
    assert len(checks) == 6 and all(c.samples for c in checks)


# Over 5 s: new processes import torch and load the model.
def test_state_of_a_first_run_is_named_though_new_processes_have_the_fault_too(tmp_path):
    root = profile.write(tmp_path / "default", "default")
    outcome = selftest.look(BY_NAME["the first run sets a scale for good"], selftest.Bench(tmp_path, "cpu"))
    assert outcome.found.caught and outcome.found.by == "fresh_process" and not outcome.left, outcome.found
    assert fresh_process.PREPARATIONS == [] and root.is_dir()


def test_memory_that_nobody_wrote_is_named(planted):
    subject = planted("counters of picks are never cleared")
    ids = torch.randint(0, 320, (1, 60), generator=torch.Generator().manual_seed(0))
    here = fresh_process.answer(subject, ids, [50, 10])
    assert "unwritten memory, selections" in parts(fresh_process.dirty(subject, ids, [50, 10], here))


def test_a_process_that_ends_badly_says_why(official, monkeypatch):
    subject = OurSubject(official)
    monkeypatch.setattr(fresh_process, "PREPARATIONS", [("os:abort", [])])
    ids = torch.zeros(1, 8, dtype=torch.int64)
    [check] = attempted_all("x", "", "new process", lambda: fresh_process.fresh(subject, ids, [8], {}))
    assert check.status is Status.ERROR and "ended with code" in check.note


def test_other_implementations_are_vacuous():
    class Theirs(Subject):
        can = frozenset({"run"})

    [check] = fresh_process.FreshProcess().run(Theirs())
    assert check.status is Status.VACUOUS and "another implementation" in check.note
