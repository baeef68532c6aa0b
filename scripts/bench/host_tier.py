"""Measurements of caches in host memory."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import torch

from dsv4.cache.host_tier.entries import Staged
from dsv4.cache.host_tier.grouped import HostRows
from dsv4.cache.host_tier.memory import HostBuffer
from dsv4.cache.host_tier.stream import DenseStream
from dsv4.cache.streams import Stream
from dsv4.errors import CapacityError, InputError
from dsv4.kernels.attention import sparse_attention
from dsv4.kernels.cache_rows import PAGE, RowFormat, pack_layout
from dsv4.kernels.grouped_attention.exact import sizes
from dsv4.kernels.staging import fetch
from dsv4.kernels.widths import FLASH, QWEN
from dsv4.runtime.timing import capture

H, KV, D = sizes(QWEN)
WIDTH, ROPE, HEADS = FLASH.head_dim, FLASH.qk_rope_head_dim, FLASH.num_attention_heads
TOPK, WINDOW, RATIO = FLASH.index_topk, FLASH.sliding_window, 4
COPIED = 1 << 30  # bytes of one copy by which the link is measured
DEVICE = torch.device("cuda")


def no_device() -> InputError:
    return InputError("the host-memory tier is measured on a CUDA device, and none is here")


@dataclass(frozen=True)
class Link:
    """Bytes a second of large copies between pinned host memory and the device."""

    to_device: float
    to_host: float
    together: float  # both ways at once, summed
    kernel: float  # read by a kernel's loads: what `fetch` could reach


def seconds(run, repeats: int = 5) -> float:
    """Median time of a run on the device."""
    times = []
    for _ in range(repeats + 1):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e-3)
    return median(times[1:])


def link() -> Link:
    there, back = (HostBuffer((COPIED,), torch.uint8, DEVICE) for _ in range(2))
    here, from_here = (torch.zeros(COPIED, dtype=torch.uint8, device=DEVICE) for _ in range(2))
    side = torch.cuda.Stream()

    def both():
        side.wait_stream(torch.cuda.current_stream())
        here.copy_(there.host, non_blocking=True)
        with torch.cuda.stream(side):
            back.host.copy_(from_here, non_blocking=True)
        torch.cuda.current_stream().wait_stream(side)

    one = lambda to, source: COPIED / seconds(lambda: to.copy_(source, non_blocking=True))
    kernel = COPIED / seconds(lambda: torch.bitwise_not(there.device.view(torch.int64), out=here.view(torch.int64)))
    found = Link(one(here, there.host), one(back.host, from_here), 2 * COPIED / seconds(both), kernel)
    there.close(), back.close()
    return found


class Trace:
    """Choices of `groups` groups, `count` of `items` numbers each; each is kept with probability `locality`."""

    def __init__(self, groups: int, count: int, items: int, locality: float, seed: int = 0):
        self.g = torch.Generator().manual_seed(seed)
        self.items, self.locality = items, locality
        self.now = torch.stack([torch.randperm(items, generator=self.g)[:count] for _ in range(groups)])

    def step(self) -> torch.Tensor:
        """int64 [groups, count], distinct in a group."""
        for row in self.now:
            free = torch.ones(self.items, dtype=torch.bool)
            free[row] = False
            away = (torch.rand(len(row), generator=self.g) >= self.locality).nonzero().flatten()
            fresh = free.nonzero().flatten()
            row[away] = fresh[torch.randperm(len(fresh), generator=self.g)[: len(away)]]
        return self.now


def timed(graph, feed, steps: int) -> list[float]:
    """Seconds of each replay; `feed(i)` writes the step's inputs first."""
    times = []
    for i in range(steps):
        feed(i)
        torch.cuda.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e-3)
    return times


