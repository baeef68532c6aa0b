"""Section 1.15: what decoding reads under a policy that chooses once, after the prompt."""

import copy

import torch

from dsv4.kernels.block_choice import observed
from dsv4.model.gqa.attention import SelfAttention
from dsv4.model.gqa.selection import Selection
from dsv4.probes.faults import Site, mutation

READING = dict(probes=("sparse_reading",), profile="qwen2")


def scored(site: Site, change) -> None:
    """Tokens are scored by change(real, q, keys, before, scale, policy)."""
    real = observed.token_scores
    site.patch(observed, "token_scores", lambda *given: change(real, *given))


@mutation("1.15", bugs=(), parts=("tokens, without causal order",), **READING)
def window_queries_see_what_follows(site: Site) -> None:
    """The window's queries attend to all of the window, so those with more ahead count for less."""

    def change(real, q, keys, before, scale, policy):
        KV = keys.shape[0]
        heads = q.float().unflatten(1, (KV, -1))
        found = []
        for kv in range(KV):
            mass = torch.einsum("wgd,pd->gwp", heads[:, kv], keys[kv].float()).mul(scale).softmax(-1)[..., :before]
            found.append(observed.pooled(mass.sum(1), policy).mean(0))
        return torch.stack(found)

    scored(site, change)


@mutation("1.15", bugs=(), parts=("tokens, without pooling",), **READING)
def scores_not_pooled(site: Site) -> None:
    """Single tokens win, without their neighbours."""
    site.patch(observed, "pooled", lambda mass, policy: mass)


@mutation("1.15", bugs=(), parts=("tokens, first query head",), **READING)
def first_head_scores_for_its_group(site: Site) -> None:
    """The mean over the query heads of a group is left out: the first one's scores count."""

    def change(real, q, keys, *rest):
        heads = q.unflatten(1, (keys.shape[0], -1))
        return real(heads[:, :, :1].expand_as(heads).flatten(1, 2), keys, *rest)

    scored(site, change)


@mutation("1.15", bugs=(), parts=("tokens, scores of another KV head",), **READING)
def scores_of_the_wrong_head(site: Site) -> None:
    """KV heads keep what their neighbours' queries attend to."""
    scored(site, lambda real, *given: real(*given).roll(1, 0))


@mutation("1.15", bugs=(), parts=("tokens, lowest scores",), **READING)
def lowest_token_scores_win(site: Site) -> None:
    """The comparison is inverted."""
    scored(site, lambda real, *given: -real(*given))


@mutation("1.15", bugs=(), parts=("prompt's choice, tokens",), **READING)
def window_of_the_first_piece(site: Site) -> None:
    """A prompt that runs in pieces is scored by the queries of its first piece."""

    def observe(self, step, q, keys, scale):
        before = self.queries.clone()
        real(self, step, q, keys, scale)
        for i, start in enumerate(step.starts):
            if start:
                b = step.first + i
                self.queries[b] = before[b]
                self._choose(b, keys[i], scale)

    real = site.patch(Selection, "observe", observe)


@mutation("1.15", bugs=(), parts=("prompt's choice, tokens",), **READING)
def window_of_the_last_piece_alone(site: Site) -> None:
    """Each piece of a prompt counts as a prompt: a last one that is shorter than the window observes alone."""

    def observe(self, step, q, keys, scale):
        for i in range(len(step.starts)):
            self.runs[step.first + i] = (0, 0)
        real(self, step, q, keys, scale)

    real = site.patch(Selection, "observe", observe)


@mutation("1.15", bugs=(), parts=("prompt's choice, budget",), **READING)
def budget_of_another_layer(site: Site) -> None:
    """Layers take the budgets of those that follow them; the last one takes the first's."""

    def __init__(self, tensors, policy, layer, layers):
        real(self, tensors, policy, (layer + 1) % layers, layers)

    real = site.patch(Selection, "__init__", __init__)


@mutation("1.15", bugs=(), parts=("prompt's choice, window",), **READING)
def window_not_kept(site: Site) -> None:
    """The prompt's last tokens are chosen from like all others, and kept only by their scores."""

    def keep(self, b, best, since):
        real(self, b, best, since)
        if since:
            end = self.runs[b][1]
            self.kept[b, :, self.slots + 1 - end : self.slots - since] = -1

    real = site.patch(Selection, "_keep", keep)


@mutation("1.15", bugs=(), parts=("prompt's choice, later tokens",), **READING)
def later_tokens_not_appended(site: Site) -> None:
    """The list ends with the prompt: a step reads its own token and no other of those that were decoded."""

    def lists(self, step):
        found = real(self, step)
        end = torch.tensor([run[1] for run in self.runs[step.rows]], device=found.device).view(-1, 1, 1, 1)
        own = step.pos.view(*step.pos.shape, 1, 1)
        return torch.where((found >= end) & (found < own), -1, found).int()

    real = site.patch(Selection, "lists", lists)


@mutation("1.15", bugs=(), parts=("prompt's choice, fixed",), **READING)
def chosen_again_by_every_step(site: Site) -> None:
    """Decoding tokens are taken for a prompt too: each step chooses anew by its own queries."""

    def whole(self, qkv, biases, step, cache):
        if self.selection is None or step.prompt or step.captured or not self.reading.policy.once:
            return real(self, qkv, biases, step, cache)
        attend = self.attend

        def also(q, keys, values, summaries, step):
            held = copy.copy(self.selection)
            self.selection.runs = [(0, 0)] * len(held.runs)
            self.selection.observe(step, q, keys, self.scale)
            self.selection.runs = held.runs
            return attend(q, keys, values, summaries, step)

        self.attend = also
        try:
            return real(self, qkv, biases, step, cache)
        finally:
            del self.attend

    real = site.patch(SelfAttention, "_whole", whole)
