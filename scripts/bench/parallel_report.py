"""The report of a model that several GPUs hold together."""

from collections.abc import Sequence
from dataclasses import asdict

from scripts.bench.goals import goal_table
from scripts.bench.report import headline, us
from scripts.bench.timing import Machine

# (what, part, ranks, what picks the row, its number, the goal, whether at least): of Flash on two H100s
GOALS = (
    ("ms a token, batch 1 at 8K", "whole", 2, {"batch": 1, "context": 8192}, "step_ms", 4.4, False),
    ("ms a token, batch 1 at 1M", "long", 2, {"batch": 1, "context": 1 << 20}, "step_ms", 4.9, False),
    ("tokens/s with MTP drafts, the best number", "whole", 2, {"kind": "drafts"}, "tokens_per_second", 270, True),
    ("tokens/s of a prompt of 128K", "whole", 2, {"kind": "prompt"}, "tokens_per_second", 18_000, True),
)  # fmt: skip
SCALING = {1: 1.55, 8: 1.75}  # batch → how often as fast two ranks are as one, at 16 layers


def picked(rows: Sequence[dict], **wanted) -> list[dict]:
    return [row for row in rows if all(row.get(key) == value for key, value in wanted.items())]


def scaling(rows: Sequence[dict], batch: int) -> float | None:
    """Time of one rank over that of two."""
    near = [r for r in rows if r.get("embedding_memory") != "host" and r.get("numerics", "native") == "native"]
    one, two = (picked(near, kind="step", part="part", ranks=n, batch=batch, by_expert=False) for n in (1, 2))
    return one[-1]["step_ms"] / two[-1]["step_ms"] if one and two else None


def verdicts(rows: Sequence[dict]) -> list[dict]:
    found = []
    for what, part, ranks, wanted, key, goal, least in GOALS:
        values = [row[key] for row in picked(rows, part=part, ranks=ranks, **wanted) if key in row]
        found.append((what, (max if least else min)(values) if values else None, goal, least))
    found += [
        (f"two ranks against one at 16 layers, batch {batch}: times as fast", scaling(rows, batch), goal, True)
        for batch, goal in SCALING.items()
    ]
    verdict = lambda got, goal, least: "not measured" if got is None else "met" if (got >= goal) is least else "MISSED"
    return [
        {"what": what, "measured": got, "goal": goal, "at_least": least, "verdict": verdict(got, goal, least)}
        for what, got, goal, least in found
    ]


def red(rows: Sequence[dict]) -> bool:
    """Whether a sum was wrong, or a step broke what it must hold whatever its speed."""
    wrong = lambda row: not row.get("bits", True) or not row.get("finite", True)
    return any(wrong(row) or row.get("compiles") or row.get("syncs") for row in rows)


def document(rows: Sequence[dict], machine: Machine | None, about: dict, subject: str, failed: Sequence[str]) -> dict:
    return {
        "about": about,
        "machine": None if machine is None else asdict(machine),
        "subject": subject,
        "rows": list(rows),
        "goals": verdicts(rows),
        "failed": [f"{part} ended with an error" for part in failed],
    }


