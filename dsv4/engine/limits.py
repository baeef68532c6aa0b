"""What a request must fit: the context, the checkpoint, the vocabulary."""

from collections.abc import Sequence

from dsv4.errors import ContextOverrun, InputError, brief
from dsv4.model.causal import CausalLM


def context_limit(model: CausalLM, prompts: list[list[int]], max_new_tokens: int, max_context: int | None) -> int:
    """Tokens that the cache of this request holds: max_context, or just enough. Raises as `context_needed` does."""
    limit = max_context if max_context is not None else model.max_context
    return context_needed(model.config, prompts, max_new_tokens, limit)


def context_needed(config, prompts: list[list[int]], max_new_tokens: int, limit: int | None) -> int:
    """Tokens that the cache of this request holds: `limit`, or just enough. It takes a config, so that a request can be
    refused before the weights are read.

    Raises InputError for an empty prompt and ids outside the vocabulary, ContextOverrun for a prompt that is too long
    for the limit or, with all requested tokens, for the checkpoint: then no max_context would help.
    """
    if not prompts or not all(prompts):
        raise InputError("the prompt is empty")
    if max_new_tokens < 1:
        raise InputError(f"max_new_tokens is {max_new_tokens}; expected at least 1")
    longest, most = max(map(len, prompts)), config.max_position_embeddings
    if longest + max_new_tokens - 1 > most:
        raise beyond_checkpoint(longest, max_new_tokens, most, "--max-new-tokens")
    limit = limit if limit is not None else longest + max_new_tokens - 1
    if longest > limit:
        raise ContextOverrun(
            f"the prompt has {longest} tokens, max_context is {limit}; shorten it or raise --max-context (at "
            f"most {most})"
        )
    for ids in prompts:
        check_ids(ids, config.vocab_size)
    return limit


def check_ids(ids: Sequence[int], vocab_size: int) -> None:
    """Raises InputError for a token id that the model does not have, however large: tensors hold 64 bits."""
    low, high = min(ids), max(ids)
    if low < 0 or high >= vocab_size:
        raise InputError(
            f"token id {brief(low if low < 0 else high)} is outside the vocabulary of {vocab_size}; expected 0 to "
            f"{vocab_size - 1}, as the checkpoint's own tokenizer gives them"
        )


def beyond_checkpoint(prompt_tokens: int, max_tokens: int, most: int, option: str) -> ContextOverrun:
    """The error of a request that no --max-context would help. option: the option that sets its max_tokens."""
    lower = "shorten it" if prompt_tokens > most else f"shorten it, or lower {option}"
    return ContextOverrun(
        f"the prompt has {prompt_tokens} tokens and {brief(max_tokens)} more were asked for, over the {most} "
        f"(max_position_embeddings) that the checkpoint takes; {lower}"
    )


def context_full(limit: int, generated: int) -> ContextOverrun:
    """The error of a next token without room in the context. The checkpoint has room, else `context_limit` had refused
    the request."""
    return ContextOverrun(
        f"the context of {limit} tokens is full after {generated} new tokens; raise --max-context or lower "
        "--max-new-tokens"
    )
