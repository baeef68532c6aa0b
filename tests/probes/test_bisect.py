"""Bisection names layer, point and module of a planted fault, proves it by a swap, and finds nothing in a sound
model."""

import pytest
import torch

from dsv4.probes.blame.bisect import Bisection, reference_of
from dsv4.probes.blame.bisect_report import sentence, to_report
from dsv4.probes.blame.by_layer import differences, expected, rounded
from dsv4.probes.blame.confirm import Confirmation
from dsv4.probes.blame.swaps import swapped
from dsv4.probes.blame.swaps.ours import OurSwap
from dsv4.probes.compare import oracle_of, tokens
from dsv4.probes.result import Status
from dsv4.probes.subject import POINTS
from dsv4.probes.subjects.ours import OurSubject
from tests import checkpoints

T = 300  # two HCA entries, 75 CSA entries of which 6 are selected


def bisected(subject, other=None):
    """(pass, verdict or None)."""
    ids = getattr(subject, "ids", getattr(other, "ids", tokens(subject, T, 0)))
    found = Bisection(subject, reference_of(subject, other), ids).run()
    return found, Confirmation(found).verdict() if found.fault else None


# ---- faults in this project's model ------------------------------------------------------


class Other:
    """Operations of which some are others."""

    def __init__(self, op, **others):
        self.__dict__ |= others
        self._op = op

    def __getattr__(self, name):
        return getattr(self._op, name)


def sink_ignored(layers):
    attn, attend = layers[1].attn, layers[1].attn.op.sparse_attention
    attn.op = Other(
        attn.op, sparse_attention=lambda q, w, wi, e, ei, sink, *rest: attend(q, w, wi, e, ei, sink - 1e9, *rest)
    )


def sink_not_loaded(layers):
    layers[4].attn.attn_sink.data.zero_()


def rope_base(layers):
    layers[3].attn.base = layers[3].attn.compressor.base = "main"


def random_like(weight):
    return torch.randn(weight.shape, generator=torch.Generator().manual_seed(0)) * weight.float().std()


def indexer_compressor(layers):
    weight = layers[3].attn.indexer.compressor.wkv_gate.weight
    weight.data = random_like(weight)


def lowest_scores(layers):
    indexer, topk = layers[3].attn.indexer, layers[3].attn.indexer.op.topk_entries
    flipped = lambda scores, k: topk(torch.where(scores == -torch.inf, scores, -scores), k)
    indexer.op = Other(indexer.op, topk_entries=flipped)


def comb(layers):
    layers[2].hc_attn.register_forward_hook(lambda _, args, out: (out[0], out[1], out[2].transpose(1, 2).contiguous()))


def comb_everywhere(layers):
    op = layers[2].op
    layers[2].op = Other(op, mhc_post=lambda out, s, post, c: op.mhc_post(out, s, post, c.transpose(1, 2).contiguous()))


def gate_bias(layers):
    layers[4].ffn.gate.bias.data.zero_()


def clamp(layers):
    layers[3].ffn.experts.limit = 1e9


def kv_norm(layers):
    layers[2].attn.kv_norm.forward = lambda x: x


def entries_half(layers):
    layers[4].attn.compressor.register_forward_hook(lambda _, args, out: args[2].entries.buffer.mul_(0.5))


def output_projection(layers):
    wo_a, real = layers[0].attn.wo_a, layers[0].attn.wo_a.forward
    wo_a.forward = lambda x: real(x.flip(1))


FAULTS = {  # fault → layer, point, module, words of the reason
    sink_ignored: (1, "attn_out", "layers.1.attn", "sinks are ignored"),
    sink_not_loaded: (4, "attn_out", "layers.4.attn.attn_sink", "not the file's: layers.4.attn.attn_sink"),
    rope_base: (3, "q_after_rope", "layers.3.attn.rope", "base of the other layer kind"),
    indexer_compressor: (
        3,
        "index_keys",
        "layers.3.attn.indexer.compressor",
        "layers.3.attn.indexer.compressor.wkv.weight",
    ),
    lowest_scores: (3, "selection", "layers.3.attn.indexer", ""),
    comb: (2, "ffn_out", "layers.2.hc_attn", "comb of hc_attn is transposed"),
    comb_everywhere: (2, "ffn_out", "layers.2.hc", "comb of hc_attn is transposed"),
    gate_bias: (4, "ffn_out", "layers.4.ffn.gate", "layers.4.ffn.gate.bias"),
    clamp: (3, "ffn_out", "layers.3.ffn.experts", "clamp is missing"),
    kv_norm: (2, "kv_window", "layers.2.attn.kv_norm", "kv_norm is skipped"),
    entries_half: (4, "compressed_kv", "layers.4.attn.compressor", ""),
    output_projection: (0, "attn_out", "layers.0.attn.wo_a", ""),
}


@pytest.fixture(scope="module")
def clamped(tmp_path_factory):
    """A checkpoint whose clamps take part: values of this size stay below 10."""
    raw = checkpoints.SMALL | {"swiglu_limit": 0.5}
    return checkpoints.write_official(tmp_path_factory.mktemp("clamped") / "official", raw)


@pytest.mark.few("plant", plant=[sink_not_loaded, lowest_scores])
@pytest.mark.parametrize("plant", FAULTS, ids=lambda f: f.__name__)
def test_a_planted_fault_is_located_and_confirmed(clamped, plant):
    subject = OurSubject(clamped)
    plant(subject.model.layers)
    layer, point, module, why = FAULTS[plant]
    found, verdict = bisected(subject)
    assert (verdict.first.layer, verdict.first.point, verdict.module) == (layer, point, module)
    assert verdict.confirmed and why in verdict.why and verdict.first.ratio > 10
    before, after, floor = verdict.after["logits"]
    assert after <= floor and max(b for b, _, _ in verdict.after.values()) > 2 * floor
    assert {r.index for r in found.layers if any(d.found for d in r.found)} == {layer}, (
        "a fault shows in its own layer only"
    )
    report = to_report(found, verdict, 0.0)
    assert report.exit_code == 1 and {s.status for s in report.sections} == {Status.FAIL}
    assert module in sentence(found, verdict) and "confirmed" in sentence(found, verdict)


