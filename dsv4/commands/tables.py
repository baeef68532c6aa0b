"""Documents as tables for readers."""

from collections import Counter
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

from dsv4.units import format_bytes

MOST_ROWS = 40  # of a listing; the JSON has all


def new_table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for column in columns:
        right = column.startswith(">")
        table.add_column(column.lstrip(">"), justify="right" if right else "left", overflow="fold", no_wrap=right)
    return table


def print_table(table: Table, console: Console) -> None:
    """Print a table. Outside of a terminal, without the blanks that fill its last column."""
    if console.is_terminal:
        console.print(table)
        return
    with console.capture() as drawn:
        console.print(table)
    console.print("\n".join(line.rstrip() for line in drawn.get().splitlines()))


def generation_summary(document: Mapping, console: Console) -> None:
    """Notes, if there are any, and three lines: what was generated and how fast, in what memory, and with which
    implementation."""
    t, b, layers = document["timings"], document["bytes"], document["layers"]
    for note in document["notes"]:
        console.print(f"note: {note}")
    first, drafted = t["time_to_first_token_seconds"], document["speculation"]
    console.print(
        f"generated: {len(document['token_ids'])} tokens after {len(document['prompt_token_ids'])} of the prompt "
        f"(stopped: {document['stop_reason']}), decode {t['decode_tokens_per_second']:.1f} tokens/s, prefill "
        f"{t['prefill_tokens_per_second']:.1f} tokens/s"
        + ("" if first is None else f", first token after {first:.2f} s")
        + (f", {drafted['accepted']} of {drafted['proposed']} drafts accepted" if drafted else "")
    )
    host = document["host_memory"]
    console.print(
        f"memory: weights {format_bytes(b['weights'])}, cache {format_bytes(b['cache'])} for {b['max_context']} tokens"
        + (f", pinned host memory {format_bytes(host['pinned_bytes'])}" if host else "")
        + f", peak {format_bytes(b['peak'])}"
    )
    embedding_place(document.get("embedding"), console)
    experts_use(document.get("experts"), console)
    kinds = Counter(row["kind"] for row in layers)
    ran = Counter(row["implementation"] for row in document["dispatch"] if row["calls"])
    where = ", ".join(sorted(set(document["placement"].values()))) or document["device"]
    console.print(
        f"path: {_counted(kinds)} layers on {where}; numerics {document['numerics']}, backend "
        f"{document['backend']}; operations by {_counted(ran)}"
    )


def embedding_place(found: Mapping | None, console: Console) -> None:
    """One line of a token embedding in host memory, if it is there."""
    if found:
        pinned = format_bytes(found["pinned_bytes"])
        console.print(f"embedding: {pinned} of the weights in host memory, of which a step reads a row a token")


def experts_use(found: Mapping | None, console: Console) -> None:
    """One line of routed experts in host memory, if they are there: hits, bytes a token, and the tokens a second that
    the link allows beside those that were measured."""
    if not found:
        return
    d, link = found["decode"], found["decode"]["link_bytes_per_second"]
    allowed = d["link_tokens_per_second"]
    rate = "the link was not measured on a CPU" if link is None else f"the link brings {link / 1e9:.1f} GB/s"
    if link is not None:
        rate += ", which does not limit" if allowed is None else f", which allows {allowed:.1f} tokens/s"
    over = f"; {d['over_slots']} steps of a layer chose more experts than it has slots" if d["over_slots"] else ""
    console.print(
        f"experts: {found['resident']} of {found['of']} a layer on the device ({format_bytes(found['device_bytes'])}), "
        f"all in {format_bytes(found['pinned_bytes'])} of host memory; {d['hits']} hits and {d['misses']} misses "
        f"({d['hit_rate']:.1%} hit), {format_bytes(d['fetched_bytes_per_token'])} fetched a token; {rate}; measured "
        f"{d['tokens_per_second']:.1f} tokens/s{over}"
    )


def _counted(found: Mapping[str, int]) -> str:
    """'3 window, 2 csa'."""
    return ", ".join(f"{count} {name}" for name, count in found.items())


