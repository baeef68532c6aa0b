"""Documents as tables for people."""

from rich.console import Console
from rich.table import Table

from dsv4.memory import format_bytes

# of a plan
GROUPS = {"weights": "weights", "cache": "cache", "staging": "staging on the device", "pinned": "pinned host memory"}
MOST_ROWS = 40  # of a listing; the JSON has all


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for column in columns:
        right = column.startswith(">")
        table.add_column(column.lstrip(">"), justify="right" if right else "left", overflow="fold", no_wrap=right)
    return table


def generation(document: dict, console: Console) -> None:
    """Rates, memory, the path of each layer, and which implementation ran."""
    t, b = document["timings"], document["bytes"]
    console.print(
        f"\n{len(document['prompt_token_ids'])} prompt tokens, {len(document['token_ids'])} new (stopped: "
        f"{document['stop_reason']}); numerics {document['numerics']}, backend {document['backend']}, device "
        f"{document['device']}, layout {document['layout']}"
    )
    console.print(
        f"prefill {t['prefill_tokens_per_second']:.1f} tokens/s, decode {t['decode_tokens_per_second']:.1f} tokens/s"
    )
    console.print(
        f"weights {format_bytes(b['weights'])}, cache {format_bytes(b['cache'])} for {b['max_context']} tokens, "
        f"peak memory {format_bytes(b['peak'])}"
    )
    if host := document["host_memory"]:
        console.print(
            f"host memory {format_bytes(host['pinned_bytes'])} pinned; {format_bytes(host['fetched_bytes'])} "
            "fetched as they were chosen"
            f" ({host['hit_rate']:.1%} were staged already), {format_bytes(host['guessed_bytes'])} ahead"
        )
    if drafted := document["speculation"]:
        _speculation(drafted, console)
    for where in sorted(set(document["placement"].values())):
        console.print(
            f"on {where}: " + ", ".join(name for name, place in document["placement"].items() if place == where)
        )
    if t["capture_seconds"]:
        console.print(f"the decode step was captured in {t['capture_seconds']:.2f} s and replayed")
    if load := document["load"]:
        console.print(
            f"load ledger: {load['consumed']} tensors loaded, {load['listed']} left out with a reason, "
            f"{load['parameters']} parameters, each written once"
        )
    for note in document["notes"]:
        console.print(f"note: {note}")
    table = _table("\npath of each layer in the last step", "layer", "kind", "experts", "attended to")
    for row in document["layers"]:
        table.add_row(row["layer"], row["kind"], row["experts"], row["path"])
    console.print(table)
    table = _table("\nwhat ran", "operation", "implementation", ">calls", "why")
    for row in document["dispatch"]:
        if row["calls"]:
            table.add_row(row["operation"], row["implementation"], str(row["calls"]), row["why"])
    console.print(table)


def _speculation(drafted: dict, console: Console) -> None:
    """What came of drafting."""
    if not drafted["proposed"]:
        console.print(
            f"speculation by {drafted['method']}: nothing could be drafted in {drafted['verify_passes']} passes"
        )
        return
    console.print(
        f"speculation by {drafted['method']}: {drafted['accepted']} of {drafted['proposed']} drafts accepted "
        f"({drafted['acceptance']:.1%}), {drafted['tokens_per_pass']:.2f} tokens a verify pass "
        f"({drafted['verify_passes']} passes, {drafted['mean_block_size']:.2f} drafts each, {drafted['draft_steps']} "
        "steps of the MTP block)"
    )


