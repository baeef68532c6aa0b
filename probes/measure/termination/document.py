"""The measurement as strict JSON, described by probes/schema/termination-1.json."""

import time

from dsv4.kernels.block_choice import Policy
from dsv4.loaders.expected import preset
from dsv4.probes.measure.base.asking import Limits
from dsv4.probes.measure.base.document import Kind
from dsv4.probes.measure.base.models import ModelSubject, Say, family, reads_by_policy
from dsv4.probes.measure.base.text import Text, rows_of
from dsv4.probes.measure.termination import measure
from dsv4.probes.measure.termination.settings import WHOLE, Settings
from dsv4.probes.oracle import kinds

KIND = Kind("termination", "Run-time termination on", "needles", revision=".3")
valid = KIND.valid
# of tiles: what must be skipped, when probing costs up to 2 % of the time and tiles are fetched ahead of it
PAYS = 0.1
FAITHFUL = 0.01  # relative error that 99 of 100 heads keep to


def measured(
    subject: ModelSubject, policies: list[Policy], settings: Settings, text: Text, command: list[str], say: Say
) -> dict:
    """Everything that `dsv4 termination` reports, as JSON values that fit the schema."""
    started, model = time.time(), subject.model
    limits = Limits.of_model(model)
    ids = rows_of(text, settings.contexts[-1], settings.rows, model.config.bos_token_id)
    walked = measure.walks(model, policies, ids, settings, limits.chunk, say)
    stopped, varied = measure.stopped(walked, settings), measure.varied(walked, settings)
    hidden = None
    if settings.needles:
        hidden = measure.hidden_needles(model, policies, text.tokenizer.backend, text.ids, settings, limits, say)
    found = {
        "family": family(model),
        "texts": len(ids),
        "verdicts": verdicts(stopped),
        "rows": stopped,
        "varied": varied,
        "geometries": [] if reads_by_policy(model) else geometries(settings),
        "needles": hidden,
    }
    return KIND.document(subject, settings.about(), text, found, command, started)


def verdicts(rows: list[dict]) -> list[dict]:
    """By order and context, all layers: whether the rule pays: skips at least PAYS of the tiles and keeps 99 % of heads
    within FAITHFUL."""
    return [
        {
            "order": r["order"],
            "context": r["context"],
            "skipped": r["skipped"],
            "error_p99": r["error_p99"],
            "pays": r["skipped"] >= PAYS and r["error_p99"] <= FAITHFUL,
        }
        for r in rows
        if r["layer"] is None
    ]


def idle(varied: list[dict]) -> list[dict]:
    """By order and context, what was left out of the rule, or swept, and changed no figure: so this measurement cannot
    tell whether that part of the rule matters. varied: of `measure.varied`."""
    found, names = [], ("order", "context", "varied", "tau", "phi", "patience")
    figures = lambda row: {key: value for key, value in row.items() if key not in names}
    for order, context in dict.fromkeys((r["order"], r["context"]) for r in varied):
        rows = [r for r in varied if (r["order"], r["context"]) == (order, context)]
        whole = figures(next(r for r in rows if r["varied"] == WHOLE))
        for name in dict.fromkeys(r["varied"] for r in rows if r["varied"] != WHOLE):
            if all(figures(r) == whole for r in rows if r["varied"] == name):
                found.append({"order": order, "context": context, "varied": name})
    return found


def geometries(settings: Settings) -> list[dict]:
    """Keep-sets of the published configurations: the rule cannot stop before its first tile and `wait` stable ones, so
    this is the most that it can skip of them."""
    found = []
    for name in ("flash", "pro"):
        raw = preset(name)
        window, most = raw["sliding_window"], raw["max_position_embeddings"]
        sets = {f"CSA of {name}: {window} window rows, {raw['index_topk']:,} entries": window + raw["index_topk"]}
        sets |= {
            f"HCA of {name} at {n >> 10}K: {window} window rows, {n // kinds.HCA:,} entries": window + n // kinds.HCA
            for n in (128 << 10, most)
        }
        for label, rows in sets.items():
            for tile in (64, 128):
                tiles = -(-rows // tile)
                least = min(tiles, settings.rule.wait + 1)
                found.append(
                    {
                        "name": label,
                        "rows": rows,
                        "tile": tile,
                        "tiles": tiles,
                        "read_at_least": least,
                        "skipped_at_most": 1 - least / tiles,
                    }
                )
    return found
