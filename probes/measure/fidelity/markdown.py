"""The measurement for people: what was found in a few lines, then every figure, then where it comes from."""

from dsv4.probes.measure.base.logits import CONFIDENT
from dsv4.probes.measure.base.markdown import page, paragraph, pictures, section
from dsv4.probes.measure.base.tables import (
    CHANCE,
    CONTEXT,
    LAYER,
    Table,
    needle_lines,
    percent,
    table_of,
    task_columns,
    task_name,
    together_in_one,
)
from dsv4.probes.report.markdown import escape

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
        _reading(document),
        document["prefill"],
        paragraph(REMARKS),
        *pictures(plots),
        *section("Variants", _variants(document["variants"])),
        *section("By context and variant", comparison(document)),
    ]
    if any(r["continuations"] for r in document["rows"]):
        parts += section("Greedy continuations", continuations(document))
    if document["findability"]:
        kept = paragraph(KEPT).format(top=document["findability"][0]["top"])
        parts += section("What the selector keeps of the dense attention", findability(document), kept)
    if document["needles"]:
        parts += section("Needles", needles(document), _about(document))
    return page(document, parts)


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
    asked = (document["needles"] or {"rows": []})["rows"]
    bounded = lambda r: f"{r['hits']} ({percent(r['at_least'])} … {percent(r['at_most'])})"
    return "\n".join(lines + needle_lines(asked, bounded))


def _most(variant: dict) -> str:
    """Tokens that a query reads at most, in words."""
    if variant["budget"] is not None:
        return f"{variant['budget']:,}"
    share = (variant["policy"] or {}).get("retention")
    return "all" if share is None else f"{share:.0%} of the prompt"


def _variants(variants: list[dict]) -> Table:
    kind = lambda v: (
        "exact" if v["exact"] else "control" if v["control"] else "the checkpoint's own" if v["own"] else ""
    )
    what = lambda v: (
        f"k = {v['k']:,}"
        if v["k"] is not None
        else "–"
        if v["policy"] is None or v["policy"]["dense"]
        else "by {window} last queries of the prompt, {pooling} pooling over {kernel}".format(**v["policy"])
        + ("" if v["policy"]["beta"] is None else f", budgets falling by layer, beta {v['policy']['beta']}")
        if "retention" in v["policy"]
        else "{}blocks of {block}: {sink} sink, {local} local, {topk} distant".format(
            f"{v['policy']['selector']} of " if v["policy"]["selector"] else "", **v["policy"]
        )
    )
    return table_of(
        variants,
        ("variant", "name"),
        ("", kind),
        (">tokens read at most", _most),
        ("what", what),
    )


# ---- tables, which the terminal shows too ---------------------------------------------------------


def comparison(document: dict) -> Table:
    return table_of(
        document["rows"],
        CONTEXT,
        "variant",
        "status",
        (">positions", "positions", ","),
        (">agreement", "agreement", percent),
        (">its chance", "agreement_chance", percent),
        (">confident", "confident", ","),
        (">agreement there", "agreement_confident", percent),
        (">KL (nats)", "kl", ".4g"),
        (">KL, 99th percentile", "kl_p99", ".4g"),
        (">perplexity", "perplexity", ".5g"),
        (">exact run's", "perplexity_exact", ".5g"),
    )


def continuations(document: dict) -> Table:
    return table_of(
        [r | r["continuations"] for r in document["rows"] if r["continuations"]],
        CONTEXT,
        "variant",
        (">prompts", "prompts"),
        (">new tokens", "new_tokens"),
        (">mean exact prefix", "prefix_mean", ".1f"),
        (">median", "prefix_median", "g"),
        (">without any difference", "prefix_full", percent),
        ("all, ascending", "prefixes", lambda lengths: " ".join(map(str, lengths))),
    )


def findability(document: dict) -> Table:
    return table_of(
        document["findability"],
        CONTEXT,
        "variant",
        LAYER,
        "status",
        (">queries", "queries", ","),
        (">chance", "chance", percent),
        (">mass kept", "mass_kept", percent),
        (">best", "mass_best", percent),
        (">findability", "findability", percent),
        (">attention that is on the choices", "attention_on_choices", percent),
    )


def needles(document: dict) -> Table:
    rows, tasks = document["needles"]["rows"], task_name(document["needles"]["rows"])
    what = *tasks, "haystack", CONTEXT, "variant", ("status", "status", str)
    return table_of(rows, *what, *task_columns(rows), *(() if tasks else (CHANCE,)))


def _about(document: dict) -> str:
    needles = document["needles"]
    return escape(
        f"Format: {needles['format']}. At least {needles['beyond']:,} tokens lie between needle and question. Bounds "
        "are one-sided 97.5 % each (Clopper-Pearson). Chance: the best constant guess."
        + together_in_one(document["settings"])
    )
