"""Walks along a model's exact run, and needles under terminated decoding."""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from dsv4.kernels.block_choice import Observed, Policy
from dsv4.kernels.grouped_attention.termination import Termination
from dsv4.model.attention import HCAAttention
from dsv4.model.causal import CausalLM
from dsv4.probes.measure.base import needles
from dsv4.probes.measure.base.asking import Limits
from dsv4.probes.measure.base.attending import attending, kept_once, longest_window, observing
from dsv4.probes.measure.base.mass import watched as watched_csa
from dsv4.probes.measure.base.models import Say, reads_by_policy
from dsv4.probes.measure.base.variants import Variant, of_policy
from dsv4.probes.measure.termination import orders
from dsv4.probes.measure.termination.reading import Count, counted
from dsv4.probes.measure.termination.settings import Settings, rules
from dsv4.probes.measure.termination.stops import figures
from dsv4.probes.measure.termination.walk import Walk, joined
from dsv4.probes.scenes.patching import replaced, wrapped

Key = tuple[str, int, int]  # order, context, layer


def walks(
    model: CausalLM, policies: list[Policy], rows: torch.Tensor, settings: Settings, chunk: int, say: Say
) -> dict[Key, Walk]:
    """The last queries of each context of rows int64 [B, T], by order, context and layer. For a policy that chooses
    once, the tokens before these queries are the prompt."""
    found: dict[Key, list[Walk]] = {}
    window = longest_window(policies)
    for b, ids in enumerate(rows):
        cache, at, observed = model.new_cache(1, len(ids), max_rewind=0), 0, {}
        for context in settings.contexts:
            say(f"walks: row {b + 1} of {len(rows)}, {context} tokens")
            first = max(at, context - settings.queries)
            early = max(at, first - window)
            if early > at:
                model.append(ids[None, at:early], cache, logits="none", chunk=chunk)
            if first > early:
                with observing(model, window, observed):
                    model.append(ids[None, early:first], cache, logits="none", chunk=chunk)

            def see(order: str, layer: int, walk: Walk) -> None:
                found.setdefault((order, context, layer), []).append(walk)

            watched = _watched(model, policies, settings.tile, see, first, dict(observed))
            with watched, observing(model, window, observed) if window else nullcontext():
                model.append(ids[None, first:context], cache, logits="none", chunk=chunk)
            at = context
    return {key: joined(parts) for key, parts in found.items()}


def name_of(policy: Policy) -> str:
    return "dense, newest first" if policy.dense else f"{policy.name}, {policy.size}"


@contextmanager
def _watched(
    model: CausalLM, policies: list[Policy], tile: int, see: Callable, prompt: int, observed: dict[int, torch.Tensor]
) -> Iterator[None]:
    if reads_by_policy(model):

        def look(layer: int, attn, q, keys, values, step) -> None:
            for policy in policies:
                kept = None
                if isinstance(policy, Observed):
                    kept = kept_once(model, layer, observed[layer], keys, prompt, attn.scale, policy)
                see(name_of(policy), layer, orders.heads(q, keys, values, step.start, attn.scale, policy, tile, kept))

        with attending(model, look):
            yield
        return
    csa = lambda layer, attn, *held: see("CSA, best first", layer, orders.entries(attn, *held, tile))
    hca = lambda layer, attn, *held: see("HCA, newest first", layer, orders.heavily_compressed(attn, *held, tile))
    with watched_csa(model, csa), _watched_hca(model, hca):
        yield


def _watched_hca(model: CausalLM, see: Callable) -> AbstractContextManager:
    """Calls see(layer, attn, q, window, window_index, step, cache) before each HCA layer attends."""

    def also(i: int, attn, attend: Callable) -> Callable:
        def run(q, window, window_index, selection, step, cache):
            see(i, attn, q, window, window_index, step, cache)
            return attend(q, window, window_index, selection, step, cache)

        return run

    return wrapped(
        [(i, block.attn) for i, block in enumerate(model.layers) if isinstance(block.attn, HCAAttention)],
        "attend",
        also,
    )


def stopped(found: dict[Key, Walk], settings: Settings) -> list[dict]:
    """The rule's figures by order and context, of each layer and of all (layer None)."""
    rows = []
    for order, context in dict.fromkeys((o, c) for o, c, _ in found):
        layers = {layer: walk for (o, c, layer), walk in found.items() if (o, c) == (order, context)}
        for layer, walk in [*layers.items(), (None, joined(list(layers.values())))]:
            rows.append({"order": order, "context": context, "layer": layer} | figures(walk, settings.rule))
    return rows


def varied(found: dict[Key, Walk], settings: Settings) -> list[dict]:
    """The figures of all layers under each ablation and along each sweep."""
    rows = []
    for order, context in dict.fromkeys((o, c) for o, c, _ in found):
        walk = joined([walk for (o, c, _), walk in found.items() if (o, c) == (order, context)])
        for name, rule in rules(settings):
            rows.append(
                {
                    "order": order,
                    "context": context,
                    "varied": name,
                    "tau": rule.tau,
                    "phi": rule.phi,
                    "patience": rule.wait,
                }
                | figures(walk, rule)
            )
    return rows


def terminated(policy: Policy, rule: Termination | None, count: Count | None = None) -> Variant:
    """A GQA model that decodes by `policy`, and stops by `rule`. count: gets the tiles that it reads under the rule."""
    if rule is None:
        return of_policy(policy)

    @contextmanager
    def switch(model: CausalLM) -> Iterator[None]:
        reads = replaced([model], "attention", dataclasses.replace(model.attention, policy=policy, termination=rule))
        with reads, nullcontext() if count is None else counted(model, count):
            yield

    return Variant(
        f"{name_of(policy)}, τ = {rule.tau:g}",
        switch,
        None if policy.dense else policy.tokens,
        decode_only=True,
        policy=policy,
    )


def hidden_needles(
    model: CausalLM, policies: list[Policy], tokenizer, prose, settings: Settings, limits: Limits, say: Say
) -> list[dict]:
    """Needles by policy and rule: without termination, by the rule, and by each looser τ; the same trials for all.

    A query's tiles are one traversal, as in the walks: where a GPU divides them among many, none can stop.
    """
    rule = dataclasses.replace(settings.rule, splits=1, least=None)
    choices = [None, rule, *(dataclasses.replace(rule, tau=tau) for tau in settings.looser)]
    reads = [_Reading(policy, rule) for policy in policies for rule in choices]
    of = {reading.variant.name: reading for reading in reads}
    ways, how = [reading.variant for reading in of.values()], (settings.seed, settings.tasks, settings.together)
    about = lambda variant: of[variant.name].about()
    return needles.found(
        model, ways, tokenizer, prose, settings.asked, settings.needles, limits, say, *how, about=about
    )


class _Reading:
    """A policy read to the end or under a rule, and what it read since it was last asked."""

    def __init__(self, policy: Policy, rule: Termination | None):
        self.policy, self.rule, self.count = policy, rule, Count()
        self.variant = terminated(policy, rule, self.count)

    def about(self) -> dict:
        """Of a row of needles. Under a rule that left nothing out the row says nothing about it. Counts start anew."""
        if self.rule is None:
            return {"order": name_of(self.policy), "tau": None, "skipped": None}
        skipped, self.count.read, self.count.there = self.count.skipped, 0, 0
        status = "MEASURED" if skipped else "VACUOUS"
        return {"order": name_of(self.policy), "tau": self.rule.tau, "skipped": skipped, "status": status}
