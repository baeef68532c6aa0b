"""The measurement as strict JSON, described by probes/schema/fidelity-1.json."""

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from dsv4.model.causal import CausalLM
from dsv4.model.load import load_model
from dsv4.probes.bounds import lower_bound
from dsv4.probes.measure.fidelity import findability, measures, needles, runs
from dsv4.probes.measure.fidelity.settings import Settings, needle_contexts
from dsv4.probes.measure.fidelity.variants import Variant, is_gqa
from dsv4.probes.measure.recall.haystack import FORMAT
from dsv4.probes.measure.recall.needles import PASS, Limits, reach
from dsv4.probes.measure.recall.text import Text, rows_of
from dsv4.probes.report import schema
from dsv4.probes.report.json_report import strict
from dsv4.probes.report.provenance import provenance
from dsv4.probes.subject import Subject

VERSION = "1"
PIECE = 1024  # tokens of a GQA model's prompts that run at once: no layer of it holds logits of them all
SCHEMA = Path(__file__).resolve().parents[2] / "schema" / f"fidelity-{VERSION}.json"
PREFILL = {
    True: "Policies act in decoding alone: every prompt is prefilled densely and exactly; the tokens after it, and the "
    f"last {needles.DECODED} tokens of a needle's prompt, are run in passes of at most {PASS} tokens under the "
    "policy.",
    False: "CSA has no dense mode to prefill in: prompts, continuations and needles run with the variant's k from the "
    "first token on, so what a small k loses early is lost to all layers above.",
}


class ModelSubject(Subject):
    """A model of either family, loaded from a checkpoint, as provenance takes it."""

    can = frozenset({"run", "kernels"})

    def __init__(self, checkpoint: Path, numerics: str, backend: str, device: str, kernels: Mapping | None = None):
        self.model: CausalLM = load_model(
            checkpoint, numerics=numerics, backend=backend, device=device, kernels=kernels
        )
        self.files, self.config, self.numerics = self.model.inventory, self.model.config, numerics
        said = "".join(f", {operation} by {kernel.shown}" for operation, kernel in self.model.replacements.items())
        self.name = f"ours, {numerics}{said}, backend {self.model.backend}, {device}"
        self.provenance = {
            "path": str(checkpoint),
            "backend": self.model.backend,
            "device": device,
            "torch": torch.__version__,
        }


def measured(
    subject: ModelSubject,
    variants: list[Variant],
    settings: Settings,
    text: Text,
    command: list[str],
    say: runs.Say = lambda text: None,
    advance: runs.Advance = lambda tokens: None,
) -> dict:
    """Everything that `dsv4 fidelity` reports, as JSON values that fit the schema."""
    started, model = time.time(), subject.model
    limits = Limits.of(str(model.device))
    if is_gqa(model):
        limits = replace(limits, chunk=max(limits.chunk, PIECE))
    rows = compared(model, variants, settings, text, limits, say, advance)
    ids = rows_of(text, settings.contexts[-1], settings.rows, model.config.bos_token_id)
    kept = findability.measure(
        model, variants, ids, list(settings.contexts), settings.queries, limits.chunk, say, advance
    )
    hidden, notes = hidden_needles(model, variants, settings, text, limits, say)
    about = provenance(subject, command, {"needles and random ids": settings.seed}, started)
    document = {
        "schema_version": VERSION,
        "title": f"Fidelity of {about['checkpoint']['name']}, {about['subject']}",
        "provenance": about,
        "text": text.about(),
        "settings": settings.about(),
        "family": "gqa" if is_gqa(model) else "csa",
        "prefill": PREFILL[is_gqa(model)],
        "variants": [v.about() for v in variants],
        "rows": rows,
        "findability": kept,
        "needles": hidden,
        "notes": notes,
        "seconds": about["seconds"],
    }
    return valid(strict(document))


def compared(
    model: CausalLM,
    variants: list[Variant],
    settings: Settings,
    text: Text,
    limits: Limits,
    say: runs.Say,
    advance: runs.Advance,
) -> list[dict]:
    """A row a context and variant: agreement, KL, perplexity, exact prefixes."""
    rows = []
    for context in settings.contexts:
        ids = rows_of(text, context, settings.rows, model.config.bos_token_id)
        found = runs.compare(model, variants, ids, settings.tail, settings.new, limits, say, advance)
        for variant in variants[1:]:
            positions, prefixes = found[variant.name]
            status = "VACUOUS" if variant.keeps_all(context) else "MEASURED"
            continued = measures.prefix_figures(prefixes, settings.new) if settings.new else None
            rows.append(
                {
                    "variant": variant.name,
                    "budget": variant.budget,
                    "context": context,
                    "status": status,
                    "texts": len(ids),
                }
                | measures.figures(positions)
                | {"continuations": continued}
            )
    return rows


def hidden_needles(
    model: CausalLM, variants: list[Variant], settings: Settings, text: Text, limits: Limits, say: runs.Say
) -> tuple[dict | None, list[str]]:
    """(the needles' part of the document, notes on what was left out)."""
    why = (
        "needles were turned off (--needles 0)"
        if not settings.needles
        else "no needles without a tokenizer: they are sentences"
        if text.tokenizer is None
        else None
    )
    if why:
        return None, [why]
    fits, notes = needle_contexts(model, settings, len(text.ids))
    best = lower_bound(settings.needles, settings.needles)
    notes.append(
        f"{settings.needles} needles a haystack and context bound the rate below by {best:.1%} at best; "
        "--needles 100 by 96.4 %"
    )
    rows = needles.found(
        model, variants, text.tokenizer.backend, text.ids, fits, settings.needles, limits, say, settings.seed
    )
    return {"format": FORMAT, "beyond": reach(model), "trials": settings.needles, "rows": rows}, notes


def valid(document: dict) -> dict:
    """`document` itself. Raises Dsv4Error with the first thing that contradicts the schema."""
    return schema.valid(document, SCHEMA, f"the measurement is no valid fidelity-{VERSION} document")


def work(variants: list[Variant], settings: Settings) -> int:
    """Tokens that the progress bar counts: texts, under every variant, and once for findability."""
    return settings.rows * (len(variants) * sum(settings.contexts) + settings.contexts[-1])
