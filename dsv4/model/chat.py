"""DeepSeek's chat format.

    <｜begin▁of▁sentence｜>{system}<｜User｜>{text}<｜Assistant｜></think>{reply}<｜end▁of▁sentence｜>…

A thinking reply starts with <think> instead of </think>.
"""

from collections.abc import Mapping, Sequence

from dsv4.errors import InputError
from dsv4.model.tokenizer import Tokenizer

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
USER, ASSISTANT = "<｜User｜>", "<｜Assistant｜>"
THINK, END_THINK = "<think>", "</think>"


def chat_ids(tokenizer: Tokenizer, messages: Sequence[Mapping[str, str]], think: bool = False) -> list[int]:
    """Token ids of a conversation that ends with a user message, ready for the assistant's reply.

    messages: {'role': 'system' | 'user' | 'assistant', 'content': text}; a system message only first. Raises InputError
    for another order, and for a tokenizer without the control tokens.
    """
    control = tokenizer.control
    ids = [control(BOS)]
    expected: tuple[str, ...] = ("system", "user")
    for message in messages:
        role, text = message["role"], message["content"]
        if role not in expected:
            raise InputError(f"a {role!r} message stands where {' or '.join(map(repr, expected))} was expected")
        if role == "system":
            ids += tokenizer.encode(text)
            expected = ("user",)
        elif role == "user":
            ids += [control(USER), *tokenizer.encode(text), control(ASSISTANT)]
            expected = ("assistant",)
        else:
            ids += [control(END_THINK), *tokenizer.encode(text), control(EOS)]
            expected = ("user",)
    if not messages or messages[-1]["role"] != "user":
        raise InputError("a conversation must end with a user message for the assistant to answer")
    return [*ids, control(THINK if think else END_THINK)]


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
