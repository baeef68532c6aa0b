"""What a selector keeps of the dense attention: mass against budget and context, and its most attended blocks
("findability").

The model runs exactly; at the last queries of each context, each layer's dense attention is held against what each
variant's selector would keep from the same queries and keys. So nothing of layers below enters, and one pass serves all
budgets.

A selector chooses among the entries that a query sees (CSA), or the distant blocks between the sink and the local ones
(policies). What is read in any case (window, sink, local blocks) is not among the choices: it would flatter every
selector.
"""

import math
from collections.abc import Callable
from contextlib import nullcontext

import torch

from dsv4.kernels.block_choice import Observed, Policy, block_scores
from dsv4.kernels.block_choice.reference import distant_blocks
from dsv4.kernels.block_summaries import summarise_blocks
from dsv4.kernels.indexer.reference import topk_entries
from dsv4.model.causal import CausalLM
from dsv4.probes.measure.base.attending import attending, kept_once, longest_window, observing
from dsv4.probes.measure.base.mass import QUERY_BLOCK, mask, row_mass, watched
from dsv4.probes.measure.base.models import reads_by_policy
from dsv4.probes.measure.base.variants import Variant

TOP = 8  # most attended choices of a query, of which findability is the share that is kept
NAMES = ("queries", "mass", "mass_kept", "mass_best", "wanted", "found", "chance")
# layer, context, variant, mass, kept, choices
See = Callable[[int, int, str, torch.Tensor, torch.Tensor, torch.Tensor], None]


def tally(mass: torch.Tensor, kept: torch.Tensor, choices: torch.Tensor, top: int = TOP) -> dict[str, float]:
    """Sums over queries that have a choice. mass fp32 [Q, n]: each query's attention probabilities by block (window,
    sink and what is read in any case have the rest); kept, choices bool [Q, n]: what is selected, and what from.

    mass_best: of as many choices as are kept, the most attended. wanted: the `top` most attended choices (of equal mass
    the first), found: those of them that are kept. chance: Σ of kept / choices, by query.
    """
    some = choices.any(-1)
    mass, kept, choices = (t[some].cpu() for t in (mass.double(), kept & choices, choices))
    ranked, order = mass.masked_fill(~choices, -1.0).sort(dim=-1, descending=True, stable=True)
    size, number, place = kept.sum(-1), choices.sum(-1), torch.arange(mass.shape[-1])
    best = ranked.clamp(min=0).masked_fill(place >= size.unsqueeze(-1), 0)
    wanted = place < number.clamp(max=top).unsqueeze(-1)
    return {
        "queries": len(mass),
        "mass": (mass * choices).sum().item(),
        "mass_kept": (mass * kept).sum().item(),
        "mass_best": best.sum().item(),
        "wanted": wanted.sum().item(),
        "found": (wanted & kept.gather(-1, order)).sum().item(),
        "chance": (size / number).sum().item(),
    }


def added(a: dict[str, float], b: dict[str, float]) -> dict[str, float]:
    return {name: a.get(name, 0) + b.get(name, 0) for name in NAMES}


def of_all_ranks(model: CausalLM, sums: dict[str, float]) -> dict[str, float]:
    """The sums of all ranks together."""
    given = torch.tensor([float(sums[name]) for name in NAMES], dtype=torch.float64, device=model.device)
    return dict(zip(NAMES, model.ranks.sum(given).tolist()))


def figures(sums: dict[str, float]) -> dict:
    """As JSON values; None where nothing was there to be divided by. Vacuous where every choice is kept."""
    ratio = lambda a, b: sums[a] / sums[b] if sums[b] and math.isfinite(sums[a] / sums[b]) else None
    chance = ratio("chance", "queries")
    return {
        "queries": int(sums["queries"]),
        "status": "VACUOUS" if chance in (None, 1.0) else "MEASURED",
        "chance": chance,
        "attention_on_choices": ratio("mass", "queries"),
        "mass_kept": ratio("mass_kept", "mass"),
        "mass_best": ratio("mass_best", "mass"),
        "findability": ratio("found", "wanted"),
        "top": TOP,
    }


