"""Speculative greedy output is plain greedy output, token for token; and what is left in the caches is what plain
decoding leaves."""

import functools
from pathlib import Path

import pytest
import torch

from dsv4 import load_model
from dsv4.speculation.draft import LookupDrafter, MTPDrafter
from dsv4.speculation.passes import SingleSteps
from dsv4.speculation.verify import default
from tests.speculation.scripted import Scripted, drafted, plain, prompt_of

DEMO = Path(__file__).resolve().parents[2] / "demo"
FORMATS = [("native", "auto", "auto"), ("qat", "auto", "auto"), ("qat", "fp8", "fp4"), ("native", "fp8", "fp8")]


@pytest.fixture(scope="module")
def model(brief_official):
    return load_model(brief_official, numerics="fp32")


@pytest.fixture(scope="module")
def golden(brief_golden):
    return load_model(brief_golden, numerics="fp32")


# Window 8, ratios 4 and 128: every residue mod 4, both sides of the window's edge, and of 128, within the prompt and
# while drafting.
LENGTHS = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 115, 121, 124, 125, 126, 127, 128, 129, 130, 131, 250, 253, 255, 256, 257]


@pytest.fixture(scope="module")
def continued(model):
    """Function: plain greedy tokens of a random prompt of so many tokens, each computed once."""
    return functools.cache(lambda length, n: plain(model, prompt_of(model, length), n))


