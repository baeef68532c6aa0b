"""The measurement for people: what was found in a few lines, then every figure, then where it comes from."""

from urllib.parse import quote

from dsv4.probes.measure.fidelity.measures import CONFIDENT
from dsv4.probes.measure.recall.markdown import percent
from dsv4.probes.report import words
from dsv4.probes.report.markdown import escape, fence, table

REMARKS = f"""Everything is held against the exact run of the same weights in the same numerics. Agreement: both \
would choose the same
next token; "confident": where the exact run's first choice leads by more than {CONFIDENT:g} logit. KL(exact ‖ \
variant) in nats a token.
Exact prefix: tokens of a greedy continuation before the first that differs from the exact run's. VACUOUS: nothing \
was left out there.
Neighbouring positions are not independent: their count overstates the evidence. Definitions: \
probes/measure/fidelity/README.md."""
KEPT = """Measured along the exact run, so nothing of layers below enters. Choices: entries (CSA) or the blocks \
between sink and local
ones (policies); what is read in any case is not counted. Best: of as many choices, the most attended. Findability: \
share of each query's
{top} most attended choices that the selector keeps. Chance: of as many choices picked at random, for mass and \
findability alike."""


def render(document: dict, plots: dict[str, str]) -> str:
    """plots: title → file name beside the report."""
    parts = [
        f"# {escape(document['title'])}",
        _reading(document),
        document["prefill"],
        " ".join(REMARKS.split()),
        *(f"![{escape(title)}]({quote(file)})" for title, file in plots.items()),
        "## Variants",
        _variants(document["variants"]),
        "## By context and variant",
        table(*comparison(document)),
    ]
    continued = table(*continuations(document))
    if any(r["continuations"] for r in document["rows"]):
        parts += ["## Greedy continuations", continued]
    if document["findability"]:
        kept = " ".join(KEPT.split()).format(top=document["findability"][0]["top"])
        parts += ["## What the selector keeps of the dense attention", kept, table(*findability(document))]
    if document["needles"]:
        parts += ["## Needles", _about(document["needles"]), table(*needles(document))]
    if document["notes"]:
        parts += ["## Notes", "\n".join(f"- {escape(note)}" for note in document["notes"])]
    parts += ["## Provenance", fence(document["provenance"]["command"]), _provenance(document)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _reading(document: dict) -> str:
    lines = []
    for r in document["rows"]:
        prefix = r["continuations"]
        said = (
            ""
            if prefix is None
            else (
                f"; {percent(prefix['prefix_full'])} of {prefix['prompts']} continuations of "
                f"{prefix['new_tokens']} tokens are the exact run's"
            )
        )
        vacuous = " **VACUOUS**: nothing was left out." if r["status"] == "VACUOUS" else ""
        lines.append(
            f"- {r['context']:,} tokens, {escape(r['variant'])}: agreement **{percent(r['agreement'])}**, confident "
            f"**{percent(r['agreement_confident'])}** (chance {percent(r['agreement_chance'])}); KL {r['kl']:.4g} "
            f"nats; perplexity {r['perplexity']:.4g} against {r['perplexity_exact']:.4g}{said}.{vacuous}"
        )
    found: dict[tuple, list[str]] = {}
    for r in (document["needles"] or {"rows": []})["rows"]:
        found.setdefault((r["context"], r["haystack"], r["trials"]), []).append(
            f"{escape(r['variant'])}: {r['hits']} ({percent(r['at_least'])} … {percent(r['at_most'])})"
        )
    for (context, haystack, trials), each in found.items():
        lines.append(
            f"- {context:,} tokens, needles in {escape(haystack)}, of {trials} found (bounds): {'; '.join(each)}."
        )
    return "\n".join(lines)


def _variants(variants: list[dict]) -> str:
    kind = lambda v: (
        "exact" if v["exact"] else "control" if v["control"] else "the checkpoint's own" if v["own"] else ""
    )
    what = lambda v: (
        f"k = {v['k']:,}"
        if v["k"] is not None
        else "–"
        if v["policy"] is None or v["policy"]["dense"]
        else "{}blocks of {block}: {sink} sink, {local} local, {topk} distant".format(
            f"{v['policy']['selector']} of " if v["policy"]["selector"] else "", **v["policy"]
        )
    )
    return table(
        ["variant", "", ">tokens read at most", "what"],
        [[escape(v["name"]), kind(v), budget(v["budget"]), escape(what(v))] for v in variants],
    )


def budget(tokens: int | None) -> str:
    return "all" if tokens is None else f"{tokens:,}"


# ---- tables: (columns, rows of cells), which the terminal shows too -------------------------------


def comparison(document: dict) -> tuple[list[str], list[list[str]]]:
    columns = [
        ">context",
        "variant",
        "status",
        ">positions",
        ">agreement",
        ">its chance",
        ">confident",
        ">agreement there",
        ">KL (nats)",
        ">KL, 99th percentile",
        ">perplexity",
        ">exact run's",
    ]
    return columns, [
        [
            f"{r['context']:,}",
            escape(r["variant"]),
            r["status"],
            f"{r['positions']:,}",
            percent(r["agreement"]),
            percent(r["agreement_chance"]),
            f"{r['confident']:,}",
            percent(r["agreement_confident"]),
            f"{r['kl']:.4g}",
            f"{r['kl_p99']:.4g}",
            f"{r['perplexity']:.5g}",
            f"{r['perplexity_exact']:.5g}",
        ]
        for r in document["rows"]
    ]


def continuations(document: dict) -> tuple[list[str], list[list[str]]]:
    columns = [
        ">context",
        "variant",
        ">prompts",
        ">new tokens",
        ">mean exact prefix",
        ">median",
        ">without any difference",
        "all, ascending",
    ]
    cells = []
    for r in document["rows"]:
        if c := r["continuations"]:
            cells.append(
                [
                    f"{r['context']:,}",
                    escape(r["variant"]),
                    str(c["prompts"]),
                    str(c["new_tokens"]),
                    f"{c['prefix_mean']:.1f}",
                    f"{c['prefix_median']:g}",
                    percent(c["prefix_full"]),
                    " ".join(map(str, c["prefixes"])),
                ]
            )
    return columns, cells


def findability(document: dict) -> tuple[list[str], list[list[str]]]:
    columns = [
        ">context",
        "variant",
        "layer",
        "status",
        ">queries",
        ">chance",
        ">mass kept",
        ">best",
        ">findability",
        ">attention that is on the choices",
    ]
    return columns, [
        [
            f"{r['context']:,}",
            escape(r["variant"]),
            "all" if r["layer"] is None else str(r["layer"]),
            r["status"],
            f"{r['queries']:,}",
            percent(r["chance"]),
            percent(r["mass_kept"]),
            percent(r["mass_best"]),
            percent(r["findability"]),
            percent(r["attention_on_choices"]),
        ]
        for r in document["findability"]
    ]


def needles(document: dict) -> tuple[list[str], list[list[str]]]:
    columns = [
        "haystack",
        ">context",
        "variant",
        "status",
        ">found",
        ">share",
        ">at least (97.5 %)",
        ">at most (97.5 %)",
        ">chance",
    ]
    return columns, [
        [
            escape(r["haystack"]),
            f"{r['context']:,}",
            escape(r["variant"]),
            r["status"],
            f"{r['hits']} of {r['trials']}",
            percent(r["share"]),
            percent(r["at_least"]),
            percent(r["at_most"]),
            f"{r['chance']:.1e}",
        ]
        for r in document["needles"]["rows"]
    ]


def _about(needles: dict) -> str:
    return escape(
        f"Format: {needles['format']}. At least {needles['beyond']:,} tokens lie between needle and question. Bounds "
        "are one-sided 97.5 % each (Clopper-Pearson). Chance: the best constant guess."
    )


def _provenance(document: dict) -> str:
    rows = words.flat({"text": document["text"], "settings": document["settings"]} | document["provenance"])
    return table(["", ""], [[escape(key), escape(value)] for key, value in rows if key != "command"])
