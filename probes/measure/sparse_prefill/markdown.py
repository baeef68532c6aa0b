"""The measurement for people: what was found in a few lines, then every figure, then where it comes from."""

import re

from dsv4.kernels.chunked_prefill import Chunking
from dsv4.probes.measure.base.markdown import page, paragraph, pictures, section
from dsv4.probes.measure.base.tables import BOUNDED, CHANCE, CONTEXT, FOUND, Table, grouped, percent, table_of
from dsv4.probes.measure.sparse_prefill.mass import KINDS
from dsv4.probes.measure.sparse_prefill.settings import KEYS
from dsv4.probes.report.markdown import escape

REMARKS = """Everything is held against dense prefill of the same weights in the same numerics, teacher-forced. \
Positions: from the second
chunk on, since the first is attended to densely in any case. Loss: perplexity over dense perplexity, less 1; its \
interval takes means over
256 neighbouring positions for independent. "Decoded": the last tokens of each context, by attention to the whole \
cache that sparse prefill
wrote. Definitions: probes/measure/sparse_prefill/README.md."""
MASS = """Share of the dense attention's mass (queries and keys of the dense run) on keys that chunked prefill could \
see, from the second
chunk on, mean over query heads. Own: the causal part of the own chunk, which each of the others has too. Kept: the \
memory that it chose.
Recent: as many last tokens. Random: as many of all earlier tokens, expected. Oracles: the same local tokens, and the \
H earlier ones that
the queries of this chunk (next: no memory of a KV head holds more) or of this and all later chunks (future) truly \
give most."""

BY_TEXT = """A text is one row of so many tokens. Goal: less than 5 % lost on at least half of them."""
BY_CLASS = """Of all texts at the longest context. The pair stood before: where this token and the next last stood \
side by side: in the own
chunk, among the memory's local tokens, before those (where the memory has only heavy tokens), or nowhere. Place in \
the chunk: its
quarters."""


def render(document: dict, plots: dict[str, str]) -> str:
    """plots: title → file name beside the report."""
    jaccard = (
        "Jaccard index of the heavy tokens before and after an update; tokens of chunk 0 that the last memory holds, "
        "beside as many heavy tokens picked at random."
    )
    decoded = "Decoded after a sparse prompt, reading the whole cache"
    parts = [
        reading(document),
        paragraph(REMARKS),
        *pictures(plots),
        *section("Perplexity, KL and agreement", perplexity(document)),
        *by_text(document),
        *section(decoded, perplexity(document, "tail")),
        *section("Attention mass", mass(document), paragraph(MASS)),
        *section("Heavy hitters", stability(document), jaccard),
    ]
    if document["needles"]:
        parts += section("Needles and facts", needles(document), about_needles(document["needles"]))
    parts += section("Memory", memory(document), memory_remark(document))
    return page(document, [*parts, "## Rows at once", batch(document["batch"])])


def cut_of(row: dict) -> str:
    if row["chunk"] is None:
        return "dense"
    rule = Chunking(**{key: row[key] for key in KEYS if key in row}).rule  # reports of before had one rule
    return f"{row['chunk']}: {row['local']} + {row['heavy']}{rule and f', {rule}'}"