def measured(graph, feed, steps: int, traffic, link_rate: float, floor: float) -> dict:
    """A row of the report. floor: seconds of the same step with everything resident; what is longer is the fetching."""
    for i in range(3):
        feed(i)
        graph.replay()
    torch.cuda.synchronize()
    before = traffic()
    middle = median(timed(graph, feed, steps))
    after = traffic()
    hits, misses, nbytes = (b - a for a, b in zip(before, after))
    rate = nbytes / steps / (middle - floor) if middle > floor and nbytes else None  # nothing was fetched: no rate
    return {
        "seconds": middle,
        "hits": hits,
        "misses": misses,
        "hit_rate": hits / max(1, hits + misses),
        "bytes_a_step": nbytes / steps,
        "bytes_a_second": rate,
        "of_link": rate and rate / link_rate,
    }


def grouped(args, rows: Sequence[HostRows], op) -> dict:
    """A step's attention in every layer: resident, from the tier at each locality and with every choice new, and dense
    by streaming.
    rows: of the layers, filled."""
    (B, _, S, _), policy, count = rows[0].shape, rows[0].policy, len(rows)
    start = torch.full((B,), S - 1, dtype=torch.int64, device=DEVICE)
    (place,), last = rows[0].places(start), S // 128 - 1
    q = torch.randn(B, 1, H, D, dtype=torch.bfloat16, device=DEVICE)
    blocks = torch.zeros(count, B, 1, KV, policy.kept, dtype=torch.int32, device=DEVICE)
    scale, rate = D**-0.5, link().to_device
    for layer in rows:
        for near, far in ((layer.keys, layer.host_keys), (layer.values, layer.host_values)):
            near[:, :, -128:] = far[:, :, last * 128 : (last + 1) * 128]

    def feed(locality):
        trace = Trace(count * B * KV, policy.topk, last - 2, locality)

        def write(i):
            chosen = trace.step().view(count, B, 1, KV, -1) + 1
            ends = torch.tensor([0, last - 1, last]).expand(*chosen.shape[:-1], 3)
            blocks.copy_(torch.cat((ends, chosen), -1).sort(-1).values)

        return write

    check, (keys, values) = feed(0.5), _resident(rows[0])
    for i in range(3):  # identity, before any figure
        check(i)
        want = op.gather_attention(q, keys, values, blocks[0], start, None, scale, 128)
        if not torch.equal(rows[0].attend(op, q, place, scale, blocks[0])[0], want):
            raise InputError("the tier's output differs from the resident cache's; nothing was timed")
    resident = capture(
        lambda: [op.gather_attention(q, keys, values, blocks[i], start, None, scale, 128) for i in range(count)]
    )
    floor = median(timed(resident, check, args.steps))
    dense_resident = capture(lambda: [op.grouped_attention(q, keys, values, start, None, scale) for _ in rows])
    dense = median(timed(dense_resident, check, args.steps))
    keys = values = resident = dense_resident = None  # memory that rows to come need
    graph = capture(lambda: [layer.attend(op, q, place, scale, blocks[i])[0] for i, layer in enumerate(rows)])
    traffic = lambda: tuple(map(sum, zip(*(layer.traffic() for layer in rows))))
    found = [
        {"locality": x} | measured(graph, feed(x), args.steps, traffic, rate, floor) for x in (*args.locality, 1.0, 0.0)
    ]
    nbytes = sum(layer.host_bytes for layer in rows)
    return {
        "layers": count,
        "batch": B,
        "context": S,
        "kept": policy.kept,
        "slots": rows[0].slots,
        "host_bytes": nbytes,
        "formula": f"2 × {count} layers × {B} rows × {KV} heads × {S} × {D} × 2 B",
        "device_bytes": sum(layer.device_bytes for layer in rows),
        "resident_seconds": floor,
        "dense_resident_seconds": dense,
        "link": rate,
        "rows": found,
    }