def markdown(found: dict) -> str:
    rows = found["rows"]
    lines = [
        "# A model that several GPUs hold together",
        "",
        f"{headline(found['about'])}.",
        "",
        f"    {found['about']['command']}",
        "",
        f"DeepSeek-V4-{found['subject'].capitalize()} widths with random weights, FP8 and FP4 caches.",
    ]
    if found["machine"]:
        lines[-1] += f" Floor: the bytes that a rank's step reads at {found['machine']['bandwidth'] / 1e12:.2f} TB/s."
    lines += goal_table(found["goals"])
    lines += _table(
        "Decode steps",
        "ranks | layers | batch | context | ms a token | floor | share | weights GB | cache GB | peak GB | "
        "outside torch GB",
        [
            f"{_ranks(r)} | {r['layers']} | {r['batch']} | {r['context']} | {r['step_ms']:.3f} | {r['floor_ms']:.3f} | "
            f"{r['share_of_floor']:.0%} | {_gb(r['weight_bytes'])} | {_gb(r['cache_bytes'])} | "
            f"{_gb(r['peak_bytes'])} | {_gb(r.get('outside_bytes'))}"
            for r in picked(rows, kind="step")
            if "step_ms" in r
        ],
    )
    lines += _table(
        "Rounds of drafts",
        "ranks | layers | context | drafts | accepted as | tokens/s",
        [
            f"{_ranks(r)} | {r['layers']} | {r['context']} | {r['drafts']} | {r['trace']} | "
            f"{r['tokens_per_second']:.0f}"
            for r in picked(rows, kind="drafts")
        ],
    )
    lines += _table(
        "Prompts",
        "ranks | layers | tokens | chunk | s to the first token | the first time | tokens/s | peak GB",
        [
            f"{_ranks(r)} | {r['layers']} | {r['tokens']} | {r['chunk']} | {r['seconds']:.2f} | "
            f"{r['first_seconds']:.2f} | {r['tokens_per_second']:.0f} | {_gb(r['peak_bytes'])}"
            for r in picked(rows, kind="prompt")
        ],
    )
    lines += _table(
        "Sums over ranks",
        "ranks | numbers | ours µs | NCCL all-reduce of bf16, µs | bits",
        [
            f"{r['ranks']} | {' × '.join(map(str, r['shape']))} | {us(r['ours_us'])} | {us(r['nccl_us'])} | "
            f"{'equal' if r['bits'] else 'WRONG'}"
            for r in picked(rows, kind="exchange")
        ],
    )
    lines += _table(
        "What follows a sublayer, with its sum over ranks",
        "ranks | after | tokens | summed while it is merged, µs | summed by itself, µs | bits",
        [
            f"{r['ranks']} | {r['after']} | {r['tokens']} | {us(r['deferred_us'])} | {us(r['alone_us'])} | "
            f"{'equal' if r['bits'] else 'WRONG'}"
            for r in picked(rows, kind="boundary")
        ],
    )
    for r in (row for row in rows if row.get("by_kernel")):
        what = f"a chunk of {r['chunk']} tokens, {r['span_ms']:.1f} ms" if "chunk" in r else "a step"
        lines += _table(
            f"The {r['kernels']} kernels of {what}: {_ranks(r, ' ranks')}, {r['layers']} layers, batch {r['batch']} at "
            f"{r['context']}",
            "kernel | count | µs that they add",
            [f"{name or 'fill or copy'} | {count} | {us(added)}" for name, count, added in r["by_kernel"]],
        )
    notes = [f"- {_ranks(r, ' ranks')}, batch {r['batch']} at {r['context']}: {r['why']}" for r in rows if r.get("why")]
    notes += [f"- failed: {line}" for line in found["failed"]]
    return "\n".join([*lines, *([""] if notes else []), *notes]) + "\n"


def _gb(nbytes: float | None) -> str:
    return "–" if nbytes is None else f"{nbytes / 1e9:.2f}"


def _ranks(row: dict, noun: str = "") -> str:
    """How many ranks, and how they hold the model: '2 ranks, by expert'."""
    expert = ", by expert" if row.get("by_expert") else ""
    host = ", embedding in host memory" if row.get("embedding_memory") == "host" else ""
    numerics = "" if row.get("numerics", "native") == "native" else f", {row['numerics']}"
    return f"{row['ranks']}{noun}{expert}{host}{numerics}"


def _table(title: str, head: str, body: Sequence[str]) -> list[str]:
    if not body:
        return []
    names = head.count("|") + 1
    return [
        "",
        f"## {title}",
        "",
        f"| {head} |",
        "|---" + "|---:" * (names - 1) + "|",
        *(f"| {line} |" for line in body),
    ]
