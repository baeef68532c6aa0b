"""A run of the engine as JSON, markdown and an SVG."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from dsv4.cache.paging import PRESSURE_PERCENT
from dsv4.cache.prefixes import hit_rate
from dsv4.engine import plots
from dsv4.engine.state import Result, percentiles
from dsv4.speculation.documents import check_can_draw, write_whole


def check_can_report(directory: Path) -> None:
    """Make the directory. Raises InputError where a report could not be written: before a run, not after it."""
    check_can_draw(
        directory,
        "a report holds an SVG, and matplotlib is not installed; pip install 'dsv4[plots]', or run without --report",
        "--report",
    )


def request_document(result: Result, text: str | None = None) -> dict:
    """JSON values of a result; prefix_hit_rate as in `dsv4.cache.prefixes.hit_rate`, None where nothing could be
    borrowed."""
    return result.document(text) | {"prefix_hit_rate": hit_rate(result.grafted, result.prompt_tokens)}


def document(about: Mapping, figures: Mapping, requests: Sequence[Mapping]) -> dict:
    """JSON values. requests: of `request_document`, all submitted when the run began; latency: of all of them, seconds.
    last_token_seconds: when the last token came, None without tokens."""
    ends = [
        r["time_to_first_token_seconds"] + sum(r["inter_token_seconds"])
        for r in requests
        if r["time_to_first_token_seconds"] is not None
    ]
    firsts = [r["time_to_first_token_seconds"] for r in requests if r["time_to_first_token_seconds"] is not None]
    drafted, accepted = (sum(r[key] for r in requests) for key in ("drafted", "accepted"))
    totals = {
        "requests": len(requests),
        "failed": sum(r["error"] is not None for r in requests),
        "tokens": sum(len(r["token_ids"]) for r in requests),
        "passes": sum(len(r["block_size_history"]) for r in requests),
        "drafted": drafted,
        "accepted": accepted,
        "acceptance": accepted / drafted if drafted else None,
        "last_token_seconds": max(ends, default=None),
    }
    latency = {
        "time_to_first_token": percentiles(firsts),
        "inter_token": percentiles([s for r in requests for s in r["inter_token_seconds"]]),
    }
    return {
        "about": dict(about),
        "totals": totals,
        "latency_seconds": latency,
        "figures": dict(figures),
        "requests": list(requests),
    }


def write_report(directory: Path, name: str, report: dict) -> list[Path]:
    """`batch_<name>.json`, `.md` and `.svg`, each whole or not at all. Raises InputError when one cannot be written."""
    texts = {
        ".json": json.dumps(report, indent=1) + "\n",
        ".md": markdown(name, report),
        ".svg": plots.svg(name, report),
    }
    paths = []
    for suffix, text in texts.items():
        paths.append(directory / f"batch_{name}{suffix}")
        write_whole(paths[-1], text)
    return paths


def markdown(name: str, report: dict) -> str:
    about, totals, figures = report["about"], report["totals"], report["figures"]
    setting = [f"{key} {value}" for key, value in about.items() if key not in ("notes", "versions", "dirty", "command")]
    versions = [f"{key} {value}" for key, value in about["versions"].items() if value is not None]
    lines = [
        f"# Batch run {name}",
        "",
        ", ".join([*setting, *versions]) + (", with changes that were not committed." if about["dirty"] else "."),
        "",
        f"    {about['command']}",
        "",
        f"{totals['requests']} requests, {totals['failed']} failed; {totals['tokens']} tokens in {totals['passes']} "
        f"passes and {figures['steps']} steps; {totals['accepted']} of {totals['drafted']} drafts accepted"
        + (f" ({totals['acceptance']:.1%})." if totals["drafted"] else "."),
        *_rate(totals),
        f"{figures['evictions']} evictions; page hit rate of prefixes {figures['prefix_hit_rate']:.1%}; "
        f"{figures['share_of_steps_under_pressure']:.1%} of the steps under pressure (over "
        f"{PRESSURE_PERCENT} % of a pool live).",
        "",
        "| latency, ms | p50 | p95 | p99 |",
        "|---|---:|---:|---:|",
    ]
    lines += [
        f"| {what.replace('_', ' ')} | {_milliseconds(found)} |" for what, found in report["latency_seconds"].items()
    ]
    lines += [
        "",
        "Tokens of one pass come at once: 0 ms apart.",
        "",
        "| request | stopped | tokens | passes | drafted | accepted | mean block size | variance | prefix hits | "
        "evictions | first token, ms | between tokens p50, ms | p95 | p99 |",
        "|---|---|" + "---:|" * 12,
    ]
    lines += [_row(r) for r in report["requests"]]
    lines += ["", "| pool | pages | most live | mean fragmentation |", "|---|---:|---:|---:|"]
    lines += [
        f"| {pool} | {p['pages']} | {p['peak']} | {p['mean_fragmentation']:.1%} |"
        for pool, p in figures["pools"].items()
    ]
    lines += ["", f"![sizes, acceptance, latency, live pages and their fragmentation](batch_{name}.svg)"]
    return "\n".join([*lines, *([""] if about["notes"] else []), *(f"- {note}" for note in about["notes"])]) + "\n"


def _rate(totals: Mapping) -> list[str]:
    seconds = totals["last_token_seconds"]
    return (
        [f"The last token came after {seconds:.2f} s: {totals['tokens'] / seconds:,.0f} tokens/s."] if seconds else []
    )


def _row(r: Mapping) -> str:
    first = r["time_to_first_token_seconds"]
    stopped = r["stop_reason"] if r["error"] is None else f"{r['error']['type']}: {r['error']['message']}"
    cells = [
        r["id"],
        stopped,
        len(r["token_ids"]),
        len(r["block_size_history"]),
        r["drafted"],
        r["accepted"] if r["acceptance"] is None else f"{r['accepted']} ({r['acceptance']:.0%})",
        *(("–" if r[key] is None else f"{r[key]:.2f}") for key in ("mean_block_size", "block_size_variance")),
        "–" if r["prefix_hit_rate"] is None else f"{r['prefix_hit_rate']:.0%}",
        r["evictions"],
        "–" if first is None else f"{first * 1e3:.1f}",
    ]
    safe = (str(cell).replace("\\", "\\\\").replace("|", "\\|").replace("\n", " ") for cell in cells)
    return "| " + " | ".join(safe) + f" | {_milliseconds(r['inter_token_percentiles_seconds'])} |"


def _milliseconds(found: Mapping[str, float] | None) -> str:
    return "– | – | –" if found is None else " | ".join(f"{seconds * 1e3:.1f}" for seconds in found.values())
