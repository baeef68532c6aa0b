"""How near each check came to its threshold: the ratio, the worst of a probe, and a strip of all of them as SVG."""

import math
import re
from collections.abc import Iterable, Sequence

from dsv4.probes.result import Check, Status

LEAST, MOST = -6, 2  # powers of ten that a strip shows; what is beyond stands at its end
WIDTH, LEFT, ROW, TOP = 620, 150, 14, 18
SHARE = 0.9  # from here on a threshold below 1 is that of a share
RED = (Status.FAIL, Status.ERROR)


def margin(check: Check) -> float | None:
    """Measured over threshold: 1 is the threshold, more than 1 is red, 0 is exact; None where there is no such number.

    '>=' the other way round; of shares that must be near 1, what is missing over what may be. An exact equality has no
    margin.
    """
    a, b = check.measured, check.threshold
    if check.relation not in ("<=", ">=") or any(isinstance(v, (str, bool)) or v is None for v in (a, b)):
        return None
    if check.relation == ">=" and SHARE <= b < 1 and a <= 1:
        return (1 - a) / (1 - b)
    ratio = a / b if check.relation == "<=" and b else b / a if check.relation == ">=" and a else None
    return None if ratio is None or not math.isfinite(ratio) or ratio < 0 else ratio


def worst(checks: Iterable[Check]) -> tuple[float, Check] | None:
    """The largest margin and its check; None where no check has a margin."""
    found = [(value, check) for check in checks if (value := margin(check)) is not None]
    return max(found, key=lambda pair: pair[0], default=None)


def layer_of(check: Check) -> int | None:
    """The layer that a check speaks of, by its place: 'layer 3, decode' or 'layers.3.attn.wkv.weight'."""
    found = re.match(r"layers?[ .](\d+)", check.at)
    return int(found[1]) if found else None


def strip(checks: Sequence[Check]) -> str:
    """Inline SVG: a line a layer, a mark a check by its margin on a logarithmic axis, the threshold as a red line.

    Exact results have no logarithm: they are counted in a column of their own, left of the axis. '' without margins.
    """
    lines: dict[int | None, list[tuple[float, Check]]] = {}
    for check in checks:
        value = margin(check)
        if value is not None:
            lines.setdefault(layer_of(check), []).append((value, check))
    if not lines:
        return ""
    ordered = sorted(lines, key=lambda layer: -1 if layer is None else layer)
    height, end = TOP + ROW * len(ordered) + 4, TOP + ROW * len(ordered)
    parts = [f'<svg class="strip" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="margins by layer">']
    for power in range(LEAST, MOST + 1):
        name = "threshold" if power == 0 else f"10{str(power).translate(RAISED)}"
        kind = "limit" if power == 0 else "tick"
        parts.append(f'<line class="{kind}" x1="{_x(power):g}" x2="{_x(power):g}" y1="{TOP - 3}" y2="{end}"/>')
        parts.append(f'<text x="{_x(power):g}" y="10" text-anchor="middle">{name}</text>')
    parts.append(f'<text x="{LEFT - 45}" y="10" text-anchor="middle">exact</text>')
    for row, layer in enumerate(ordered):
        parts += _line(TOP + ROW * (row + 0.5), layer, lines[layer])
    return "".join([*parts, "</svg>"])


RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def _line(y: float, layer: int | None, found: list[tuple[float, Check]]) -> list[str]:
    exact = sum(value == 0 for value, _ in found)
    label = "whole model" if layer is None else f"layer {layer}"
    parts = [f'<text x="0" y="{y + 4:g}">{label}</text>']
    if exact:
        parts.append(f'<text x="{LEFT - 45}" y="{y + 4:g}" text-anchor="middle">{exact}</text>')
    marks = {(_x(math.log10(value)), check.status in RED) for value, check in found if value > 0}
    parts += [
        f'<circle class="{"bad" if red else "good"}" cx="{x:g}" cy="{y:g}" r="{4 if red else 3}"/>'
        for x, red in sorted(marks)
    ]
    return parts


def _x(power: float) -> float:
    share = (min(max(power, LEAST), MOST) - LEAST) / (MOST - LEAST)
    return round(LEFT + share * (WIDTH - LEFT - 30), 1)
