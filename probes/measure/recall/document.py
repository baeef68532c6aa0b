"""The measurement as strict JSON, described by probes/schema/recall-1.json."""

import time

from dsv4.probes.measure.base.document import Kind
from dsv4.probes.measure.base.models import Advance, Say
from dsv4.probes.measure.base.text import Text
from dsv4.probes.measure.recall import measure
from dsv4.probes.measure.recall.settings import Settings
from dsv4.probes.subject import Subject

KIND = Kind("recall", "Indexer recall of", "needles and random ids")
valid = KIND.valid


def measured(
    subject: Subject,
    settings: Settings,
    text: Text | None,
    command: list[str],
    say: Say = lambda text: None,
    advance: Advance = lambda tokens: None,
) -> dict:
    """Everything that `dsv4 recall` reports, as JSON values that fit the schema. text: None for a recorded dump."""
    started = time.time()
    rows = measure.indexer(subject, settings, text, say, advance)
    needles, notes = measure.needles_of(subject, settings, text, say)
    bad = sum(r["nan_queries"] for r in rows if r["layer"] is not None)
    notes += [f"NaN in the scores or the attention of {bad} queries: their figures mean nothing"] if bad else []
    asked = [r for r in rows if r["context"] in settings.contexts and r["k"] in settings.ks]
    gates = {"gate": measure.gate(asked).to_json(), "gate_exact": measure.exact_gate(rows).to_json()}
    found = {"rows": rows, **gates, "needles": needles, "notes": notes}
    config = subject.config
    about = settings.about(index_topk=config.index_topk, sliding_window=config.sliding_window)
    return KIND.document(subject, about, text or recorded(subject), found, command, started)


def recorded(subject: Subject) -> dict:
    """What stands in the text's place for a dump."""
    return {"name": "the recorded ids", "sha256": None, "tokens": subject.ids.numel(), "tokenizer": False}
