"""The whole model against transformers in fp32, however the tokens arrive."""

import pytest
import torch

from dsv4 import load_model
from dsv4.errors import RewindError
from tests import oracle
from tests.conftest import GOLDEN, TOLERANCE
from tests.parity import assert_ragged_batches, far


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_golden_logits_streams_and_mtp(backend):
    from safetensors.torch import load_file

    expected = load_file(GOLDEN / "expected.safetensors")
    model = load_model(GOLDEN, numerics="fp32", backend=backend)
    cache = model.new_cache(1, 300)
    logits, streams = model.append(expected["ids"], cache, return_streams=True)
    assert far(logits, expected["logits"]) < TOLERANCE
    assert far(streams, expected["streams_before_head"]) < 1e-3  # streams reach hundreds
    assert far(model.mtp_logits(streams, expected["next_ids"], cache), expected["mtp_logits"]) < TOLERANCE
    assert far(model.mtp_logits(streams, expected["next_ids"]), expected["mtp_logits"]) < TOLERANCE
    one_by_one = model.new_cache(1, 300)
    for t in range(0, 300, 50):
        got = model.mtp_logits(streams[:, t : t + 50], expected["next_ids"][:, t : t + 50], one_by_one)
        assert far(got, expected["mtp_logits"][:, t : t + 50]) < TOLERANCE


def test_one_shot_equals_transformers(pair):
    ours, _, ids, wanted = pair
    assert far(ours(ids), wanted) < TOLERANCE


@pytest.mark.parametrize("form", list(oracle.FORMS))
def test_other_forms_of_the_config_equal_transformers(form, tmp_path):
    config = oracle.FORMS[form]
    theirs = oracle.randomised(config)
    ours = load_model(oracle.save_in_memory_names(theirs, config, tmp_path / "oracle"), numerics="fp32")
    ids = torch.randint(0, config["vocab_size"], (1, 150), generator=torch.Generator().manual_seed(1))
    wanted = oracle.logits(theirs, ids)
    assert far(ours(ids), wanted) < TOLERANCE
    assert far(ours.append(ids, ours.new_cache(1, 150), chunk=7), wanted) < TOLERANCE


@pytest.mark.few(pair=["Pro-like start"])
def test_token_by_token_equals_transformers(pair):
    ours, _, ids, wanted = pair
    cache = ours.new_cache(1, 310)
    got = [ours.append(ids[:, t : t + 1], cache)[0, 0] for t in range(310)]
    assert far(torch.stack(got), wanted[0]) < TOLERANCE


@pytest.mark.few(chunk=[3, 17, 128, 255])
@pytest.mark.parametrize("chunk", [2, 3, 5, 17, 127, 128, 129, 255])
def test_any_step_size_equals_transformers(pair, chunk):
    ours, _, ids, wanted = pair
    assert far(ours.append(ids, ours.new_cache(1, 310), chunk=chunk), wanted) < TOLERANCE


def first_config(request) -> bool:
    """Whether `pair` is of the configuration that everything is tried on; the others are tried at the borders and in
    between."""
    return request.node.callspec.params["pair"] == next(iter(oracle.CONFIGS))


@pytest.mark.few(pair=["every entry selected"])
def test_every_split_into_two_equals_transformers(pair, request):
    ours, _, ids, wanted = pair
    splits = (
        [*range(1, 140), *range(250, 262)]
        if first_config(request)
        else [*range(1, 132, 7), *range(126, 132), *range(254, 259)]
    )
    worst = max((far(_two_parts(ours, ids, s), wanted[:, s : s + 9]), s) for s in splits)
    assert worst[0] < TOLERANCE, f"split at {worst[1]}"


def _two_parts(model, ids, split):
    cache = model.new_cache(1, 310, max_rewind=0)
    model.append(ids[:, :split], cache, logits="none")
    return model.append(ids[:, split : split + 9], cache)


@pytest.mark.few(pair=["Pro-like start"])
def test_rewinding_equals_never_having_written(pair, request):
    ours, _, ids, wanted = pair
    most = 20
    lengths = [*range(120, 124), *range(252, 256)] if first_config(request) else (121, 254)
    for length in lengths:  # every residue mod 4, each crossing a 128 boundary
        cache = ours.new_cache(1, 310, max_rewind=most)
        ours.append(ids[:, :length], cache, logits="none")
        for n in range(1, most + 1):
            wrong = (ids[:, length : length + n] + 7) % 512
            ours.append(wrong, cache, logits="none", chunk=1 + n % 7)
            cache.rewind(n)
            got = ours.append(ids[:, length : length + 3], cache)
            assert far(got, wanted[:, length : length + 3]) < TOLERANCE, (length, n)
            cache.rewind(3)


def test_rewinding_at_once_by_max_rewind_across_windows(pair):
    ours, _, ids, wanted = pair
    cache = ours.new_cache(1, 310, max_rewind=150)
    ours.append(ids[:, :300], cache, logits="none")
    cache.rewind(150)
    assert far(ours.append(ids[:, 150:], cache), wanted[:, 150:]) < TOLERANCE


