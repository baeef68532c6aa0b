"""Draws docs/architecture.svg: the rooms of the code by layer, what they import, and where data lives.

    python scripts/draw_architecture.py [OUT.svg]

Arrows are imports of the code as it is, to the next layer; rooms may use all that is further below, too.
"""

import ast
import sys
from collections import Counter
from collections.abc import Iterator
from html import escape
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LAYERS = (  # from the top: (layer, ((room, what is in it), …))
    (
        "commands",
        (
            ("dsv4/commands", "a file a command: generate, batch, plan, audit, kernel, recall, fidelity, regime …"),
            ("dsv4/lm_eval", "adapter of lm-evaluation-harness"),
        ),
    ),
    (
        "probes",
        (
            ("probes/catalogue", "a file a probe"),
            ("probes/measure", "recall, fidelity, termination, sparse prefill"),
            ("probes/kernel_audit", "clauses, plants, traces"),
            ("probes/selftest", "every fault, every probe"),
            ("probes/subjects", "what can be audited"),
            ("probes/faults", "planted bugs"),
            ("probes/oracle", "float64, shares no code"),
            ("probes/report", "markdown, JSON, JUnit"),
        ),
    ),
    (
        "engine",
        (
            ("dsv4/engine", "requests, the loop, its steppers, pages' engine"),
            ("dsv4/speculation", "drafters, policies, accepting, device rounds"),
            ("dsv4/runtime", "captured graphs, plans, GPUs, memory"),
            ("dsv4/cost_model", "what a step costs"),
            ("dsv4/parallel", "ranks as processes"),
        ),
    ),
    (
        "model",
        (
            ("dsv4/model", "spec, families, config, attention, experts, streams, MTP"),
            ("dsv4/cache", "rows: linear, ring, paged, staged, whole; prefixes; lengths"),
        ),
    ),
    ("loaders", (("loaders", "files, layouts, number formats, the ledger of both directions"),)),
    ("kernels", (("kernels", "a folder an operation: contract, reference, cpu, triton; compositions; cache formats"),)),
)
DATA = {  # layer → what lies there, as (name, kind)
    "commands": ("text, JSON, exit codes", "what a user sees"),
    "probes": ("audits/", "markdown, JSON and SVG with device, commit, command"),
    "engine": ("tokens, generators, policy states", "one object a request, on the host; rounds: on the device"),
    "model": ("parameters; cache buffers", "on the device, allocated once; far entries in pinned host memory"),
    "loaders": ("safetensors, config.json", "on disk; read once, tensor by tensor"),
    "kernels": ("positions, slots, indices", "on the device, of one step"),
}
# the walk of a token, as docs/architecture.md tells it
TOKEN = (
    "dsv4/commands",
    "dsv4/engine",
    "dsv4/runtime",
    "dsv4/model",
    "dsv4/cache",
    "kernels",
    "dsv4/speculation",
    "dsv4/engine",
)
WIDTH, LEFT, RIGHT, HEIGHT, GAP = 1180, 100, 300, 58, 44
INK, SOFT, LINE, BLUE = "#1f2328", "#57606a", "#8c959f", "#0969da"
FILLS = dict(zip((name for name, _ in LAYERS), ("#ddf4ff", "#fff8c5", "#dafbe1", "#fbefff", "#ffeff7", "#ffe7d6")))
FONT = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif"


def imports(room: str) -> Iterator[str]:
    """Folders, in the names of the tree, of all modules of ours that the files of a room import."""
    for path in (ROOT / room).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("dsv4."):
                parts = node.module.split(".")[1:]
                yield "/".join(parts if parts[0] in ("kernels", "loaders", "probes") else ["dsv4", *parts])


def takes(room: str, other: str) -> bool:
    """Whether a file of `room` imports a module of `other`."""
    return any(name == other or name.startswith(f"{other}/") for name in imports(room))


def places() -> dict[str, tuple[float, float, float]]:
    """Room → left edge, top and width."""
    found, top = {}, 40.0
    for _, rooms in LAYERS:
        lines = [rooms[i : i + 4] for i in range(0, len(rooms), 4)]
        for line in lines:
            wide = (WIDTH - LEFT - RIGHT - 12 * (len(line) - 1)) / len(line)
            for i, (room, _) in enumerate(line):
                found[room] = LEFT + i * (wide + 12), top, wide
            top += HEIGHT + 12
        top += GAP - 12
    return found


