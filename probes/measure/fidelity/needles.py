"""Needles under each variant: in looped filler and in real prose, with bounds on both sides and the chance of a
guess."""

from collections.abc import Callable

import numpy as np
from tokenizers import Tokenizer

from dsv4.model.causal import CausalLM
from dsv4.probes.bounds import lower_bound, upper_bound
from dsv4.probes.measure.fidelity.variants import Variant
from dsv4.probes.measure.recall.haystack import chance_of_a_guess, filler
from dsv4.probes.measure.recall.needles import Asked, Haystack, Limits, answered, hidden, replies_by

HAYSTACKS = (Haystack("prose", True), Haystack("looped filler", False))
# last tokens of a prompt that run as decoding: more than a question has, so that none of it is read exactly
DECODED = 32
Say = Callable[[str], None]


def found(
    model: CausalLM,
    variants: list[Variant],
    tokenizer: Tokenizer,
    prose: np.ndarray,
    contexts: list[int],
    trials: int,
    limits: Limits,
    say: Say = lambda text: None,
    seed: int = 0,
) -> list[dict]:
    """Needles found by variant, haystack and context, as JSON values; the same trials for every variant."""
    rows = []
    for haystack in HAYSTACKS:
        for context in contexts:
            text = prose if haystack.prose else filler(tokenizer, context)
            asked = hidden(model, tokenizer, text, context, trials, seed)
            note = lambda text: say(f"needles, {haystack.name}, {context} tokens: {text}")
            hits = answers(model, variants, asked, limits, note)
            rows += [row(v, haystack.name, context, asked, hits[v.name]) for v in variants]
    return rows


def answers(
    model: CausalLM, variants: list[Variant], asked: list[Asked], limits: Limits, say: Say
) -> dict[str, list[bool]]:
    """Whether each answer was given, by variant. Where all act in decoding alone, prompts are prefilled once."""
    if not all(v.decode_only for v in variants):
        found = {}
        for variant in variants:
            with variant.on(model):
                found[variant.name] = answered(model, asked, limits, lambda text: say(f"{variant.name}: {text}"))
        return found
    ways = {v.name: lambda cache, v=v: v.resumed(model, cache) for v in variants}
    said = replies_by(model, asked, limits, ways, say, DECODED)
    return {name: [reply == a.answer for a, reply in zip(asked, of)] for name, of in said.items()}


def row(variant: Variant, haystack: str, context: int, asked: list[Asked], hits: list[bool]) -> dict:
    """One row of the document. at_least, at_most: one-sided 97.5 % bounds each (Clopper-Pearson); chance: of the best
    guess. Vacuous where the variant leaves nothing out of any prompt and answer, which together are longer than the
    context."""
    count, longest = sum(hits), max(map(len, asked))
    return {
        "variant": variant.name,
        "haystack": haystack,
        "context": context,
        "trials": len(hits),
        "hits": count,
        "share": count / len(hits),
        "at_least": lower_bound(count, len(hits)),
        "at_most": upper_bound(count, len(hits)),
        "chance": chance_of_a_guess(),
        "status": "VACUOUS" if variant.keeps_all(longest) and not variant.exact else "MEASURED",
        "depths": [{"depth": round(d, 4), "hit": hit} for d, hit in zip([a.depth for a in asked], hits)],
    }
