"""Models of each kind beside transformers' own; loaded once a session and not changed by tests."""

import pytest
import torch

from dsv4 import load_model
from dsv4.model.gqa.choice import Attention
from tests.gqa import oracle
from tests.texts import PROSE

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
    from tokenizers import processors

    from scripts.training.tokenizer import train_tokenizer

    config = oracle.CONFIGS["qwen2, bias and tied head"]
    folder = oracle.save(oracle.randomised(config), config, tmp_path_factory.mktemp("gqa") / "c", torch.bfloat16)
    tokenizer = train_tokenizer([PROSE], config["vocab_size"])
    begin = tokenizer.id_to_token(0)
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{begin} $A", special_tokens=[(begin, 0)])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


MODELS = {  # of the engine's tests: dense layers, some with a window, and all
    "dense": ("qwen2, bias and tied head", "fp32", "cpu"),
    "dense, native": ("llama, llama3 rope and biases", "native", "reference"),
    "some windows": ("qwen2, yarn and some sliding layers", "fp32", "cpu"),
    "windows": ("mistral, sliding window", "fp32", "cpu"),
}


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """Function: the model of that name in MODELS, loaded once."""
    loaded = {}

    def named(name: str):
        if name not in loaded:
            config, numerics, backend = MODELS[name]
            folder = oracle.save(
                oracle.randomised(oracle.CONFIGS[config]), oracle.CONFIGS[config], tmp_path_factory.mktemp("gqa")
            )
            loaded[name] = load_model(folder, numerics=numerics, backend=backend)
        return loaded[name]

    return named


@pytest.fixture(params=MODELS)
def model(request, models):
    """Each of MODELS, reading densely again afterwards."""
    found = models(request.param)
    yield found
    found.attention = Attention()
