"""The measurement as strict JSON, described by probes/schema/sparse_prefill-1.json."""

import json
import math
import time
from dataclasses import astuple

import torch

from dsv4.kernels.chunked_prefill import Chunking
from dsv4.probes.measure.base.document import Kind
from dsv4.probes.measure.base.haystack import FORMAT, filler
from dsv4.probes.measure.base.logits import Positions
from dsv4.probes.measure.base.models import ModelSubject, Say, reach
from dsv4.probes.measure.base.needles import Limits
from dsv4.probes.measure.base.text import Text, rows_of
from dsv4.probes.measure.sparse_prefill import batch, distribution, mass, measures, memory_use, needles, quality
from dsv4.probes.measure.sparse_prefill.reading import Reading, read
from dsv4.probes.measure.sparse_prefill.settings import Settings, name, way

KIND = Kind("sparse_prefill", "Chunked sparse prefill of", "needles")
ROOM = 64  # tokens of a question and its answer
WIDTHS = 128  # columns of a map of what is kept


class Found:
    """What is gathered along the way: positions by (cut, context, text), tails likewise; the rest as JSON values, and
    maps to be drawn."""

    def __init__(self):
        self.positions: dict[tuple[Chunking, int], dict[str, list[Positions]]] = {}
        self.tails: dict[tuple[Chunking, int], dict[str, list[Positions]]] = {}
        self.by_chunk: list[dict] = []
        # of each cut: nats lost, and the two classes of each position (`distribution`), a tensor [n] a row
        self.classes: dict[Chunking, list[tuple[torch.Tensor, ...]]] = {}
        self.mass: list[dict] = []
        self.mass_by_chunk: list[dict] = []
        self.stability: list[dict] = []
        self.held: dict[Chunking, tuple[int, int]] = {}
        self.maps: dict[str, dict[int, torch.Tensor]] = {}


def measured(
    subject: ModelSubject, settings: Settings, texts: list[Text], command: list[str], say: Say = lambda text: None
) -> tuple[dict, dict[str, dict[int, torch.Tensor]]]:
    """(everything that `dsv4 sparse-prefill` reports, as JSON values that fit the schema; name of a cut → layer → map
    of what it kept)."""
    started, model, found = time.time(), subject.model, Found()
    hidden, notes = hide_needles(model, settings, texts[0])
    for text in texts:
        for i, ids in enumerate(rows_of(text, settings.contexts[-1], settings.rows, model.config.bos_token_id)):
            read_row(model, settings, text.name, ids, found, say, first=not i and text is texts[0])
    asked = ask(model, settings, texts[0], hidden, say) if hidden else None
    say("a batch of rows beside each row alone")
    alone = batch.compared(model, settings.cuts[0], texts[0], settings.seed)
    figures = {
        "rows": quality_rows(found),
        "by_chunk": found.by_chunk,
        "by_text": text_rows(found),
        "texts_below": texts_below(found),
        "by_class": class_rows(found),
        "mass": found.mass,
        "mass_by_chunk": found.mass_by_chunk,
        "stability": found.stability,
        "needles": asked,
        "memory": memory_use.rows(model, list(settings.cuts), list(settings.contexts), found.held),
        "batch": alone,
        "notes": notes,
    }
    return KIND.document(subject, settings.about(), texts, figures, command, started), found.maps


