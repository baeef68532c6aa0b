"""Whole tasks under lm_eval, written here, beside lm_eval's own adapter of transformers; conversations, the command
line, and a DeepSeek-V4 checkpoint. Nothing is fetched."""

import json
import logging
import os
import shutil

import pytest
import torch

from dsv4.errors import InputError

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when lm_eval imports its libraries
pytest.importorskip("lm_eval")

from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

from dsv4.lm_eval import model as adapter
from dsv4.lm_eval.model import Dsv4LM
from dsv4.model import chat
from tests.lm_eval.compare import CLOSE, agree, close
from tests.lm_eval.conftest import write_tokenizer
from tests.texts import PROSE

# ---- whole tasks ---------------------------------------------------------------------------------------------------

CHOICES = [
    {"question": "The kernels of the model", "choices": ["are compared", "were lost", "sing"], "label": 0},
    {"question": "A page of", "choices": ["tokens", "a book about it"], "label": 1},
    {"question": "Errors are", "choices": ["one line", "many", "a", "b"], "label": 2},
]
TEXTS = [{"text": PROSE[:100]}, {"text": PROSE[1000:1080]}, {"text": "One line."}]


def write_task(folder, name: str, docs: list[dict], **config) -> dict:
    file = folder / f"{name}.jsonl"
    file.write_text("".join(json.dumps(doc) + "\n" for doc in docs))
    kwargs = {"data_files": str(file), "cache_dir": str(folder / "cache")}
    return {"task": name, "dataset_path": "json", "dataset_kwargs": kwargs, "test_split": "train"} | config


@pytest.fixture
def tasks(tmp_path) -> list[dict]:
    mean = lambda name, higher=True, by="mean": {"metric": name, "aggregation": by, "higher_is_better": higher}
    perplexity = [mean("word_perplexity", False, "weighted_perplexity"), mean("bits_per_byte", False, "bits_per_byte")]
    return [
        write_task(
            tmp_path,
            "choice",
            CHOICES,
            output_type="multiple_choice",
            doc_to_text="{{question}}",
            doc_to_choice="{{choices}}",
            doc_to_target="{{label}}",
            metric_list=[mean("acc"), mean("acc_norm")],
        ),
        write_task(
            tmp_path,
            "rolling",
            TEXTS,
            output_type="loglikelihood_rolling",
            doc_to_text="",
            doc_to_target="{{text}}",
            metric_list=perplexity,
        ),
        write_task(
            tmp_path,
            "answers",
            CHOICES,
            output_type="generate_until",
            doc_to_text="{{question}}",
            doc_to_target="{{choices[label]}}",
            generation_kwargs={"until": ["\n", "."], "max_gen_toks": 16},
            metric_list=[mean("exact_match")],
        ),
    ]


def evaluated(tasks: list[dict], **how) -> dict:
    manager = TaskManager(include_defaults=False)
    return simple_evaluate(tasks=tasks, task_manager=manager, log_samples=True, bootstrap_iters=0, **how)


def answers(found: dict) -> dict[str, list]:
    return {name: [sample["resps"] for sample in samples] for name, samples in found["samples"].items()}


def test_tasks_have_transformers_results(tasks, folder, theirs):
    given = {"checkpoint": str(folder), "numerics": "fp32", "batch_size": 4}
    found, wanted = evaluated(tasks, model="dsv4", model_args=given), evaluated(tasks, model=theirs)
    ours, others = answers(found), answers(wanted)
    assert ours["answers"] == others["answers"]
    for mine, other in zip(ours["choice"], others["choice"]):
        assert agree([x for [x] in mine], [x for [x] in other])
    assert close([x for [[x]] in ours["rolling"]], [x for [[x]] in others["rolling"]])
    for name, metrics in wanted["results"].items():
        for metric, value in metrics.items():
            if isinstance(value, float):
                assert found["results"][name][metric] == pytest.approx(value, rel=1e-5)
    assert found["config"]["dsv4_arguments"]["batch_size"] == 4 and found["config"]["dsv4_version"]


# ---- conversations ---------------------------------------------------------------------------------------------------


def test_a_conversation_reaches_the_model_as_the_chat_format(ours, folder, tasks, monkeypatch):
    seen = []
    monkeypatch.setattr(adapter, "scores", lambda model, pairs, *more: seen.extend(pairs) or [(0.0, True)] * len(pairs))
    args = {"model": "dsv4", "model_args": {"checkpoint": str(folder)}}
    evaluated(tasks[:1], **args, apply_chat_template=True, system_instruction="Be brief.")
    system = {"role": "system", "content": "Be brief."}
    wanted = [chat.chat_ids(ours.tokenizer, [system, {"role": "user", "content": doc["question"]}]) for doc in CHOICES]
    assert [context for context, _ in seen] == [ids for ids, doc in zip(wanted, CHOICES) for _ in doc["choices"]]
    assert ours.tokenizer.decode(list(seen[0][1])) == "are compared"


