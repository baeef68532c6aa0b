"""The host-memory tier's measurements as markdown and SVG."""

from io import StringIO

from scripts.bench.report import headline, size, us

RATIO = 4  # tokens of a CSA entry
GOAL = 0.85  # of the measured pinned copy
OVERHEAD = 0.05  # of a step, with at least 90 % of the choices staged
SEQUENCES = 3  # as many in the same device memory
TOKEN = 4.5  # KiB of host memory a token, all layers
REFERENCE = 15  # how many times faster than streaming the dense cache a staged step is in the published system


def markdown(report: dict) -> str:
    wire = report["link"]
    lines = [
        "# Caches in host memory",
        "",
        f"{headline(report['about'])}.",
        "",
        f"    {report['about']['command']}",
        "",
        f"Link, copies of 1 GiB of pinned memory: {gbs(wire['to_device'])} to the device, {gbs(wire['to_host'])} to "
        f"the host, {gbs(wire['together'])} both ways at once; read by a kernel's loads {gbs(wire['kernel'])}.",
        "",
        "Rate: bytes fetched over what a step takes longer than the resident one, all launches of the tier in it. "
        f"Goal: {GOAL:.0%} of the copy to the device. Medians of captured steps.",
    ]
    for part, section in (("grouped", grouped), ("decode", decode), ("entries", entries), ("flash", flash)):
        if part in report:
            lines += ["", *section(report[part])]
    spent = ", ".join(f"{part} {seconds:.0f} s" for part, seconds in report["seconds"].items())
    if "setup" in report:
        spent += f" (of the set-up {report['setup']['pinning_seconds']:.0f} s to pin host memory)"
    return "\n".join([*lines, "", f"The run took: {spent}.", ""])


def grouped(g: dict) -> list[str]:
    dense, streamed = g["dense_resident_seconds"], g["stream_seconds"]
    best = max((r["of_link"] or 0 for r in g["rows"]), default=0)
    ratios = [streamed / r["seconds"] for r in g["rows"]]
    return [
        "## Keys and values of a GQA model",
        "",
        f"Attention of all layers, no weights. {g['context']} tokens, batch {g['batch']}: {g['host_bytes']} bytes in "
        f"host memory = {g['formula']}; on the device {g['device_bytes']} bytes (summaries, {g['slots']} + 1 staged "
        f"blocks a KV head, slot tables). {g['kept']} blocks of 128 a step and KV head.",
        "",
        "| step | hit rate | fetched | ms | rate | of the link | of streaming |",
        "|---|---:|---:|---:|---:|---:|---:|",
        f"| resident, same blocks | – | – | {ms(g['resident_seconds'])} | – | – | "
        f"{streamed / g['resident_seconds']:.1f}× |",
        f"| resident, dense | – | – | {ms(dense)} | – | – | {streamed / dense:.1f}× |",
        *(f"| tier, {kind(r)} | {row(r)} | {streamed / r['seconds']:.1f}× |" for r in g["rows"]),
        f"| dense, streamed | – | {size(g['host_bytes'])} | {ms(streamed)} | {gbs(g['host_bytes'] / streamed)} | "
        f"{g['host_bytes'] / streamed / g['link']:.0%} | 1× |",
        "",
        f"Goal of {GOAL:.0%} of the link: {verdict(best >= GOAL, f'{best:.0%} at best')}. Staged against streamed, "
        f"reference {REFERENCE}×: "
        f"{verdict(min(ratios) >= REFERENCE, f'{min(ratios):.1f}× where every choice is new')}, up to "
        f"{max(ratios):.1f}×.",
    ]


def decode(d: dict) -> list[str]:
    streamed = d["rows"][-1]["seconds"]
    return [
        "## Tokens through the model",
        "",
        f"{d['geometry']} widths with random weights ({size(d['weight_bytes'])}), {d['layers']} layers and the head, "
        f"{d['context']} tokens, batch {d['batch']}: {size(d['host_bytes'])} of keys and values in host memory, "
        f"{size(d['device_cache_bytes'])} of caches on the device. {d['policy']}, {d['kept']} blocks; {d['slots']} "
        "staged. What random weights choose says nothing of what trained ones would.",
        "",
        "| way | hit rate | fetched a step | guessed a step | ms a step | tokens/s | of streaming |",
        "|---|---:|---:|---:|---:|---:|---:|",
        *(
            f"| {r['way']} | {r['hit_rate']:.1%} | {size(round(r['fetched_a_step']))} | "
            f"{size(round(r['guessed_a_step']))} | {ms(r['seconds'])} | {r['tokens_a_second']:.1f} | "
            f"{streamed / r['seconds']:.1f}× |"
            for r in d["rows"]
        ),
        "",
        _sequences(d["host_bytes"] + d["device_cache_bytes"], d["device_cache_bytes"]),
    ]


def entries(found: list[dict]) -> list[str]:
    paid = [(r["seconds"] - r["resident_seconds"]) / r["layers"] * 1e6 for r in found if r["locality"] == 1]
    fixed = ", ".join(
        f"{each:.1f} µs with {rows_of(r)}" for each, r in zip(paid, (r for r in found if r["locality"] == 1))
    )
    best = max((r["of_link"] or 0 for r in found), default=0)
    return [
        "## Entries of CSA layers",
        "",
        "| rows | host bytes | device bytes | resident ms | step | hit rate | fetched | ms | rate | of the link |",
        "|---|---:|---:|---:|---|---:|---:|---:|---:|---:|",
        *(
            f"| {rows_of(r)}, {r['layers']} layers × {r['entries']} | {r['host_bytes']} | {r['device_bytes']} | "
            f"{ms(r['resident_seconds'])} | {kind(r)} | {row(r)} |"
            for r in found
        ),
        *(["", f"What a layer pays where nothing is missing: {fixed}."] if fixed else []),
        "",
        f"Goal of {GOAL:.0%} of the link: {verdict(best >= GOAL, f'{best:.0%} at best')}.",
        *_a_token(found),
    ]


