"""The report of `dsv4 kernel bench`."""

from dataclasses import asdict

import torch

from dsv4.probes.kernel_audit.bench import Row
from dsv4.probes.report.provenance import commit, device, versions, without_paths


def document(operation, shapes, rows: list[Row], found: dict, verdicts: dict, command, day, seed, where: str) -> dict:
    """The benchmark as JSON values."""
    about = {"command": command, "date": day, "device": device(torch.device(where)), "versions": versions(), **commit()}
    return {
        "about": about,
        "operation": operation,
        "shapes": shapes,
        "seed": seed,
        "device limits": found,
        "audits": {without_paths(k): v for k, v in verdicts.items()},
        "rows": [asdict(row) for row in rows],
    }


HEADER = "| row | kernel | cold µs | hot µs | nodes | share of floor | base / this, 95 % interval | verdict |"


def markdown(report: dict) -> str:
    """The table for a reviewer."""
    about, limits = report["about"], report["device limits"]
    clock = limits["sm_clock_mhz"]
    known = ", ".join(f"{k} {v}" for k, v in about["versions"].items() if v)
    lines = [
        f"# {report['operation']} · {report['shapes']} shapes · {about['device']}",
        "",
        "One graph replay lies between two events; the kernels take turns in random order on the same inputs. Cold: "
        "128 MiB were read before. A tenth of the replays wrote over NaN. The first result and the three that differ "
        "most from it were judged by fp64.",
        "",
        HEADER,
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in report["rows"]:
        lines += [_line(row, t) for t in row["times"]]
    lines += ["", "| row | floor µs | bytes | operations | formula |", "|---|---|---|---|---|"]
    lines += [
        f"| {r['label']} | {r['floor_us']:.2f} | {r['bytes']} | {r['flops']} | {r['formula']} |" for r in report["rows"]
    ]
    lines += [
        "",
        f"- Floor: the larger of bytes at {limits['bytes_per_s'] / 1e12:.2f} TB/s (a read of 2 GiB) and operations at "
        f"{limits['flops_per_s'] / 1e12:.0f} TFLOP/s (a bf16 product), both measured in this run.",
        f"- Clock of the multiprocessors: {clock or 'not known'}{' MHz' if clock else ''}. Clocks were not set.",
        f"- Audits before: {'; '.join(f'{k}: {v}' for k, v in report['audits'].items())}.",
        f"- `{about['command']}`, {about['date']}, commit {about['commit']}, seed {report['seed']}, {known}",
        "",
    ]
    return "\n".join(lines)


def _line(row: dict, time: dict) -> str:
    if time["cold_us"] is None:
        return f"| {row['label']} | {time['kernel']} | | | | | | {time['verdict']} |"
    ratio = time["ratio"]
    shown = "" if ratio is None else f"{ratio[0]} [{ratio[1]}, {ratio[2]}]"
    cells = row["label"], time["kernel"], time["cold_us"], time["hot_us"], time["nodes"], time["share"], shown
    return "| " + " | ".join(map(str, (*cells, _verdict(time)))) + " |"


def bits_differ(time: dict) -> str:
    """'bits differ in 3 of 4 looked-at replays', '' where they do not. Reports of before say nothing of it."""
    count = time.get("unsteady", 0)
    return f"bits differ in {count} of {time['looked']} looked-at replays" if count else ""


def _verdict(time: dict) -> str:
    return "; ".join(filter(None, (time["verdict"], bits_differ(time))))


def lines(report: dict) -> list[str]:
    """One line a time, for the terminal."""
    found = []
    for row in report["rows"]:
        found.append(f"{row['label']}: floor {row['floor_us']:.2f} µs")
        for time in row["times"]:
            if time["cold_us"] is None:
                found.append(f"  {time['kernel']:24} {time['verdict']}")
                continue
            low, high = time["ratio"][1:] if time["ratio"] else (None, None)
            ratio = "" if time["ratio"] is None else f"{time['ratio'][0]:.3f} [{low}, {high}] × base"
            shown = f"{time['cold_us']:9.2f} cold {time['hot_us']:9.2f} hot µs  {time['share']:.2f} of floor  {ratio}"
            found.append(f"  {time['kernel']:24} {shown}  {_verdict(time)}")
    return found
