"""Measures a subject: its indexer on text, and needles."""

from dataclasses import replace

from dsv4.probes.catalogue.index_oracle import TIES
from dsv4.probes.measure.base.haystack import CHANCE, FORMAT
from dsv4.probes.measure.base.models import Advance, Say, csa_layers, reach
from dsv4.probes.measure.base.needles import Limits, best_bound, fitting, why_none
from dsv4.probes.measure.base.settings import QUESTION
from dsv4.probes.measure.base.text import Text, rows_of
from dsv4.probes.measure.recall import needles
from dsv4.probes.measure.recall.figures import Tally, row, tally
from dsv4.probes.measure.recall.observe import Oracles, Seen, observe_capture, observe_model
from dsv4.probes.measure.recall.settings import GATE_CONTEXT, GATE_ENTRIES, GATE_K, LEAST, Settings
from dsv4.probes.oracle import kinds
from dsv4.probes.result import Check, Status, compare, vacuous
from dsv4.probes.subject import Subject

GATE = 0.99
GATE_NAME = f"classic gate: recall@{GATE_K} against the fp32 oracle, n_comp ≥ {GATE_ENTRIES}"
EXACT_NAME = f"classic gate: recall@{GATE_K} against the fp32 oracle, n_comp = {GATE_ENTRIES}"


def indexer(subject: Subject, settings: Settings, text: Text | None, say: Say, advance: Advance) -> list[dict]:
    """Rows of figures by context, k and layer, each followed by one of all layers (layer None). text: None for a
    dump."""
    oracles, window = Oracles(subject), subject.config.sliding_window
    margin, topk = TIES.get(subject.numerics, TIES["native"]), subject.config.index_topk
    tallies: dict[tuple[int, int, int], Tally] = {}

    def see(seen: Seen) -> None:
        for k in (k for context, k in settings.measured if context == seen.context):
            key = seen.context, k, seen.layer
            tallies[key] = tallies.get(key, Tally()) + tally(seen, k, topk, margin, window)

    contexts, queries = sorted({context for context, _ in settings.measured}), settings.queries
    if text is None:
        ids = subject.ids
        observe_capture(subject, oracles, ids, contexts, queries, see, advance)
    else:
        ids = rows_of(text, contexts[-1], settings.rows, subject.config.bos_token_id)
        for b, line in enumerate(ids):
            say(f"indexer: row {b + 1} of {len(ids)}, {contexts[-1]} tokens")
            if ours(subject):
                chunk = Limits.of(str(subject.model.device)).chunk
                observe_model(subject.model, oracles, line, contexts, queries, chunk, see, advance)
            else:
                observe_capture(subject, oracles, line.unsqueeze(0), contexts, queries, see, advance)
    return rows_of_figures(tallies, settings, topk, csa_layers(subject.config), window, len(ids))


def ours(subject: Subject) -> bool:
    """Whether `subject.model` is this project's model."""
    return "kernels" in subject.can


def rows_of_figures(
    tallies: dict[tuple[int, int, int], Tally],
    settings: Settings,
    topk: int,
    layers: list[int],
    window: int,
    texts: int,
) -> list[dict]:
    """tallies by (context, k, layer) → rows of the document. topk: the model's own k; texts: rows of text behind
    them."""
    rows = []
    for context, k in settings.measured:
        status = Status.VACUOUS.value if settings.is_vacuous(context, k) else "MEASURED"
        found = {layer: tallies[context, k, layer] for layer in layers}
        for layer, total in [*found.items(), (None, sum(found.values(), Tally()))]:
            rows.append(
                {
                    "layer": layer,
                    "context": context,
                    "n_comp": context // kinds.CSA,
                    "k": k,
                    "what_if": k != topk,
                    "status": status,
                    "texts": texts,
                }
                | row(total, window)
            )
    return rows