def inspection(document: dict, console: Console) -> None:
    """The ledgers, shortened; problems in full."""
    ledger, totals = document["ledger"], document["ledger"]["totals"]
    console.print(
        f"{document['checkpoint']}: layout {document['layout']}, {len(document['shards'])} file(s), "
        f"{totals['file_tensors']} tensors; matrices: "
        + ", ".join(f"{n} {form}" for form, n in document["formats"].items())
        + f"; MTP blocks: {document['mtp_blocks']}"
    )
    table = _table("\nload ledger", ">bytes", "dtype", "shape", "tensor", "goes to")
    rows = ledger["tensors"]
    for row in rows[:MOST_ROWS]:
        goes = ", ".join(row["parameters"][:2]) or "; ".join(row["reasons"]) or "NOWHERE"
        table.add_row(str(row["bytes"]), row["dtype"], str(row["shape"]), row["tensor"], goes)
    console.print(table)
    if len(rows) > MOST_ROWS:
        console.print(f"… and {len(rows) - MOST_ROWS} more tensors; --json lists all")
    table = _table("\nbytes", ">bytes", "what")
    for dtype, n in totals["consumed_bytes_by_dtype"].items():
        table.add_row(str(n), f"{dtype} loaded")
    for reason, n in totals["listed_bytes_by_reason"].items():
        table.add_row(str(n), f"left out: {reason}")
    console.print(table)
    table = _table("\nconfig ledger", "key", "requested", "effective", "status", "note")
    for row in document["config"]:
        cells = (
            [str(row["requested"]), str(row["effective"])]
            if row["status"] != "never read"
            else [str(row["requested"]), "–"]
        )
        table.add_row(row["key"], *cells, row["status"], row["note"])
    console.print(table)
    for note in ledger["notes"]:
        console.print(f"note: {note}")
    for problem in ledger["problems"]:
        console.print(f"PROBLEM: {problem}")
    verdict = "every tensor and every parameter is accounted for" if not ledger["problems"] else "NOT accounted for"
    console.print(
        f"\n{totals['consumed']} tensors loaded, {totals['listed']} left out with a reason, "
        f"{totals['parameters']} parameters: {verdict}"
    )


def conversion(document: dict, console: Console) -> None:
    console.print(f"{document['source']} → {document['destination']} ({document['to']})")
    for action, count in document["actions"].items():
        console.print(f"  {count} matrices: {action}")
    if document["inexact_blocks"]:
        console.print(f"  {document['inexact_blocks']} blocks were rounded, as --allow-inexact allows")
    if document["rounded_tensors"]:
        console.print(
            f"  {len(document['rounded_tensors'])} dense tensors were rounded to bf16, first "
            f"{document['rounded_tensors'][0]}"
        )


def _parts(title: str, rows: list[dict]) -> Table:
    """Bytes of each part with their formula, and their sum."""
    table = _table(f"\n{title}", ">bytes", ">", "part", "formula")
    for row in rows:
        table.add_row(str(row["nbytes"]), format_bytes(row["nbytes"]), row["name"], row["formula"])
    total = sum(row["nbytes"] for row in rows)
    table.add_row(str(total), format_bytes(total), "sum", "")
    return table


def plan(document: dict, console: Console) -> None:
    chosen = " (the model's longest, at most 1M; --max-context sets it)" if document["max_context_default"] else ""
    console.print(
        f"{document['checkpoint']}: {document['batch']} row(s) of {document['max_context']} tokens{chosen}, "
        f"{document['max_rewind']} to rewind, numerics {document['numerics']}"
    )
    for group in [g for g in GROUPS if any(row["group"] == g for row in document["rows"])]:
        console.print(_parts(GROUPS[group], [row for row in document["rows"] if row["group"] == group]))
    console.print(_parts("a decode step of all rows reads, their caches full", document["step"]))
    if token := document["cache_bytes_per_token"]:
        console.print(f"\nkeys and values of one token of one row: {token['nbytes']} B = {token['formula']}")
    verdict = "fits" if document["fits"] else "does NOT fit"
    if document["pinned_bytes"]:
        free = document["host_free_bytes"]
        console.print(
            f"\nhost: {document['pinned_bytes']} B = {format_bytes(document['pinned_bytes'])} pinned; "
            f"{format_bytes(free)} free now: " + ("fits" if document["pinned_bytes"] <= free else "does NOT fit")
        )
    console.print(
        f"\ntotal {document['total_bytes']} B = {format_bytes(document['total_bytes'])}; {document['device']} has "
        f"{format_bytes(document['free_bytes'])} free: {verdict}"
    )
