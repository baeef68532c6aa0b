"""The measurement as strict JSON, described by probes/schema/fidelity-1.json."""

import time

from dsv4.model.causal import CausalLM
from dsv4.probes.measure.base import logits, needles
from dsv4.probes.measure.base.asking import DECODED, PASS, Limits
from dsv4.probes.measure.base.document import Kind
from dsv4.probes.measure.base.haystack import FORMAT
from dsv4.probes.measure.base.models import Advance, ModelSubject, Say, family, reach, reads_by_policy
from dsv4.probes.measure.base.needles import best_bound, fitting, unsolved, why_none
from dsv4.probes.measure.base.text import Text, rows_of
from dsv4.probes.measure.base.variants import Variant
from dsv4.probes.measure.fidelity import findability, runs
from dsv4.probes.measure.fidelity.settings import Settings

KIND = Kind("fidelity", "Fidelity of", "needles and random ids", revision=".1")
valid = KIND.valid
PREFILL = {
    True: "Policies act in decoding alone: every prompt is prefilled densely and exactly; the tokens after it, and the "
    f"last {DECODED} tokens of a needle's prompt, are run in passes of at most {PASS} tokens under the "
    "policy. Where a policy chooses once, its window must hold the question, so needles' prompts are prefilled whole.",
    False: "CSA has no dense mode to prefill in: prompts, continuations and needles run with the variant's k from the "
    "first token on, so what a small k loses early is lost to all layers above.",
}


def measured(
    subject: ModelSubject,
    variants: list[Variant],
    settings: Settings,
    text: Text,
    command: list[str],
    say: Say = lambda text: None,
    advance: Advance = lambda tokens: None,
) -> dict:
    """Everything that `dsv4 fidelity` reports, as JSON values that fit the schema."""
    started, model = time.time(), subject.model
    limits = Limits.of_model(model)
    rows = compared(model, variants, settings, text, limits, say, advance)
    ids = rows_of(text, settings.contexts[-1], settings.rows, model.config.bos_token_id)
    kept = findability.measure(
        model, variants, ids, list(settings.contexts), settings.queries, limits.chunk, say, advance
    )
    hidden, notes = hidden_needles(model, variants, settings, text, limits, say)
    found = {
        "family": family(model),
        "prefill": PREFILL[reads_by_policy(model)],
        "variants": [v.about() for v in variants],
        "rows": rows,
        "findability": kept,
        "needles": hidden,
        "notes": notes,
    }
    return KIND.document(subject, settings.about(), text, found, command, started)


def compared(
    model: CausalLM,
    variants: list[Variant],
    settings: Settings,
    text: Text,
    limits: Limits,
    say: Say,
    advance: Advance,
) -> list[dict]:
    """A row a context and variant: agreement, KL, perplexity, exact prefixes."""
    rows = []
    for context in settings.contexts:
        ids = rows_of(text, context, settings.rows, model.config.bos_token_id)
        found = runs.compare(model, variants, ids, settings.tail, settings.new, limits, say, advance)
        for variant in variants[1:]:
            positions, prefixes = found[variant.name]
            status = "VACUOUS" if variant.keeps_all(context) else "MEASURED"
            continued = logits.prefix_figures(prefixes, settings.new) if settings.new else None
            rows.append(
                {
                    "variant": variant.name,
                    "budget": variant.budget_at(context),
                    "context": context,
                    "status": status,
                    "texts": len(ids),
                }
                | logits.figures(positions)
                | {"continuations": continued}
            )
    return rows


def hidden_needles(
    model: CausalLM, variants: list[Variant], settings: Settings, text: Text, limits: Limits, say: Say
) -> tuple[dict | None, list[str]]:
    """(the needles' part of the document, notes on what was left out)."""
    why = why_none(settings, text)
    if why:
        return None, [why]
    fits, notes = fitting(model, settings.asked, len(text.ids), ", as many as the text has")
    notes += [best_bound(settings.needles, "a haystack and context")] if settings.needles < 100 else []
    backend = text.tokenizer.backend
    how = settings.seed, settings.tasks, settings.together
    rows = needles.found(model, variants, backend, text.ids, fits, settings.needles, limits, say, *how)
    notes += unsolved(rows)
    return {"format": FORMAT, "beyond": reach(model), "trials": settings.needles, "rows": rows}, notes


def work(variants: list[Variant], settings: Settings) -> int:
    """Tokens that the progress bar counts: texts, under every variant, and once for findability."""
    return settings.rows * (len(variants) * sum(settings.contexts) + settings.contexts[-1])