def generation(document: dict, console: Console) -> None:
    """How long the start took, what was loaded and drafted, the path of each layer, and which implementation ran."""
    t = document["timings"]
    console.print(f"\nlayout {document['layout']}")
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
    if "load_seconds" in t:
        torch, ours = t["import_torch_seconds"], t["import_seconds"] - t["import_torch_seconds"]
        console.print(
            f"start: torch imported in {torch:.2f} s, dsv4 in {ours:.2f} s, loaded in {t['load_seconds']:.2f} s"
        )
    if t["capture_seconds"]:
        console.print(f"the decode step was captured in {t['capture_seconds']:.2f} s and replayed")
    if load := document["load"]:
        console.print(
            f"load ledger: {load['consumed']} tensors loaded, {load['listed']} left out with a reason, "
            f"{load['parameters']} parameters, each written once"
        )
    table = new_table("\npath of each layer in the last step", "layer", "kind", "experts", "attended to")
    for row in document["layers"]:
        table.add_row(row["layer"], row["kind"], row["experts"], row["path"])
    print_table(table, console)
    table = new_table("\nwhat ran", "operation", "implementation", ">calls", "why")
    for row in document["dispatch"]:
        if row["calls"]:
            table.add_row(row["operation"], row["implementation"], str(row["calls"]), row["why"])
    print_table(table, console)
    console.print()


def batch(requests: Sequence[Mapping], figures: Mapping, seconds: float, console: Console) -> None:
    """Each request of a batch with its latencies, and totals of the run. seconds: of everything, loading included."""
    columns = ("request", "stopped", ">prompt", ">new", ">first token, s", ">between tokens p50, ms", ">evicted")
    table = new_table("\nrequests", *columns)
    for r in requests[:MOST_ROWS]:
        first, between = r["time_to_first_token_seconds"], r["inter_token_percentiles_seconds"]
        table.add_row(
            r["id"],
            r["stop_reason"] if r["error"] is None else f"{r['error']['type']}: {r['error']['message']}",
            str(r["prompt_tokens"]),
            str(len(r["token_ids"])),
            "–" if first is None else f"{first:.2f}",
            "–" if between is None else f"{between['p50'] * 1e3:.1f}",
            str(r["evictions"]),
        )
    print_table(table, console)
    if len(requests) > MOST_ROWS:
        console.print(f"… and {len(requests) - MOST_ROWS} more requests; stdout has all")
    for note in figures["notes"]:
        console.print(f"note: {note}")
    embedding_place(figures.get("embedding"), console)
    experts_use(figures.get("experts"), console)
    failed = sum(r["error"] is not None for r in requests)
    drafted, accepted = (sum(r[key] for r in requests) for key in ("drafted", "accepted"))
    console.print(
        f"{len(requests)} requests, {failed} failed; {sum(len(r['token_ids']) for r in requests)} tokens in "
        f"{figures['steps']} steps, {seconds:.1f} s with loading; {figures['evictions']} evictions, "
        f"{figures['prefix_hit_tokens']} prompt tokens from kept prefixes"
        + _first_tokens(figures["time_to_first_token_seconds"])
        + (f"; {accepted} of {drafted} drafts accepted" if drafted else "")
        + (f"; {figures['launches']} launches" if "launches" in figures else "")
    )


def _first_tokens(of: Mapping | None) -> str:
    """When the requests got their first tokens. of: percentiles, None if none did."""
    return "" if of is None else f"; first token after {of['p50']:.2f} s (p50), {of['p95']:.2f} s (p95)"


def _speculation(drafted: dict, console: Console) -> None:
    """The results of drafting."""
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
    table = new_table("\nload ledger", ">bytes", "dtype", "shape", "tensor", "goes to")
    rows = ledger["tensors"]
    for row in rows[:MOST_ROWS]:
        goes = ", ".join(row["parameters"][:2]) or "; ".join(row["reasons"]) or "NOWHERE"
        table.add_row(str(row["bytes"]), row["dtype"], str(row["shape"]), row["tensor"], goes)
    print_table(table, console)
    if len(rows) > MOST_ROWS:
        console.print(f"… and {len(rows) - MOST_ROWS} more tensors; --json lists all")
    table = new_table("\nbytes", ">bytes", "what")
    for dtype, n in totals["consumed_bytes_by_dtype"].items():
        table.add_row(str(n), f"{dtype} loaded")
    for reason, n in totals["listed_bytes_by_reason"].items():
        table.add_row(str(n), f"left out: {reason}")
    print_table(table, console)
    table = new_table("\nconfig ledger", "key", "requested", "effective", "status", "note")
    for row in document["config"]:
        cells = (
            [str(row["requested"]), str(row["effective"])]
            if row["status"] != "never read"
            else [str(row["requested"]), "–"]
        )
        table.add_row(row["key"], *cells, row["status"], row["note"])
    print_table(table, console)
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
    if rounded := document["rounded_tensors"]:
        console.print(
            f"  {document['rounded_values']} values of {len(rounded)} tensors were rounded, as --allow-rounding "
            f"allows; first {rounded[0]}"
        )
