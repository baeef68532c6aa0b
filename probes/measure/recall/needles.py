"""Needles with and without the compressed branches."""

from contextlib import nullcontext

import numpy as np
from tokenizers import Tokenizer

from dsv4.model.causal import CausalLM
from dsv4.probes.bounds import lower_bound
from dsv4.probes.measure.base import needles
from dsv4.probes.measure.base.mass import window_only
from dsv4.probes.measure.base.models import Say
from dsv4.probes.measure.base.models import reach as reach  # old places of these names, until 0.4
from dsv4.probes.measure.base.needles import Asked as Asked
from dsv4.probes.measure.base.needles import Haystack, Limits, answered, depths, trials
from dsv4.probes.measure.base.needles import hidden as hidden
from dsv4.probes.measure.base.needles import replies as replies
from dsv4.probes.measure.base.needles import replies_by as replies_by

HAYSTACKS = (*needles.HAYSTACKS, Haystack("prose, window only", True, True))


def found(
    model: CausalLM,
    tokenizer: Tokenizer,
    prose: np.ndarray,
    lengths: list[int],
    count: int,
    limits: Limits,
    say: Say,
    seed: int = 0,
) -> list[dict]:
    """Needles found by haystack and length, as JSON values; the same `count` trials whatever the numerics. Lengths
    beyond `reach`."""
    rows = []
    for haystack, length, asked, note in trials(model, tokenizer, prose, lengths, count, seed, say, HAYSTACKS):
        with window_only(model) if haystack.window_only else nullcontext():
            hits = answered(model, asked, limits, note)
        rows.append(
            {
                "haystack": haystack.name,
                "window_only": haystack.window_only,
                "context": length,
                "trials": count,
                "hits": sum(hits),
                "share": sum(hits) / count,
                "at_least": lower_bound(sum(hits), count),
                "depths": depths(asked, hits),
            }
        )
    return rows
