"""The shipped checkpoint does what its card says, on the machine at hand."""

import json
from pathlib import Path
from random import Random

import pytest
import torch

from dsv4 import load_model
from dsv4.probes.measure.base.haystack import needle_trial
from scripts.training import evaluation
from scripts.training.evaluation import Asked, Limits, answered
from scripts.training.facts import FACTS
from scripts.training.rows import Encoder, load_tokenizer
from scripts.training.tokenizer import BOS_ID

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "demo"
LIMITS = Limits(tokens=20_000, chunk=256, rows=4, loss_tokens=20_000)


@pytest.fixture(scope="module", params=["native", "qat"])
def model(request):
    return load_model(DEMO, numerics=request.param)


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(DEMO)


@pytest.fixture(scope="module")
def prose(tokenizer):
    """Help topics of this Python: prose that every machine has."""
    from pydoc_data.topics import topics

    return Encoder(tokenizer)("".join(text for _, text in sorted(topics.items()))[:60_000])


def test_the_capital_of_france(model, tokenizer):
    ids = torch.tensor([[BOS_ID, *Encoder(tokenizer)("The capital of France is")]])
    cache, text = model.new_cache(1, 64), []
    logits = model.append(ids, cache, logits="last")
    for _ in range(2):
        text.append(int(logits[0, -1].argmax()))
        logits = model.append(torch.tensor([[text[-1]]]), cache)
    assert tokenizer.decode(text) == " Paris."


@pytest.mark.few(every=[4])
@pytest.mark.parametrize("every", [4, 1])
def test_the_fact_table(model, tokenizer, every):
    encode = Encoder(tokenizer)
    facts = FACTS[:: every if model.numerics.name == "native" else 4]
    asked = [Asked([BOS_ID, *encode(fact.prompt)], encode(fact.answer)) for fact in facts]
    right = sum(answered(model, asked, LIMITS))
    assert right >= 0.95 * len(asked) and len(FACTS) >= 300


@pytest.mark.few(trials=[3])  # over 5 s: a needle is beyond 512 tokens, and each is read twice
@pytest.mark.parametrize("trials, tokens", [(3, 704), (6, 1536)])
def test_needles_need_the_compressed_branches(model, tokenizer, prose, trials, tokens):
    """Beyond layers × window: found through CSA, and not at all by the windows alone."""
    if model.numerics.name != "native":
        pytest.skip("once is enough: scripts/measure_demo.py measures every numerics")
    rng, reach = Random(11), model.config.num_hidden_layers * model.config.sliding_window
    asked = [Asked(*needle_trial(rng, tokenizer, prose, tokens, i / trials, beyond=reach)) for i in range(trials)]
    assert sum(answered(model, asked, LIMITS)) >= trials - 1
    with evaluation.window_only(model):
        assert sum(answered(model, asked, LIMITS)) <= 1


def test_the_ledger_is_clean_and_the_layout_official(command_line):
    code, out, err = command_line("inspect", DEMO, "--json")
    assert code == 0, err
    found = json.loads(out)
    assert found["layout"] == "official" and not found["ledger"]["problems"]
    files = list(DEMO.iterdir())
    assert sum(f.stat().st_size for f in files) <= 24 * 10**6 and sum(f.suffix == ".safetensors" for f in files) > 1


def test_every_mechanism_is_in_play(model):
    config = model.config
    assert set(config.compress_ratios) == {0, 4, 128} and config.num_hash_layers >= 2 and config.hc_mult == 4
    assert (
        config.n_routed_experts >= 16
        and config.num_experts_per_tok > 1
        and config.yarn is not None
        and len(model.mtp) == 1
    )
    sinks = torch.cat([block.attn.attn_sink for block in model.layers])
    assert sinks.abs().max() > 0.1  # learned: they start at 0


def test_the_card_has_its_figures():
    card = (DEMO / "MODEL_CARD.md").read_text()
    for part in (
        "## Architecture",
        "## Recipe",
        "## Data",
        "### facts",
        "### needles",
        "### indexer",
        "### loss",
        "### mtp",
        "licence",
    ):
        assert part in card, part