def read_row(model, settings: Settings, text: str, ids: torch.Tensor, found: Found, say: Say, first: bool) -> None:
    """One row ids int64 [T]: dense, then every cut. The row's last token is only predicted."""
    T, unit = len(ids), math.gcd(*(c.chunk for c in settings.cuts))
    limits = Limits.of(str(model.device))
    say(f"{text}: {T:,} tokens, dense")
    with mass.watched(model, T - 1, unit, settings.every) as dense:
        exact = read(model, ids[None, :-1], None, limits.chunk)
    for cut in settings.cuts:
        say(f"{text}: {T:,} tokens, {name(cut)}")
        other = read(model, ids[None, :-1], cut, limits.chunk)
        found.held[cut] = T - 1, other.memory_bytes
        note_memory(found, settings, cut, text, dense, other, T - 1, first)
        of = quality.compared(model, exact, other, ids, cut.chunk)
        found.by_chunk.append(way(cut) | {"text": text, "lost": quality.by_chunk(of, cut)})
        found.classes.setdefault(cut, []).append(
            (
                distribution.lost(of),
                distribution.origins(ids, cut, cut.chunk),
                distribution.quarters(cut, cut.chunk, len(of.nll)),
            )
        )
        tails = [(n - settings.tail - 1, n - 1) for n in sorted(settings.contexts, reverse=True)]
        ends = quality.decoded(model, exact, other, ids, tails, limits.chunk)
        for context, end in zip(sorted(settings.contexts, reverse=True), ends):
            found.positions.setdefault((cut, context), {}).setdefault(text, []).append(
                quality.until(of, context - 1 - cut.chunk)
            )
            found.tails.setdefault((cut, context), {}).setdefault(text, []).append(end)


