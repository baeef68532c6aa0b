"""The host-memory tier's measurements as markdown and SVG."""

from io import StringIO

from scripts.bench.report import headline, size, us

GOAL = 0.85  # of the measured pinned copy


def markdown(report: dict) -> str:
    wire, g = report["link"], report["grouped"]
    dense, streamed = g["dense_resident_seconds"], g["stream_seconds"]
    lines = ["# Caches in host memory", "", f"{headline(report['about'])}.", "", f"    {report['about']['command']}", "",
             f"Link, copies of 1 GiB of pinned memory: {gbs(wire['to_device'])} to the device, {gbs(wire['to_host'])} to the host, "
             f"{gbs(wire['together'])} both ways at once; read by a kernel's loads {gbs(wire['kernel'])}.", "",
             "Rate: bytes fetched over what a step takes longer than the resident one, all launches of the tier in it. "
             f"Goal: {GOAL:.0%} of the copy to the device. Medians of captured steps; attention of all layers, no weights.", "",
             "## Keys and values of a GQA model", "",
             f"{g['context']} tokens, batch {g['batch']}: {g['host_bytes']} bytes in host memory = {g['formula']}; on the device "
             f"{g['device_bytes']} bytes (summaries, {g['slots']} + 1 staged blocks a KV head, slot tables). "
             f"{g['kept']} blocks of 128 a step and KV head.", "",
             "| step | hit rate | fetched | ms | rate | of the link | of streaming |", "|---|---:|---:|---:|---:|---:|---:|",
             f"| resident, same blocks | – | – | {ms(g['resident_seconds'])} | – | – | {streamed / g['resident_seconds']:.1f}× |",
             f"| resident, dense | – | – | {ms(dense)} | – | – | {streamed / dense:.1f}× |"]
    lines += [f"| tier, {kind(r)} | {row(r)} | {g['stream_seconds'] / r['seconds']:.1f}× |" for r in g["rows"]]
    lines += [f"| dense, streamed | – | {size(g['host_bytes'])} | {ms(g['stream_seconds'])} | {gbs(g['stream_rate'])} | "
              f"{g['stream_rate'] / g['link']:.0%} | 1× |", "", "## Entries of CSA layers", "",
              "| rows | host bytes | device bytes | resident ms | step | hit rate | fetched | ms | rate | of the link |",
              "|---|---:|---:|---:|---|---:|---:|---:|---:|---:|"]
    lines += [f"| {r['rows']}, {r['layers']} layers × {r['entries']} | {r['host_bytes']} | {r['device_bytes']} | "
              f"{ms(r['resident_seconds'])} | {kind(r)} | {row(r)} |" for r in report["entries"]]
    best = max((r["of_link"] or 0 for r in g["rows"]), default=0)
    verdict = "reached" if best >= GOAL else f"NOT reached: {best:.0%} at best"
    return "\n".join([*lines, "", f"Goal of {GOAL:.0%} of the link: {verdict} (GQA blocks).", ""])


def row(r: dict) -> str:
    share = "–" if r["of_link"] is None else f"{r['of_link']:.0%}"
    return f"{r['hit_rate']:.1%} | {size(round(r['bytes_a_step']))} | {ms(r['seconds'])} | {gbs(r['bytes_a_second'])} | {share}"


def kind(r: dict) -> str:
    return "every choice new" if r["locality"] == 0 else f"locality {r['locality']:g}"


def ms(seconds: float) -> str:
    return us(seconds * 1e3)


def gbs(rate: float | None) -> str:
    return "–" if rate is None else f"{rate / 1e9:.1f} GB/s"


def svg(report: dict) -> str:
    """Times of a step above, rates over the link below. Raises ModuleNotFoundError without matplotlib."""
    import matplotlib
    from matplotlib.figure import Figure
    g, copy = report["grouped"], report["link"]["to_device"]
    with matplotlib.rc_context({"svg.hashsalt": "dsv4", "svg.fonttype": "none", "text.parse_math": False}):
        figure = Figure(figsize=(8, 6), layout="constrained")
        above, below = figure.subplots(2, 1)
        bars = [("resident", g["resident_seconds"]), ("resident, dense", g["dense_resident_seconds"]),
                *((f"tier, {kind(r)}", r["seconds"]) for r in g["rows"]), ("dense, streamed", g["stream_seconds"])]
        above.barh([name for name, _ in bars], [1e3 * t for _, t in bars], color="#1f6feb")
        above.set(xscale="log")
        above.set_xlabel("ms a step, attention of all layers", fontsize=7)
        above.set_title(f"{g['context']} tokens, {g['layers']} layers, {size(g['host_bytes'])} in host memory", fontsize=8)
        rates = [(f"GQA, {kind(r)}", r) for r in g["rows"]] + [(f"CSA {r['rows']}, {kind(r)}", r) for r in report["entries"]]
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
