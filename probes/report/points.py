"""Which capture point of `dsv4.probes.subject.POINTS` a check looks at."""

import re

from dsv4.probes.result import Check
from dsv4.probes.subject import POINTS

PARTS = {  # the part that a check speaks of → the first point that shows its fault
    "q_after_rope": ("rotation of queries",),
    "kv_window": ("rotation of window rows", "window", "graft, window rows"),
    "compressed_kv": ("rotation of compressed entries", "compressed entries", "main raw rows", "entries"),
    "index_keys": ("rotation of indexer keys", "indexer keys", "index raw rows", "index keys"),
    "index_scores": ("indexer queries", "indexer scores"),
    "selection": ("selection",),
    "attn_out": ("attention core", "absent keys", "sink", "causality", "output projection", "rotation of the output"),
    "ffn_out": ("experts", "router", "routing weights", "shared expert"),
    "streams": ("streams", "Sinkhorn", "mHC pre", "mHC post", "mHC comb"),
}
_POINT = {part: point for point, parts in PARTS.items() for part in parts}
_NAMED = re.compile(r"\b(" + "|".join(name.replace("_", "[_ ]") for name in POINTS) + r")\b")


def point_of(check: Check) -> str | None:
    """The point that the check's name begins with or contains, else the one of its part; None for what no point
    shows."""
    found = _NAMED.search(check.name)
    return found[1].replace(" ", "_") if found else _POINT.get(check.part)
