"""Scores and generated texts as lm_eval's model gets them, beside the model's own logits and generation. Needs no
lm_eval."""

import pytest
import torch

from dsv4.engine.generate import generate
from dsv4.engine.state import Request
from dsv4.errors import InputError
from dsv4.lm_eval import scoring
from dsv4.lm_eval.generation import generated
from dsv4.model import chat
from dsv4.model.gqa.choice import Attention, attention_named
from tests.lm_eval.compare import CLOSE, agree

MOST = 512  # tokens of the small checkpoints' context


def drawn(*lengths: int, seed: int = 0) -> list[list[int]]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randint(6, 384, (n,), generator=g).tolist() for n in lengths]


PAIRS = list(zip(drawn(5, 300, 1, 40, 40, 600), drawn(3, 1, 9, 60, 2, 7, seed=1)))


def single(model, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    """The definition: logits of the whole text at once."""
    whole = (context + continuation)[-MOST - 1 :]
    logits, n = model.forward(torch.tensor([whole[:-1]]))[0], len(continuation)
    ids = torch.tensor(continuation)
    found = logits.log_softmax(-1)[-n:].gather(1, ids.unsqueeze(1)).double().sum()
    return float(found), logits[-n:].argmax(-1).tolist() == continuation


@pytest.mark.parametrize("rows", [1, 3, 8])
@pytest.mark.parametrize("decoded", [False, True])
@pytest.mark.every
def test_scores_are_those_of_each_text_alone(session, rows, decoded):
    """The continuations among them that are greedy are of 1 and of 5 tokens, and two share a row."""
    model, pairs = session.model, list(PAIRS)
    for n in (1, 5):
        pairs.append((PAIRS[0][0], generate(model, PAIRS[0][0], n).token_ids))
    pairs.append((PAIRS[0][0], [*pairs[-1][1][:-1], 17]))
    wanted = [single(model, *pair) for pair in pairs]
    assert [greedy for _, greedy in wanted] == [False] * 6 + [True, True, False]
    counted = []
    found = scoring.scores(model, pairs, MOST, rows, decoded, counted.append)
    assert agree(found, wanted) and sum(counted) == len(pairs)


def test_logits_of_a_long_text_never_exist_at_once(session, monkeypatch):
    """As many as SCORED tokens do, though the text is read in pieces of other sizes. The last of them are greedy, the
    first are not."""
    sizes, head = [], session.model.lm_head.forward
    context, first = drawn(3)[0], drawn(330)[0]
    pair = (context, first + generate(session.model, context + first, 40).token_ids)
    monkeypatch.setattr(session.model.lm_head, "forward", lambda y: sizes.append(len(y)) or head(y))
    monkeypatch.setattr(scoring, "SCORED", 48)
    found = scoring.scores(session.model, [pair], MOST, 4, False)
    monkeypatch.undo()
    assert max(sizes) == 48 and sum(sizes) == 370 and agree(found, [single(session.model, *pair)])


@pytest.mark.parametrize("pair,message", [(([5], []), "adds no token"), (([5], [6] * 513), "has 513 tokens, over")])
def test_continuations_that_cannot_be_scored(session, pair, message):
    with pytest.raises(InputError, match=message):
        scoring.scores(session.model, [pair], MOST, 1, False)


POLICIES = {
    "sink-window": dict(name="sink-window", tokens=256),
    "block-bound": dict(name="block-bound", tokens=512),
    "terminate": dict(name=None, terminate=True, rule="tau=10,phi=2,patience=1"),
    "chunks": dict(name=None, prefill_chunks="64,8,24"),
}


@pytest.mark.parametrize("name", POLICIES)
def test_a_context_is_read_as_a_prompt_and_a_continuation_as_decoding(session, name, monkeypatch):
    """Step by step, as `dsv4 generate` would come to the same tokens; and otherwise than densely."""
    model = session.model
    context, continuation = drawn(450)[0], drawn(20, seed=5)[0]
    dense = single(model, context, continuation)[0]
    try:
        model.attention = attention_named(**POLICIES[name])
        cache = model.new_cache(1, MOST)
        logits = [model.append(torch.tensor([context]), cache, logits="last", prompt=True)]
        for token in continuation[:-1]:
            logits.append(model.append(torch.tensor([[token]]), cache, prompt=False))
        logs = torch.cat(logits, 1)[0].log_softmax(-1)
        wanted = float(logs.gather(1, torch.tensor(continuation).unsqueeze(1)).double().sum())
        for pairs in ([(context, continuation)], [(context, continuation), PAIRS[0], PAIRS[1]]):
            (found, _), *_ = scoring.scores(model, pairs, MOST, 3, True)
            assert abs(found - wanted) < CLOSE
    finally:
        model.attention = Attention()
    if name != "block-bound":  # which keeps all of so short a text
        assert abs(wanted - dense) > 1e-3


def asked(prompts, stops) -> list[tuple[Request, list[str]]]:
    return [(Request(str(i), tuple(p), 24), s) for i, (p, s) in enumerate(prompts_of(prompts, stops))]


def prompts_of(prompts, stops):
    return zip(prompts, stops)


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("chunks", [None, "64,8,24"])
@pytest.mark.every
def test_generation_stops_soon_after_a_stop_string(session, words, together, chunks):
    """Stop strings that end in the middle of a token, that span several, that come first of two, and that never
    come."""
    prompts = drawn(30, 7, 150, 90)
    try:
        session.model.attention = attention_named(None, prefill_chunks=chunks) or Attention()
        whole = [generate(session.model, p, 24, stop_ids=session.stop_ids).token_ids for p in prompts]
        texts = [words.decode(ids) for ids in whole]
        spans = words.decode(whole[0][6:14])
        stops = [[spans[1:-1]], ["never comes", texts[1][9:12]], [], ["never comes"]]
        found = dict(generated(session, words, asked(prompts, stops), 3, together))
    finally:
        session.model.attention = Attention()
    for i, ids in enumerate(whole):
        text, new = words.decode(found[str(i)]), found[str(i)]
        assert new == ids[: len(new)]
        if i < 2:
            assert stops[i][-1] in text and stops[i][-1] not in words.decode(new[:-1])
            assert len(new) < len(ids)
        else:
            assert text == texts[i] and len(new) == 24


def test_a_stop_id_is_left_out(session, words, monkeypatch):
    prompt = drawn(30)[0]
    ids = generate(session.model, prompt, 8).token_ids
    monkeypatch.setattr(session, "stop_ids", {ids[5]})
    ((_, found),) = generated(session, words, asked([prompt], [[]]), 2, True)
    assert found == ids[: ids.index(ids[5])]


def test_a_request_that_fails_is_raised(session, words):
    with pytest.raises(InputError, match="the prompt is empty"):
        list(generated(session, words, asked([[]], [[]]), 1, True))


def test_a_written_conversation_has_the_tokens_of_the_conversation(words):
    messages = [{"role": r, "content": t} for r, t in (("system", "Be brief."), ("user", "2 + 2?"))]
    more = [*messages, {"role": "assistant", "content": "4"}, {"role": "user", "content": "Sure?"}]
    for told, think in ((messages, False), (messages, True), (more, False)):
        written = "".join(text for text, _ in chat.chat_parts(told, think))
        assert chat.written_ids(words, written) == chat.chat_ids(words, told, think)
    written = "".join(text for text, _ in chat.chat_parts(more[:3], resume=True))
    assert chat.written_ids(words, written) == [*chat.chat_ids(words, messages), *words.encode("4")]
    for told, resume, message in ((more[:3], False, "end with a user"), (more, True, "end with an assistant")):
        with pytest.raises(InputError, match=message):
            chat.chat_parts(told, resume=resume)