def test_ragged_batches_equal_each_row_alone(pair):
    ours, _, ids, wanted = pair
    assert_ragged_batches(ours, ids, wanted)


def test_last_logits_of_a_ragged_batch(pair):
    ours, _, ids, wanted = pair
    lengths = [7, 300, 41]
    got = ours.append(ids.expand(3, -1)[:, :300], ours.new_cache(3, 310), n_new=lengths, logits="last")
    assert got.shape == (3, 1, 512)
    for b, n in enumerate(lengths):
        assert far(got[b, 0], wanted[0, n - 1]) < TOLERANCE


def test_what_a_cache_held_before_does_not_matter(pair):
    ours, _, ids, wanted = pair
    cache = ours.new_cache(1, 310)
    for layer in cache.layers:
        for tensor in layer.tensors.values():
            tensor.fill_(float("nan"))
    assert far(ours.append(ids[:, :200], cache), wanted[:, :200]) < TOLERANCE
    cache.reset()
    ours.append((ids + 3) % 512, cache, logits="none")
    cache.reset()
    assert far(ours.append(ids, cache, chunk=13), wanted) < TOLERANCE


def test_a_row_does_not_see_its_neighbours(pair):
    ours, _, ids, wanted = pair
    others = torch.randint(0, 512, (2, 310), generator=torch.Generator().manual_seed(9))
    got = ours(torch.stack([others[0], ids[0], others[1]]))
    assert far(got[1], wanted[0]) < TOLERANCE


def test_checkpoints_of_save_pretrained_load(pair, tmp_path):
    ours, theirs, ids, wanted = pair
    theirs.save_pretrained(tmp_path / "saved")
    model = load_model(tmp_path / "saved", numerics="fp32")
    assert model.inventory.layout.name == "transformers save_pretrained"
    assert far(model(ids), wanted) < TOLERANCE


def test_rewinding_too_far_is_an_error_and_changes_nothing(pair):
    ours, _, ids, wanted = pair
    cache = ours.new_cache(1, 310, max_rewind=8)
    ours.append(ids[:, :200], cache, logits="none")
    with pytest.raises(RewindError, match="max_rewind >= 9"):
        cache.rewind(9)
    cache.rewind(5)
    with pytest.raises(RewindError, match="keeps 8"):
        cache.rewind(4)  # 9 in all below the furthest token written
    assert cache.lengths == [195]
    ours.append(ids[:, 195:197], cache, logits="none")
    with pytest.raises(RewindError, match="was filled to 200 tokens"):
        cache.rewind(6)  # a shorter branch does not bring back what the longer one overwrote
    assert far(ours.append(ids[:, 197:210], cache), wanted[:, 197:210]) < TOLERANCE


def test_mtp_follows_a_rewind():
    from safetensors.torch import load_file

    expected = load_file(GOLDEN / "expected.safetensors")
    model = load_model(GOLDEN, numerics="fp32")
    cache = model.new_cache(1, 300, max_rewind=64)
    _, streams = model.append(expected["ids"], cache, return_streams=True)
    model.mtp_logits(streams, expected["next_ids"], cache)
    cache.rewind(50)
    assert (cache.lengths, cache.mtp_lengths) == ([250], [249])  # the entry at 249 had consumed token 250
    _, again = model.append(expected["ids"][:, 250:], cache, return_streams=True)
    tail = torch.cat([streams[:, 249:250], again], 1)
    got = model.mtp_logits(tail, expected["next_ids"][:, 249:], cache)
    assert far(got, expected["mtp_logits"][:, 249:]) < TOLERANCE


def test_transformers_imports_beside_our_kernels_package():
    from transformers.utils import import_utils  # looks for a distribution that is also called kernels

    from dsv4 import kernels

    assert kernels.__file__.endswith("kernels/__init__.py")
    assert import_utils is not None and oracle.randomised(oracle.TINY) is not None


def test_index_scores_have_the_oracle_s_values(pair):
    """Selection alone cannot see a missing score temperature: the order of scores is the same without it."""
    ours, theirs, ids, _ = pair
    expected, got = {}, {}
    indexers = {i: layer.attn.indexer for i, layer in enumerate(ours.layers) if hasattr(layer.attn, "indexer")}
    for i, indexer in indexers.items():
        theirs.model.layers[i].self_attn.compressor.indexer.scorer.register_forward_hook(
            lambda module, args, out, i=i: expected.__setitem__(i, out)
        )

        def recorded(*args, i=i, indexer=indexer, real=indexer.forward):
            selection = real(*args)
            got[i] = indexer.scores(*args)
            return selection

        indexer.forward = recorded
    try:
        oracle.logits(theirs, ids)
        ours.append(ids, ours.new_cache(1, 310), chunk=310)
    finally:
        for indexer in indexers.values():
            del indexer.forward
    assert got.keys() == expected.keys() != set()
    for i in got:
        visible = torch.isfinite(got[i])
        assert visible[0].sum() == sum((t + 1) // 4 for t in range(310))
        assert (got[i] - expected[i])[visible].abs().max() < 1e-5 * max(1, expected[i][visible].abs().max())
