"""The shipped GQA checkpoint does what its card says, on the machine at hand."""

import json
from pathlib import Path
from random import Random

import pytest

from dsv4 import load_model
from dsv4.kernels.block_choice import block_bounds, sink_window
from dsv4.probes.measure.base.haystack import needle_trial
from dsv4.probes.measure.base.needles import DECODED, Asked, Limits, answered, replies_by
from dsv4.probes.measure.base.variants import of_policy
from scripts.training.facts import FACTS
from scripts.training.rows import Encoder, load_tokenizer
from scripts.training.tokenizer import BOS_ID
from tests.demo.test_demo import prose  # noqa: F401  (fixture)

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "demo_gqa"
LIMITS = Limits(tokens=20_000, chunk=1024)


@pytest.fixture(scope="module")
def model():
    return load_model(DEMO, numerics="native")


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(DEMO)


@pytest.mark.few(every=[4])
@pytest.mark.parametrize("every", [4, 1])
def test_the_fact_table(model, tokenizer, every):
    encode = Encoder(tokenizer)
    asked = [Asked([BOS_ID, *encode(fact.prompt)], encode(fact.answer)) for fact in FACTS[::every]]
    assert sum(answered(model, asked, LIMITS)) >= 0.95 * len(asked) and len(FACTS) >= 300


@pytest.mark.sweep  # minutes on a busy machine; its parts have tests of their own
def test_needles_are_found_by_what_reads_them_and_by_nothing_else(model, tokenizer, prose):
    """By the dense model and by bounds of blocks; 512 tokens of sink and window do not reach them."""
    rng = Random(11)
    asked = [Asked(*needle_trial(rng, tokenizer, prose, 2048, (i + 1) / 10, beyond=1024)) for i in range(4)]
    assert sum(answered(model, asked, LIMITS)) >= 3
    variants = {v.name: v for v in map(of_policy, (block_bounds(1024), sink_window(512)))}
    said = replies_by(
        model,
        asked,
        LIMITS,
        {name: lambda cache, v=v: v.resumed(model, cache) for name, v in variants.items()},
        decoded=DECODED,
    )
    bound, window = (sum(reply == a.answer for a, reply in zip(asked, of)) for of in said.values())
    assert bound >= 3 and window == 0


def test_the_ledger_is_clean_and_the_files_are_small(command_line):
    code, out, err = command_line("inspect", DEMO, "--json")
    assert code == 0, err
    assert not json.loads(out)["ledger"]["problems"]
    files = [file for file in DEMO.iterdir() if file.suffix != ".md"]
    assert sum(f.stat().st_size for f in files) <= 12 * 10**6 and sum(f.suffix == ".safetensors" for f in files) > 1


def test_the_card_has_its_figures():
    card = (DEMO / "MODEL_CARD.md").read_text()
    for part in (
        "## Architecture",
        "## Recipe",
        "## Data",
        "### facts",
        "### needles",
        "### loss",
        "licence",
        "train_gqa.jsonl",
    ):
        assert part in card, part
