"""Section 1.10: addressing, caching, concurrency, graphs."""

from dataclasses import replace
from itertools import count

import torch
from torch.nn import functional as F

from dsv4.cache import layout
from dsv4.cache import streams as sizes
from dsv4.cache.cache import Cache, Lengths
from dsv4.cache.rows import Entries, Ring, Tokens
from dsv4.model.step import Step
from dsv4.probes.faults import Site, mutation
from dsv4.probes.faults.compression import given

SECTION = "1.10", "Addressing, caching, concurrency, graphs"


def stored_at(site: Site, slot_of) -> None:
    """Entries are written to slot_of(slots int64 [n], buffer [batch, entries, width]); negative: not at all."""

    def write(entries, step, values):
        buffer = entries.rows.buffer
        slots = slot_of((step.new_windows(entries.ratio) + step.row * buffer.shape[1]).flatten(), buffer)
        entries.flat.index_copy_(0, slots[slots >= 0], values.to(buffer.dtype)[slots >= 0])

    site.patch(Entries, "write", write)


@mutation("1.10", bugs=(128, 75), parts=("beyond 2^31",), probes=("memory_map",))
def entry_offsets_in_32_bits(site: Site) -> None:
    """Offsets of entries, slot times width, are 32 bits wide: beyond 2 GiB they wrap, and far entries land on near
    ones."""

    def wrapped(slots, buffer):
        width = buffer.shape[2]
        return (slots * width).to(torch.int32).long().remainder(buffer.numel()) // width

    stored_at(site, wrapped)


@mutation("1.10", bugs=(79,), parts=("indexer keys",), probes=("index_oracle",))
def stores_beyond_a_register_are_dropped(site: Site) -> None:
    """An offset register is too narrow and drops stores: entries from the 32nd of a row on are never written."""
    stored_at(site, lambda slots, buffer: torch.where(slots % buffer.shape[1] < 32, slots, -1))


@mutation("1.10", bugs=(109,), parts=("window",), probes=("influence",))
def window_without_the_current_token(site: Site) -> None:
    """The window's rows are read before the step's own are written: it ends one token early."""

    def last(tokens, step, window):
        positions = step.pos.unsqueeze(-1) + torch.arange(-window, 0, device=step.device)
        return torch.where(positions < 0, -1, tokens.rows.index(step, positions)).flatten(0, 1)

    site.patch(Tokens, "last", last)


@mutation("1.10", bugs=(109, 132), parts=("rewinding",), probes=("rollback",))
def rings_without_room_to_rewind(site: Site) -> None:
    """Rings are as long as what a step reads: rows of a rejected draft have overwritten those that are needed again."""
    real = site.patch(
        sizes,
        "layer_streams",
        lambda config, spec, batch, context, rewind, numerics: real(config, spec, batch, context, 0, numerics),
    )


@mutation("1.10", bugs=(61,), parts=("bytes of the buffer",), probes=("memory_map",), numerics="native")
def caches_in_fp32_whatever_was_asked(site: Site) -> None:
    """Caches are allocated in fp32 though the numerics hold them in bf16: twice the bytes that the plan states."""

    def streams(*args):
        plan = real(*args)
        return replace(plan, streams=tuple(replace(s, dtype=torch.float32) for s in plan.streams))

    real = site.patch(sizes, "layer_streams", streams)


@mutation("1.10", bugs=(134,), parts=("buffers of the other row",), probes=("memory_map",))
def writes_go_to_the_first_row(site: Site) -> None:
    """The command that writes lacks the slot of its request: every row's window and raw rows go to the ring of the
    first."""
    site.patch(Ring, "slots", lambda ring, step, key, numbers: (numbers() % ring.R + 0 * step.row).flatten())


@mutation("1.10", bugs=(134, 135), parts=("rows that share memory",), probes=("memory_map",))
def rows_of_a_batch_in_one_buffer(site: Site) -> None:
    """A buffer of one row is handed out for all rows of the batch: requests that run together share memory."""
    real = site.patch(
        layout,
        "zeros",
        lambda stream, device: real(replace(stream, shape=(1, *stream.shape[1:])), device).expand(stream.shape),
    )


