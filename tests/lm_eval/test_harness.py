"""dsv4 as a model of lm_eval, beside lm_eval's own adapter of transformers on the same checkpoint."""

import json
import logging
import os
from types import SimpleNamespace

import pytest
import torch

from dsv4.commands.generate import model_config
from dsv4.errors import InputError

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when lm_eval imports its libraries
pytest.importorskip("lm_eval")

from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from dsv4.lm_eval import model as adapter
from dsv4.lm_eval import scoring
from dsv4.lm_eval.model import Dsv4LM
from dsv4.model.tokenizer import Tokenizer
from tests.lm_eval.compare import agree, close
from tests.texts import PROSE


def requests(kind: str, *given) -> list[Instance]:
    return [Instance(kind, {}, arguments, i) for i, arguments in enumerate(given)]


# ---- log-likelihoods -----------------------------------------------------------------------------------------------

PAIRS = [
    ("The kernels of the model", " are compared with the reference."),
    ("The kernels of the model ", "are compared"),  # the space belongs to the continuation
    ("The kernels of the model", " x"),
    ("", "A text without a context"),
    ("a", " continuation that is much longer than its context, with several words and a full stop."),
    ("Question: which of these holds?\nAnswer:", " no"),
    ("Question: which of these holds?\nAnswer:", " yes"),
    (PROSE[:4000], " and that was too long"),  # for the context of 512 tokens: its first tokens are left out
    (PROSE[4000:5000], "\n\nA heading"),
]


def greedy_pairs(model: HFLM) -> list[tuple[str, str]]:
    """Continuations that transformers finds greedy: the likeliest next token, where its text reads as that token."""
    found = []
    for start in range(0, 1500, 75):
        context = PROSE[start : start + 60].rstrip()
        ids = model.tok_encode(context)
        text = model.tok_decode([int(model._model_call(torch.tensor([ids]))[0, -1].argmax())])
        if model.tok_encode(context + text)[: len(ids)] == ids and text.strip():
            found.append((context, text))
    return found


def test_log_likelihoods_are_transformers(ours, theirs, caplog):
    given = requests("loglikelihood", *PAIRS, *greedy_pairs(theirs))
    wanted = theirs.loglikelihood(given, disable_tqdm=True)
    with caplog.at_level(logging.WARNING, "lm_eval.dsv4"):
        found = ours.loglikelihood(given, disable_tqdm=True)
    assert agree(found, wanted)
    assert any(greedy for _, greedy in wanted) and not all(greedy for _, greedy in wanted)
    assert "2 of " in caplog.text and "lost their first tokens, for a context of 512 tokens" in caplog.text


@pytest.mark.parametrize(
    "named,wanted",
    [
        (None, (0, 1)),  # as config.json
        ({"bos_token": "<think>", "eos_token": {"content": "</think>"}}, (4, 5)),
        ({"bos_token": None, "eos_token": "</think>"}, (5, 5)),
        ({"eos_token": "no such token"}, (1, 1)),
    ],
)
def test_begin_and_end_of_text(dense_folder, tmp_path, named, wanted):
    tokenizer, config = Tokenizer(dense_folder, 384), model_config(dense_folder)
    if named is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(named))
    assert adapter._begin_and_end(tmp_path, config, tokenizer) == wanted
    neither = SimpleNamespace(bos_token_id=None, eos_token_id=())
    if named is None:
        with pytest.raises(InputError, match="names no begin or end of text"):
            adapter._begin_and_end(tmp_path, neither, tokenizer)


def test_a_context_of_spaces_is_no_context(ours):
    given = requests("loglikelihood", ("  ", "A text"), ("", "  A text"))
    spaces, none = ours.loglikelihood(given, True)
    assert spaces == none


def test_a_request_alone_and_in_a_batch_agree(ours, folder):
    given = requests("loglikelihood", *PAIRS)
    alone = Dsv4LM(checkpoint=str(folder), numerics="fp32", batch_size=1)
    assert agree(ours.loglikelihood(given, True), [alone.loglikelihood([one], True)[0] for one in given])


def test_rolling_log_likelihoods_are_transformers(folder):
    """Texts of one window of 64 tokens, of several, and of none. Sums of windows stay below 1,000 nats,
    where fp32, in which lm_eval adds, has steps of 6e-5."""
    theirs = HFLM(pretrained=str(folder), device="cpu", dtype="float32", batch_size=3, max_length=64)
    ours = Dsv4LM(checkpoint=str(folder), numerics="fp32", batch_size=3, max_context=64)
    given = requests("loglikelihood_rolling", ("A short text.",), (PROSE[:400],), ("a",), (PROSE[900:1100],))
    assert len(ours.tok_encode(PROSE[:400])) > 2 * ours.max_length
    found = ours.loglikelihood_rolling(given, True)
    assert close(found, theirs.loglikelihood_rolling(given, True))
    assert ours.loglikelihood_rolling(requests("loglikelihood_rolling", ("",)), True) == [0.0]


