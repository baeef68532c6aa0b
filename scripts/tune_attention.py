"""Times of attention over many queries on a Hopper GPU: `hopper_prefill` beside `hopper`.

    python scripts/tune_attention.py [--tokens 256,1024,4096] [--seconds 100]

The second is first held against the first. A line: µs of both, cold L2, TFLOPS of the second, and how far it is off,
over the largest number.
"""

import sys
import time
from pathlib import Path
from unittest.mock import patch

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dsv4.kernels.attention import triton
from dsv4.kernels.cache_rows import PAGE, PackedRows, RowFormat, pack_layout
from dsv4.kernels.cache_rows.triton import write_rows
from dsv4.kernels.widths import FLASH
from scripts.bench.timing import Clock
from scripts.bench.tuning import asked

H, D, WINDOW = FLASH.num_attention_heads, FLASH.head_dim, FLASH.sliding_window
REPLAYS = 20


def main() -> int:
    args = asked(__doc__, "kernels", (256, 1024, 4096), 100.0)
    if args is None:
        return 2
    begun, wrong, clock = time.monotonic(), 0, Clock()
    for N in args.tokens:
        for make in (listed, packed, visible):
            name, run, keys = make(N)
            if time.monotonic() - begun > args.seconds:
                print("not begun: the time was up")
                return int(bool(wrong))
            found = []
            for takes in (lambda *given: False, triton._many):
                with patch.object(triton, "_many", takes):
                    found.append((run().float(), clock.runs([run], REPLAYS).cold_us))
            (right, before), (out, after) = found
            off = float((out - right).abs().max() / right.abs().max())
            wrong += not off < 0.01
            rate = 4 * keys * H * D / after / 1e6
            print(f"{name}, {N} tokens: {before:.1f}, {after:.1f} µs, {rate:.0f} TFLOPS, off {off:.1e}", flush=True)
    return int(bool(wrong))


def drawn(N: int) -> tuple[torch.Tensor, ...]:
    """Queries bf16 [1, N, H, D], rows of the window [N + 128, D] and their numbers [N, 128], sinks [H]."""
    q = torch.randn(1, N, H, D, device="cuda", dtype=torch.bfloat16)
    rows = torch.randn(N + WINDOW, D, device="cuda", dtype=torch.bfloat16)
    window = torch.arange(N, device="cuda")[:, None] + torch.arange(WINDOW, device="cuda")
    return q, rows, window, torch.randn(H, device="cuda")


def listed(N: int):
    """CSA: 512 of the entries of 32K tokens. (name, run, keys of all queries)"""
    q, rows, window, sink = drawn(N)
    entries = torch.randn(8192, D, device="cuda", dtype=torch.bfloat16)
    chosen = torch.rand(N, len(entries), device="cuda").topk(FLASH.index_topk, -1).indices
    run = lambda: triton.sparse_attention(q[0], rows, window, entries, chosen, sink, D**-0.5)
    return "CSA", run, N * (WINDOW + FLASH.index_topk)


def packed(N: int):
    """CSA of packed rows, which the second kernel reads unpacked: that is part of its time."""
    q, rows, window, sink = drawn(N)
    pools = [pool(rows), pool(torch.randn(8192, D, device="cuda", dtype=torch.bfloat16))]
    chosen = torch.rand(N, 8192, device="cuda").topk(FLASH.index_topk, -1).indices
    run = lambda: triton.sparse_attention(q[0], pools[0], window, pools[1], chosen, sink, D**-0.5)
    return "CSA, packed", run, N * (WINDOW + FLASH.index_topk)


def pool(rows: torch.Tensor) -> PackedRows:
    """These rows in pages."""
    layout = pack_layout(RowFormat.KV_FP8, D, FLASH.qk_rope_head_dim)
    data = torch.zeros(-(-len(rows) // PAGE), layout.page, dtype=torch.uint8, device="cuda")
    made = PackedRows(RowFormat.KV_FP8, data, D, FLASH.qk_rope_head_dim, len(rows))
    write_rows(made, torch.arange(len(rows), device="cuda"), rows)
    return made


def visible(N: int):
    """HCA: the last N of 128K tokens. (name, run, keys of all queries)"""
    q, rows, window, sink = drawn(N)
    entries = torch.randn(1, 1024, D, device="cuda", dtype=torch.bfloat16)
    seen = (torch.arange(N, device="cuda") + (128 << 10) - N + 1) // 128
    run = lambda: triton.hca_attention(q, rows, window, entries, seen[None], sink, D**-0.5)
    return "HCA", run, N * WINDOW + int(seen.sum())


if __name__ == "__main__":
    sys.exit(main())