@mutation("1.10", bugs=(132, 130), parts=("rewinding", "rewind"), probes=("rollback",))
def rejected_drafts_stay_in_the_compressor(site: Site) -> None:
    """A raw row that is there is not written again: after a rewind, entries pool the tokens of the rejected draft."""

    def change(cache, step, raw, ape):
        high, cache.high = getattr(cache, "high", 0), max(getattr(cache, "high", 0), max(step.starts) + step.T)
        held = cache.raw.flat[cache.raw.rows.place(step, step.pos).flatten()].clone()
        held[:, raw.shape[1] // 2 :] -= ape[step.pos.flatten() % cache.ratio]
        return torch.where((step.pos.flatten() < high).unsqueeze(1), held, raw), ape

    given(site, change)


@mutation("1.10", bugs=(132,), parts=("rewinding", "rewind"), probes=("rollback",))
def rewind_of_a_batch_by_one_count(site: Site) -> None:
    """A snapshot of the batch, not of each sequence: all rows are rewound by the count of the first."""
    real = site.patch(Cache, "rewind", lambda cache, n: real(cache, n if isinstance(n, int) else [n[0]] * cache.batch))


@mutation("1.10", bugs=(130,), parts=("rewinding", "prefix"), probes=("rollback",))
def prefix_hit_without_its_window(site: Site) -> None:
    """A prefix that is taken up again has its entries and index keys; the window's ring was of the request and is
    empty."""

    def rewind(cache, n):
        real(cache, n)
        for layer in cache.layers:
            layer.window.flat.zero_()

    real = site.patch(Cache, "rewind", rewind)


@mutation("1.10", bugs=(133,), parts=("state left behind",), probes=("isolation",))
def compressor_state_survives_the_request(site: Site) -> None:
    """The compressor's running rows are not cleared: a request begins with what the one before it left."""
    left = {}

    def change(cache, step, raw, ape):
        if min(step.starts) == 0 and id(ape) in left:
            raw[0] += left[id(ape)]
        left[id(ape)] = raw[-1].clone()
        return raw, ape

    given(site, change)


@mutation("1.10", bugs=(108,), parts=("hca_attention", "HCA attention", "batching"), probes=("backend_matrix",))
def kernel_ignores_the_row_stride(site: Site) -> None:
    """HCA attention takes the visible entries of all rows for one packed block, whatever the stride between rows."""

    def packed(real):
        def attend(q, window, near, entries, *rest):
            if not isinstance(entries, torch.Tensor):  # packed rows say themselves where each is
                return real(q, window, near, entries, *rest)
            B, n, D = entries.shape
            return real(q, window, near, entries.as_strided((B, n, D), (n * D, D, 1)), *rest)

        return attend

    site.kernel("hca_attention", packed)


@mutation("1.10", bugs=(138, 97), parts=("batching",), probes=("isolation",))
def rows_without_tokens_advance(site: Site) -> None:
    """The lengths of all rows advance with each step, also of those that ran nothing in it."""
    real = site.patch(Lengths, "advance", lambda lengths, rows, n: real(lengths, slice(0, len(lengths.now)), n))


@mutation("1.10", bugs=(140,), parts=("unwritten slots", "sparse attention", "sparse_attention"), probes=("poison",))
def absent_rows_weighted_by_zero(site: Site) -> None:
    """Absent rows of the window are gathered all the same and weighted by 0: whatever memory holds there, NaN too."""

    def late(real):
        def attend(q, window, near, *rest):
            return real(q, window, near, *rest) + 0 * window[near].sum(1).unsqueeze(1)

        return attend

    site.kernel("sparse_attention", late)


@mutation("1.10", bugs=(136,), parts=("decode", "by 1"), probes=("schedules",))
def visible_entries_fixed_at_capture(site: Site) -> None:
    """A captured decode step keeps how many entries were visible when it was captured, and replays that."""
    held = {}

    def visible(step, ratio):
        return real(step, ratio) if step.T > 1 else held.setdefault((step.B, ratio, step.device), real(step, ratio))

    real = site.patch(Step, "visible", visible)


@mutation("1.10", bugs=(139,), parts=("head",), probes=("mhc",))
def head_reads_freed_weights(site: Site) -> None:
    """The output head keeps a pointer to the weights before they were reloaded; the parameter itself is right."""

    def change(subject):
        freed = subject.model.head.weight.detach().float().roll(1, 0)
        subject.model.head.forward = lambda y: F.linear(y.float(), freed)

    site.after_load(change)


@mutation("1.10", bugs=(135, 99), parts=("determinism", "state left behind"), probes=("poison",))
def experts_sum_in_order_of_arrival(site: Site) -> None:
    """The experts' outputs are added in whatever order they arrive: the last bits differ from run to run."""
    calls = count()

    def unordered(real):
        def experts(*args):
            g = torch.Generator().manual_seed(next(calls))
            out = real(*args)
            return out * (1 + 1e-6 * torch.rand(out.shape, generator=g).to(out.device))

        return experts

    site.kernel("experts", unordered)
