"""Probes and measurements of a model that ranks share, against those of the whole one."""

import pytest
import torch

from dsv4.errors import InputError, RankLost
from dsv4.model import ranks as of_process
from dsv4.model.load import load_model
from dsv4.model.ranks import ALONE, Ranks
from dsv4.parallel.threads import together
from dsv4.probes import audit as audits
from dsv4.probes.audit import audit, open_subject
from dsv4.probes.compare import tokens
from dsv4.probes.joint import agreed, joint
from dsv4.probes.measure.base.variants import csa_variants, policy_variants
from dsv4.probes.measure.fidelity import findability
from dsv4.probes.measure.recall import measure as recall
from dsv4.probes.measure.recall.settings import settle
from dsv4.probes.probe import Probe, execute
from dsv4.probes.report import markdown
from dsv4.probes.result import Check, Status
from dsv4.probes.subject import GQA_POINTS, POINTS
from dsv4.probes.subjects.files import FilesSubject
from dsv4.probes.subjects.gqa import OurGQASubject
from dsv4.probes.subjects.ours import OurSubject
from tests.parallel.held import alike, close
from tests.parallel.test_ranks import DEMO

GQA = DEMO.parent / "demo_gqa"
KINDS = {"deepseek_v4": (OurSubject, DEMO, POINTS), "gqa": (OurGQASubject, GQA, GQA_POINTS)}
TINY = DEMO.parent / "tests" / "golden" / "tiny_fp32"
QUICK = ["config_ledger", "dtype_ledger", "memory_map"]


def subjects(kind: str, numerics: str = "fp32", by_expert: bool = False, size: int = 2):
    make, path, _ = KINDS[kind]
    open_one = lambda ranks: make(path, numerics, ranks=Ranks(ranks.rank, ranks.size, ranks.group, by_expert))
    return lambda then: together(size, lambda ranks: then(open_one(ranks)))


@pytest.mark.parametrize("kind, by_expert", [("deepseek_v4", False), ("deepseek_v4", True), ("gqa", False)])
def test_weights_of_all_ranks_are_the_file_s(kind, by_expert):
    files = FilesSubject(KINDS[kind][1])
    names = [n for n in files.files.sources if n.startswith(("layers.0.", "model.layers.0.")) or n.count(".") == 1]
    names += ["model.embed_tokens.weight"] * (kind == "gqa")

    def check(subject):
        for name in names:
            if not name.endswith(".scale"):
                wanted = files.weight(name)
                assert torch.equal(subject.weight(name).reshape(wanted.shape), wanted), name
        with pytest.raises(InputError, match="holds no parameter for 'nothing'"):
            subject.weight("nothing")

    subjects(kind, by_expert=by_expert)(check)


@pytest.mark.parametrize("kind", KINDS)
def test_points_of_all_ranks_are_the_whole_model_s(kind):
    make, path, points = KINDS[kind]
    whole = make(path)
    ids, want = tokens(whole, 150, 0, rows=2), [p for p in points if p not in ("selection", "index_scores")]
    wanted = whole.run(ids, (100, 50), want)
    for found in subjects(kind)(lambda subject: subject.run(ids, (100, 50), want)):
        close(found.logits, wanted.logits)
        assert found.points.keys() == wanted.points.keys() and len(found.points) > len(want)
        for key, value in wanted.points.items():
            held = ~value.isnan()
            assert found.points[key].shape == value.shape and torch.equal(~found.points[key].isnan(), held), key
            close(found.points[key][held], value[held])


@pytest.mark.parametrize("numerics", ["fp32", "qat"])
def test_an_audit_of_ranks_has_the_verdicts_of_one_process(numerics):
    names = [*QUICK, "fresh_process"]
    verdicts = lambda report: {
        (s.probe, c.name, c.where): c.status for s, c in report.checks if s.probe != "fresh_process"
    }
    whole = audit(OurSubject(DEMO, numerics), QUICK)
    found = subjects("deepseek_v4", numerics)(lambda subject: audit(subject, names))
    for report in found:
        assert verdicts(report) == verdicts(whole) and report.exit_code == whole.exit_code == 0
        assert (
            list(report.left_out) == ["fresh_process"] and "would hold the whole model" in report.left_out.popitem()[1]
        )
        said = "2 ranks, experts by width, exchanging by memory of this process"
        assert said in report.title and report.provenance["ranks"] == said and said in markdown.render(report, "x")
    assert "ranks" not in whole.provenance