# Over 5 s: each of 25 prompts is decoded by itself too.
@pytest.mark.few(right=[2])
@pytest.mark.parametrize("right", [0, 2, 4])
def test_prompts_of_every_residue(model, continued, right):
    """As one ragged batch, of which every row is compared with plain decoding of its own."""
    want = [continued(n, 10) for n in LENGTHS]
    found = drafted(model, [prompt_of(model, n) for n in LENGTHS], 10, Scripted(want, right, model.config.vocab_size))
    assert {n: out.token_ids for n, out in zip(LENGTHS, found)} == dict(zip(LENGTHS, want))
    assert all(out.speculation.verify_passes == -(-9 // (right + 1)) for out in found)


@pytest.mark.parametrize("length", [3, 8, 127])
def test_prompts_by_themselves(model, continued, length):
    found = drafted(
        model, [prompt_of(model, length)], 10, Scripted([continued(length, 10)], 2, model.config.vocab_size)
    )[0]
    assert found.token_ids == continued(length, 10)


@pytest.mark.few(right=[0, 3, 8])
@pytest.mark.parametrize("right", [*range(9)])
def test_right_k_then_wrong(model, continued, right):
    """Eight drafts a pass, k of them right: across the windows of 4 and the end of one of 128."""
    ids, want = prompt_of(model, 119), continued(119, 30)
    found = drafted(model, [ids], 30, Scripted([want], right, model.config.vocab_size), 8)[0]
    s = found.speculation
    assert found.token_ids == want
    assert s.verify_passes == -(-29 // (right + 1))  # each pass gives the right ones and one more
    assert s.accepted == 29 - s.verify_passes


@pytest.mark.few(right=[4])
@pytest.mark.parametrize("right", range(5))
def test_every_residue_of_128_while_drafting(model, continued, right):
    """A pass of four drafts, so many of them right, from each place of a window of 128: rows that begin 0 … `right`
    tokens later pass them all between them."""
    ids, want = prompt_of(model, 100), continued(100, 150)
    shifted = range(right + 1)
    found = drafted(
        model,
        [ids + want[:i] for i in shifted],
        140,
        Scripted([want[i:] for i in shifted], right, model.config.vocab_size),
        4,
    )
    assert [out.token_ids for out in found] == [want[i : i + 140] for i in shifted]
    seen = set()
    for i, out in enumerate(found):
        at = len(ids) + i
        for size, accepted in zip(out.speculation.block_size_history, out.speculation.accepted_history):
            if size == 4:  # the last passes of a row have room for less
                seen.add((at % 128, accepted))
            at += accepted + 1
    assert seen == {(residue, right) for residue in range(128)}


@pytest.mark.parametrize("max_rewind, right", [(5, 0), (5, 1), (6, 0)])
def test_rewinds_at_the_ring_s_edge(model, continued, max_rewind, right):
    """Rings of the least size that 4 drafts need, and one more: every pass is wrong, so that most is forgotten."""
    drafter = Scripted([continued(119, 30)], right, model.config.vocab_size)
    assert (
        drafted(model, [prompt_of(model, 119)], 20, drafter, 4, max_rewind=max_rewind)[0].token_ids
        == continued(119, 30)[:20]
    )


def test_a_ring_too_small_for_the_policy_drafts_less(model, continued):
    ids, want = prompt_of(model, 8), continued(8, 10)
    for max_rewind, most in ((0, 0), (1, 0), (3, 2)):
        found = drafted(model, [ids], 10, Scripted([want], 9, model.config.vocab_size), 8, max_rewind=max_rewind)[0]
        assert found.token_ids == want and max(found.speculation.block_size_history) == most


@pytest.mark.parametrize("max_rewind", [0, 1, 3])
def test_finished_rows_rest_in_small_rings(model, continued, max_rewind):
    """A row that has stopped keeps its place beside rows that go on, however little may be forgotten."""
    want = [continued(3, 10), continued(8, 10)]
    stop = {want[0][2]}
    want = [row[: next((i + 1 for i, t in enumerate(row) if t in stop), 10)] for row in want]
    assert len(want[0]) < len(want[1])
    found = drafted(
        model,
        [prompt_of(model, 3), prompt_of(model, 8)],
        10,
        Scripted(want, 1, model.config.vocab_size),
        stop_ids=stop,
        max_rewind=max_rewind,
    )
    assert [out.token_ids for out in found] == want


@pytest.mark.parametrize("drafter", [MTPDrafter, LookupDrafter], ids=["mtp", "lookup"])
def test_real_drafters(model, golden, drafter):
    for m in (model, golden):
        for ids in (prompt_of(m, 3), (prompt_of(m, 25) * 6)[:126]):
            assert drafted(m, [ids], 12, drafter())[0].token_ids == plain(m, ids, 12)


def test_ragged_rows_equal_each_row_alone(model):
    """Rows of different lengths, that accept differently many, stop at different times, and meet the end of the
    context."""
    prompts = [prompt_of(model, n) for n in (1, 7, 125, 40, 128)]
    want = [plain(model, ids, 20) for ids in prompts]
    stop = {want[1][4], want[3][11]}
    want = [row[: next((i + 1 for i, t in enumerate(row) if t in stop), 20)] for row in want]
    assert len({len(row) for row in want}) > 1
    for drafter in (Scripted(want, [4, 0, 1, 2, 3], model.config.vocab_size), MTPDrafter(), LookupDrafter()):
        found = drafted(model, prompts, 20, drafter, stop_ids=stop)
        assert [out.token_ids for out in found] == want
        assert [out.stop_reason for out in found] == ["eos" if row[-1] in stop else "max_new_tokens" for row in want]


@pytest.mark.few(verify=[default], numerics=["native"], cache=["fp8"])
@pytest.mark.parametrize("verify", [SingleSteps, default])
@pytest.mark.parametrize("numerics, cache, index_cache", FORMATS)
def test_in_any_format_the_caches_end_bit_for_bit_as_plain_decoding_leaves_them(
    brief_official, numerics, cache, index_cache, verify
):
    """Where no rounding differs, tokens and the logits of what follows are equal to the last bit."""
    model = load_model(brief_official, numerics=numerics, cache=cache, index_cache=index_cache)
    for length in (7, 126):
        ids, held = prompt_of(model, length), []
        want = plain(model, ids, 10)
        untouched = model.new_cache(1, length + 20)
        model.append(torch.tensor([ids]), untouched, logits="none")
        for token in want[:-1]:
            model.append(torch.tensor([[token]]), untouched, logits="none")
        found = drafted(
            model,
            [ids],
            10,
            Scripted([want], lambda n: n % 5, model.config.vocab_size),
            max_context=length + 20,
            verify=lambda m, c: held.append(c) or verify(m, c),
        )[0]
        assert found.token_ids == want and held[0].lengths == untouched.lengths
        for token in (want[-1], 5, 6, 7, 8):
            logits = [model.append(torch.tensor([[token]]), c) for c in (held[0], untouched)]
            assert torch.equal(*logits)


# Over 5 s: a trained model, which is larger, in bf16.
@pytest.mark.few(numerics=["native"])
@pytest.mark.parametrize("numerics, cache, index_cache", [("fp32", "auto", "auto"), *FORMATS[:3]])
def test_the_demo_checkpoint(numerics, cache, index_cache):
    """Trained weights choose with a margin: here even passes of several tokens, rounded differently, say the same."""
    from dsv4.model.tokenizer import Tokenizer

    model = load_model(DEMO, numerics=numerics, cache=cache, index_cache=index_cache)
    ids = [0, *Tokenizer(DEMO, model.config.vocab_size).encode("The capital of France is")]
    want = plain(model, ids, 24)
    for drafter in (MTPDrafter(), LookupDrafter()):
        found = drafted(model, [ids], 24, drafter)[0]
        assert found.token_ids == want and found.speculation.accepted > 5


@pytest.mark.parametrize("drafter", [MTPDrafter, LookupDrafter], ids=["mtp", "lookup"])
def test_layers_read_from_disk(model, brief_official, drafter):
    """The head, the block and most layers are not in memory between passes."""
    spread = load_model(brief_official, numerics="fp32", device_map="auto", max_memory={"cpu": model.nbytes // 2})
    assert "disk" in spread.placement.values()
    ids = [5, 6, 7, 8] * 3
    assert drafted(spread, [ids], 6, drafter())[0].token_ids == plain(model, ids, 6)
