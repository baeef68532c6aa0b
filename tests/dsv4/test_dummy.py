"""Random weights of a geometry: every parameter filled, gains near 1, reproducible, refusals in one line."""

import json

import pytest
import torch

from dsv4.errors import InputError
from dsv4.loaders.ledger import poison, poisoned
from dsv4.model import dummy
from dsv4.model.dummy import fill_cache, load_dummy
from dsv4.runtime.graph import DecodeGraph
from tests.checkpoints import SMALL


@pytest.fixture
def small_flash(monkeypatch):
    monkeypatch.setattr(dummy, "preset", lambda name: dict(SMALL) if name == "flash" else None)


def test_every_parameter_is_filled_and_signals_keep_their_size(small_flash, monkeypatch):
    filled = dummy.fill_weights

    def poisoned_first(model, *given):
        for p in model.parameters():
            poison(p)
        filled(model, *given)

    monkeypatch.setattr(dummy, "fill_weights", poisoned_first)
    model = load_dummy("flash", numerics="qat", cache="fp8", index_cache="fp4")
    assert [n for n, p in model.named_parameters() if poisoned(p)] == []
    logits = model(torch.arange(40).view(1, 40))
    assert torch.isfinite(logits).all() and 0.05 < logits.std() < 20
    again = load_dummy("flash", numerics="qat", cache="fp8", index_cache="fp4")
    assert all(
        torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(model.parameters(), again.parameters())
    )


@pytest.mark.parametrize("cache, index_cache", [("auto", "auto"), ("fp8", "fp4"), ("fp8", "fp8")])
def test_a_filled_cache_is_decoded_from(small_flash, cache, index_cache):
    model = load_dummy("flash", cache=cache, index_cache=index_cache, backend="reference")
    held = model.new_cache(2, 512)
    fill_cache(held, 400)
    graph = DecodeGraph(model, held)
    for token in range(6):
        assert torch.isfinite(graph.step(torch.full((2, 1), token))).all()
    assert held.lengths == [406, 406]
    fill_cache(held, [400, 9])
    graph.step(torch.full((2, 1), 3))
    held.rewind(2)
    assert held.lengths == [399, 8]
    with pytest.raises(InputError, match="1 rows were given for a cache of 2"):
        fill_cache(held, [4])


def test_layers_and_refusals(small_flash, command_line):
    assert len(load_dummy("flash", layers=2).layers) == 2
    for arguments, message in (
        (("grand",), "expected flash or pro"),
        (("flash", 0), "expected 1 …"),
        (("flash", 99), "expected 1 …"),
    ):
        with pytest.raises(InputError, match=message):
            load_dummy(*arguments)
    for options, message in (
        (["--layers", "2", "--prompt", "x"], "a checkpoint directory or --dummy-weights"),
        (["demo", "--layers", "2", "--prompt", "x"], "--layers belongs to"),
        (["--dummy-weights", "flash", "--prompt", "x", "--prompt-tokens", "3"], "comes from one of them"),
    ):
        code, _, err = command_line("generate", *options)
        assert code == 2 and message in err


def test_generate_without_a_checkpoint(small_flash, command_line):
    asked = ("--dummy-weights", "flash", "--prompt-tokens", 20, "--max-new-tokens", 3, "--json")
    code, out, _ = command_line("generate", *asked)
    document = json.loads(out)
    assert code == 0 and len(document["token_ids"]) == 3 and len(document["prompt_token_ids"]) == 20
    assert "random weights" in document["checkpoint"] and document["load"] is None
