"""The measurement for people: what was found in a few lines, then every figure, then where it comes from."""

import re
from urllib.parse import quote

from dsv4.probes.measure.recall.markdown import percent
from dsv4.probes.measure.sparse_prefill.mass import KINDS
from dsv4.probes.report import words
from dsv4.probes.report.markdown import escape, fence, table

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


def render(document: dict, plots: dict[str, str]) -> str:
    """plots: title → file name beside the report."""
    parts = [
        f"# {escape(document['title'])}",
        reading(document),
        " ".join(REMARKS.split()),
        *(f"![{escape(title)}]({quote(file)})" for title, file in plots.items()),
        "## Perplexity, KL and agreement",
        table(*perplexity(document)),
        "## Decoded after a sparse prompt, reading the whole cache",
        table(*perplexity(document, "tail")),
        "## Attention mass",
        " ".join(MASS.split()),
        table(*mass(document)),
        "## Heavy hitters",
        "Jaccard index of the heavy tokens before and after an update; tokens of chunk 0 that the last memory "
        "holds, beside as many heavy tokens picked at random.",
        table(*stability(document)),
    ]
    if document["needles"]:
        parts += ["## Needles and facts", about_needles(document["needles"]), table(*needles(document))]
    parts += [
        "## Memory",
        memory_remark(document),
        table(*memory(document)),
        "## Rows at once",
        batch(document["batch"]),
    ]
    if document["notes"]:
        parts += ["## Notes", "\n".join(f"- {escape(note)}" for note in document["notes"])]
    rows = words.flat({"texts": document["texts"], "settings": document["settings"]} | document["provenance"])
    parts += [
        "## Provenance",
        fence(document["provenance"]["command"]),
        table(["", ""], [[escape(key), escape(value)] for key, value in rows if key != "command"]),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def cut_of(row: dict) -> str:
    return "dense" if row["chunk"] is None else f"{row['chunk']}: {row['local']} + {row['heavy']}"


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
    missed = [r for r in document["memory"] if r["verdict"] == "MISSED"]
    most = max(document["memory"], key=lambda r: r["call_share"])
    of = len(document["memory"])
    lines.append(
        f"- Less than 5 % more memory than dense (formula): **met in {of - len(missed)}, MISSED in {len(missed)}** of "
        f"{of} settings; at most {percent(most['call_share'])} ({cut_of(most)}, {most['context']:,} tokens)."
    )
    lines += [
        "- The memory was chosen chunks − 1 times by every KV head of every layer, in every run (asserted).",
        f"- {batch(document['batch'])}",
    ]
    groups: dict[tuple, list[str]] = {}
    for r in (document["needles"] or {"rows": []})["rows"]:
        groups.setdefault((r["kind"], r["context"], r["trials"]), []).append(f"{cut_of(r)}: {r['hits']}")
    lines += [
        f"- {escape(kind)}, {context:,} tokens, right of {trials}: {'; '.join(each)}."
        for (kind, context, trials), each in groups.items()
    ]
    return "\n".join(lines)


def perplexity(document: dict, part: str | None = None) -> tuple[list[str], list[list[str]]]:
    """(columns, rows of cells), of all positions or of the decoded tails."""
    columns = [
        ">chunk",
        ">L",
        ">H",
        ">context",
        "text",
        ">positions",
        ">dense",
        ">sparse",
        ">loss",
        ">95 %",
        "below 5 %",
        ">KL (nats)",
        ">99th percentile",
        ">agreement",
        ">chance",
        ">confident",
    ]
    cells = []
    for row in document["rows"]:
        r = row if part is None else row[part]
        interval = "–" if r["loss_low"] is None else f"{percent(r['loss_low'])} … {percent(r['loss_high'])}"
        verdict = r["verdict"] if r["verdict"] == "met" else "**MISSED**"
        cells.append(
            [
                str(row["chunk"]),
                str(row["local"]),
                str(row["heavy"]),
                f"{row['context']:,}",
                escape(row["text"] or "all"),
                f"{r['positions']:,}",
                f"{r['perplexity_exact']:.4g}",
                f"{r['perplexity']:.4g}",
                percent(r["loss"]),
                interval,
                verdict,
                f"{r['kl']:.4g}",
                f"{r['kl_p99']:.4g}",
                percent(r["agreement"]),
                percent(r["agreement_chance"]),
                percent(r["agreement_confident"]),
            ]
        )
    return columns, cells


def mass(document: dict) -> tuple[list[str], list[list[str]]]:
    """By cut, text and layer; the heads are in the JSON and in the plot."""
    columns = ["cut", "text", ">layer", *(f">{kind.replace('_', ', ')}" for kind in KINDS), ">kept, least head"]
    return columns, [
        [
            cut_of(r),
            escape(r["text"]),
            str(r["layer"]),
            *(percent(sum(r[kind]) / len(r[kind])) for kind in KINDS),
            percent(min(r["kept"])),
        ]
        for r in document["mass"]
    ]


def stability(document: dict) -> tuple[list[str], list[list[str]]]:
    columns = [
        "cut",
        "text",
        ">layer",
        ">updates",
        ">mean Jaccard",
        ">last",
        ">of chunk 0 at first",
        ">at last, mean of heads",
        ">most",
        ">by chance",
    ]
    return columns, [
        [
            cut_of(r),
            escape(r["text"]),
            str(r["layer"]),
            str(r["updates"]),
            *(
                ("–" if x is None else f"{x:.3f}")
                for x in (r["jaccard_mean"], r["jaccard"][-1] if r["jaccard"] else None)
            ),
            f"{r['survivors'][0]:.0f}",
            f"{r['survivors'][-1]:.1f}",
            str(r["survivors_most"]),
            f"{r['survivors_chance'][-1]:.1f}",
        ]
        for r in document["stability"]
    ]


def needles(document: dict) -> tuple[list[str], list[list[str]]]:
    columns = [
        "what",
        ">context",
        "prompt read",
        ">right",
        ">share",
        ">at least (97.5 %)",
        ">at most (97.5 %)",
        ">chance",
        "by depth",
    ]
    return columns, [
        [
            escape(r["kind"]),
            f"{r['context']:,}",
            cut_of(r),
            f"{r['hits']} of {r['trials']}",
            percent(r["share"]),
            percent(r["at_least"]),
            percent(r["at_most"]),
            f"{r['chance']:.1e}",
            "".join("●" if d["hit"] else "○" for d in r["depths"]) or "–",
        ]
        for r in document["needles"]["rows"]
    ]


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


def memory(document: dict) -> tuple[list[str], list[list[str]]]:
    columns = [
        "cut",
        ">context",
        ">dense call, bytes",
        ">more, bytes",
        ">share",
        "below 5 %",
        ">held by all layers",
        ">caches",
        ">measured",
    ]
    peak = lambda m: "–" if m is None else f"{m['sparse']:,} / {m['dense']:,}"
    return columns, [
        [
            cut_of(r),
            f"{r['context']:,}",
            f"{r['call_dense']:,}",
            f"{r['call_extra']:,}",
            percent(r["call_share"]),
            r["verdict"],
            f"{r['held_layers']:,}",
            f"{r['cache']:,}",
            peak(r["measured"]),
        ]
        for r in document["memory"]
    ]


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
