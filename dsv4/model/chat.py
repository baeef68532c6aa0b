"""DeepSeek's chat format.

    <｜begin▁of▁sentence｜>{system}<｜User｜>{text}<｜Assistant｜></think>{reply}<｜end▁of▁sentence｜>…

A thinking reply starts with <think> instead of </think>.
"""

import re
from collections.abc import Mapping, Sequence

from dsv4.errors import InputError
from dsv4.model.tokenizer import Tokenizer

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
USER, ASSISTANT = "<｜User｜>", "<｜Assistant｜>"
THINK, END_THINK = "<think>", "</think>"


def chat_parts(
    messages: Sequence[Mapping[str, str]], think: bool = False, resume: bool = False
) -> list[tuple[str, bool]]:
    """A conversation in pieces of text, each with whether it is a control token. It ends with a user message and is
    ready for the assistant's reply; with `resume` it ends with an assistant message, which is not closed.

    messages: {'role': 'system' | 'user' | 'assistant', 'content': text}; a system message only first. Raises InputError
    for another order.
    """
    parts = [(BOS, True)]
    expected: tuple[str, ...] = ("system", "user")
    for message in messages:
        role, text = message["role"], message["content"]
        if role not in expected:
            raise InputError(f"a {role!r} message stands where {' or '.join(map(repr, expected))} was expected")
        if role == "system":
            parts += [(text, False)]
            expected = ("user",)
        elif role == "user":
            parts += [(USER, True), (text, False), (ASSISTANT, True)]
            expected = ("assistant",)
        else:
            parts += [(END_THINK, True), (text, False), (EOS, True)]
            expected = ("user",)
    if not messages or messages[-1]["role"] != ("assistant" if resume else "user"):
        raise InputError(
            "a conversation must end with "
            + ("an assistant message to go on with" if resume else "a user message for the assistant to answer")
        )
    return parts[:-1] if resume else [*parts, (THINK if think else END_THINK, True)]


def chat_ids(tokenizer: Tokenizer, messages: Sequence[Mapping[str, str]], think: bool = False) -> list[int]:
    """Token ids of a conversation that ends with a user message, ready for the assistant's reply. Text of messages
    never becomes control tokens. Raises InputError as `chat_parts`, and for a tokenizer without the control tokens."""
    ids: list[int] = []
    for text, is_control in chat_parts(messages, think):
        ids += [tokenizer.control(text)] if is_control else tokenizer.encode(text)
    return ids


def written_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """Token ids of a conversation that was written out, in which names of special tokens are those tokens."""
    names = "|".join(map(re.escape, sorted(tokenizer.special, key=len, reverse=True)))
    ids: list[int] = []
    for part in re.split(f"({names})", text) if names else [text]:
        ids += [tokenizer.special[part]] if part in tokenizer.special else tokenizer.encode(part)
    return ids


def plain_ids(tokenizer: Tokenizer, text: str, bos: int | None) -> list[int]:
    """Token ids of a plain prompt, after the checkpoint's begin-of-sentence token if it has one."""
    ids = tokenizer.encode(text)
    if not ids:
        raise InputError("the prompt is empty; pass --prompt TEXT, --prompt-file FILE, or text on standard input")
    return ids if bos is None else [bos, *ids]


def templated_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """Token ids of a plain prompt by the tokenizer's own template: checkpoints in the transformers layout may name a
    begin-of-text token in config.json that their prompts do not begin with (Qwen2)."""
    if not tokenizer.encode(text):
        raise InputError("the prompt is empty; pass --prompt TEXT, --prompt-file FILE, or text on standard input")
    return tokenizer.encode_templated(text)