def reading(document: dict) -> str:
    """Each goal, met or MISSED, and the needles."""
    lines = []
    for chunk, text in dict.fromkeys((r["chunk"], r["text"]) for r in document["rows"]):
        of = [r for r in document["rows"] if (r["chunk"], r["text"]) == (chunk, text)]
        met = [r for r in of if r["verdict"] == "met"]
        best, worst = (pick(of, key=lambda r: r["loss"]) for pick in (min, max))
        at = lambda r: f"{percent(r['loss'])} ({cut_of(r)}, {r['context']:,} tokens)"
        lines.append(
            f"- Perplexity loss below 5 %, chunks of {chunk}, {escape(text or 'all texts')}: **met in {len(met)}, "
            f"MISSED in {len(of) - len(met)}** of {len(of)} settings; from {at(best)} to {at(worst)}."
        )
    for r in document.get("texts_below", ()):
        lines.append(
            f"- Perplexity loss below 5 % on at least half of the texts, {cut_of(r)}, {r['context']:,} tokens: "
            f"**{r['verdict']}**, on {r['below']} of {r['texts']}; from {percent(r['least'])} to "
            f"{percent(r['most'])}, median {percent(r['median'])}."
        )
    missed = [r for r in document["memory"] if r["verdict"] == "MISSED"]
    most = max(document["memory"], key=lambda r: r["call_share"])
    of = len(document["memory"])
    lines.append(
        f"- Less than 5 % more memory than dense (formula): **met in {of - len(missed)}, MISSED in {len(missed)}** of "
        f"{of} settings; at most {percent(most['call_share'])} ({cut_of(most)}, {most['context']:,} tokens)."
    )
    lines += [
        "- Every memory of every layer was chosen anew chunks − 1 times, in every run (asserted).",
        f"- {batch(document['batch'])}",
    ]
    asked = (document["needles"] or {"rows": []})["rows"]
    for (kind, context, trials), group in grouped(asked, lambda r: (r["kind"], r["context"], r["trials"])).items():
        each = "; ".join(f"{cut_of(r)}: {r['hits']}" for r in group)
        lines.append(f"- {escape(kind)}, {context:,} tokens, right of {trials}: {each}.")
    return "\n".join(lines)


CUT = "cut", cut_of


def perplexity(document: dict, part: str | None = None) -> Table:
    """Of all positions or of the decoded tails."""
    interval = lambda r: "–" if r["loss_low"] is None else f"{percent(r['loss_low'])} … {percent(r['loss_high'])}"
    return table_of(
        document["rows"] if part is None else [row | row[part] for row in document["rows"]],
        (">chunk", "chunk"),
        (">L", "local"),
        (">H", "heavy"),
        ("score", lambda r: r.get("score", "fused")),
        ("heads", lambda r: r.get("heads", "kv")),
        CONTEXT,
        ("text", lambda r: r["text"] or "all"),
        (">positions", "positions", ","),
        (">dense", "perplexity_exact", ".4g"),
        (">sparse", "perplexity", ".4g"),
        (">loss", "loss", percent),
        (">95 %", interval),
        ("below 5 %", "verdict", lambda verdict: verdict if verdict == "met" else "**MISSED**"),
        (">KL (nats)", "kl", ".4g"),
        (">99th percentile", "kl_p99", ".4g"),
        (">agreement", "agreement", percent),
        (">chance", "agreement_chance", percent),
        (">confident", "agreement_confident", percent),
    )


def by_text(document: dict) -> list[str]:
    """How the loss is distributed over texts and positions; nothing for reports of before it was measured."""
    if "by_text" not in document:
        return []
    below = table_of(
        document["texts_below"],
        CUT,
        CONTEXT,
        (">texts", "texts"),
        (">below 5 %", "below"),
        (">share", "share", percent),
        (">least", "least", percent),
        (">median", "median", percent),
        (">most", "most", percent),
        ("half of them", "verdict", lambda verdict: verdict if verdict == "met" else "**MISSED**"),
    )
    classes = table_of(
        document["by_class"],
        CUT,
        ("by", "by"),
        ("class", "class"),
        (">positions", "positions", ","),
        (">nats lost a position", "lost", ".4f"),
        (">share of all nats lost", "share", percent),
    )
    each = grouped(document["by_text"], lambda r: (cut_of(r), r["context"], r["text"]))
    losses = [
        {"cut": cut, "context": n, "text": text, "losses": ", ".join(f"{100 * r['loss']:.1f}" for r in rows)}
        for (cut, n, text), rows in each.items()
    ]
    return [
        *section("Loss by text", below, paragraph(BY_TEXT)),
        *section("Loss of each text, %", table_of(losses, "cut", CONTEXT, "text", (">losses", "losses"))),
        *section("Which positions lose", classes, paragraph(BY_CLASS)),
    ]