def test_a_probe_reads_all_weights_where_experts_are_apart():
    (first, _) = subjects("deepseek_v4", by_expert=True)(lambda subject: audit(subject, ["load_ledger"]))
    (section,) = first.sections
    assert section.status is Status.PASS, [c for c in section.checks if c.status is not Status.PASS]
    held = next(c for c in section.checks if c.name.startswith("held value is the file's"))
    assert held.samples == len([n for n in FilesSubject(DEMO).files.sources if not n.endswith(".scale")])
    assert any(c.note.startswith("rank 1") and "an expert of another rank" in c.note for c in section.checks)


def test_what_one_rank_finds_is_in_the_report_of_all():
    fine, bad = Check("a", Status.PASS, "x"), Check("a", Status.FAIL, "x", note="off")
    more = Check("b", Status.WARN, measured=float("inf"))
    found = together(3, lambda ranks: joint(ranks, [fine, [fine, bad, fine][ranks.rank], *[more] * (ranks.rank == 2)]))
    assert found[0] == found[1] == found[2]
    assert [(c.name, c.status, c.note) for c in found[0]] == [
        ("a", Status.PASS, ""),
        ("a", Status.FAIL, "rank 1; off"),
        ("b", Status.WARN, "rank 2"),
    ]
    assert joint(ALONE, [fine, bad]) == [fine, bad]
    assert together(2, lambda ranks: agreed(ranks, ranks.rank == 0)) == [True, True]


def test_a_lost_rank_is_no_finding():
    class Lost(Probe):
        name, title = "lost", "a rank is lost"

        def run(self, subject):
            raise RankLost("rank 1 of 2 died")

    with pytest.raises(RankLost):
        execute(Lost(), FilesSubject(DEMO))


def test_other_subjects_are_refused(monkeypatch):
    monkeypatch.setattr(of_process, "_here", Ranks(0, 2))
    for kind in ("transformers", "files", "x.safetensors"):
        with pytest.raises(InputError, match="given to 2 ranks, which share this project's model only"):
            open_subject(DEMO, kind)
    with pytest.raises(InputError, match="training backend was asked of 2 ranks"):
        open_subject(DEMO, "ours", backend="training")
    assert audits.here().size == 2


class Words:
    """A text of token ids."""

    def __init__(self, ids):
        self.ids = ids


def test_recall_of_ranks_is_that_of_one_process():
    whole = OurSubject(DEMO)
    ids = tokens(whole, 4096, 0)[0].numpy()
    settings = settle(whole.config, [512], [16], 32, 1, 0, 0, False)
    measured = lambda subject: recall.indexer(subject, settings, Words(ids), lambda text: None, lambda n: None)
    wanted = measured(whole)
    for rows in subjects("deepseek_v4")(measured):
        assert alike(rows, wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_fidelity_of_ranks_is_that_of_one_process(kind):
    whole = load_model(KINDS[kind][1], numerics="fp32", backend="reference")
    ids = torch.randint(3, 4000, (1, 512), generator=torch.Generator().manual_seed(0))
    variants = csa_variants(whole, [8], 600) if kind == "deepseek_v4" else policy_variants(["page-bound"], [128], None)
    measured = lambda model: findability.measure(model, variants, ids, [512], 16, 128)
    wanted = measured(whole)
    one = lambda ranks: load_model(KINDS[kind][1], numerics="fp32", backend="reference", ranks=ranks)
    first, second = together(2, lambda ranks: measured(one(ranks)))
    assert first == second and len(first) == len(wanted) > 2
    assert alike(first, wanted)


# Over 5 s: the probes that read what passes and steps leave cut. `sampling` replaces a function of the process, in
# which these ranks are threads.
@pytest.mark.parametrize("name", ["verification", "speculation", "grafting", "draft_depth"])
def test_probes_of_what_ranks_keep_cut_are_green(name):
    open_one = lambda ranks: OurSubject(TINY, ranks=ranks)
    for report in together(2, lambda ranks: audit(open_one(ranks), [name])):
        assert report.exit_code == 0 and [c.note for _, c in report.checks if c.status is Status.ERROR] == []
