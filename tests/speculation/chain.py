"""A model of few tokens whose next one depends on the last alone, with a block that says something else: what rounds
sample can be counted."""

from types import SimpleNamespace

import torch

from dsv4.cache.cache import Lengths
from dsv4.sampling import Sampling
from dsv4.speculation.choosing import Sampled
from dsv4.speculation.device_drafters import LookupDrafts, MTPDrafts
from dsv4.speculation.rounds import Rounds

V = 5
TARGET = torch.tensor(
    [
        [0.5, 0.2, 0.15, 0.1, 0.05],
        [0.05, 0.05, 0.6, 0.3, 0.0],
        [0.0, 0.25, 0.25, 0.25, 0.25],
        [0.1, 0.1, 0.1, 0.1, 0.6],
        [0.9, 0.1, 0.0, 0.0, 0.0],
    ]
)
UNIFORM = torch.full((V, V), 1 / V)
APART = torch.where(TARGET <= TARGET.sort(1).values[:, 1:2], 1.0, 0.0)  # only what the target finds least likely
PROPOSALS = {
    "the target": TARGET,
    "some of it": 0.5 * TARGET + 0.5 * TARGET.roll(1, 1),
    "uniform": UNIFORM,
    "hardly any of it": APART / APART.sum(1, True),
    "none of it": TARGET.roll(1, 0) * 0 + torch.eye(V)[[4, 4, 0, 0, 2]],
}


class Words:
    """The block: its features are the tokens that it is given."""

    def __call__(self, streams, embedded, step, cache):
        return embedded, streams

    def forward_rows(self, streams, embedded, step, cache, row, last):
        return embedded.index_select(0, row), streams.index_select(0, row)


class Chain:
    """p [V, V], q [V, V]: of the next token by the last one; q's is the block's."""

    device, backend, layer_devices = torch.device("cpu"), "cpu", None
    numerics = SimpleNamespace(activation=torch.float32)

    def __init__(self, p: torch.Tensor, q: torch.Tensor):
        self.p, self.q = p.log(), q.log()
        self.mtp, self.head = [Words()], SimpleNamespace(own=lambda features: self.q[features[:, 0].long()])

    def rope_frequencies(self):
        return {}

    def embed(self, ids):
        return ids.unsqueeze(1).float()

    def captured(self, step, cache):
        return torch.zeros(step.N, 1, 1), self.p[step.ids]

    def cache(self, batch: int, length: int, room: int):
        held = SimpleNamespace(
            batch=batch,
            max_context=length + room + 10,
            max_rewind=8,
            mtp_layers=[None],
            _main=Lengths(batch, 8),
            _mtp=Lengths(batch, 8),
            lengths=[length] * batch,
            pressed=lambda start, more, done: None,
        )
        return held


def chained(
    q,
    seeds,
    new,
    policy,
    sampling=Sampling(1.0),
    p=TARGET,
    lookup=False,
    stop_ids=(),
    kind=Rounds,
    length=3,
    seed=0,
    **more,
):
    """Rounds of `seeds` rows that each write `new` tokens after token 0, at position `length`, ready to run."""
    model = Chain(p, q)
    cache, choice = (
        model.cache(seeds, length, new),
        Sampled(Sampling(sampling.temperature, sampling.top_p, seed), seeds, "cpu"),
    )
    tokens = torch.zeros(seeds, dtype=torch.int64)
    if lookup:
        drafter = LookupDrafts([[1, 2, 0][:length]] * seeds, tokens, cache.max_context + 1, 2, 1)
    else:
        drafter = MTPDrafts(model, cache, model.embed(tokens), torch.zeros(seeds, 1, 1), choice)
    return kind(model, cache, 8, tokens, drafter, [new] * seeds, stop_ids, policy, choice=choice, **more)