def measure(
    model: CausalLM,
    variants: list[Variant],
    rows: torch.Tensor,
    contexts: list[int],
    queries: int,
    chunk: int,
    say: Callable[[str], None] = lambda text: None,
    advance: Callable[[int], None] = lambda tokens: None,
) -> list[dict]:
    """Rows of figures by variant, context and layer, each variant and context followed by one of all layers (layer
    None).

    rows int64 [B, T], one after the other; variants[0] is the exact run, under which the model runs.
    """
    selecting = [v for v in variants[1:] if not v.control]
    sums: dict[tuple, dict[str, float]] = {}

    def see(layer: int, context: int, name: str, *what: torch.Tensor) -> None:
        sums[name, context, layer] = added(sums.get((name, context, layer), {}), tally(*what))

    for b, ids in enumerate(rows):
        say(f"findability: row {b + 1} of {len(rows)}, {contexts[-1]} tokens")
        with variants[0].on(model):
            observe(model, selecting, ids[: contexts[-1]], contexts, queries, chunk, see)
        advance(contexts[-1])
    if reads_by_policy(model):  # each rank looked at what its own KV heads choose
        sums = {key: of_all_ranks(model, of) for key, of in sums.items()}
    found = []
    for variant in selecting:
        for context in contexts:
            layers = {layer: of for (name, c, layer), of in sums.items() if (name, c) == (variant.name, context)}
            total: dict[str, float] = {}
            for of in layers.values():
                total = added(total, of)
            for layer, of in [*layers.items(), *([(None, total)] if layers else [])]:
                found.append(
                    {"variant": variant.name, "budget": variant.budget_at(context), "context": context, "layer": layer}
                    | figures(of)
                )
    return found


def observe(
    model: CausalLM, variants: list[Variant], ids: torch.Tensor, contexts: list[int], queries: int, chunk: int, see: See
) -> None:
    """One row ids int64 [T] under the exact run; `see` gets each choosing layer's last `queries` queries of each
    context."""
    cache, at = model.new_cache(1, len(ids), max_rewind=0), 0
    window, observed = longest_window(v.policy for v in variants), {}
    for context in contexts:
        first = max(at, context - queries)
        early = max(at, first - window)
        if early > at:
            model.append(ids[None, at:early], cache, logits="none", chunk=chunk)
        if first > early:  # the window of policies that choose once, after the first `first` tokens
            with observing(model, window, observed):
                model.append(ids[None, early:first], cache, logits="none", chunk=chunk)
        look = lambda layer, *what: see(layer, context, *what)
        if reads_by_policy(model):
            watch = _watch_blocks(model, variants, look, first, dict(observed))
        else:
            watch = _watch_entries(model, variants, look)
        with watch, observing(model, window, observed) if window else nullcontext():
            model.append(ids[None, first:context], cache, logits="none", chunk=chunk)
        at = context


# ---- CSA ------------------------------------------------------------------------------------


def _watch_entries(model: CausalLM, variants: list[Variant], see: Callable):
    def look(layer: int, attn, x, qr, q, window, window_index, step, cache) -> None:
        scores, mass = attn.indexer.scores(x, qr, step, cache)[0], row_mass(attn, q, window, window_index, step, cache)
        choices = torch.arange(mass.shape[-1], device=mass.device) < step.visible(attn.ratio)[0].unsqueeze(-1)
        for variant in variants:
            kept = mask(topk_entries(scores.unsqueeze(0).float(), variant.k)[0].cpu(), mass.shape[-1])
            see(layer, variant.name, mass, kept.to(mass.device), choices)

    return watched(model, look)


# ---- policies of a GQA model ----------------------------------------------------------------


