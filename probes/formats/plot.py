"""How near each check of a probe came to its threshold, layer by layer, as an SVG."""

import io
import math
import re
from collections import defaultdict
from collections.abc import Sequence

from dsv4.probes.result import Check

FEWEST = 3  # layers, below which a table says as much
SERIES = 8  # checks that are drawn; those that came nearest
FLOOR = 1e-6  # of the ratio: what is exact is drawn here


def margin(check: Check) -> float | None:
    """Measured over threshold, so that 1 is the threshold and more than 1 is red; None where there is no such number.

    '>=' the other way round. An exact equality has no margin.
    """
    a, b = check.measured, check.threshold
    if check.relation not in ("<=", ">=") or any(isinstance(v, (str, bool)) or v is None for v in (a, b)):
        return None
    ratio = a / b if check.relation == "<=" and b else b / a if check.relation == ">=" and a else None
    return None if ratio is None or not math.isfinite(ratio) or ratio < 0 else max(ratio, FLOOR)


def by_layer(checks: Sequence[Check]) -> dict[str, dict[int, float]]:
    """Check name → layer → the worst margin of all checks of that name there."""
    found: dict[str, dict[int, float]] = defaultdict(dict)
    for check in checks:
        layer, value = re.match(r"layers?[ .](\d+)", check.at), margin(check)
        if layer and value is not None:
            i = int(layer[1])
            found[check.name][i] = max(value, found[check.name].get(i, 0.0))
    return {name: values for name, values in found.items() if len(values) >= FEWEST}


def margins(title: str, checks: Sequence[Check]) -> str | None:
    """SVG document, None where too few checks speak of layers. Raises ModuleNotFoundError without matplotlib."""
    series = by_layer(checks)
    if not series:
        return None
    import matplotlib
    from matplotlib.figure import Figure

    worst = sorted(series, key=lambda name: -max(series[name].values()))[:SERIES]
    with matplotlib.rc_context({"svg.hashsalt": "dsv4", "svg.fonttype": "none"}):
        figure = Figure(figsize=(8.5, 3.2), layout="constrained")
        axis = figure.subplots()
        for name in worst:
            layers = sorted(series[name])
            axis.plot(layers, [series[name][i] for i in layers], "o-", ms=3.5, lw=1, label=name[:70])
        axis.axhline(1.0, color="crimson", lw=1)
        axis.set(yscale="log", xlabel="layer", ylabel="measured / threshold")
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.set_title(f"{title}: red line is the threshold", fontsize=9)
        axis.legend(fontsize=6, loc="center left", bbox_to_anchor=(1, 0.5))
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None})
    return out.getvalue()
