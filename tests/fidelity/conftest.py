"""Models that fidelity is measured on: small ones with random weights, and a GQA model whose decoding obeys a policy."""

import sys
from dataclasses import dataclass

import pytest
import torch

from dsv4 import load_model
from kernels.block_choice import Policy, choose_blocks, dense
from kernels.block_summaries import summarise_blocks
from kernels.gather_attention import gather_attention
from probes.recall.text import read_text
from tests.checkpoints import SMALL, write_dense
from tests.gqa import oracle

LONG = {"max_position_embeddings": 2048}


@dataclass(frozen=True)
class Choice:
    """In the place of a model's own `attention`, where it has none yet."""

    policy: Policy = dense()


def obeying(model):
    """The model itself, with an `attention` whose policy its decoding obeys; one of its own is left as it is."""
    if getattr(model, "attention", None) is not None:
        return model
    model.attention = Choice()
    for layer in model.layers:
        attn = layer.self_attn
        if attn.window is None:
            attn.attend = _attend(model, attn, attn.attend)
    return model


def _attend(model, attn, whole):
    choose, gather, summarise = (op.resolve("reference")[0] for op in (choose_blocks, gather_attention, summarise_blocks))

    def run(q, keys, values, step):
        policy = model.attention.policy
        if policy.dense or step.T > 16:
            return whole(q, keys, values, step)
        (B, KV, S, D), N = keys.shape, keys.shape[2] // policy.block
        low, high, mean = (torch.zeros(B, KV, N, D, dtype=keys.dtype) for _ in range(3))
        for b in range(B):
            one = slice(b, b + 1)
            summarise(keys[one], step.start[one] * 0, int(step.start[b]) + step.T, low[one], high[one], mean[one], policy.block)
        blocks = choose(q, KV, low, high, mean, step.start, policy)
        return gather(q, keys, values, blocks, step.start, None, attn.scale, policy.block)
    return run


@pytest.fixture(autouse=True, scope="module")
def one_thread(two_threads):
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(2)


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
    from pathlib import Path

    from scripts.training.tokenizer import train_tokenizer
    config = oracle.CONFIGS["qwen2, bias and tied head"] | LONG
    folder = oracle.save(oracle.randomised(config), config, tmp_path_factory.mktemp("fidelity") / "gqa")
    readme = Path(__file__).resolve().parents[2] / "README.md"
    train_tokenizer([readme.read_text()], config["vocab_size"]).save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="session")
def gqa(gqa_path):
    return obeying(load_model(gqa_path, numerics="fp32"))


@pytest.fixture(scope="session")
def one_layer(tmp_path_factory):
    """A GQA model of one layer, whose keys are of their own tokens alone: what is not read has no other way to matter."""
    config = oracle.CONFIGS["qwen2, bias and tied head"] | {"num_hidden_layers": 1}
    return obeying(load_model(oracle.save(oracle.randomised(config), config, tmp_path_factory.mktemp("fidelity") / "one"), numerics="fp32"))


@pytest.fixture
def run(monkeypatch, capsys):
    """Function: `dsv4 …` in this process → (exit code, stdout, stderr)."""
    from dsv4 import cli

    def call(*args):
        monkeypatch.setattr(sys, "argv", ["dsv4", *map(str, args)])
        with pytest.raises(SystemExit) as stop:
            cli.main()
        found = capsys.readouterr()
        return stop.value.code or 0, found.out, found.err
    return call
