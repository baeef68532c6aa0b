"""A plan as tables for readers."""

from rich.console import Console
from rich.table import Table

from dsv4.commands.tables import new_table, print_table
from dsv4.units import format_bytes

GROUPS = {
    "weights": "weights",
    "cache": "cache",
    "staging": "staging on the device",
    "pinned": "pinned host memory",
    "step": "step (an estimate)",
}


def plan(document: dict, console: Console) -> None:
    """The answer first, then the parts."""
    console.print(document["answer"])
    chosen = " (the model's longest, at most 1M; --max-context sets it)" if document["max_context_default"] else ""
    console.print(
        f"\n{document['checkpoint']}: {document['batch']} row(s) of {document['max_context']} tokens{chosen}, "
        f"{document['max_rewind']} to rewind, numerics {document['numerics']}"
    )
    for group in [g for g in GROUPS if any(row["group"] == g for row in document["rows"])]:
        if document["ranks"]:
            print_table(_of_ranks(GROUPS[group], group, document["ranks"]), console)
        else:
            print_table(_parts(GROUPS[group], [row for row in document["rows"] if row["group"] == group]), console)
    reader = "on rank 0 (of routed experts its average) " if document["ranks"] else ""
    print_table(_parts(f"a decode step of all rows {reader}reads, their caches full", document["step"]), console)
    if token := document["cache_bytes_per_token"]:
        console.print(f"\nkeys and values of one token of one row: {token['nbytes']} B = {token['formula']}")
    if document["cache_beside"]:
        _beside(document["cache_beside"], console)
    if document["ranks"]:
        _ranks(document, console)
    elif len(document["gpus"]) > 1:
        _shares(document, console)
    if held := document["experts"]:
        console.print(
            f"\nrouted experts: {held['resident']} of {held['of']} in each of {held['layers']} layers on the device, "
            f"of {held['expert_bytes']} B each; the others are fetched from host memory when they are chosen"
        )
    if document["pinned_bytes"]:
        free, pinned = document["host_free_bytes"], document["pinned_bytes"]
        console.print(
            f"\nhost: {pinned} B = {format_bytes(pinned)} pinned; this machine has {format_bytes(free)} free now: "
            + ("fits" if pinned <= free else "does not fit")
        )
    console.print(f"\ntotal {document['total_bytes']} B = {format_bytes(document['total_bytes'])}")
    console.print(document["capacity_note"])


def _parts(title: str, rows: list[dict]) -> Table:
    """Bytes of each part with their formula, and their sum."""
    table = new_table(f"\n{title}", ">bytes", ">", "part", "formula")
    for row in rows:
        table.add_row(str(row["nbytes"]), format_bytes(row["nbytes"]), row["name"], row["formula"])
    total = sum(row["nbytes"] for row in rows)
    table.add_row(str(total), format_bytes(total), "sum", "")
    return table


def _beside(rows: list[dict], console: Console) -> None:
    """The cache beside those of other models."""
    table = new_table("\nthe cache beside others", ">bytes", "", ">B a token", ">times", "model", "formula")
    for row in rows:
        table.add_row(
            str(row["nbytes"]),
            format_bytes(row["nbytes"]),
            f"{row['bytes_per_token']:.0f}",
            f"{row['times']:.3g}",
            row["name"],
            row["formula"],
        )
    print_table(table, console)


def _of_ranks(title: str, group: str, ranks: list[dict]) -> Table:
    """The rows of one group, a column for ranks that hold equally much of all of it."""
    alike: dict[tuple, list[int]] = {}
    for r in ranks:
        held = tuple((row["name"], row["nbytes"]) for row in r["rows"] if row["group"] == group)
        alike.setdefault(held, []).append(r["rank"])
    columns = [dict(held) for held in alike]
    rows = [row for row in ranks[0]["rows"] if row["group"] == group]
    table = new_table(
        f"\n{title} of each rank", *(f">{_numbered(found)}" for found in alike.values()), "part", "formula"
    )
    for row in rows:
        formula = row["formula"] if len({c.get(row["name"]) for c in columns}) == 1 else f"rank 0: {row['formula']}"
        table.add_row(*(str(c.get(row["name"], 0)) for c in columns), row["name"], formula)
    table.add_row(*(str(sum(c.values())) for c in columns), "sum", "")
    return table


def _numbered(ranks: list[int]) -> str:
    """'ranks 0 … 3' for an unbroken range, 'ranks 0, 2' else."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 2 and ranks == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]} … {ranks[-1]}"
    return f"ranks {', '.join(map(str, ranks))}"


def _ranks(document: dict, console: Console) -> None:
    """What each rank holds, and what it has left on a device of its own."""
    table = new_table("\nranks", ">rank", ">weights", ">of them on all ranks", ">caches", ">step", ">left free")
    own = len(document["gpus"]) == len(document["ranks"])
    for i, r in enumerate(document["ranks"]):
        table.add_row(
            str(r["rank"]),
            *(format_bytes(r[key]) for key in ("weights_bytes", "replicated_bytes")),
            format_bytes(r["cache_bytes"] + r["staging_bytes"]),
            format_bytes(r["step_bytes"]),
            format_bytes(document["gpus"][i]["left_bytes"]) if own else "–",
        )
    print_table(table, console)


def _shares(document: dict, console: Console) -> None:
    """What each GPU holds of a model that is spread over several."""
    table = new_table("\nwhole layers per GPU", ">GPU", "holds", ">weights", ">caches", ">left free")
    for gpu in document["gpus"]:
        table.add_row(
            str(gpu["gpu"]),
            gpu["holds"],
            format_bytes(gpu["weights_bytes"]),
            format_bytes(gpu["cache_bytes"]),
            format_bytes(gpu["left_bytes"]),
        )
    print_table(table, console)
    if document["max_memory"]:
        console.print(f"\nthis split: --device-map auto --max-memory {document['max_memory']}")