def _resident(layer: HostRows) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of a layer on the device."""
    return tuple(far.clone() for far in (layer.host_keys, layer.host_values))


def stream_dense(op, stream: DenseStream) -> float:
    """Seconds of a step that brings every layer whole and attends densely."""
    B, _, S, _ = stream.first.shape
    start, q = (
        torch.full((B,), S - 1, dtype=torch.int64, device=DEVICE),
        torch.randn(B, 1, H, D, dtype=torch.bfloat16, device=DEVICE),
    )
    graph = capture(
        lambda: [op.grouped_attention(q, *stream.layer(i), start, None, D**-0.5) for i in range(len(stream.layers))]
    )
    return seconds(graph.replay, 3)


class OneToken:
    """What `Staged` asks of a step of one token a row."""

    T, first = 1, 0

    def __init__(self, start: torch.Tensor):
        self.B, self.start, self.rows = len(start), start, slice(0, len(start))


def entries(args) -> list[dict]:
    return [
        row
        for B in args.entry_batch
        for packed in (False, True)
        for row in _entries(args, packed, B, max(1, args.csa_layers // B))
    ]


def _entries(args, packed: bool, B: int, count: int) -> list[dict]:
    """count: layers, fewer with more rows, so that host memory is the same."""
    n, rate = args.context // RATIO, link().to_device
    if packed:
        layout = pack_layout(RowFormat.KV_FP8, WIDTH, ROPE)
        stream = Stream("entries", (B, -(-n // PAGE), layout.page), torch.uint8, "", (RowFormat.KV_FP8, WIDTH, ROPE))
    else:
        stream = Stream("entries", (B, n, WIDTH), torch.bfloat16, "")
    operation, _ = fetch.resolve("triton")
    layers = [Staged(stream, RATIO, TOPK, args.entry_slots, DEVICE, operation) for _ in range(count)]
    for layer in layers:
        layer.host.device.random_(0, 120) if packed else layer.host.device.normal_()
    step = OneToken(torch.full((B,), args.context - 1, dtype=torch.int64, device=DEVICE))
    q, sink = torch.randn(B, HEADS, WIDTH, dtype=torch.bfloat16, device=DEVICE), torch.zeros(HEADS, device=DEVICE)
    window, index = (
        torch.randn(B * WINDOW, WIDTH, dtype=torch.bfloat16, device=DEVICE),
        torch.arange(B * WINDOW, device=DEVICE).view(B, -1),
    )
    window = (
        window
        if not packed
        else layers[0].staged._replace(
            data=torch.full((-(-B * WINDOW // PAGE), stream.shape[-1]), 64, dtype=torch.uint8, device=DEVICE),
            count=B * WINDOW,
        )
    )
    chosen = torch.zeros(count, B, 1, TOPK, dtype=torch.int64, device=DEVICE)
    attend = lambda pool, rows: sparse_attention(
        q, window, index, pool, rows, sink, WIDTH**-0.5, True, 1, backend="triton"
    )

    def feed(trace):
        return lambda i: chosen.copy_(trace.step().view(chosen.shape))

    check = feed(Trace(count * B, TOPK, n - 1, 0.5))
    base = torch.arange(B, device=DEVICE).view(B, 1) * layers[0].n
    for i in range(3):
        check(i)
        resident_pool = layers[0].flat._replace(data=layers[0].flat.data.clone()) if packed else layers[0].flat.clone()
        found = attend(*layers[0].chosen(step, chosen[0], None))
        if not torch.equal(found, attend(resident_pool, chosen[0, :, 0] + base)):
            raise CapacityError("the tier's output differs from the resident entries'; nothing was timed")
    resident = capture(lambda: [attend(resident_pool, chosen[i, :, 0] + base) for i in range(count)])
    floor = median(timed(resident, check, args.steps))
    graph, found = capture(lambda: [attend(*layer.chosen(step, chosen[i], None)) for i, layer in enumerate(layers)]), []
    traffic = lambda: tuple(map(sum, zip(*(layer.traffic() for layer in layers))))
    common = {
        "rows": "584-byte rows" if packed else "bf16",
        "batch": B,
        "layers": count,
        "entries": n,
        "resident_seconds": floor,
        "link": rate,
        "host_bytes": sum(layer.host.nbytes for layer in layers),
        "slots": layers[0].rows,
        "device_bytes": sum(t.nbytes for layer in layers for t in layer.tensors.values()),
    }
    for locality in (*args.locality, 1.0, 0.0):
        trace = Trace(count * B, TOPK, n - 1, locality)
        found.append(common | {"locality": locality} | measured(graph, feed(trace), args.steps, traffic, rate, floor))
    return found
