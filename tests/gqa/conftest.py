"""Models of each kind beside transformers' own; loaded once a session and not changed by tests."""

import pytest
import torch

from dsv4 import load_model
from tests.gqa import oracle

TOKENS = 310


@pytest.fixture(scope="session", params=list(oracle.CONFIGS))
def pair(request, tmp_path_factory):
    """(our model in fp32, transformers' model, ids [1, 310], its logits) of one randomised config."""
    config = oracle.CONFIGS[request.param]
    theirs = oracle.randomised(config)
    folder = oracle.save(theirs, config, tmp_path_factory.mktemp("gqa"))
    ids = torch.randint(0, config["vocab_size"], (1, TOKENS), generator=torch.Generator().manual_seed(1))
    return load_model(folder, numerics="fp32"), theirs, ids, oracle.logits(theirs, ids)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """A Qwen2 checkpoint in bf16 with a tied head and a tokenizer whose template begins with token 0."""
    from pathlib import Path

    from tokenizers import processors

    from scripts.training.tokenizer import train_tokenizer
    config = oracle.CONFIGS["qwen2, bias and tied head"]
    folder = oracle.save(oracle.randomised(config), config, tmp_path_factory.mktemp("gqa") / "c", torch.bfloat16)
    tokenizer = train_tokenizer([(Path(__file__).resolve().parents[2] / "README.md").read_text()], config["vocab_size"])
    begin = tokenizer.id_to_token(0)
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{begin} $A", special_tokens=[(begin, 0)])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder
