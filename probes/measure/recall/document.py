"""The measurement as strict JSON, described by probes/schema/recall-1.json."""

import time
from pathlib import Path

from dsv4.probes.measure.recall import measure
from dsv4.probes.measure.recall.settings import Settings
from dsv4.probes.measure.recall.text import Text
from dsv4.probes.report import schema
from dsv4.probes.report.json_report import strict
from dsv4.probes.report.provenance import provenance
from dsv4.probes.subject import Subject

VERSION = "1"
SCHEMA = Path(__file__).resolve().parents[2] / "schema" / f"recall-{VERSION}.json"


def measured(
    subject: Subject,
    settings: Settings,
    text: Text | None,
    command: list[str],
    say: measure.Say = lambda text: None,
    advance: measure.Advance = lambda tokens: None,
) -> dict:
    """Everything that `dsv4 recall` reports, as JSON values that fit the schema. text: None for a recorded dump."""
    started = time.time()
    rows = measure.indexer(subject, settings, text, say, advance)
    needles, notes = measure.needles_of(subject, settings, text, say)
    bad = sum(r["nan_queries"] for r in rows if r["layer"] is not None)
    notes += [f"NaN in the scores or the attention of {bad} queries: their figures mean nothing"] if bad else []
    about = provenance(subject, command, {"needles and random ids": settings.seed}, started)
    document = {
        "schema_version": VERSION,
        "title": f"Indexer recall of {about['checkpoint']['name']}, {about['subject']}",
        "provenance": about,
        "text": text.about() if text else recorded(subject),
        "settings": {
            "contexts": list(settings.contexts),
            "k": list(settings.ks),
            "index_topk": subject.config.index_topk,
            "sliding_window": subject.config.sliding_window,
            "queries": settings.queries,
            "rows": settings.rows,
            "needles": settings.needles,
            "seed": settings.seed,
        },
        "rows": rows,
        "gate": measure.gate(rows).to_json(),
        "needles": needles,
        "notes": notes,
        "seconds": about["seconds"],
    }
    return valid(strict(document))


def recorded(subject: Subject) -> dict:
    """What stands in the text's place for a dump."""
    return {"name": "the recorded ids", "sha256": None, "tokens": subject.ids.numel(), "tokenizer": False}


def valid(document: dict) -> dict:
    """`document` itself. Raises Dsv4Error with the first thing that contradicts the schema."""
    return schema.valid(document, SCHEMA, f"the measurement is no valid recall-{VERSION} document")