def wrapped(text: str, most: int) -> list[str]:
    """Words in lines of up to `most` letters."""
    lines = [""]
    for word in text.split():
        if lines[-1] and len(lines[-1]) + 1 + len(word) > most:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return lines


def box(x: float, y: float, wide: float, fill: str, name: str, text: str) -> list[str]:
    """A room with its name, and below it what is in it."""
    found = [
        f'<rect x="{x:.0f}" y="{y:.0f}" width="{wide:.0f}" height="{HEIGHT}" rx="6" fill="{fill}" stroke="{LINE}"/>'
    ]
    found += [f'<text x="{x + 10:.0f}" y="{y + 18:.0f}" fill="{INK}" font-weight="600">{escape(name)}</text>']
    for i, line in enumerate(wrapped(text, int((wide - 16) / 5.6))):
        found += [
            f'<text x="{x + 10:.0f}" y="{y + 33 + 13 * i:.0f}" fill="{SOFT}" font-size="11">{escape(line)}</text>'
        ]
    return found


def arrows(at: dict[str, tuple[float, float, float]]) -> list[str]:
    """A curve from each room of a layer's last row to each room of the next layer's first row that it imports."""
    found = []
    for (_, rooms), (_, below) in zip(LAYERS, LAYERS[1:]):
        last, first = max(at[room][1] for room, _ in rooms), min(at[room][1] for room, _ in below)
        lower = [room for room, _ in rooms if at[room][1] == last]
        upper = [room for room, _ in below if at[room][1] == first]
        for i, room in enumerate(lower):
            for j, to in enumerate(upper):
                if takes(room, to):
                    x, X = (
                        at[r][0] + at[r][2] * (k + 1) / (n + 1)
                        for r, k, n in ((room, j, len(upper)), (to, i, len(lower)))
                    )
                    y, Y = last + HEIGHT, first - 2
                    curve = f"M{x:.0f} {y:.0f}C{x:.0f} {y + 18:.0f} {X:.0f} {Y - 20:.0f} {X:.0f} {Y:.0f}"
                    found.append(f'<path d="{curve}" fill="none" stroke="{LINE}" marker-end="url(#tip)"/>')
    return found


def path(at: dict[str, tuple[float, float, float]]) -> list[str]:
    """The numbers of the walk of a token, in the corners of the rooms."""
    found, left = [], Counter(TOKEN)
    for number, room in enumerate(TOKEN, 1):
        x, y = at[room][0] + at[room][2] + 10 - 24 * left[room], at[room][1] + 14
        left[room] -= 1
        found += [
            f'<circle cx="{x:.0f}" cy="{y:.0f}" r="9.5" fill="{BLUE}"/>',
            f'<text x="{x:.0f}" y="{y + 4:.0f}" fill="#ffffff" font-size="11" text-anchor="middle">{number}</text>',
        ]
    return found


def draw() -> str:
    """The picture as SVG."""
    at, parts = places(), []
    for name, rooms in LAYERS:
        tops = [at[room][1] for room, _ in rooms]
        middle = (min(tops) + max(tops) + HEIGHT) / 2
        parts += [f'<text x="14" y="{middle + 4:.0f}" fill="{SOFT}" font-weight="600">{name}</text>']
        for room, text in rooms:
            parts += box(*at[room], FILLS[name], room, text)
        lies, how = DATA[name]
        x = WIDTH - RIGHT + 24
        parts += [f'<text x="{x}" y="{middle - 4:.0f}" fill="{INK}" font-style="italic">{escape(lies)}</text>']
        for i, line in enumerate(wrapped(how, 46)):
            parts += [
                f'<text x="{x}" y="{middle + 11 + 13 * i:.0f}" fill="{SOFT}" font-size="11">{escape(line)}</text>'
            ]
    height = max(top for _, top, _ in at.values()) + HEIGHT + 20
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" font-family="{FONT}" '
        'font-size="13">',
        "<title>The rooms of dsv4, what each takes from the rooms below, and where data lives</title>",
        f'<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        f'<path d="M0 0 8 4 0 8z" fill="{LINE}"/></marker></defs>',
        f'<rect width="{WIDTH}" height="{height:.0f}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="24" fill="{SOFT}">who imports whom: downwards only; blue: the walk of a token</text>',
        f'<text x="{WIDTH - RIGHT + 24}" y="24" fill="{SOFT}">where data lives</text>',
    ]
    return "\n".join([*head, *arrows(at), *parts, *path(at), "</svg>"]) + "\n"


if __name__ == "__main__":
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "architecture.svg"
    out.write_text(draw())
    print(out)
