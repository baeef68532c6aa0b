"""Single-shot generation: prefill, then one token at a time."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dsv4.cache.host_tier.grouped import host_use
from dsv4.errors import ContextOverrun, InputError, brief
from dsv4.model.causal import CausalLM, capacity
from dsv4.runtime.graph import DecodeGraph
from dsv4.sampling import COLDEST as COLDEST  # old places of these names, until 0.4
from dsv4.sampling import HOTTEST as HOTTEST
from dsv4.sampling import Sampling, sample
from dsv4.sampling import distribution as distribution
from dsv4.sampling import weights as weights
from dsv4.speculation.result import Speculation


@dataclass
class Generation:
    """The result of a generation. Times in seconds; `prefill_seconds` ends with the first token's logits."""

    prompt_ids: list[int]
    token_ids: list[int] = field(default_factory=list)
    stop_reason: str = ""  # 'eos' or 'max_new_tokens'
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    capture_seconds: float = 0.0  # capturing the decode step as a graph, on a GPU; not part of the other times
    cache_bytes: int = 0
    max_context: int = 0
    host: dict | None = None  # of a cache in host memory: `dsv4.cache.host_tier.grouped.host_use`
    speculation: Speculation | None = None  # counts of drafting, if tokens were drafted

    @property
    def prefill_rate(self) -> float:
        return len(self.prompt_ids) / self.prefill_seconds if self.prefill_seconds else 0.0

    @property
    def decode_rate(self) -> float:
        """Tokens per second of the steps after the first token."""
        steps = len(self.token_ids) - 1
        return steps / self.decode_seconds if steps > 0 and self.decode_seconds else 0.0


def generate(
    model: CausalLM,
    ids: list[int],
    max_new_tokens: int,
    sampling: Sampling = Sampling(),
    max_context: int | None = None,
    stop_ids: Iterable[int] = (),
    on_token: Callable[[int], None] | None = None,
    on_prefill: Callable[[int, int], None] | None = None,
) -> Generation:
    """Generate from a prompt until a stop id or `max_new_tokens`.

    max_context: tokens the cache holds; by default just enough. The last token is not fed back, so a prompt of P
    tokens and N new ones need P + N − 1. on_token(id) as tokens appear; on_prefill(done, total) during prefill.
    Raises InputError for an empty prompt or id outside the vocabulary; ContextOverrun when the prompt does not fit
    max_context, or all that was asked for the checkpoint, and, while generating, when the next token would not fit
    max_context: tokens so far have been passed to on_token.
    """
    limit = context_limit(model, [ids], max_new_tokens, max_context)
    cache = model.new_cache(1, capacity(model, limit))
    out = Generation(list(ids), cache_bytes=cache.nbytes, max_context=limit)
    generator = torch.Generator().manual_seed(sampling.seed)
    stops = frozenset(stop_ids)
    begun = time.perf_counter()
    logits = _prefill(model, ids, cache, on_prefill)
    out.prefill_seconds = time.perf_counter() - begun
    graph = None
    if model.backend == "triton" and max_new_tokens > 1 and cache.lengths[0] < limit:
        begun = time.perf_counter()
        graph = DecodeGraph(model, cache)
        if graph.graph is not None:
            out.capture_seconds = time.perf_counter() - begun
    begun = time.perf_counter()
    while True:
        # a token that stops the generation is then appended for nothing
        ahead = graph is not None and sampling.temperature == 0
        if graph is not None and ahead:
            (token,), logits = graph.greedy(
                logits, len(out.token_ids) + 1 < max_new_tokens and cache.lengths[0] < limit
            )
        else:
            token = sample(logits[0, -1], sampling, generator)
        out.token_ids.append(token)
        if on_token is not None and token not in stops:
            on_token(token)
        out.decode_seconds = time.perf_counter() - begun
        if token in stops or len(out.token_ids) == max_new_tokens:
            out.stop_reason, out.host = "eos" if token in stops else "max_new_tokens", host_use(cache)
            return out
        if logits is None or not ahead and cache.lengths[0] == limit:
            raise context_full(limit, len(out.token_ids))
        if not ahead:
            fed = torch.tensor([[token]])
            logits = model.append(fed, cache, logits="last") if graph is None else graph.step(fed)


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


def _prefill(model: CausalLM, ids: list[int], cache, on_prefill) -> torch.Tensor:
    prompt = torch.tensor([ids])
    logits: Any = None
    for start in range(0, len(ids), model.chunk):
        last = start + model.chunk >= len(ids)
        logits = model.append(
            prompt[:, start : start + model.chunk], cache, logits="last" if last else "none", prompt=True
        )
        if on_prefill is not None:
            on_prefill(min(start + model.chunk, len(ids)), len(ids))
    if logits.is_cuda:
        torch.cuda.synchronize(logits.device)  # prefill time ends when the device has finished its work
    return logits
