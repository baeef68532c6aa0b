"""Acceptance traces: for each position of a generated text, how many of the next drafted tokens would have been
accepted."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dsv4.cache.streams import MAX_DRAFTS
from dsv4.errors import InputError
from dsv4.speculation.documents import expect_header, read_document, write_whole

FORMAT, VERSION = "dsv4-acceptance-trace", 1


@dataclass(frozen=True, eq=False)
class Request:
    """One generated text of T tokens.

    accepted int64 [T], 0 … 8: with t tokens committed, how many of 8 drafted tokens would be accepted. A pass that
    drafts k from there commits min(k, accepted[t]) + 1 tokens. rates fp64 [T] (synthetic traces only): the probability
    that token t is one which a draft gets right, given that those before it were.
    """

    name: str
    accepted: np.ndarray
    rates: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.accepted)


@dataclass(frozen=True, eq=False)
class Trace:
    """Requests and where they come from (`provenance`: 'kind' is 'recorded' or 'synthetic', and what is needed to
    obtain it again)."""

    name: str
    requests: tuple[Request, ...]
    provenance: Mapping[str, object]

    @property
    def tokens(self) -> int:
        return sum(map(len, self.requests))


def write_trace(trace: Trace, path: str | Path) -> None:
    """Whole or not at all. Raises InputError when the file cannot be written."""
    requests = [
        {"name": r.name, "accepted": r.accepted.tolist(), **({} if r.rates is None else {"rates": r.rates.tolist()})}
        for r in trace.requests
    ]
    document = {
        "format": FORMAT,
        "version": VERSION,
        "largest": MAX_DRAFTS,
        "name": trace.name,
        "provenance": dict(trace.provenance),
        "requests": requests,
    }
    write_whole(Path(path), json.dumps(document) + "\n")


def read_trace(path: str | Path) -> Trace:
    """Raises InputError, naming the file and the field."""
    return read_document(path, parse_trace)


def parse_trace(document: object) -> Trace:
    """Raises InputError for another format or counts outside 0 … 8."""
    document = expect_header(document, "an acceptance trace", FORMAT, VERSION)
    if document.get("largest") != MAX_DRAFTS:
        raise InputError(
            f"largest is {document.get('largest')!r}; expected {MAX_DRAFTS}: record how many of {MAX_DRAFTS} drafts "
            "are accepted"
        )
    provenance, requests = document.get("provenance"), document.get("requests")
    if not isinstance(provenance, dict) or provenance.get("kind") not in ("recorded", "synthetic"):
        raise InputError(f"provenance is {provenance!r}; expected an object whose 'kind' is 'recorded' or 'synthetic'")
    if not isinstance(requests, list) or not requests:
        raise InputError("there are no requests; expected a list of at least one")
    return Trace(str(document.get("name", "")), tuple(_request(i, r) for i, r in enumerate(requests)), provenance)


def _request(index: int, document: object) -> Request:
    document = document if isinstance(document, dict) else {}
    counts, rates = document.get("accepted"), document.get("rates")
    if not isinstance(counts, list) or not counts:
        raise InputError(f"request {index} has no 'accepted'; expected a count for each of its tokens")
    for t, count in enumerate(counts):
        if type(count) is not int or not 0 <= count <= MAX_DRAFTS:
            raise InputError(
                f"request {index} has {count!r} accepted at token {t}; expected a whole number from 0 to {MAX_DRAFTS}"
            )
    if rates is not None:
        if not isinstance(rates, list) or len(rates) != len(counts):
            raise InputError(f"request {index} has 'rates' that are not {len(counts)} numbers, one a token")
        for t, rate in enumerate(rates):
            if type(rate) not in (int, float) or not 0 <= rate <= 1:
                raise InputError(f"request {index} has rate {rate!r} at token {t}; expected 0 … 1")
    return Request(
        str(document.get("name", index)),
        np.array(counts, np.int64),
        None if rates is None else np.array(rates, np.float64),
    )


def counts_of(drafted: Sequence[Sequence[int]], chosen: Sequence[int]) -> np.ndarray:
    """Counts of a recorded greedy run, int64 [T]. drafted[t]: up to 8 ids drafted with t tokens committed, for tokens
    t, t + 1, …; chosen [T + 8 or more]: what the model chose itself."""
    counts = np.zeros(len(drafted), np.int64)
    for t, ids in enumerate(drafted):
        while (
            counts[t] < min(len(ids), MAX_DRAFTS)
            and t + counts[t] < len(chosen)
            and ids[counts[t]] == chosen[t + counts[t]]
        ):
            counts[t] += 1
    return counts


# Synthetic traces. Each token is either easy or difficult for drafts, for every drafter and from every position: from
# position t, all are accepted up to the next difficult token. A policy then sees independent trials, and positions of
# one text agree.


def synthetic_request(name: str, rates: np.ndarray, rng: np.random.Generator, falloff: float = 1.0) -> Request:
    """rates fp64 [T]. falloff: a draft at depth j, from 0, also fails by itself with probability 1 − falloff^j (errors
    of a chain of drafts); independent between positions."""
    T = len(rates)
    easy = np.concatenate([rng.random(T) < rates, np.zeros(MAX_DRAFTS, bool)])
    # [T, 8]: draft j from position t is for token t + j
    right = np.stack([easy[j : j + T] for j in range(MAX_DRAFTS)], axis=1)
    if falloff < 1:
        right &= rng.random(right.shape) < falloff ** np.arange(MAX_DRAFTS)
    return Request(name, np.cumprod(right, axis=1).sum(1), np.asarray(rates, np.float64))


def stationary(
    name: str, rate: float, requests: int = 64, tokens: int = 1024, seed: int = 0, falloff: float = 1.0
) -> Trace:
    """Every token with the same rate."""
    rng = np.random.default_rng(seed)
    made = tuple(synthetic_request(f"{name} {i}", np.full(tokens, rate), rng, falloff) for i in range(requests))
    about = {
        "kind": "synthetic",
        "generator": "stationary",
        "rate": rate,
        "requests": requests,
        "tokens": tokens,
        "seed": seed,
        "falloff": falloff,
    }
    return Trace(name, made, about)


def mixed(
    name: str = "mixed",
    high: float = 0.95,
    low: float = 0.35,
    segment: int = 128,
    requests: int = 64,
    tokens: int = 1024,
    seed: int = 0,
    falloff: float = 1.0,
) -> Trace:
    """Alternating segments of code (high) and free text (low), lengths geometric with mean `segment`; half the requests
    begin with each."""
    rng = np.random.default_rng(seed)
    made = []
    for i in range(requests):
        begun = bool(rng.random() < 0.5)
        turns = np.cumsum(rng.random(tokens) < 1 / segment) % 2 == 1
        made.append(synthetic_request(f"{name} {i}", np.where(turns ^ begun, high, low), rng, falloff))
    about = {
        "kind": "synthetic",
        "generator": "mixed",
        "high": high,
        "low": low,
        "segment": segment,
        "requests": requests,
        "tokens": tokens,
        "seed": seed,
        "falloff": falloff,
    }
    return Trace(name, tuple(made), about)