def gate(rows: list[dict]) -> Check:
    """The classic gate over all layers and contexts that it speaks of; the worst one counts.

    Below 99 % is a FAIL wherever it was measured; from 99 % on it is a PASS only with at least 8 · k entries.
    """
    among = [r for r in rows if r["layer"] is not None and r["k"] == GATE_K and r["n_comp"] >= GATE_ENTRIES]
    if not among:
        return vacuous(
            GATE_NAME,
            f"nothing was measured at k = {GATE_K} and n_comp ≥ {GATE_ENTRIES}: {_instead(rows)}",
            relation=">=",
            threshold=GATE,
            source="the issue",
            chance=GATE_K / GATE_ENTRIES,
        )
    worst = min(among, key=lambda r: r["recall_fp32"])
    what_if = "; what-if: the model selects another k" if worst["what_if"] else ""
    check = compare(
        GATE_NAME,
        worst["recall_fp32"],
        ">=",
        GATE,
        "the issue",
        sum(r["queries"] for r in among),
        where=f"layer {worst['layer']}",
        part="selection",
        chance=worst["chance"],
        note=f"worst of {len(among)} at {worst['context']:,} tokens, n_comp {worst['n_comp']:,}; chance at n_comp "
        f"{GATE_ENTRIES} is {GATE_K / GATE_ENTRIES:.0%}{what_if}",
    )
    if check.status is Status.PASS and any(r["status"] == Status.VACUOUS.value for r in among):
        return replace(check, status=Status.VACUOUS, note=f"n_comp < {LEAST} · k proves nothing; {check.note}")
    return check


def exact_gate(rows: list[dict]) -> Check:
    """The classic gate at exactly GATE_ENTRIES entries, by its own terms: the worst layer passes from 99 % on. Half of
    that is chance, so the note has the share of what chance leaves."""
    among = [r for r in rows if r["layer"] is not None and (r["k"], r["n_comp"]) == (GATE_K, GATE_ENTRIES)]
    about = dict(relation=">=", threshold=GATE, source="the issue", chance=GATE_K / GATE_ENTRIES)
    if not among:
        return vacuous(EXACT_NAME, f"not measured; --context {GATE_CONTEXT} or more measures it", **about)
    worst = min(among, key=lambda r: r["recall_fp32"])
    chance, what_if = worst["chance"], "; what-if: the model selects another k" if worst["what_if"] else ""
    beyond = (worst["recall_fp32"] - chance) / (1 - chance)
    about = dict(where=f"layer {worst['layer']}", part="selection", chance=chance)
    note = f"worst of {len(among)} layers; {beyond:.1%} of what chance, {chance:.0%}, leaves{what_if}"
    samples = sum(r["queries"] for r in among)
    return compare(EXACT_NAME, worst["recall_fp32"], ">=", GATE, "the issue", samples, note=note, **about)


def _instead(rows: list[dict]) -> str:
    ks = sorted({r["k"] for r in rows})
    tokens = kinds.CSA * LEAST * GATE_K
    longest = max(r["context"] for r in rows)
    said = f"measured were k = {', '.join(map(str, ks))} in contexts up to {longest:,} tokens"
    return f"{said}; --k {GATE_K} --context {tokens} measures it" + ("" if GATE_K in ks else ", as a what-if")


def needles_of(subject: Subject, settings: Settings, text: Text | None, say: Say) -> tuple[dict | None, list[str]]:
    """(the needles' part of the document, notes on what was left out)."""
    if not settings.needles or ours(subject):
        why = why_none(settings, text)
    else:
        why = "needles are asked of this project's model only"
    if why:
        return None, [why]
    model, limits, backend = subject.model, Limits.of(str(subject.model.device)), text.tokenizer.backend
    most = min(subject.config.max_position_embeddings - QUESTION, len(text.ids))
    fits, notes = fitting(model, settings.contexts, most)
    notes += [best_bound(settings.needles, "a length")] if settings.needles < 100 else []
    rows = needles.found(model, backend, text.ids, fits, settings.needles, limits, say, settings.seed)
    about = {"format": FORMAT, "chance": CHANCE, "beyond": reach(model), "trials": settings.needles}
    return about | {"rows": rows}, notes
