"""The measurements of the trained demo: bounds, the window-only ablation, answers by teacher forcing, attention
mass."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from dsv4 import load_model
from scripts.training import evaluation
from scripts.training.evaluation import (
    Asked,
    Limits,
    answered,
    lower_bound,
    reach,
    replies,
    text_rows,
    watched,
    window_only,
)
from tests.checkpoints import SMALL, write_dense

LIMITS = Limits(tokens=256, chunk=32, rows=2, loss_tokens=600)
CONFIG = SMALL | {"index_topk": 4}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return load_model(write_dense(tmp_path_factory.mktemp("evaluation") / "dense", CONFIG), numerics="fp32")


def some_ids(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, CONFIG["vocab_size"], shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    "hits, trials, bound",
    [(100, 100, 0.9638), (95, 100, 0.8872), (0, 10, 0.0), (10, 10, 0.6915), (1, 10, 0.0025), (400, 400, 0.9908)],
)
def test_lower_bound(hits, trials, bound):
    assert lower_bound(hits, trials) == pytest.approx(bound, abs=5e-5)


def test_window_only_cuts_the_compressed_branches_off_and_restores_them(model):
    ids = some_ids(1, 200)
    other = ids.clone()
    other[0, 0] = (other[0, 0] + 1) % CONFIG["vocab_size"]
    before = model(ids)
    with pytest.raises(ZeroDivisionError), window_only(model):
        cut, moved = model(ids), model(other)
        raise ZeroDivisionError
    first_entry = min(r for r in CONFIG["compress_ratios"] if r) - 1
    changed = (cut - before).abs().amax(-1)[0]
    # BLAS may round products of other shapes otherwise
    assert changed[:first_entry].max() < 1e-5 < 0.1 < changed[first_entry]
    assert (changed > 1e-3)[CONFIG["sliding_window"] :].all()
    assert not torch.equal(cut[0, : reach(model) // 2], moved[0, : reach(model) // 2])
    moved_by = lambda a, b: (a - b)[0, reach(model) :].abs().max()
    # token 0 gets no further without entries
    assert moved_by(cut, moved) < 1e-4 < 1e-2 < moved_by(before, model(other))
    assert torch.equal(model(ids), before)


def test_window_only_agrees_across_chunks_and_rows(model):
    ids = some_ids(3, 150, seed=1)
    with window_only(model):
        whole = model.append(ids, model.new_cache(3, 150), chunk=150)
        parts = model.append(ids, model.new_cache(3, 150), chunk=7)
    assert torch.allclose(whole, parts, atol=2e-4)


def test_teacher_forced_answers_are_greedy_continuations(model):
    """Prompts of several lengths in one ragged batch, answers right, wrong in the last token, and wrong in the
    first."""
    asked, expected, greedy = [], [], []
    for i, length in enumerate((150, 40, 9, 70, 41)):
        prompt, n = some_ids(length, seed=2 + i).tolist(), 1 + i % 3
        cache, ids = model.new_cache(1, 256), torch.tensor([prompt])
        answer = []
        for _ in range(n):
            ids = model.append(ids, cache, logits="last").argmax(-1)
            answer.append(ids.item())
        greedy.append((prompt, answer))
        wrong = lambda at: [(t + 1) % CONFIG["vocab_size"] if j == at else t for j, t in enumerate(answer)]
        asked += [Asked(prompt, answer), Asked(prompt, wrong(n - 1)), Asked(prompt, wrong(0))]
        expected += [True, False, False]
    assert answered(model, asked, LIMITS) == expected == answered(model, asked, Limits(4096, 64, 1, 1))
    for (_, answer), (right, late, early) in zip(greedy, zip(*[iter(replies(model, asked, LIMITS))] * 3)):
        assert right == answer and late == answer and early == answer[:1]


def test_attention_mass_is_that_of_the_model(model):
    """Probabilities per entry, read off the model's own attention: entries get one-hot dimensions that queries
    ignore."""
    ids, seen = some_ids(1, 120, seed=9), []

    def see(layer, attn, x, qr, q, window, window_index, step, cache):
        mass = evaluation.dense_mass(attn, q, window, window_index, step, cache.main.entries.visible(step))
        pool, entry = cache.main.entries.chosen(step, cache.main.entries.all_visible(step))
        n = mass.shape[-1]
        widened = torch.cat((pool[:n], torch.eye(n)), 1)
        o = attn.op.sparse_attention(
            F.pad(q, (0, n)), F.pad(window, (0, n)), window_index, widened, entry, attn.attn_sink, attn.scale
        )
        assert torch.allclose(o[..., attn.D :].mean(1), mass[0], atol=1e-6)
        seen.append(layer)

    with watched(model, see):
        model.append(ids, model.new_cache(1, 120), logits="none", chunk=60)
    assert seen == [i for i, r in enumerate(CONFIG["compress_ratios"][:5]) if r == 4] * 2


def test_selected_mass(model):
    """No more than the best selection holds, no more than all, and all of it where everything visible is selected."""
    found = []
    with watched(model, lambda layer, *held: found.append(evaluation.masses(*held))):
        model.append(some_ids(2, 120, seed=9), model.new_cache(2, 120), logits="none", chunk=30)
    assert not any("_attend" in vars(block.attn) for block in model.layers)
    for part in found:
        total, selected, best, chance = part.unbind(-1)
        assert (selected <= best + 1e-6).all() and (best <= total + 1e-6).all() and (total < 1).all()
        assert torch.allclose(selected[chance == 1], total[chance == 1])


class Text:
    """In the place of `Rows`: streams of random tokens."""

    split = "heldout"
    random = np.random.default_rng(0).integers(2, CONFIG["vocab_size"], 2000).astype(np.uint16)
    streams = {"prose": random, "code": random}


def test_text_rows():
    rows = text_rows(Text.streams["prose"], 101, 7)
    assert (
        rows.shape == (7, 101)
        and (rows[:, 0] == 0).all()
        and rows[0, 1:].tolist() == Text.streams["prose"][:100].tolist()
    )
    assert text_rows(Text.streams["prose"], 501, 100).shape == (4, 501)


def test_losses_do_not_depend_on_batches(model):
    """Rows run in one piece and in several, and against the logits of the model's forward."""
    quiet = lambda text: None
    found = evaluation.losses(model, Text, [60], Limits(120, 32, 2, 180), quiet)
    other = evaluation.losses(model, Text, [60], Limits(60, 7, 1, 180), quiet)
    assert [f.value for f in found] == pytest.approx([f.value for f in other], abs=1e-5) and found[0].count == 180
    ids = text_rows(Text.streams["prose"], 61, 3)
    exact = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    assert found[0].value == pytest.approx(exact.item(), abs=1e-5)


def test_drafts_on_text_and_on_continuations(model):
    """A continuation is what step-by-step decoding gives, and drafts are those of MTP fed in one piece."""
    ids = some_ids(2, 12, seed=4)
    longer = evaluation.continued(model, ids, 6, 8)
    assert torch.equal(longer[:, :12], ids) and torch.equal(longer[:, 12:], model(longer).argmax(-1)[:, 11:-1])
    main, draft = evaluation.drafted(model, longer, chunk=5)
    logits, streams = model.append(longer, model.new_cache(2, 18), return_streams=True)
    assert torch.equal(main, logits.argmax(-1))
    assert torch.equal(draft, model.mtp_logits(streams[:, :-1], longer[:, 1:]).argmax(-1))
    figures = evaluation.mtp(model, Text, LIMITS, lambda text: None, length=40, prompt=10, new=8)
    assert [f.count for f in figures] == [2 * 39, 2 * 7] * 2 and all(0 <= f.value <= 1 for f in figures)
