"""GQA models against transformers in fp32, however the tokens arrive."""

import pytest
import torch

from dsv4.engine.generate import generate, generate_speculative
from dsv4.errors import ContextOverrun, InputError, RewindError
from dsv4.speculation.draft import LookupDrafter
from tests.conftest import TOLERANCE
from tests.gqa.conftest import TOKENS
from tests.parity import assert_ragged_batches, far
from tests.speculation.scripted import Scripted, drafted

# of the configs, full layers, some with a window, and windows alone, each with rope of its own
SHAPES = ["llama, llama3 rope and biases", "qwen2, yarn and some sliding layers", "mistral, sliding window"]


def test_one_shot_equals_transformers(pair):
    ours, _, ids, wanted = pair
    assert wanted.std() > 1 and far(ours(ids), wanted) < TOLERANCE


@pytest.mark.few(pair=SHAPES)
def test_token_by_token_equals_transformers(pair):
    ours, _, ids, wanted = pair
    cache = ours.new_cache(1, TOKENS)
    got = [ours.append(ids[:, t : t + 1], cache)[0, 0] for t in range(TOKENS)]
    assert far(torch.stack(got), wanted[0]) < TOLERANCE


@pytest.mark.parametrize("chunk", [2, 7, 23, 24, 25, 127, 128, 129, 255])
def test_any_step_size_equals_transformers(pair, chunk):
    ours, _, ids, wanted = pair
    assert far(ours.append(ids, ours.new_cache(1, TOKENS), chunk=chunk), wanted) < TOLERANCE


def test_every_split_into_two_equals_transformers(pair):
    ours, _, ids, wanted = pair
    for split in [*range(1, 70, 3), *range(120, 136)]:
        cache = ours.new_cache(1, TOKENS)
        ours.append(ids[:, :split], cache, logits="none")
        assert far(ours.append(ids[:, split : split + 5], cache), wanted[:, split : split + 5]) < TOLERANCE, split


@pytest.mark.few(pair=SHAPES)
def test_rewinding_equals_never_having_written(pair):
    ours, _, ids, wanted = pair
    for length in (1, 24, 127, 128, 129, 200):
        for n in (1, 2, 30, 100):
            cache = ours.new_cache(1, TOKENS)
            ours.append(ids[:, :length], cache, logits="none")
            ours.append((ids[:, length : length + n] + 7) % 384, cache, logits="none", chunk=1 + n % 7)
            cache.rewind(n)
            assert far(ours.append(ids[:, length : length + 3], cache), wanted[:, length : length + 3]) < TOLERANCE, (
                length,
                n,
            )


def test_a_cache_rewinds_to_anywhere_and_no_further(pair):
    ours, _, ids, wanted = pair
    cache = ours.new_cache(1, TOKENS)
    ours.append(ids, cache, logits="none")
    cache.rewind(TOKENS - 1)
    assert far(ours.append(ids[:, 1:40], cache), wanted[:, 1:40]) < TOLERANCE
    with pytest.raises(RewindError, match="holds 40"):
        cache.rewind(41)
    cache.reset()
    assert cache.lengths == [0]


def test_ragged_batches_equal_each_row_alone(pair):
    ours, _, ids, wanted = pair
    assert_ragged_batches(ours, ids, wanted)


def test_what_a_cache_held_before_does_not_matter(pair):
    ours, _, ids, wanted = pair
    cache = ours.new_cache(2, TOKENS)
    for layer in cache.layers:
        for tensor in layer.tensors.values():
            tensor.fill_(float("nan"))
    got = ours.append(ids.expand(2, -1), cache, n_new=[TOKENS, 40], chunk=37)
    assert far(got[0], wanted[0]) < TOLERANCE and far(got[1, :40], wanted[0, :40]) < TOLERANCE


@pytest.mark.few(pair=SHAPES)
def test_greedy_text_equals_transformers(pair):
    ours, theirs, ids, _ = pair
    prompt = ids[:, :90]
    with torch.inference_mode():
        wanted = theirs.generate(prompt, max_new_tokens=60, do_sample=False, eos_token_id=None, pad_token_id=2)[
            0, 90:
        ].tolist()
    assert generate(ours, prompt[0].tolist(), 60).token_ids == wanted
    assert generate_speculative(ours, [prompt[0].tolist()], 60, LookupDrafter())[0].token_ids == wanted


@pytest.mark.parametrize("right", [0, 2, 4])
def test_drafts_right_and_wrong_change_nothing(pair, right):
    ours, _, ids, _ = pair
    prompts = [ids[0, :50].tolist(), ids[0, 7:130].tolist()]
    plain = [generate(ours, p, 40).token_ids for p in prompts]
    outs = drafted(ours, prompts, 40, Scripted(plain, right, 384))
    assert [out.token_ids for out in outs] == plain
    assert all(out.speculation.proposed > 20 and (out.speculation.accepted > 0) == (right > 0) for out in outs)


def test_context_is_checked_before_anything_runs(pair):
    ours, _, ids, _ = pair
    cache = ours.new_cache(1, 20)
    ours.append(ids[:, :18], cache)
    with pytest.raises(ContextOverrun, match="max_context"):
        ours.append(ids[:, :3], cache)
    assert cache.lengths == [18]
    with pytest.raises(InputError, match="vocabulary"):
        ours.append(torch.tensor([[384]]), cache)
    with pytest.raises(InputError, match="max_position_embeddings"):
        ours.new_cache(1, ours.config.max_position_embeddings + 1)


def test_the_cache_is_laid_out_in_tiles(pair):
    ours, _, _, _ = pair
    cache = ours.new_cache(3, 129)
    for layer in cache.layers:
        for held in (layer.keys, layer.values):
            assert (
                held.shape == (3, ours.config.num_key_value_heads, 256, ours.config.head_dim) and held.is_contiguous()
            )
    assert cache.nbytes == 2 * 3 * 256 * ours.config.num_key_value_heads * ours.config.head_dim * 4 * len(cache.layers)
