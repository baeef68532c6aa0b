"""Probes on GQA models: green on sound ones, ours and transformers'; each is red on a fault of its own; what does not
apply is left out."""

import functools
import json
from itertools import product

import pytest
import torch

from dsv4.kernels.operations import GQA_OPERATIONS
from dsv4.model.gqa.cache import LayerRows
from dsv4.model.gqa.model import GQAModel
from dsv4.probes import families
from dsv4.probes.audit import audit, open_subject
from dsv4.probes.catalogue.backend_matrix import compared, dtypes_of, judged
from dsv4.probes.faults import Site, profile
from dsv4.probes.oracle.gqa import GQAOracle, other_variant
from dsv4.probes.probe import BESIDE, CATALOGUE, applying, available, execute, left_out, probe_named
from dsv4.probes.report import json_report, markdown
from dsv4.probes.result import Status, worst
from dsv4.probes.scenes.buffers import buffers, poison
from dsv4.probes.scenes.compile_ahead import Piece, pieces, run_piece
from dsv4.probes.scenes.contract_cases import cases_beside, truths
from dsv4.probes.subject import GQA_POINTS
from tests.gqa import oracle as theirs

OF_CACHES = {"sparse_reading", "termination", "chunked_prefill"}  # of GQA models alone, as decoder is
LACKS = {
    "edges",
    "expert_memory",
    "format_decode",
    "index_oracle",
    "mhc",
    "moe_edges",
    "parallel",
    "speculation",
}
APPLY = set(CATALOGUE) - LACKS
# green in `make test` by test_sparse_probes, test_bill_probe, test_grafting and test_tile_probes
GREEN_ELSEWHERE = {*OF_CACHES, "host_tier", "cost_model", "grafting", "fresh_process"}


@pytest.fixture(scope="module")
def profiles(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gqa-profiles")
    for name in profile.GQA_PROFILES:
        profile.write(folder / name, name)
    return folder


@pytest.fixture(scope="module", params=list(profile.GQA_PROFILES))
def checkpoint(request, profiles):
    return profiles / request.param


@pytest.fixture
def site(profiles):
    site = Site(profiles)
    yield site
    site.undo()


def looked(name: str, subject):
    return execute(probe_named(name)(), subject)[0]


def red(name: str, subject) -> set[str]:
    return {c.part for c in looked(name, subject) if c.status in (Status.FAIL, Status.ERROR)}


# ---- what applies -------------------------------------------------------------------------


def test_which_probes_apply(profiles, official):
    ours, old = open_subject(profiles / "qwen2", "files"), open_subject(official, "files")
    assert set(applying(ours, available())) == APPLY
    assert set(applying(old, available())) == {*CATALOGUE, *BESIDE} - {"decoder", *OF_CACHES}
    why = left_out(probe_named("mhc"), ours)
    assert why.startswith("does not apply to GQA models: ") and left_out(probe_named("mhc"), old) is None
    [check], _ = execute(probe_named("mhc")(), ours)
    assert check.status is Status.VACUOUS and check.note == why


def test_the_report_says_what_was_left_out(profiles):
    said = []
    report = audit(open_subject(profiles / "qwen2", "files"), say=said.append)
    assert {s.probe for s in report.sections} == APPLY and set(report.left_out) == set(CATALOGUE) - APPLY
    text, document = markdown.render(report, "x"), json_report.document(report, "x")
    assert "## Left out" in text and "- index_oracle does not apply to GQA models: they have no indexer." in text
    json_report.valid(json.loads(json.dumps(document)), "it")
    assert document["left_out"] == report.left_out and any("does not apply" in line for line in said)


def test_nothing_but_what_does_not_apply_ends_with_2(profiles):
    report = audit(open_subject(profiles / "qwen2", "ours"), ["mhc"])
    assert report.exit_code == 2 and not report.sections and "mhc" in report.left_out


@pytest.mark.parametrize(
    "words",
    [
        "audit bisect {}",
        "audit record {} --out x.safetensors",
        "recall {} --out x",
        "audit run {} --numerics qat",
        "audit run {} --cache fp8",
    ],
)
def test_what_gqa_models_cannot_be_asked_is_one_line(profiles, monkeypatch, capsys, tmp_path, words):
    import sys

    from dsv4.commands import cli

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["dsv4", *words.format(profiles / "qwen2").split()])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    said = capsys.readouterr().err.strip()
    assert stop.value.code == 2 and said.startswith("error: ") and len(said.splitlines()) == 1 and "GQA" in said
    assert not list(tmp_path.iterdir())


# ---- the oracle, and subjects -------------------------------------------------------------


