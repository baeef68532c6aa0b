"""Fidelity of models: identical variants, other ks and policies, what is put back afterwards, and needles that must be
lost."""

from pathlib import Path

import numpy as np
import pytest
import torch

from dsv4 import load_model
from dsv4.engine.generate import generate
from dsv4.errors import InputError
from dsv4.kernels.block_choice import block_bounds, dense, sink_window
from dsv4.model.tokenizer import Tokenizer
from dsv4.probes.measure.base import needles
from dsv4.probes.measure.base.logits import figures, positions
from dsv4.probes.measure.base.models import reach
from dsv4.probes.measure.base.needles import PASS, Asked, Limits, replies, replies_by
from dsv4.probes.measure.base.text import read_text, rows_of
from dsv4.probes.measure.base.variants import Variant, csa_variants, of_csa, of_policy, policy_variants
from dsv4.probes.measure.fidelity import findability, runs
from dsv4.probes.measure.recall import measure
from dsv4.probes.measure.recall.settings import Settings
from dsv4.probes.scenes.patching import replaced
from dsv4.probes.subjects.ours import OurSubject
from tests.texts import PROSE_FILE

LIMITS, DEMO = Limits(tokens=400, chunk=32), Path(__file__).resolve().parents[2] / "demo"
T, TAIL, NEW = 200, 40, 12
EVERYTHING = of_csa(T // 4 + NEW, exact=True)


@pytest.fixture(scope="module")
def ids(text):
    return rows_of(text, T, 3, bos=0)


def topk(model) -> list[int]:
    return [layer.attn.indexer.topk for layer in model.layers if hasattr(layer.attn, "indexer")]


# ---- CSA ------------------------------------------------------------------------------------


def test_an_identical_variant_is_faithful(csa, ids):
    same = of_csa(T // 4 + NEW)
    found, prefixes = runs.compare(csa, [EVERYTHING, same], ids, TAIL, NEW, LIMITS)[same.name]
    assert len(found.kl) == 3 * TAIL and not found.kl.any() and torch.equal(found.choice, found.exact_choice)
    assert prefixes == [NEW] * 3 and figures(found)["perplexity"] == figures(found)["perplexity_exact"]


def test_the_comparison_is_that_of_whole_forward_passes(csa, ids):
    """Without caches, rewinds, pieces and batches: at each position, the logits that predict the row's own next
    token."""
    own = of_csa(6, own=True)
    found, prefixes = runs.compare(csa, [EVERYTHING, own], ids, TAIL, NEW, LIMITS)[own.name]
    with EVERYTHING.on(csa):
        exact, texts = csa(ids), [generate(csa, row[: T - TAIL].tolist(), NEW).token_ids for row in ids]
    other, others = csa(ids), [generate(csa, row[: T - TAIL].tolist(), NEW).token_ids for row in ids]
    order = [(b, at) for batch in ((0, 1), (2,)) for part in (range(32), range(32, TAIL)) for b in batch for at in part]
    of = lambda x, first: torch.stack([x[b, first + at] for b, at in order])
    wanted = positions(of(exact, T - TAIL - 1), of(other, T - TAIL - 1), of(ids, T - TAIL))
    assert torch.equal(found.choice, wanted.choice) and torch.equal(found.exact_choice, wanted.exact_choice)
    for name in ("margin", "kl", "exact_nll", "nll"):
        assert torch.allclose(getattr(found, name), getattr(wanted, name), rtol=1e-3, atol=2e-5), name
    assert found.kl.mean() > 1e-4 and prefixes == [
        next((i for i in range(NEW) if a[i] != b[i]), NEW) for a, b in zip(texts, others)
    ]


def test_what_a_variant_changes_is_put_back(csa):
    whole = csa(torch.arange(60).unsqueeze(0))
    for variant in csa_variants(csa, [2], 60):
        with pytest.raises(ZeroDivisionError), variant.on(csa):
            assert topk(csa) == [variant.k or 6] * 2
            raise ZeroDivisionError
        assert topk(csa) == [6, 6] and torch.equal(csa(torch.arange(60).unsqueeze(0)), whole)


def test_the_variants_of_csa(csa):
    found = csa_variants(csa, [2, 9], 1001)
    assert [(v.name, v.k, v.budget, v.exact, v.own, v.control) for v in found] == [
        ("dense over entries", 251, None, True, False, False),
        ("k = 2", 2, 16, False, False, False),
        ("k = 6 (own)", 6, 32, False, True, False),
        ("k = 9", 9, 44, False, False, False),
        ("window only", None, 8, False, False, True),
    ]
    assert [v.k for v in csa_variants(csa, None, 100)] == [25, 1, 3, 6, 12, None]
    with pytest.raises(InputError, match="--topk 0; expected at least 1"):
        csa_variants(csa, [0], 100)


def test_fewer_entries_are_less_faithful(csa, ids):
    variants = csa_variants(csa, [1, 40], 300)
    found = runs.compare(csa, variants, ids, TAIL, 0, LIMITS)
    kl = {name: p.kl.mean().item() for name, (p, _) in found.items()}
    assert kl["k = 40"] < kl["k = 6 (own)"] < kl["k = 1"] < kl["window only"] and found["k = 1"][1] == [0] * 3


def test_findability_in_the_first_csa_layer_is_what_recall_measures(csa_path, csa, text):
    """Layers below are the same, whatever k is: their attention mass, another way."""
    settings = Settings(contexts=(192, 232), ks=(6,), queries=40, rows=2, needles=0, seed=0)
    theirs = measure.indexer(OurSubject(csa_path, "fp32"), settings, text, lambda text: None, lambda n: None)
    variants = csa_variants(csa, [6], 300)
    ours = findability.measure(csa, variants, rows_of(text, 232, 2, bos=0), [192, 232], 40, 32)
    first = min(r["layer"] for r in ours if r["layer"] is not None)
    assert len(ours) == 2 * 3 and {r["variant"] for r in ours} == {"k = 6 (own)"}
    for context in (192, 232):
        mine, other = (
            next(r for r in rows if (r["layer"], r["context"]) == (first, context)) for rows in (ours, theirs)
        )
        assert mine["mass_kept"] == pytest.approx(other["attention_mass_kept"], abs=1e-5)
        assert mine["mass_best"] == pytest.approx(other["attention_mass_best"], abs=1e-5)
        assert (
            mine["chance"] == pytest.approx(other["chance"]) and 0 < mine["findability"] < 1 and mine["queries"] == 80
        )
    assert topk(csa) == [6, 6]
    with of_csa(1).on(csa):  # whatever the model does otherwise: all layers are looked at along the exact run
        assert findability.measure(csa, variants, rows_of(text, 232, 2, bos=0), [192, 232], 40, 32) == ours


# ---- policies of a GQA model ----------------------------------------------------------------


def test_an_identical_policy_is_faithful(gqa):
    """Blocks that hold the whole context, by gathering: the same attention by other sums."""
    ids = torch.randint(0, 300, (2, 200), generator=torch.Generator().manual_seed(0))
    variants = [of_policy(dense()), of_policy(block_bounds(512, 16)), of_policy(sink_window(64, 16))]
    found = runs.compare(gqa, variants, ids, TAIL, NEW, LIMITS)
    same, prefixes = found["block-16 bound, 512 tokens"]
    assert same.kl.abs().max() < 1e-8 and prefixes == [NEW] * 2 and torch.equal(same.choice, same.exact_choice)
    assert found["sink+window, 64 tokens"][0].kl.mean() > 1e-3 and gqa.attention.policy.dense


def test_policies_act_in_decoding_alone_and_prompts_are_exact(one_layer):
    """In a model of one layer, a distant token reaches the tail of a row by being read, and prompts alone may read
    it."""
    ids = torch.randint(0, 300, (1, 300), generator=torch.Generator().manual_seed(0))
    other = ids.clone()
    other[0, 100:110] = (other[0, 100:110] + 1) % 300

    def tails(variant: Variant) -> tuple:
        seen = [[], []]
        for keep, row in zip(seen, (ids, other)):
            runs.run(one_layer, variant, row, TAIL, 2, 300, lambda at, logits, keep=keep: keep.append(logits))
        return tuple(torch.cat(keep, 1) for keep in seen)

    window, whole = tails(of_policy(sink_window(64, 16))), tails(of_policy(dense()))
    assert torch.equal(*window) and not torch.equal(*whole) and not torch.equal(window[0], whole[0])
    with of_policy(sink_window(64, 16)).on(one_layer):
        cache = one_layer.new_cache(1, 300)
        prompt = one_layer.append(ids, cache)
    assert torch.equal(prompt, one_layer(ids))


def test_every_pass_of_decoding_is_short(gqa, monkeypatch):
    """Text, continuations and questions: at most PASS tokens an append, so that the policy acts; the prompt in one long
    append."""
    sizes, append = [], type(gqa).append

    def spy(self, ids, *rest, **more):
        sizes.append(ids.shape[1])
        return append(self, ids, *rest, **more)

    monkeypatch.setattr(type(gqa), "append", spy)
    ids = torch.randint(0, 300, (1, 100), generator=torch.Generator().manual_seed(0))
    runs.run(gqa, of_policy(sink_window(64, 16)), ids, TAIL, 3, 64, lambda at, logits: None)
    assert sizes == [59, 1, 1, 1, 16, 16, 8]
    sizes.clear()
    found = replies(gqa, [Asked(ids[0, :90].tolist(), list(range(20)))], LIMITS, decoded=32)
    assert sizes == [58, 16, 15, PASS, 4] and len(found[0]) >= 1


def test_prompts_prefilled_once_give_each_policy_the_bits_of_its_own_prefill(gqa, gqa_path, monkeypatch):
    """Text and needles, in caches that other policies have decoded in, and other summaries were kept in."""
    ids = torch.randint(0, 300, (2, 200), generator=torch.Generator().manual_seed(0))
    variants = policy_variants(["block-bound", "sink-window", "block-mean"], [96], 16)
    variants.append(of_policy(block_bounds(128, 32)))
    asked = [Asked(ids[0, : 120 + i].tolist(), list(range(3 + i))) for i in range(3)]
    sizes, append = [], type(gqa).append

    def spy(self, ids, *rest, **more):
        sizes.append(ids.shape[1])
        return append(self, ids, *rest, **more)

    monkeypatch.setattr(type(gqa), "append", spy)
    seen, cache = {}, runs.prefilled(gqa, variants[0], ids, TAIL, 4, 64)
    ways = {v.name: lambda cache, v=v: v.resumed(gqa, cache) for v in variants}
    said = replies_by(gqa, asked, Limits(400, 64), ways, decoded=32)
    assert sum(n > PASS for n in sizes) == 2
    for v in variants:
        mine, own = [], []
        shared = runs.run(gqa, v, ids, TAIL, 4, 64, lambda at, logits: mine.append(logits), cache)
        alone = runs.run(gqa, v, ids, TAIL, 4, 64, lambda at, logits: own.append(logits))
        assert (
            torch.equal(shared, alone)
            and torch.equal(torch.cat(mine, 1), torch.cat(own, 1))
            and cache.lengths == [T - TAIL - 1] * 2
        )
        seen[v.name] = torch.cat(mine, 1)
        with v.on(gqa):
            assert said[v.name] == replies(gqa, asked, Limits(400, 64), decoded=32)
    assert len({logits.sum().item() for logits in seen.values()}) == len(variants)


def test_a_policy_is_put_back_and_needs_a_model_that_has_policies(gqa, csa):
    before, variant = gqa.attention, of_policy(block_bounds(96, 16))
    with pytest.raises(ZeroDivisionError), variant.on(gqa):
        assert gqa.attention.policy == block_bounds(96, 16)
        raise ZeroDivisionError
    assert gqa.attention is before
    with pytest.raises(InputError, match="no choice of attention"), variant.on(csa):
        pass
    with of_policy(dense()).on(csa):  # is what it does anyway
        pass


def test_the_policies_by_name():
    found = policy_variants(["dense", "sink+window", "block-bound"], [64, 70, 128], 16)
    assert [v.name for v in found] == ["dense"] + [
        f"{name}, {n} tokens" for name in ("sink+window", "block-16 bound") for n in (64, 128)
    ]
    assert (
        found[0].exact and all(v.decode_only for v in found) and [v.budget for v in found] == [None, 64, 128, 64, 128]
    )
    assert len(policy_variants(None, [4096], None)) == 7 and len(policy_variants(["dense"], [64], None)) == 1
    with pytest.raises(InputError, match="--policy 'quest' is unknown; expected some of dense, sink-window"):
        policy_variants(["quest"], [64], None)
    with pytest.raises(InputError, match="--budget 256 is too little: policy block-128 bound"):
        policy_variants(["block-bound"], [256], None)


def test_findability_of_policies(gqa):
    rows, before = (
        torch.randint(0, 300, (2, 300), generator=torch.Generator().manual_seed(0)),
        gqa(torch.arange(50).unsqueeze(0)),
    )
    variants = policy_variants(["sink-window", "page-bound", "block-mean"], [96], 16)
    found = findability.measure(gqa, variants, rows, [200, 300], 40, 64)
    of = lambda name, context=300: next(
        r for r in found if r["variant"].startswith(name) and (r["layer"], r["context"]) == (None, context)
    )
    assert of("sink+window")["mass_kept"] == of("sink+window")["findability"] == of("sink+window")["chance"] == 0
    assert of("page-16 bound")["queries"] == 3 * 2 * 2 * 40 and len(found) == 3 * 2 * 4  # layers, KV heads, rows
    for name in ("page-16 bound", "block-16 mean"):
        assert (
            of(name)["chance"] < of(name)["mass_kept"] < of(name)["mass_best"] < 1
            and of(name, 200)["chance"] > of(name)["chance"]
        )
    assert of("page-16 bound")["attention_on_choices"] < 1 and torch.equal(gqa(torch.arange(50).unsqueeze(0)), before)


# ---- needles --------------------------------------------------------------------------------


# Over 5 s: a trained model has to find needles, in more tokens than it reaches without its entries.
def test_what_drops_everything_distant_loses_its_needles():
    """On the demo checkpoint, which finds them: at the same places with the same values."""
    model, context = load_model(DEMO, numerics="fp32"), 700
    text = read_text(PROSE_FILE, DEMO, model.config.vocab_size, 1000, 0)  # help topics take 3 s to encode
    exact, _, control = csa_variants(model, [64], 800)
    variants = [exact, control]
    rows = needles.found(model, variants, text.tokenizer.backend, text.ids, [context], 3, Limits(3000, 256))
    hits = {(r["variant"], r["haystack"]): r["hits"] for r in rows}
    assert hits[exact.name, "looped filler"] == 3 and hits[exact.name, "prose"] >= 2
    assert hits["window only", "prose"] == hits["window only", "looped filler"] == 0
    lost, found = (
        next(r for r in rows if (r["variant"], r["haystack"]) == (v, "looped filler"))
        for v in ("window only", exact.name)
    )
    assert lost["at_least"] == 0 and lost["at_most"] == pytest.approx(0.7076, abs=1e-4)
    assert found["at_least"] == pytest.approx(0.2924, abs=1e-4)
    assert all(d["depth"] * context + reach(model) < context for r in rows for d in r["depths"])
    asked = needles.hidden(model, text.tokenizer.backend, text.ids, context, 1, 0)
    assert replies(model, asked, Limits(3000, 256), decoded=needles.DECODED) == replies(model, asked, Limits(3000, 256))


def test_a_question_is_decoded_as_a_whole(gqa_path):
    """DECODED tokens hold every question of the demo's tokenizer, so no part of one is read exactly."""
    from random import Random

    from dsv4.probes.measure.base.haystack import TEMPLATES, any_name, encode

    tokenizer, rng = Tokenizer(DEMO, 4096).backend, Random(0)
    longest = max(len(encode(tokenizer, template.prompt(any_name(rng)))) for template in TEMPLATES for _ in range(200))
    assert 8 < longest <= needles.DECODED


def test_replaced_restores_each_object_s_own():
    things = [type("Thing", (), {})() for _ in range(2)]
    for n, thing in enumerate(things):
        thing.x = n
    with replaced(things, "x", 9):
        assert [thing.x for thing in things] == [9, 9]
    assert [thing.x for thing in things] == [0, 1]


def test_haystacks_are_prose_and_filler(gqa, gqa_path):
    text = read_text(None, gqa_path, 384, 2000, 0)
    variants = policy_variants(["sink-window"], [64], 16)
    rows = needles.found(gqa, variants, text.tokenizer.backend, np.array(text.ids), [700], 2, Limits(2000, 256))
    assert [(r["haystack"], r["variant"], r["trials"]) for r in rows] == [
        (h, v, 2) for h in ("prose", "looped filler") for v in ("dense", "sink+window, 64 tokens")
    ]