def _a_token(found: list[dict]) -> list[str]:
    """Host memory a token, of the rows with all of a model's layers (batch 1). Four tokens make an entry."""
    kib = {r["rows"]: r["host_bytes"] / (RATIO * r["entries"]) / 1024 for r in found if r.get("batch", 1) == 1}
    said = ", ".join(f"{each:.2f} KiB with {rows}" for rows, each in kib.items())
    return [f"Host memory a token, goal {TOKEN} KiB: {verdict(min(kib.values()) <= TOKEN, said)}."] if kib else []


def _sequences(resident: int, staged: int) -> str:
    return (
        f"Sequences in the same device memory, goal {SEQUENCES}×: "
        f"{verdict(resident >= SEQUENCES * staged, f'{resident / staged:.1f}×')} ({resident} over {staged} bytes of "
        "caches)."
    )


def rows_of(r: dict) -> str:
    return r["rows"] + (f", batch {r['batch']}" if r.get("batch", 1) > 1 else "")


def flash(f: dict) -> list[str]:
    return [
        "## Tokens through layers of Flash widths",
        "",
        f"{f['layers']} layers ({f['csa_layers']} of CSA) with random weights and the head, {f['context']} tokens, "
        f"batch {f['batch']}, {f['slots']} staged entries; the logits of both ways were the same.",
        "",
        "| entries | cache on the device | in host memory | hit rate | fetched a step | ms a step | tokens/s |",
        "|---|---:|---:|---:|---:|---:|---:|",
        *(
            f"| {r['way']} | {size(r['device_cache_bytes'])} | {size(r.get('host_bytes', 0))} | "
            + (f"{r['hit_rate']:.1%} | {size(round(r['fetched_a_step']))}" if "hit_rate" in r else "– | –")
            + f" | {ms(r['seconds'])} | {r['tokens_a_second']:.1f} |"
            for r in f["rows"]
        ),
        *_beside_resident(f["rows"]),
    ]


def _beside_resident(rows: list[dict]) -> list[str]:
    if len(rows) != 2:
        return []
    resident, staged = rows
    more = staged["seconds"] / resident["seconds"] - 1
    return [
        "",
        f"A step takes {more:.1%} more with {staged['hit_rate']:.0%} of the choices staged; goal {OVERHEAD:.0%} with "
        f"90%: {verdict(more <= OVERHEAD, f'{more:.1%}')}. "
        f"{_sequences(resident['device_cache_bytes'], staged['device_cache_bytes'])}",
    ]


def verdict(reached: bool, found: str) -> str:
    return f"reached ({found})" if reached else f"NOT reached: {found}"


def row(r: dict) -> str:
    share = "–" if r["of_link"] is None else f"{r['of_link']:.0%}"
    return (
        f"{r['hit_rate']:.1%} | {size(round(r['bytes_a_step']))} | {ms(r['seconds'])} | "
        f"{gbs(r['bytes_a_second'])} | {share}"
    )


def kind(r: dict) -> str:
    return {0: "every choice new", 1: "no choice new"}.get(r["locality"], f"locality {r['locality']:g}")


def ms(seconds: float) -> str:
    return us(seconds * 1e3)


def gbs(rate: float | None) -> str:
    return "–" if rate is None else f"{rate / 1e9:.1f} GB/s"


def svg(report: dict) -> str:
    """Times of a step above, rates over the link below. Raises ModuleNotFoundError without matplotlib."""
    import matplotlib
    from matplotlib.figure import Figure

    copy, bars, rates = report["link"]["to_device"], [], []
    if g := report.get("grouped"):
        bars += [
            ("attention: resident", g["resident_seconds"]),
            ("attention: resident, dense", g["dense_resident_seconds"]),
            *((f"attention: tier, {kind(r)}", r["seconds"]) for r in g["rows"]),
            ("attention: dense, streamed", g["stream_seconds"]),
        ]
        rates += [(f"GQA, {kind(r)}", r) for r in g["rows"]]
    for part, name in (("decode", "Qwen2.5-7B"), ("flash", "Flash")):
        bars += [(f"{name}: {r['way']}", r["seconds"]) for r in report.get(part, {}).get("rows", ())]
    rates += [(f"CSA {rows_of(r)}, {kind(r)}", r) for r in report.get("entries", ())]
    with matplotlib.rc_context({"svg.hashsalt": "dsv4", "svg.fonttype": "none", "text.parse_math": False}):
        figure = Figure(figsize=(8, 6), layout="constrained")
        above, below = figure.subplots(2, 1)
        above.barh([name for name, _ in bars], [1e3 * t for _, t in bars], color="#1f6feb")
        above.set(xscale="log")
        above.xaxis.set_major_formatter("{x:g}")
        above.set_xlabel("ms a step", fontsize=7)
        rates = [(name, r["bytes_a_second"] / 1e9) for name, r in rates if r["bytes_a_second"]]
        below.barh([name for name, _ in rates], [rate for _, rate in rates], color="#1f6feb")
        below.axvline(copy / 1e9, color="0.3", lw=0.8)
        below.axvline(GOAL * copy / 1e9, color="#d9a300", lw=0.8)
        below.set_xlabel("GB/s over the link; grey: pinned copy, yellow: the goal", fontsize=7)
        for axis in (above, below):
            axis.invert_yaxis()
            axis.tick_params(labelsize=7)
        out = StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None})
    return out.getvalue()