@pytest.mark.parametrize("name", list(theirs.CONFIGS))
def test_the_oracle_is_transformers_in_float64(tmp_path, name):
    model = theirs.randomised(theirs.CONFIGS[name])
    folder = theirs.save(model, theirs.CONFIGS[name], tmp_path / "c")
    ids = torch.randint(0, 384, (1, 200), generator=torch.Generator().manual_seed(2))
    wanted = theirs.logits(model.double(), ids)
    found = GQAOracle.open(folder).logits(ids)
    assert (found - wanted).norm() / wanted.norm() < 5e-6  # their rotation stays fp32


def test_subjects_give_the_same_points(checkpoint):
    ids = torch.randint(0, 320, (2, 90), generator=torch.Generator().manual_seed(4))
    ours, other = (
        open_subject(checkpoint, kind).run(ids, (40, 30, 1, 19), tuple(GQA_POINTS)) for kind in ("ours", "transformers")
    )
    assert set(ours.points) == set(other.points) and len(ours.points) == 3 * len(GQA_POINTS)
    for key, value in ours.points.items():
        assert value.shape == other.points[key].shape and (value - other.points[key]).norm() / value.norm() < 1e-5, key
    assert (ours.logits - other.logits).norm() / ours.logits.norm() < 1e-5


def test_one_layer_alone_is_the_layer_in_the_model(checkpoint):
    subject, ids = (
        open_subject(checkpoint, "ours"),
        torch.randint(0, 320, (1, 60), generator=torch.Generator().manual_seed(5)),
    )
    whole = subject.run(ids, (), tuple(GQA_POINTS)).points
    alone = subject.attention(1, whole[1, "attn_in"], ids, (20, 40), ("keys", "values", "q_after_rope")).points
    for (i, point), value in alone.items():
        assert torch.allclose(value, whole[i, point], atol=1e-5), point


def test_rows_of_ragged_batches_hold_nothing_beyond_their_end(profiles):
    ids = torch.randint(0, 320, (2, 30), generator=torch.Generator().manual_seed(6))
    ids[1, 12:] = -1
    found = open_subject(profiles / "mistral", "ours").run(ids, (20, 10), ("keys", "streams"))
    assert found.points[0, "keys"][1, 12:].isnan().all() and not found.points[0, "keys"][1, :12].isnan().any()
    assert found.logits[1, 12:].isnan().all() and found.points[2, "streams"][1, 12:].isnan().all()


# ---- green --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sound(profiles):
    """Function: the subject of a profile in some numerics, loaded once; no test changes it."""
    return functools.cache(lambda name, numerics: open_subject(profiles / name, "ours", numerics))


@pytest.mark.few("probe", probe=sorted(APPLY - GREEN_ELSEWHERE))
@pytest.mark.parametrize("probe", sorted(APPLY))
@pytest.mark.parametrize(
    "name,numerics", [(name, "fp32") for name in profile.GQA_PROFILES] + [("qwen2", "native"), ("mistral", "native")]
)
def test_green_on_sound_models(sound, name, numerics, probe):
    checks = looked(probe, sound(name, numerics))
    bad = [c for c in checks if c.status is not Status.PASS][:2]
    windows = name in ("mistral", "yarn")  # in every layer and in some: nothing there, or little, is read sparsely
    if windows and probe in {*OF_CACHES, "host_tier"}:
        assert worst(checks) in (Status.PASS, Status.VACUOUS), bad
    else:
        assert worst(checks) is Status.PASS, bad
        assert all(c.samples > 0 for c in checks)


@pytest.mark.few(checkpoint=["yarn"])  # scaled rotation, and windows in some layers
def test_green_on_transformers(checkpoint):
    subject = open_subject(checkpoint, "transformers")
    for name in ("load_ledger", "config_ledger", "rope", "decoder", "schedules"):
        checks = looked(name, subject)
        assert worst(checks) is Status.PASS, (name, [c for c in checks if c.status is not Status.PASS][:2])


# ---- red, where no planted fault of the catalogue asks this probe first ----------------------


def test_a_key_that_changes_the_model_and_is_not_read_is_red(profiles, site, monkeypatch):
    subject = open_subject(profiles / "llama3", "ours")
    real = type(subject.config).from_dict.__func__
    import dataclasses

    site.patch(
        type(subject.config),
        "from_dict",
        classmethod(lambda cls, raw: dataclasses.replace(real(cls, raw), rms_norm_eps=1e-6)),
    )
    bad = [c for c in looked("config_ledger", open_subject(profiles / "llama3", "ours")) if c.status is Status.FAIL]
    assert {"rms_norm_eps"} <= {c.where for c in bad} and any(c.name == "key is read" for c in bad)


def test_schedules_see_a_cut_that_is_forgotten(profiles, site):
    """The second step of a text does not see the first."""

    def forget(real):
        return lambda q, keys, values, start, *rest: real(
            q, keys, values.clone().mul_((start[0] == 0).float()), start, *rest
        )

    site.kernel("grouped_attention", forget)
    assert red("schedules", open_subject(profiles / "qwen2", "ours")) == {"caches"}