def _watch_blocks(
    model: CausalLM, variants: list[Variant], see: Callable, prompt: int, observed: dict[int, torch.Tensor]
):
    """What its KV heads choose counts as a query each. prompt: tokens before these queries, of which policies that
    choose once choose by the queries observed [n, H, D] of each layer."""

    def look(layer: int, attn, q, keys, values, step) -> None:
        for variant in variants:
            if isinstance(variant.policy, Observed):
                kept = kept_once(model, layer, observed[layer], keys, prompt, attn.scale, variant.policy)
                see(layer, variant.name, *tokens(q, keys, step.start, attn.scale, *kept))
            else:
                see(layer, variant.name, *blocks(q, keys, step.start, attn.scale, variant.policy))

    return attending(model, look)


def tokens(
    q: torch.Tensor, keys: torch.Tensor, start: torch.Tensor, scale: float, best: torch.Tensor, since: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(mass, kept, choices) as `blocks` gives them, by token: [T·KV, N]. best int64 [KV, k]: what was chosen of the
    tokens before `since`; all of those were choices."""
    (T, KV), mass = (q.shape[1], keys.shape[1]), block_mass(q, keys, start, scale, 1)
    choices = (torch.arange(mass.shape[-1], device=q.device) < since).expand(T, KV, -1)
    kept = torch.zeros(KV, mass.shape[-1], dtype=torch.bool, device=q.device).scatter_(1, best, True).expand(T, -1, -1)
    return tuple(t.flatten(0, 1) for t in (mass, kept, choices))


def blocks(
    q: torch.Tensor, keys: torch.Tensor, start: torch.Tensor, scale: float, policy: Policy
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(mass, kept, choices) of one row as `tally` takes them, [T·KV, N]: dense attention by block, mean over a group's
    heads; the distant blocks that the policy selects; all distant blocks.

    q [1, T, H, D]; keys [1, KV, S, D], those of the queries among them; start int64 [1].
    """
    (_, T, _, D), (KV, S), end = q.shape, keys.shape[1:3], int(start[0]) + q.shape[1]
    mass = block_mass(q, keys, start, scale, policy.block)
    number, until = torch.arange(mass.shape[-1], device=q.device), distant_blocks(start, T, policy)[0].view(T, 1, 1)
    choices = ((number >= policy.sink) & (number < until)).expand(T, KV, -1)
    kept = torch.zeros_like(choices)
    if policy.topk:
        low, high, mean = (torch.zeros(1, KV, mass.shape[-1], D, dtype=keys.dtype, device=q.device) for _ in range(3))
        summarise_blocks.resolve("reference")[0](keys, torch.zeros_like(start), end, low, high, mean, policy.block)
        scores = block_scores.resolve("reference")[0](q, low, high, mean, start, policy)
        best = topk_entries(scores.flatten(1, 2), policy.topk)[0]
        kept = mask(best.cpu(), mass.shape[-1]).view(T, KV, -1).to(q.device)
    return tuple(t.flatten(0, 1) for t in (mass, kept & choices, choices))


def block_mass(q: torch.Tensor, keys: torch.Tensor, start: torch.Tensor, scale: float, block: int) -> torch.Tensor:
    """Σ of the dense causal softmax over each block's keys, mean over the query heads of a KV head: fp32 [T, KV, N] of
    one row."""
    (_, T, H, D), KV, end = q.shape, keys.shape[1], int(start[0]) + q.shape[1]
    N = -(-end // block)
    k, found = keys[0, :, :end].float(), []
    for t in range(0, T, QUERY_BLOCK):
        # [KV, G, t, D]
        mine = q[0, t : t + QUERY_BLOCK].float().view(-1, KV, H // KV, D).permute(1, 2, 0, 3)
        position = int(start[0]) + torch.arange(t, t + mine.shape[2], device=q.device)
        hidden = torch.arange(end, device=q.device) > position.unsqueeze(-1)
        # [KV, t, end]
        p = (mine @ k.unsqueeze(1).mT * scale).masked_fill(hidden, float("-inf")).softmax(-1).mean(1)
        p = torch.nn.functional.pad(p, (0, N * block - end)).unflatten(-1, (N, block)).sum(-1)
        found.append(p.transpose(0, 1))
    return torch.cat(found)
