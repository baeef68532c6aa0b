"""A request on its way through the engine."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from dsv4.engine.requests import Request, Result
from dsv4.speculation.policy import Adaptive, Policy

MEAN = Adaptive()  # whatever policy chooses the sizes, this mean of acceptance decides which request is evicted


class Pass(NamedTuple):
    """The tokens that ran after a row's last token, and how many tokens of the pass were kept (that token is one)."""

    drafts: list[int]
    kept: int


@dataclass(eq=False)
class Work:
    """ids: prompt and new tokens, all final; the last is not run yet. row: of the cache, None while it waits; used:
    engine step that last advanced it; state: of its policy; epsilon: mean acceptance of its drafts.

    text: how many of `ids` run as a prompt does, in pieces of up to 128, since it joined; passes: those that ran after
    the text, of which the first `again` have run again since it joined; streams [1, n, d]: the main model's at the last
    token of the text that was run, where the drafter wants them.
    """

    request: Request
    arrival: int
    submitted: float
    ids: list[int]
    result: Result
    policy: Policy
    generator: torch.Generator = field(repr=False)
    row: int | None = None
    used: int = 0
    last_token: float = 0.0
    state: Any = None
    epsilon: np.float32 = MEAN.initial()
    text: int = 0
    passes: list[Pass] = field(default_factory=list)
    again: int = 0
    streams: torch.Tensor | None = field(default=None, repr=False)

    @property
    def left(self) -> int:
        """Tokens that it may still generate."""
        return self.request.max_tokens - len(self.result.token_ids)

    def observe(self, accepted: int, proposed: int) -> None:
        """Count `accepted` of `proposed` drafts of a pass."""
        self.state = self.policy.observe(self.state, accepted, proposed)
        self.epsilon = MEAN.observe(self.epsilon, accepted, proposed)