def test_memory_map_sees_rows_that_share_memory(profiles, site):
    def shared(self, plan, device, block=128):
        real(self, plan, device, block)
        self.tensors["values"] = self.values = self.keys

    real = site.patch(LayerRows, "__init__", shared)
    found = [c for c in looked("memory_map", open_subject(profiles / "qwen2", "ours")) if c.status is Status.FAIL]
    assert "rows that share memory" in {c.name for c in found}


def test_memory_map_sees_rows_beyond_2_to_the_31_in_the_wrong_place(profiles, site):
    def wrapped(real):
        return lambda *given: real(*given[:-1], given[-1] % (1 << 20))

    site.kernel("rotary_rows", wrapped)
    assert "keys" in red("memory_map", open_subject(profiles / "mistral", "ours"))


def test_captured_sees_a_step_that_follows_the_host(profiles, site):
    """The captured step rotates at the positions of the first replay."""
    first = {}

    def captured(model, step, cache):
        key = (step.B, step.T)
        step._cis["main"] = first.setdefault(key, step.cis("main"))
        return real(model, step, cache)

    real = site.patch(GQAModel, "captured", captured)
    assert any("captured step" in part for part in red("captured", open_subject(profiles / "llama3", "ours")))


def test_isolation_sees_state_that_stays(profiles, site):
    """Every request after the first of a model begins one token late."""
    seen = []

    def new_cache(model, *args, **more):
        cache = real(model, *args, **more)
        seen.append(cache)
        if len(seen) > 2:
            cache.layers[0].keys.fill_(0.1 * len(seen))
            cache.layers[0].values[..., -1, :] = 0.1
        return cache

    real = site.patch(GQAModel, "new_cache", new_cache)

    def reads(real_op):
        return lambda q, keys, values, start, *rest: (
            real_op(q, keys, values, start, *rest) + keys[:, :1, -1:, :1].mean().to(q.dtype)
        )

    site.kernel("grouped_attention", reads)
    assert "state left behind" in red("isolation", open_subject(profiles / "qwen2", "ours"))


# ---- what the probes are made of ----------------------------------------------------------


@pytest.mark.parametrize("name", sorted(GQA_OPERATIONS))
def test_every_operation_has_cases_that_run_and_that_a_changed_kernel_fails(profiles, name):
    subject, run, here = open_subject(profiles / "qwen2", "ours", "native"), 0, torch.device("cpu")
    reference = GQA_OPERATIONS[name].implementations["reference"]

    def changed(*given):
        match name:
            case "choose_blocks":
                return (reference(*given) + 1).int()
            case "fetch":  # a slot off by one
                return torch.where((slots := reference(*given)) < 0, slots, slots + 1)
            case "rms_norm":
                return reference(*given) * 1.5
        place = 2 if "attention" in name else 0  # what every result depends on
        return reference(*given[:place], given[place] * 1.5, *given[place + 1 :])

    for dtype, (function, status) in product(
        dtypes_of(subject.model.numerics), ((reference, Status.PASS), (changed, Status.FAIL))
    ):
        given = name, subject.config, dtype, 0
        checks = [judged(name, function, truth, dtype, here) for truth in truths(*given)]
        checks += [compared(name, function, reference, case, dtype, here) for case in cases_beside(*given)]
        run += len(checks)
        assert all(c.status is status for c in checks), [c for c in checks if c.status is not status]
    assert run >= 12


def test_kernels_are_compiled_ahead_at_its_widths(profiles):
    config = open_subject(profiles / "mistral", "files").config
    named = {piece.name for piece in pieces((torch.float32,), families.of(config).tables())}
    assert named == {*GQA_OPERATIONS, "linears"}
    # forms of `training` run on a CPU
    assert run_piece(config, Piece("rotary_rows", torch.float32, 1), "training", "cpu", 0) >= 2


def test_buffers_know_whose_bytes_are_whose(profiles):
    subject = open_subject(profiles / "yarn", "ours")
    cache = subject.model.new_cache(2, 140)
    subject.model.append(torch.randint(0, 320, (2, 9)), cache, n_new=[9, 4])
    poison(subject, cache, cache.lengths)
    for buffer in buffers(subject, cache):
        held = ~buffer.tensor.isnan()
        assert held[0, :, :9].all() and held[1, :, :4].all() and int(held.sum()) == 13 * held.shape[1] * held.shape[3]
        assert torch.equal(
            buffer.values(buffer.rows(1, torch.tensor([3]))), buffer.tensor[1, :, 3].flatten()[None].double()
        )
        (a, b), (c, _) = buffer.spans(0)[0], buffer.spans(1)[0]
        assert b - a == buffer.tensor[0].nbytes and c == b


def test_other_variants_differ_from_the_models_own(profiles):
    oracle = GQAOracle.open(profiles / "llama3")
    assert not torch.equal(other_variant(oracle, rope_type="default"), oracle.shape.frequencies)
    assert torch.equal(other_variant(oracle), oracle.shape.frequencies)