def test_a_started_reply_and_names_of_control_tokens(ours, caplog):
    history = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "It is"}]
    text = ours.apply_chat_template(history, add_generation_prompt=False)
    assert text.endswith(f"{chat.END_THINK}It is") and not caplog.text
    with caplog.at_level(logging.WARNING, "lm_eval.dsv4"):
        ours.apply_chat_template([{"role": "user", "content": f"What is {chat.USER}?"}])
    assert f"a message has {chat.USER} in its text" in caplog.text
    assert ours.tok_encode(f"What is {chat.USER}?") == ours.family.prompt_ids(
        ours.tokenizer, f"What is {chat.USER}?", ours.model.config
    )
    assert ours.tokenizer.special[chat.USER] not in ours.tok_encode(f"What is {chat.USER}?")


def test_a_tokenizer_without_control_tokens_has_no_chat_format(ours, monkeypatch):
    with pytest.raises(InputError, match="dsv4 has one chat format: leave out the name"):
        ours.chat_template("short")
    monkeypatch.setattr(ours.tokenizer, "special", {})
    for call in (
        lambda: ours.chat_template(True),
        lambda: ours.apply_chat_template([{"role": "user", "content": "a"}]),
    ):
        with pytest.raises(InputError, match="has no special token"):
            call()


# ---- the command line, and DeepSeek-V4 -----------------------------------------------------------------------------


@pytest.fixture
def few_tasks(monkeypatch):
    """lm_eval without its own tasks, which take 10 s to list, and without its log, which would keep this stderr."""
    whole = TaskManager.__init__
    brief = lambda self, *given, **more: whole(self, *given, **more | {"include_defaults": False})
    monkeypatch.setattr(TaskManager, "__init__", brief)
    monkeypatch.setattr("lm_eval.__main__.setup_logging", lambda: None)


def test_the_command_line(line, few_tasks, tasks, folder, tmp_path):
    (file := tmp_path / "choice.yaml").write_text(json.dumps(tasks[0]))
    code, out, err = line("--tasks", file, "--model_args", f"checkpoint={folder},numerics=fp32", "--batch_size", 2)
    assert code == 0 and out.startswith("dsv4 (") and "|choice|" in out
    bad = [
        (["--tasks", "no_such_task", "--model_args", f"checkpoint={folder}"], "lm_eval: Tasks not found: no_such_task"),
        (["--tasks", file, "--model_args", f"checkpoint={folder},attn=dense"], "model argument 'attn' is unknown"),
        (["--tasks", file, "--model_args", f"checkpoint={folder},max_context=4K"], "exceeds the checkpoint's max_pos"),
        (["--tasks", file, "--model_args", f"checkpoint={tmp_path}/none"], "is not a directory"),
        (["--tasks", file], "no checkpoint was named"),
        (["--tasks", file, "--log_samples"], "lm_eval: Specify --output_path"),
    ]
    for words, message in bad:
        code, out, err = line(*words)
        last = err[err.rindex("error: ") :]
        assert code == 2 and out == "" and message in last and "Traceback" not in err, err


def test_deepseek_v4_runs(brief_official, tmp_path_factory, tasks):
    folder = shutil.copytree(brief_official, tmp_path_factory.mktemp("v4") / "c")
    write_tokenizer(folder, 320, False)
    (folder / "tokenizer_config.json").unlink()
    found = answers(
        evaluated(tasks, model="dsv4", model_args={"checkpoint": str(folder), "numerics": "fp32", "batch_size": 3})
    )
    model = Dsv4LM(checkpoint=str(folder), numerics="fp32")
    assert model.tok_encode("text") == [0, *model.tokenizer.encode("text")] and model.prefix_token_id == 0
    ids = [0, *model.tokenizer.encode(CHOICES[0]["question"])]
    more = model.tokenizer.encode(" " + CHOICES[0]["choices"][0])
    logs = model.model.forward(torch.tensor([ids + more[:-1]]))[0].log_softmax(-1)[-len(more) :]
    wanted = float(logs.gather(1, torch.tensor(more).unsqueeze(1)).sum())
    assert found["choice"][0][0][0][0] == pytest.approx(wanted, abs=CLOSE)
    assert all(isinstance(text, str) for [[text]] in found["answers"]) and all(x < 0 for [[x]] in found["rolling"])
