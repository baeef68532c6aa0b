"""Cost tables for development, modelled around the few figures that were measured on an H100.

    python -m scripts.bench.speculation_costs [DIR]

Writes `speculation_h100_flash16.json` (16 layers of V4-Flash width, MoE) and `speculation_flat.json` (a dense model
whose pass reads the same weights whatever it verifies). Replace them by measured tables before quoting absolute speeds.
"""

import json
import sys
from pathlib import Path

from dsv4.cache.streams import MAX_DRAFTS
from dsv4.speculation.costs import BatchCost, CostTable

EXPERTS, CHOSEN, LAYERS = 256, 6, 16
MEASURED = {(1, 0): 2.62e-3, (8, 0): 6.0e-3}  # (batch, drafted): s of a decode step, H100, context 8K
BY_TOKENS = ((1, 2.62e-3), (2, 3.3e-3), (4, 4.4e-3), (8, 6.0e-3))  # of one pass; 2 and 4 interpolated
HEAD, DRAFT = 0.35e-3, 0.5e-3  # s: a 129280 × 4096 bf16 head at 3 TB/s; a draft step at batch 1, head and one layer
BATCHES = (1, 8, 32)
FOLDER = Path(__file__).parent / "speculation_costs"


def distinct(tokens: float) -> float:
    """Experts that at least one of `tokens` tokens chooses, when all are equally likely: what a MoE layer must read."""
    return EXPERTS * (1 - (1 - CHOSEN / EXPERTS) ** tokens)


def pass_seconds(tokens: int) -> float:
    """Up to 8 tokens between the known figures, by expert bytes; beyond, on with the bytes from 1 to 8 tokens."""
    for (n0, t0), (n1, t1) in zip(BY_TOKENS, BY_TOKENS[1:]):
        if n0 <= tokens <= n1:
            return t0 + (t1 - t0) * (distinct(tokens) - distinct(n0)) / (distinct(n1) - distinct(n0))
    (n0, t0), (n1, t1) = BY_TOKENS[0], BY_TOKENS[-1]
    return t1 + (t1 - t0) * (distinct(tokens) - distinct(n1)) / (distinct(n1) - distinct(n0))


def moe(padding: float = 1.0) -> CostTable:
    batches = {}
    for batch in BATCHES:
        verify = tuple(pass_seconds(batch * (k + 1)) for k in range(MAX_DRAFTS + 1))
        layer = (pass_seconds(batch) - pass_seconds(1)) / LAYERS
        batches[batch] = BatchCost(DRAFT + layer, verify, tuple((batch, k) in MEASURED for k in range(MAX_DRAFTS + 1)))
    about = {
        "kind": "modelled",
        "device": "NVIDIA H100",
        "model": "V4-Flash widths, 16 layers and the head, random weights",
        "measured": "decode steps of 1 token at batch 1 and 8",
        "modelled": "all others: bytes of distinct experts, 6 of 256; a draft step is the head and one layer",
    }
    return CostTable("H100, Flash widths, 16 layers (modelled)", padding, batches, about)


def flat() -> CostTable:
    """A pass costs 3 % more at 9 tokens a row than at one."""
    verify = tuple(2.62e-3 * (1 + 0.03 * k / MAX_DRAFTS) for k in range(MAX_DRAFTS + 1))
    batches = {batch: BatchCost(0.25e-3, verify, (False,) * (MAX_DRAFTS + 1)) for batch in BATCHES}
    about = {"kind": "modelled", "model": "weights dominate: verify is flat, a draft is a tenth"}
    return CostTable("dense (modelled)", 1.0, batches, about)


def main() -> None:
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    out.mkdir(parents=True, exist_ok=True)
    for name, table in (("speculation_h100_flash16", moe()), ("speculation_flat", flat())):
        (out / f"{name}.json").write_text(json.dumps(table.document(), indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
