"""Generation until a stop string, from token ids: through the engine, or alone where prompts are read in chunks. Needs
no lm_eval."""

from collections.abc import Iterator
from contextlib import suppress

from dsv4.commands.batch import Options, new_pool
from dsv4.commands.generate import Session
from dsv4.engine.batch import BatchEngine
from dsv4.engine.generate import generate
from dsv4.engine.state import Request, Result
from dsv4.model.tokenizer import Tokenizer

BESIDE = 8  # tokens before a stop string that are decoded with it: the first one may lose its space


class _Stopped(Exception):
    """A stop string has come."""


def generated(
    session: Session, tokenizer: Tokenizer, asked: list[tuple[Request, list[str]]], rows: int, together: bool
) -> Iterator[tuple[str, list[int]]]:
    """(id, new token ids) of each request as it ends: by a stop id, which is left out, its length, or soon after one of
    its stop strings, which is not cut off. rows: requests that run at once; together: they decode as one batch.

    Prompts that are read in chunks run one by one, since requests over pages share prefixes. Raises a request's error.
    """
    attention = session.model.attention
    alone = attention is not None and attention.prefill is not None
    run = _alone(session, tokenizer, asked) if alone else _batched(session, tokenizer, asked, rows, together)
    for name, ids in run:
        yield name, ids[:-1] if ids and ids[-1] in session.stop_ids else ids


def _alone(session, tokenizer, asked) -> Iterator[tuple[str, list[int]]]:
    for request, stops in asked:
        ids: list[int] = []

        def told(token: int) -> None:
            ids.append(token)
            if _stopped(tokenizer, ids, stops):
                raise _Stopped

        with suppress(_Stopped):
            given = session.model, list(request.prompt_ids), request.max_tokens, request.sampling
            generate(*given, stop_ids=session.stop_ids, on_token=told)
        yield request.id, ids


def _batched(session, tokenizer, asked, rows: int, together: bool) -> Iterator[tuple[str, list[int]]]:
    ended: list[Result] = []
    strings = {request.id: stops for request, stops in asked}
    cache = new_pool(session.model, [request for request, _ in asked], Options(rows))
    engine = BatchEngine(session.model, cache, session.stop_ids, together, ended.append)
    for request, _ in asked:
        engine.submit(request)
    while engine.waiting or engine.running or ended:
        if not ended:
            engine.step()
        for work in list(engine.running):
            if _stopped(tokenizer, work.result.token_ids, strings[work.request.id]):
                engine.cancel(work.request.id)
        for result in ended:
            if result.error is not None:
                raise result.error
            yield result.id, result.token_ids
        ended.clear()


def _stopped(tokenizer: Tokenizer, ids: list[int], stops: list[str]) -> bool:
    """Whether the text ends with a token that completes a stop string. Each token of a text has a byte at least, so a
    stop string of n bytes spans at most n tokens."""
    if not stops or not ids:
        return False
    tail = tokenizer.decode(ids[-max(len(stop.encode()) for stop in stops) - BESIDE :])
    return any(stop in tail for stop in stops)
