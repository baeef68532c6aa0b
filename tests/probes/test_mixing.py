"""The mixing matrices of hyper-connections on prompts: the table of the probe `mhc` against sums made here,
in numpy."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from dsv4.probes.audit import audit, open_subject
from dsv4.probes.faults import Site, catalogue, profile
from dsv4.probes.probe import execute, probe_named
from dsv4.probes.report import json_report, markdown
from dsv4.probes.result import Status
from dsv4.probes.scenes import mixing
from dsv4.probes.subjects.ours import OurSubject


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    """The checkpoint that faults are planted in: its iterations have not converged after 20."""
    return profile.write(tmp_path_factory.mktemp("profile") / "default", "default")


@pytest.fixture(scope="module")
def subject(planted):
    return OurSubject(planted, "fp32")


@pytest.fixture(scope="module")
def checks(subject):
    return {(c.where, c.name): c for c in mixing.runtime(subject, 0)}


def seen(subject) -> list[tuple[np.ndarray, np.ndarray]]:
    """(streams, matrices) of each connection for the probe's prompt, by hooks on the modules."""
    found, [prompt] = [], mixing.prompts(subject, 0)
    connections = [c for layer in subject.model.layers for c in (layer.hc_attn, layer.hc_ffn)]
    hooks = [
        c.register_forward_hook(lambda _, given, out, i=i: found.append((i, given[0], out[2])))
        for i, c in enumerate(connections)
    ]
    subject.model.append(prompt, subject.model.new_cache(1, prompt.shape[1]), prompt=True)
    for hook in hooks:
        hook.remove()
    join = lambda i, place: np.concatenate([call[place].double().numpy() for call in found if call[0] == i])
    return [(join(i, 1), join(i, 2)) for i in range(len(connections))]


def naive(logits: np.ndarray, iterations: int, eps: float) -> np.ndarray:
    """One token's matrix [n, n], element by element; C[j][k], rows are sums over k."""
    n = len(logits)
    C = [[np.exp(x - max(row)) for x in row] for row in logits.tolist()]
    C = [[x / sum(row) + eps for x in row] for row in C]
    for i in range(iterations):
        if i:
            C = [[x / (sum(row) + eps) for x in row] for row in C]
        down = [sum(C[j][k] for j in range(n)) + eps for k in range(n)]
        C = [[C[j][k] / down[k] for k in range(n)] for j in range(n)]
    return np.array(C)


def test_sums_are_those_of_the_matrices_that_ran(subject, checks):
    found = seen(subject)
    assert len(found) == 2 * subject.config.num_hidden_layers
    for i in range(subject.config.num_hidden_layers):
        where = f"layer {i}"
        combs = np.concatenate([comb for _, comb in found[2 * i : 2 * i + 2]])
        assert checks[where, mixing.ROWS].measured == pytest.approx(np.abs(combs.sum(2) - 1).max(), rel=1e-9)
        off = float(checks[where, mixing.COLUMNS].note.rpartition(" ")[2])
        assert off == pytest.approx(np.abs(combs.sum(1) - 1).max(), rel=1e-2) and 5e-7 < off < 1.3e-6
        streams = found[2 * i][0]
        assert checks[where, mixing.NORM].measured == pytest.approx(np.sqrt((streams**2).mean()))


def test_what_more_iterations_leave(subject, checks):
    """Of every token of a layer, element by element."""
    c, i = subject.config, 1
    n, eps = c.hc_mult, c.hc_eps
    farthest = dict.fromkeys((20, 40, 100), 0.0)
    for name, (streams, _) in zip(mixing.SUBLAYERS, seen(subject)[2 * i : 2 * i + 2]):
        leaves = ("fn", "base", "scale")
        fn, base, scale = (subject.weight(f"layers.{i}.{name}_{leaf}").double().numpy() for leaf in leaves)
        x = streams.reshape(len(streams), -1)
        m = x @ fn.T / np.sqrt((x**2).mean(1, keepdims=True) + c.rms_norm_eps)
        logits = (m[:, 2 * n :] * scale[2] + base[2 * n :]).reshape(-1, n, n)
        for one in logits:
            for count in farthest:
                farthest[count] = max(farthest[count], np.abs(naive(one, count, eps).sum(1) - 1).max())
    for count, wanted in farthest.items():
        assert checks[f"layer {i}", f"{mixing.OFF}, {count} iterations"].measured == pytest.approx(wanted, rel=1e-6)
    assert farthest[20] > 2 * farthest[40] > 4 * farthest[100]


def test_fused_kernels_are_seen_once(subject, checks, monkeypatch):
    """Where a backend makes the matrix together with what is beside it, the same matrices are found."""
    monkeypatch.setattr(subject.model.op, "fused", frozenset(mixing.NAMES[1:]))
    called = []
    real = subject.model.op.mhc_post_pre_norm
    monkeypatch.setattr(subject.model.op, "mhc_post_pre_norm", lambda *a: called.append(1) or real(*a))
    found = {(c.where, c.name): c for c in mixing.runtime(subject, 0)}
    assert called and found.keys() == checks.keys() and {c.status for c in found.values()} == {Status.PASS}
    assert all(c.samples == checks[key].samples for key, c in found.items())


def test_calls_that_cannot_be_told_apart_are_vacuous(subject, monkeypatch):
    monkeypatch.setattr(mixing, "watched", lambda *_: [(torch.ones(3), torch.ones(3))] * 3)
    [check] = mixing.runtime(subject, 0)
    assert check.status is Status.VACUOUS and "3 calls" in check.note


def test_the_table_is_in_every_form_of_the_report(planted):
    report = audit(open_subject(planted, "ours"), ["mhc"])
    [section], L = report.sections, report.sections[0].text.count("\n| ") - 2
    assert report.exit_code == 0 and L == 5 and "| layer | \\|X\\| | columns off 1 |" in section.text
    assert "20 iterations | 40 iterations | 100 iterations" in section.text
    assert section.text in markdown.render(report, "x")
    [written] = json_report.document(report, "x")["sections"]
    assert written["text"] == section.text
    assert sum(check["name"].startswith(mixing.OFF) for check in written["checks"]) == 3 * L


def test_text_is_read_where_there_is_a_tokenizer():
    demo = Path(__file__).resolve().parents[2] / "demo"
    found = mixing.prompts(OurSubject(demo, "fp32"), 0)
    assert [p.shape for p in found] == [(1, mixing.TOKENS)] * 2 and not torch.equal(*found)


@pytest.mark.parametrize(
    "fault, name, places",
    [
        ("sinkhorn ends on rows", mixing.COLUMNS, [f"layer {i}" for i in range(5)]),
        ("one round fewer in one layer", mixing.MATRIX, ["layer 1, hc_ffn"]),
    ],
    ids=lambda value: value.replace(" ", "-") if isinstance(value, str) else "",
)
def test_a_fault_is_named_in_its_layer(planted, tmp_path, fault, name, places):
    mutation = next(m for m in catalogue() if m.name == fault)
    site = Site(shutil.copytree(planted, tmp_path / "copy"))
    try:
        mutation.plant(site)
        broken = OurSubject(site.checkpoint, "fp32")
        for change in site.loaded:
            change(broken)
        checks, _ = execute(probe_named("mhc")(), broken)
    finally:
        site.undo()
    assert [c.at for c in checks if c.status is Status.FAIL and c.name == name] == places
    assert not any(c.status is Status.ERROR for c in checks)
