"""Model arguments and the command line of `python -m dsv4.lm_eval`. Needs no lm_eval."""

import importlib.util
import sys
import tomllib
from pathlib import Path

import pytest

from dsv4.errors import Dsv4Error, InputError
from dsv4.lm_eval import __main__ as command
from dsv4.lm_eval.arguments import Arguments, arguments_named, joined
from dsv4.model.gqa.choice import attention_named

ROOT = Path(__file__).resolve().parents[2]


def test_arguments_mean_what_the_options_of_generate_mean():
    found = arguments_named(
        dict(checkpoint="x", attention="block-bound", attention_tokens="1K", terminate=True, max_context="4K")
        | dict(prefill_chunks=[1024, 128, 384], batch_size="8", device=None)
    )
    assert found.reads == attention_named("block-bound", "1K", True, "1024,128,384")
    assert (found.context, found.batch_size, found.device) == (4096, 8, "cpu")
    assert arguments_named(dict(checkpoint="x")) == Arguments("x")


BAD = {
    "unknown": (
        dict(checkpoint="x", attn="dense"),
        "model argument 'attn' is unknown; expected checkpoint,",
    ),
    "no checkpoint": (dict(numerics="fp32"), "pass --model_args checkpoint=DIRECTORY"),
    "checkpoint is a number": (dict(checkpoint=7), "checkpoint is '7'; expected text"),
    "not a bool": (dict(checkpoint="x", terminate="yes"), "terminate is 'yes'; expected true or false"),
    "a bool": (dict(checkpoint="x", batch_size=True), "batch_size is 'True'; expected a whole number"),
    "auto": (dict(checkpoint="x", batch_size="auto"), "batch_size is 'auto'; expected a whole number"),
    "no rows": (dict(checkpoint="x", batch_size=0), "batch_size is 0; expected at least 1"),
    "no context": (dict(checkpoint="x", max_context=1), "max_context is 1; expected at least 2"),
    "no size": (dict(checkpoint="x", max_context="4Q"), "max_context: '4Q' is not a size"),
    "no policy": (dict(checkpoint="x", attention="nothing"), "--attention 'nothing' is unknown"),
    "dense with tokens": (dict(checkpoint="x", attention_tokens=128), "dense attention reads every token"),
    "rule alone": (dict(checkpoint="x", terminate_rule="tau=1"), "add --terminate"),
    "two numbers": (dict(checkpoint="x", prefill_chunks=[8, 2]), "expected CHUNK,LOCAL,HEAVY"),
    "no cut": (dict(checkpoint="x", prefill_chunks="8,8,8"), "less than the chunk"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_one_line(name):
    given, message = BAD[name]
    with pytest.raises(Dsv4Error) as error:
        arguments_named(given)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_arguments_and_options_of_lm_eval_may_not_contradict_each_other():
    assert joined({"batch_size": 4}, {"batch_size": 1, "device": "cpu", "max_batch_size": None}) == {
        "batch_size": 4,
        "device": "cpu",
    }
    assert joined({"device": "cuda"}, {"device": "cpu"})["device"] == "cuda"  # that is the command line's default
    assert joined({"batch_size": 4}, {"batch_size": "4"})["batch_size"] == 4
    with pytest.raises(InputError, match="--batch_size 8 and the model argument batch_size=4 were given"):
        joined({"batch_size": 4}, {"batch_size": "8"})


@pytest.mark.parametrize(
    "given,wanted",
    [
        (["--tasks", "a"], ["run", "--model", "dsv4", "--device", "cpu", "--tasks", "a"]),
        (["run", "--tasks", "a", "--device=cuda"], ["run", "--model", "dsv4", "--tasks", "a", "--device=cuda"]),
        (["-C", "a.yaml"], ["run", "--model", "dsv4", "-C", "a.yaml"]),
        (["-M", "dsv4", "-t", "a"], ["run", "--model", "dsv4", "--device", "cpu", "-M", "dsv4", "-t", "a"]),
        (["ls", "tasks"], ["ls", "tasks"]),
        ([], ["run", "--help"]),
    ],
)
def test_words_of_the_command_line(given, wanted):
    assert command.words(given) == wanted


@pytest.mark.parametrize("given", [["--model", "hf"], ["--model=hf"], ["run", "-M", "hf", "--tasks", "a"]])
def test_another_model_is_refused(given):
    with pytest.raises(InputError, match="--model hf was given; python -m dsv4.lm_eval runs dsv4"):
        command.words(given)


def test_without_lm_eval_one_line_says_what_to_install(monkeypatch, line):
    whole = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "lm_eval" else whole(name))
    code, out, err = line("--tasks", "a")
    assert (code, out) == (2, "")
    assert err == 'error: lm_eval is not installed; run: pip install "lm-eval>=0.4.12"'


def test_a_broken_lm_eval_is_one_line_too(monkeypatch, line):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setitem(sys.modules, "lm_eval.__main__", None)
    code, out, err = line("--tasks", "a")
    assert code == 2 and err.startswith("error: lm_eval cannot be used (") and "pip install" in err


def test_the_extra_asks_for_what_the_message_says():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["optional-dependencies"]["lm-eval"] == [command.NEEDED]
