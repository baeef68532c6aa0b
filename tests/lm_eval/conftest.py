"""Small GQA checkpoints with tokenizers, which transformers reads too, and the command line in this process."""

import json
import sys
from pathlib import Path

import pytest
from tokenizers import processors

from dsv4.commands.cli import guarded
from dsv4.commands.generate import Choices, Session
from dsv4.lm_eval import __main__ as command
from dsv4.model.tokenizer import Tokenizer
from scripts.training.tokenizer import train_tokenizer
from tests.gqa import oracle
from tests.texts import PROSE


def write_tokenizer(folder: Path, vocab: int, template: bool) -> None:
    """A tokenizer of `vocab` tokens. template: texts begin with token 0, and it is named; else neither."""
    tokenizer = train_tokenizer([PROSE], vocab)
    begin, end = tokenizer.id_to_token(0), tokenizer.id_to_token(1)
    if template:
        tokenizer.post_processor = processors.TemplateProcessing(single=f"{begin} $A", special_tokens=[(begin, 0)])
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end, "pad_token": end}
    named |= {"bos_token": begin} if template else {}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))


KINDS = {"no begin of text": ("qwen2, bias and tied head", False), "begin of text": ("mistral, sliding window", True)}


@pytest.fixture(scope="module", params=KINDS)
def folder(request, tmp_path_factory) -> Path:
    """A small GQA checkpoint with a tokenizer, whose template begins a text with a token or does not."""
    name, template = KINDS[request.param]
    config = oracle.CONFIGS[name]
    path = oracle.save(oracle.randomised(config), config, tmp_path_factory.mktemp("lm") / "c")
    write_tokenizer(path, config["vocab_size"], template)
    return path


@pytest.fixture(scope="module")
def dense_folder(tmp_path_factory) -> Path:
    """One whose layers have no window, so that policies act."""
    config = oracle.CONFIGS["qwen2, bias and tied head"]
    path = oracle.save(oracle.randomised(config), config, tmp_path_factory.mktemp("lm") / "c")
    write_tokenizer(path, config["vocab_size"], True)
    return path


@pytest.fixture(scope="module")
def session(dense_folder) -> Session:
    return Session(dense_folder, Choices(numerics="fp32"))


@pytest.fixture(scope="module")
def words(dense_folder) -> Tokenizer:
    return Tokenizer(dense_folder, 384)


@pytest.fixture(scope="module")
def theirs(folder):
    """lm_eval's adapter of transformers."""
    HFLM = pytest.importorskip("lm_eval.models.huggingface").HFLM
    return HFLM(pretrained=str(folder), device="cpu", dtype="float32", batch_size=3)


@pytest.fixture(scope="module")
def ours(folder):
    pytest.importorskip("lm_eval")
    from dsv4.lm_eval.model import Dsv4LM

    return Dsv4LM(checkpoint=str(folder), numerics="fp32", batch_size=3)


@pytest.fixture
def line(monkeypatch, capsys):
    """Function: run `python -m dsv4.lm_eval …` in this process → (exit code, stdout, stderr in one line)."""

    def run(*words) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["dsv4.lm_eval", *map(str, words)])
        with pytest.raises(SystemExit) as stop:
            guarded(command.run)
        out, err = capsys.readouterr()
        return stop.value.code or 0, out, " ".join(err.split())

    return run