@pytest.mark.few("numerics", numerics=["native"])
@pytest.mark.parametrize("plant", [rope_base, indexer_compressor, kv_norm, output_projection], ids=lambda f: f.__name__)
@pytest.mark.parametrize("numerics", ["native", "qat"])
def test_a_planted_fault_is_located_in_rounded_numerics(clamped, plant, numerics):
    subject = OurSubject(clamped, numerics)
    plant(subject.model.layers)
    layer, point, module, _ = FAULTS[plant]
    _, verdict = bisected(subject)
    assert (verdict.first.layer, verdict.first.point, verdict.module, verdict.confirmed) == (layer, point, module, True)


@pytest.mark.few(numerics=["qat"])
@pytest.mark.parametrize("numerics", ["fp32", "native", "qat", "qat:fp32"])
def test_a_sound_model_is_within_the_floor(official, numerics):
    found, verdict = bisected(OurSubject(official, numerics))
    assert verdict is None and len(found.layers) == 5 and found.head is not None
    error, floor = found.logits.at(0.5)
    assert all(d.ratio < 0.95 for r in found.layers for d in r.found) and error < floor
    assert {d.point for r in found.layers for d in r.found} == set(POINTS)
    assert to_report(found, verdict, 0.0).exit_code == 0


def test_the_final_norm_is_named(official):
    subject = OurSubject(official)
    subject.model.norm.weight.data *= 1.01
    _, verdict = bisected(subject)
    assert (verdict.first.layer, verdict.module, verdict.confirmed) == (
        -1,
        "norm",
        True,
    ) and "norm.weight" in verdict.why


def test_the_embedding_is_named(official):
    subject = OurSubject(official)
    subject.model.embed.weight.data *= 1 + 0.1 * torch.randn(subject.model.embed.weight.shape)
    _, verdict = bisected(subject)
    assert (verdict.first.point, verdict.module, verdict.confirmed) == ("attn_in", "embed", True)


def test_two_faults_are_told_apart(official):
    """The swap of the first leaves the second, and the verdict says where that begins."""
    subject = OurSubject(official)
    kv_norm(subject.model.layers)
    gate_bias(subject.model.layers)
    _, verdict = bisected(subject)
    assert verdict.module == "layers.2.attn.kv_norm" and "what is left after it begins in layer 4" in verdict.note


def test_a_difference_that_no_swap_explains_is_not_confirmed(official, monkeypatch):
    """Damage outside every module: between two layers, in whole runs only."""
    subject, real = OurSubject(official), OurSubject.stream

    def stream(self, ids, want, see):
        hook = self.model.layers[2].register_forward_hook(lambda _, args, out: out * (1 + 0.1 * torch.randn(out.shape)))
        try:
            return real(self, ids, want, see)
        finally:
            hook.remove()

    monkeypatch.setattr(OurSubject, "stream", stream)
    found, verdict = bisected(subject)
    assert (verdict.first.layer, verdict.first.point) == (2, "streams") and not verdict.confirmed
    assert "not confirmed" in verdict.note and "not confirmed" in sentence(found, verdict)
    [check] = [c for c in to_report(found, verdict, 0.0).sections[0].checks if "confirmed" in c.name]
    assert check.status is Status.WARN


def test_nothing_stays_swapped(official):
    subject = OurSubject(official)
    kept = [dict(vars(m)) for m in subject.model.modules()]
    parameters = [p.clone() for p in subject.model.parameters()]
    layer = oracle_of(subject).layer(1)
    for module in OurSwap.MODULES:
        with swapped(subject, 1, module, layer, tokens(subject, 8, 0)):
            pass
    assert all(vars(m) == before for m, before in zip(subject.model.modules(), kept))
    assert all(torch.equal(a, b) for a, b in zip(subject.model.parameters(), parameters))


# ---- selection ----------------------------------------------------------------------------


def test_ties_at_the_boundary_are_no_difference(official):
    """Any choice among equal scores is right; one below them is not."""
    subject = OurSubject(official)
    oracle = oracle_of(subject)
    ids = tokens(subject, 60, 0)
    points = {
        p: v for (i, p), v in subject.run(ids, want=("attn_in", "index_scores", "selection")).points.items() if i == 1
    }
    scores = points["index_scores"].clone()
    scores[:, 59] = 1.0
    scores[:, 59, 14] = 0.5
    layer = oracle.layer(1)

    def ratio(picks):
        chosen = torch.nn.functional.pad(points["selection"], (0, 1), value=-1)  # an implementation may pad
        chosen[:, 59] = torch.tensor([*picks, *[-1] * (7 - len(picks))])
        given = points | {"index_scores": scores, "selection": chosen}
        exact, noisy = (expected(l, None, ids, given) for l in (layer, rounded(layer, "fp32")))
        return next(
            d for d in differences(1, given, exact, noisy, subject.config, "fp32") if d.point == "selection"
        ).ratio

    assert ratio([0, 1, 2, 3, 4, 5]) == ratio([13, 12, 11, 10, 9, 8]) == 0
    for wrong in (
        [0, 1, 2, 3, 4, 14],
        [0, 1, 2, 3, 4, -1],
        [0, 1, 2, 3, 4, 99],
        [0, 1, 2, 3, 4, 4],
        [0, 1, 2, 3, 4, 5, 5],
    ):
        assert ratio(wrong) > 1