def note_memory(
    found: Found,
    settings: Settings,
    cut: Chunking,
    text: str,
    dense: dict[int, mass.DenseMass],
    other: Reading,
    tokens: int,
    first: bool,
) -> None:
    """Mass, stability and survivors of each layer's memory; maps of the first row."""
    together: list[dict[str, torch.Tensor]] = []
    for layer, positions in other.positions.items():
        whole = dense[layer].of_chunks(cut.chunk)
        shares = mass.shares(whole, positions[:, 0], cut)
        together.append(shares)
        about = way(cut) | {"text": text, "layer": layer}
        found.mass.append(about | {"queries": int(whole.queries[1:].sum())} | mass.figures(shares, whole.queries))
        found.stability.append(about | stability(positions, cut))
        if first and cut in settings.asked:
            found.maps.setdefault(name(cut), {})[layer] = measures.kept_by_place(
                positions[:, :1], tokens, max(1, tokens // WIDTHS)
            ).cpu()
    for kind in mass.KINDS:
        mean = torch.stack([s[kind] for s in together]).mean((0, 2))
        found.mass_by_chunk.append(way(cut) | {"text": text, "kind": kind, "share": [none(x) for x in mean.tolist()]})


def stability(positions: torch.Tensor, cut: Chunking) -> dict:
    """Of one layer and row, as JSON values: by update, means over KV heads; survivors are tokens of chunk 0."""
    jaccard, left = measures.stability(positions[:-1], cut)[:, 0], measures.survivors(positions, cut)[:, 0].double()
    live = jaccard[~jaccard.isnan()]
    return {
        "updates": len(left),
        "jaccard": [none(x) for x in jaccard.mean(-1).tolist()],
        "jaccard_mean": live.mean().item() if len(live) else None,
        "survivors": left.mean(-1).tolist(),
        "survivors_most": int(left[-1].max()),
        "survivors_chance": measures.survivors_by_chance(len(left), cut),
    }


def none(x: float) -> float | None:
    return None if x != x else x


def quality_rows(found: Found) -> list[dict]:
    """A row a cut, context and text, then one of all texts (text null)."""
    rows = []
    for cut, context in ordered(found):
        of, ends = found.positions[cut, context], found.tails[cut, context]
        for text in [*of, None]:
            parts, tail = (each[text] if text else [p for some in each.values() for p in some] for each in (of, ends))
            rows.append(
                way(cut) | {"context": context, "text": text} | quality.figures(parts) | {"tail": quality.figures(tail)}
            )
    return rows


def ordered(found: Found) -> list[tuple[Chunking, int]]:
    """Cuts and contexts, as tables list them."""
    return sorted(found.positions, key=lambda key: (*astuple(key[0]), key[1]))


def text_rows(found: Found) -> list[dict]:
    """A row a cut, context and text that was read: `row` counts those of one source."""
    return [
        way(cut) | {"context": context, "text": text, "row": i} | distribution.row_figures(of)
        for cut, context in ordered(found)
        for text, rows in found.positions[cut, context].items()
        for i, of in enumerate(rows)
    ]


def texts_below(found: Found) -> list[dict]:
    """A row a cut and context: how many texts lose less than the goal."""
    losses: dict[tuple[Chunking, int], list[float]] = {}
    for cut, context in ordered(found):
        rows = [of for some in found.positions[cut, context].values() for of in some]
        losses[cut, context] = [distribution.row_figures(of)["loss"] for of in rows]
    return [way(cut) | {"context": n} | distribution.texts_below(each) for (cut, n), each in losses.items()]


def class_rows(found: Found) -> list[dict]:
    """A row a cut and class of positions, over all texts at the longest context."""
    rows, quarters = [], tuple(f"quarter {i + 1}" for i in range(distribution.QUARTERS))
    for cut, parts in sorted(found.classes.items(), key=lambda item: astuple(item[0])):
        nats, origin, quarter = (torch.cat(part) for part in zip(*parts))
        for by, classes, names in (
            ("the pair stood before", origin, distribution.ORIGINS),
            ("place in the chunk", quarter, quarters),
        ):
            rows += [way(cut) | {"by": by} | row for row in distribution.by_class(nats, classes, names)]
    return rows


Hidden = list[tuple[str, int, needles.Planted]]


def hide_needles(model, settings: Settings, text: Text) -> tuple[Hidden, list[str]]:
    """(haystack, context, its needles; notes), before anything is run: what cannot be asked is known at once. Raises
    InputError."""
    why = (
        "turned off (--needles 0)"
        if not settings.needles
        else "they are sentences, and there is no tokenizer"
        if text.tokenizer is None
        else None
    )
    if why:
        return [], [f"no needles: {why}"]
    tokenizer, bos, found = text.tokenizer.backend, model.config.bos_token_id, []
    for context in settings.asked_contexts:
        for haystack, words in (("prose", text.ids), ("looped filler", filler(tokenizer, context))):
            planted = needles.planted(tokenizer, words, context, settings.needles, reach(model), bos, settings.seed)
            found.append((haystack, context, planted))
    return found, []


def ask(model, settings: Settings, text: Text, hidden: Hidden, say: Say) -> dict:
    """The part of the document on needles and facts."""
    limits, questions, rows = Limits.of(str(model.device)), needles.facts(text.tokenizer.backend), []
    for haystack, context, planted in hidden:
        for cut in (None, *settings.asked):

            def note(kind: str, asked: list, hits: list[bool], cut=cut) -> None:
                rows.append(needles.row(way(cut), kind, context, asked, hits))

            say(f"needles in {haystack}, {context:,} tokens, {'dense' if cut is None else name(cut)}")
            reading = read(model, torch.tensor([planted.context]), cut, limits.chunk, room=ROOM)
            note(
                f"needles in {haystack}",
                planted.questions,
                needles.answers(model, reading, planted.questions, limits.chunk),
            )
            if haystack != "prose":
                continue
            note("facts", questions, needles.answers(model, reading, questions, limits.chunk))
            if settings.in_prompt and context == settings.asked_contexts[0]:
                some = planted.questions[:: max(1, settings.needles // settings.in_prompt)][: settings.in_prompt]
                hits = needles.answers_in_prompt(model, planted.context, some, cut, limits)
                note("needles in prose, the question in the prompt", some, hits)
    return {
        "format": FORMAT,
        "beyond": reach(model),
        "fact": needles.FACT.strip(),
        "rows": sorted(rows, key=lambda r: r["kind"]),
    }


def render(document: dict) -> str:
    return (
        json.dumps(document, ensure_ascii=False, indent=None, separators=(", ", ": "), allow_nan=False).replace(
            "}, {", "},\n{"
        )
        + "\n"
    )