def test_rolling_texts_are_decoded_where_a_policy_acts_and_else_prompts(dense_folder):
    """Chunks of a prompt and policies of decoding each change the sum; neither does where it reads all."""
    given = requests("loglikelihood_rolling", (PROSE[:700],))

    def run(**how) -> float:
        return Dsv4LM(checkpoint=str(dense_folder), numerics="fp32", **how).loglikelihood_rolling(given, True)[0]

    assert 384 < len(Tokenizer(dense_folder, 384).encode(PROSE[:700])) < 512
    dense = run()
    assert abs(run(prefill_chunks=[64, 8, 24]) - dense) > 1
    assert abs(run(attention="sink-window", attention_tokens=256) - dense) > 1
    assert abs(run(attention="sink-window", attention_tokens=512) - dense) < 1e-3


def later(context, continuation, most):
    """The continuation is scored where it begins one token later."""
    row = whole(context, continuation, most)
    return row._replace(ids=(*row.ids[1:], continuation[-1]))


whole = scoring.row_of
FAULTS = {
    "one token later": (scoring, "row_of", later),
    "without the context": (scoring, "row_of", lambda a, b, most: whole(a[-1:], b, most)),
    "cut on the right": (scoring, "row_of", lambda a, b, most: scoring.Row(tuple([*a, *b][:most]), len(b))),
    "empty context after the end of text": (Dsv4LM, "prefix_token_id", 1),
    "no begin of text": (Dsv4LM, "tok_encode", lambda self, text, *given, **more: self.tokenizer.encode(text)),
    "begin of text twice": (
        Dsv4LM,
        "tok_encode",
        lambda self, text, *given, **more: [0, *self.tokenizer.encode_templated(text)],
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_seen(fault, ours, theirs, folder, monkeypatch):
    """In log-likelihoods, in rolling ones, or in both, for a tokenizer to which the fault applies."""
    where, name, wrong = FAULTS[fault]
    templated = ours.tokenizer.encode_templated("") == [0]
    pairs, texts = requests("loglikelihood", *PAIRS), requests("loglikelihood_rolling", ("A short text.",))
    wanted = theirs.loglikelihood(pairs, True), theirs.loglikelihood_rolling(texts, True)
    faulty = Dsv4LM(checkpoint=str(folder), numerics="fp32", batch_size=3)
    if where is Dsv4LM and name == "prefix_token_id":
        faulty.prefix_token_id = 0 if ours.prefix_token_id else 1
    else:
        monkeypatch.setattr(where, name, wrong)
    same = (
        agree(faulty.loglikelihood(pairs, True), wanted[0]),
        close(faulty.loglikelihood_rolling(texts, True), wanted[1]),
    )
    assert all(same) if fault == "no begin of text" and not templated else not all(same)


def test_what_cannot_be_scored_is_one_line(ours):
    for pair, message in (
        (("a", ""), "the continuation of the context 'a' is empty"),
        (("a", PROSE[:4000]), r"a continuation has \d+ tokens, over the 512 of the context; raise max_context"),
    ):
        with pytest.raises(InputError, match=message):
            ours.loglikelihood(requests("loglikelihood", pair), True)


# ---- generation ----------------------------------------------------------------------------------------------------


def test_greedy_texts_are_transformers(ours, theirs):
    """With stop strings that come, that span tokens, and that do not; with other lengths; too long for the context."""
    free = {"until": [], "max_gen_toks": 24}
    contexts = ["The kernels of the model", "Question: what?\nAnswer:", PROSE[:4000], "a", PROSE[900:1400]]
    texts = theirs.generate_until(requests("generate_until", *((c, free) for c in contexts)), True)
    hows = [
        {"until": texts[0][9:12], "max_gen_toks": 24},
        {"until": ["never comes", texts[1][6:8], texts[1][4:6]], "max_new_tokens": 24},
        {"until": [], "max_gen_toks": 8, "do_sample": False, "temperature": 0.0, "num_beams": 1},
        {"until": ["\n\n"], "max_gen_toks": 1},
        free,
    ]
    for given in (
        requests("generate_until", *((c, free) for c in contexts)),
        requests("generate_until", *zip(contexts, hows)),
    ):
        assert ours.generate_until(given, True) == theirs.generate_until(given, True)


def test_sampled_texts_depend_on_the_seed_and_on_nothing_else(ours):
    how = {"until": [], "max_gen_toks": 12, "do_sample": True, "temperature": 1.5, "top_p": 0.95}
    given = requests("generate_until", *((context, how) for context in ("The", "The", "A model of", "Why")))
    torch.manual_seed(3)
    texts = ours.generate_until(given, True)
    assert texts[0] != texts[1]  # repeats of one request are drawn anew
    assert ours.generate_until(given, True) == texts
    assert ours.generate_until(given[2:], True) == texts[2:]
    torch.manual_seed(4)
    assert ours.generate_until(given, True) != texts


@pytest.mark.parametrize(
    "how,message",
    [
        ({"until": [], "top_k": 5}, "generation argument 'top_k' is unknown; expected until, max_gen_toks"),
        ({"until": [], "num_beams": 4}, "generation argument 'num_beams' is unknown"),
        ({"until": [], "max_gen_toks": 512}, "max_gen_toks is 512; expected 1 to 511"),
        ({"until": [], "max_gen_toks": 0}, "max_gen_toks is 0; expected 1 to 511"),
        ({"until": [], "temperature": -1.0, "do_sample": True}, "temperature -1.0 was asked for"),
    ],
)
def test_what_cannot_be_generated_is_one_line(ours, how, message):
    with pytest.raises(InputError) as error:
        ours.generate_until(requests("generate_until", ("a", how)), True)
    assert message in str(error.value)
