"""Models that fidelity is measured on: small ones with random weights, and a GQA model whose decoding obeys a
policy."""

import pytest

from dsv4 import load_model
from dsv4.probes.measure.base.text import read_text
from tests.checkpoints import SMALL, write_dense
from tests.gqa import oracle
from tests.texts import PROSE

LONG = {"max_position_embeddings": 2048}


@pytest.fixture(scope="session")
def csa_path(tmp_path_factory):
    return write_dense(tmp_path_factory.mktemp("fidelity") / "csa")


@pytest.fixture(scope="session")
def csa(csa_path):
    return load_model(csa_path, numerics="fp32")


@pytest.fixture(scope="session")
def text(csa_path):
    return read_text(None, csa_path, SMALL["vocab_size"], 4000, seed=0)


@pytest.fixture(scope="session")
def gqa_path(tmp_path_factory):
    """With a tokenizer, and room for needles."""
    from scripts.training.tokenizer import train_tokenizer

    config = oracle.CONFIGS["qwen2, bias and tied head"] | LONG
    folder = oracle.save(oracle.randomised(config), config, tmp_path_factory.mktemp("fidelity") / "gqa")
    train_tokenizer([PROSE], config["vocab_size"]).save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="session")
def gqa(gqa_path):
    return load_model(gqa_path, numerics="fp32")


@pytest.fixture(scope="session")
def one_layer(tmp_path_factory):
    """A GQA model of one layer, whose keys are of their own tokens alone: what is not read has no other way to
    matter."""
    config = oracle.CONFIGS["qwen2, bias and tied head"] | {"num_hidden_layers": 1}
    return load_model(
        oracle.save(oracle.randomised(config), config, tmp_path_factory.mktemp("fidelity") / "one"), numerics="fp32"
    )


@pytest.fixture
def run(command_line):
    return command_line