def mass(document: dict) -> Table:
    """By cut, text and layer; the heads are in the JSON and in the plot."""
    mean = lambda heads: percent(sum(heads) / len(heads))
    return table_of(
        document["mass"],
        CUT,
        "text",
        (">layer", "layer"),
        *((f">{kind.replace('_', ', ')}", kind, mean) for kind in KINDS),
        (">kept, least head", "kept", lambda heads: percent(min(heads))),
    )


def stability(document: dict) -> Table:
    return table_of(
        document["stability"],
        CUT,
        "text",
        (">layer", "layer"),
        (">updates", "updates"),
        (">mean Jaccard", "jaccard_mean", ".3f"),
        (">last", lambda r: r["jaccard"][-1] if r["jaccard"] else None, ".3f"),
        (">of chunk 0 at first", lambda r: r["survivors"][0], ".0f"),
        (">at last, mean of heads", lambda r: r["survivors"][-1], ".1f"),
        (">most", "survivors_most"),
        (">by chance", lambda r: r["survivors_chance"][-1], ".1f"),
    )


def needles(document: dict) -> Table:
    marks = lambda depths: "".join("●" if d["hit"] else "○" for d in depths) or "–"
    return table_of(
        document["needles"]["rows"],
        ("what", "kind"),
        CONTEXT,
        ("prompt read", cut_of),
        (">right", *FOUND[0][1:]),
        *BOUNDED[1:],
        CHANCE,
        ("by depth", "depths", marks),
    )


def about_needles(found: dict) -> str:
    return escape(
        f"Needles: {found['format']}. All of a row stand in one context, which is read once; each is asked by "
        "itself, and the "
        f"question is decoded, so that it reads the whole cache. At least {found['beyond']:,} "
        "tokens follow the last. Where the "
        "question is in the prompt it is read sparsely too, as generate does. Facts, which are "
        "not in the context: "
        f'"{found["fact"]}". By depth: the first needle to the last. Bounds are one-sided 97.5 % each '
        "(Clopper-Pearson). Chance: the best constant guess."
    )


def memory_remark(document: dict) -> str:
    measured = any(r["measured"] for r in document["memory"])
    return (
        "Of one layer's call by formula (`extra_bytes`, `dense_bytes` in probes/measure/sparse_prefill/measures.py), "
        "bf16, tiles of an H100. Held: what all layers keep of their last call until the next, counted in the run and "
        "equal to its formula. "
        + (
            "Measured: peak of torch's allocator."
            if measured
            else "The peak was not measured: the plain torch of a host processor has other buffers than the kernels."
        )
    )


def memory(document: dict) -> Table:
    peak = lambda m: "–" if m is None else f"{m['sparse']:,} / {m['dense']:,}"
    return table_of(
        document["memory"],
        CUT,
        CONTEXT,
        (">dense call, bytes", "call_dense", ","),
        (">more, bytes", "call_extra", ","),
        (">share", "call_share", percent),
        ("below 5 %", "verdict"),
        (">held by all layers", "held_layers", ","),
        (">caches", "cache", ","),
        (">measured", "measured", peak),
    )


def batch(found: dict) -> str:
    return (
        f"Rows of {', '.join(f'{n:,}' for n in found['lengths'])} tokens read at once ({cut_of(found)}) give each "
        f"row's own result: logits within {found['largest_difference']:.2g} (**{found['verdict']}**: below "
        f"{found['tolerance']:g}), {percent(found['same_memory'])} of the memory's tokens the same."
    )


def terminal(document: dict) -> str:
    """The title, what was found, and the table of perplexities, as plain text."""
    columns, cells = perplexity(document)
    plain = lambda text: re.sub(r"\\(.)|\*\*", r"\1", text)
    lines = [[c.lstrip(">") for c in columns], *[[plain(cell) for cell in row] for row in cells]]
    widths = [max(map(len, column)) for column in zip(*lines)]
    placed = lambda line: "  ".join(
        cell.rjust(w) if c[0] == ">" else cell.ljust(w) for cell, w, c in zip(line, widths, columns)
    ).rstrip()
    shown = "\n".join(map(placed, lines))
    return f"{document['title']}\n{plain(reading(document))}\n\n{shown}\n{document['seconds']:.0f} s\n"
