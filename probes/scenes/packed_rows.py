"""Packed rows byte by byte, for `memory_map`: where the subject writes them, how it reads them, and beyond 2 GiB.

What is written is held against bytes that `dsv4.probes.scenes.layouts` makes, all of a pool: of the rows, between them
and around them.
"""

from collections.abc import Iterator

import torch

from dsv4.cache.rows import Entries, Linear
from dsv4.cache.streams import Stream, zeros
from dsv4.kernels.cache_rows import KEY_FORMATS, PackedRows, RowFormat, read_rows
from dsv4.model.step import Step
from dsv4.probes.result import Check, compare, vacuous
from dsv4.probes.scenes.layouts import PAGE, Packed, all_keys, fp8_rows
from dsv4.probes.subject import Subject

FORMATS = {"fp8 rows": RowFormat.KV_FP8} | {f"{form.option} keys": form for form in KEY_FORMATS}
LAYOUT = "specification 5: page = payload of 64 rows, then their scales; encoded by dsv4.probes.scenes.layouts"
NUMBERS = "the same rows as plain numbers, decoded by dsv4.probes.scenes.layouts; sums in fp32"
WRAP = "offsets are 64 bits wide; int32 ones wrap here (SGLang 40351)"
BEFORE = 0xA5  # what lies in a pool before anything is written
PAGES, FAR = 3, 1 << 31


def formats_of(config) -> list[Packed]:
    """Every packed format at the widths of the model; keys where they divide into blocks."""
    return [fp8_rows(config.head_dim, config.qk_rope_head_dim), *all_keys(config.index_head_dim)]


def rows_of(form: Packed, data: torch.Tensor) -> PackedRows:
    """A flat pool [pages, page bytes], or one run a batch row [B, pages, page bytes], as the operations take it."""
    return PackedRows(FORMATS[form.kind], data, form.width, form.rotated, PAGE * data.shape[-2])


def some_values(form: Packed, rows: int, seed: int) -> torch.Tensor:
    """fp32 [rows, width] that bf16 holds, of sizes from 2^−6 to 2^6 by row and column, so that no two scales need be
    equal."""
    g = torch.Generator().manual_seed(seed)
    sizes = 2.0 ** (torch.randint(-3, 4, (rows, 1), generator=g) + torch.randint(-3, 4, (1, form.width), generator=g))
    return (torch.randn(rows, form.width, generator=g) * sizes).bfloat16().float()


def bytes_of_rows(subject: Subject, seed: int) -> Iterator[Check]:
    """Writing and reading of every format, whatever the subject's own caches are."""
    for form in formats_of(subject.config):
        yield _written(subject, form, seed)
        yield _read_back(form, seed)
        yield from _attended(subject, form, seed)


def _written(subject: Subject, form: Packed, seed: int) -> Check:
    """Rows of three pages in no order, the first and the last of a page among them, into a pool that is not empty."""
    device, g = subject.model.device, torch.Generator().manual_seed(seed)
    slots = torch.cat(
        (
            torch.tensor([0, PAGE - 1, PAGE, PAGES * PAGE - 1]),
            1 + torch.randperm(PAGE - 2, generator=g)[:40],
            PAGE + 1 + torch.randperm(PAGE, generator=g)[:40],
        )
    )
    slots = slots[torch.randperm(len(slots), generator=g)]
    values = some_values(form, len(slots), seed)
    pool = torch.full((PAGES, form.page), BEFORE, dtype=torch.uint8, device=device)
    subject.model.op.write_rows(
        rows_of(form, pool), slots.to(device), values.to(device, subject.model.numerics.activation)
    )
    wanted, places = torch.full((PAGES * form.page,), BEFORE, dtype=torch.uint8), form.offsets(slots)
    wanted[places] = form.encode(values.double())
    wrong = pool.cpu().flatten() != wanted
    wrong[places[:, form.payload + form.used :]] = False  # padding of the scales: anything
    part, note = _blame(form, wrong, places) if wrong.any() else ("packed rows", "")
    return compare(
        "bytes of written rows are those of the public layout: exceptions",
        int(wrong.sum()),
        "==",
        0,
        LAYOUT,
        wrong.numel(),
        unit="B",
        where=form.kind,
        part=part,
        note=note,
    )


def _blame(form: Packed, wrong: torch.Tensor, places: torch.Tensor) -> tuple[str, str]:
    """(part, note) of wrong bytes bool [n] of a pool, of which rows at places int64 [rows, bytes] were written."""
    sizes = PAGE * form.payload, PAGE * form.scales
    areas = wrong.view(PAGES, -1).split((*sizes, form.page - sum(sizes)), 1)
    payload, scales, padding = (int(area.sum()) for area in areas)
    mine = int(wrong[places[:, : form.payload]].sum())
    note = f"{payload} in payloads, {payload - mine} of them of other rows; {scales} in scales, {padding} in padding"
    if payload > mine or padding:
        return "place of packed rows", note
    return ("payload of packed rows" if payload else "scales of packed rows"), note


def _pool(form: Packed, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Three pages uint8 [3, page bytes] full of rows, and their numbers float64 [3 · 64, width]."""
    raw = form.encode(some_values(form, PAGES * PAGE, seed + 1).double())
    data = torch.full((PAGES * form.page,), BEFORE, dtype=torch.uint8)
    data[form.offsets(torch.arange(PAGES * PAGE))] = raw
    return data.view(PAGES, form.page), form.decode(raw)


def _read_back(form: Packed, seed: int) -> Check:
    """What rings and entries read through."""
    data, numbers = _pool(form, seed)
    index = torch.randperm(PAGES * PAGE, generator=torch.Generator().manual_seed(seed))
    wrong = int((read_rows(rows_of(form, data), index).double() != numbers[index]).sum())
    return compare(
        "rows that are read back are the numbers of their bytes: exceptions",
        wrong,
        "==",
        0,
        LAYOUT,
        numbers.numel(),
        unit="values",
        where=form.kind,
        part="packed rows",
    )


def _attended(subject: Subject, form: Packed, seed: int) -> Iterator[Check]:
    """The operations that read packed rows: on the bytes, and on the same rows as numbers."""
    c, g, run = subject.config, torch.Generator().manual_seed(seed), subject.operations
    data, plain = _pool(form, seed)
    rows, plain, n = rows_of(form, data), plain.float(), PAGES * PAGE
    rand = lambda *shape: torch.randn(*shape, generator=g)
    if form.kind == "fp8 rows":
        H, D, tail = c.num_attention_heads, c.head_dim, (rand(c.num_attention_heads), c.head_dim**-0.5)
        some = lambda k: torch.randint(0, n, (3, k), generator=g)
        q, near, far = rand(3, H, D), some(c.sliding_window), some(17)
        batched, entries = rows._replace(data=data.unsqueeze(0), count=n - 5), plain[None, : n - 5]
        cases = {
            "sparse_attention": lambda pool, _: run["sparse_attention"](q, pool, near, pool, far, *tail),
            "hca_attention": lambda pool, all_: run["hca_attention"](
                q[None], pool, near, all_, torch.tensor([[n - 40, n - 6, n - 5]]), *tail
            ),
        }
    else:
        q, weights = rand(1, 3, c.index_n_heads, c.index_head_dim).bfloat16().float(), rand(1, 3, c.index_n_heads)
        batched, entries = rows._replace(data=data.unsqueeze(0)), plain[None]
        cases = {"index_scores": lambda _, keys: run["index_scores"](q, weights, keys, torch.full((1, 3), n))}
    for name, of in cases.items():
        found, wanted = of(rows, batched).double(), of(plain, entries).double()
        error = torch.nan_to_num((found - wanted).norm() / wanted.norm().clamp(min=1e-12), nan=float("inf")).item()
        yield compare(
            f"{name} of packed rows is that of their numbers",
            error,
            "<=",
            1e-5,
            NUMBERS,
            found.numel(),
            unit="relative",
            where=form.kind,
            part="packed rows",
        )


def far_rows(subject: Subject, packed: dict[str, Packed]) -> Iterator[Check]:
    """A row of each packed linear stream whose first byte lies beyond 2^31: written and read in place."""
    for stream in ("entries", "index keys"):
        if stream in packed:
            yield _far(subject, stream, packed[stream])


def _far(subject: Subject, stream: str, form: Packed) -> Check:
    device, ratio, pages = subject.model.device, 4, -(-FAR // form.page) + 1
    n, name = pages * PAGE, "packed rows beyond 2^31 bytes that are written and read in place"
    about = dict(where=f"row {n - 1} of {form.kind}", part=f"{stream}, packed rows", unit="rows")
    try:  # in host memory pages are taken when written
        data = zeros(Stream(stream, (1, pages, form.page), torch.uint8, ""), device)
    except (RuntimeError, MemoryError) as error:
        return vacuous(name, f"{pages * form.page} B cannot be reserved: {str(error).splitlines()[0]}", **about)
    entries = Entries(Linear(rows_of(form, data), subject.model.op.write_rows), ratio)
    step = Step(torch.zeros(1, ratio, dtype=torch.int64, device=device), 0, [(n - 1) * ratio], {})
    values = some_values(form, 1, 0)
    entries.write(step, values.to(device, subject.model.numerics.activation))
    pool, rows = entries.chosen(step, torch.full((1, ratio, 1), n - 1, device=device))
    raw, whole = form.encode(values.double()), data.view(-1)
    used = form.payload + form.used
    bytes_at = lambda row: whole[form.offsets(torch.tensor([row], device=device))].cpu()
    right = [
        torch.equal(bytes_at(n - 1)[:, :used], raw[:, :used]),
        not bytes_at(0).any(),
        not bytes_at(n - 2).any(),
        torch.equal(read_rows(pool, rows[0]).cpu().double(), form.decode(raw)),
    ]
    if stream == "entries":
        right.append(_attends(subject, form, pool, rows, raw))
    return compare(name, sum(right), "==", len(right), WRAP, len(right), **about)


def _attends(subject: Subject, form: Packed, pool: PackedRows, rows: torch.Tensor, raw: torch.Tensor) -> bool:
    """Whether attention to that row of a pool is attention to the same row of a small one."""
    c, device = subject.config, subject.model.device
    small = torch.zeros(form.page, dtype=torch.uint8)
    small[form.offsets(torch.tensor([5]))] = raw
    near = rows_of(form, small.view(1, -1).to(device))
    g = torch.Generator().manual_seed(0)
    q = torch.randn(1, c.num_attention_heads, c.head_dim, generator=g).to(device)
    sink = torch.zeros(c.num_attention_heads, device=device)
    window = torch.zeros(1, c.sliding_window, dtype=torch.int64, device=device)
    of = lambda entries, index: subject.model.op.sparse_attention(
        q, near, window, entries, index, sink, c.head_dim**-0.5
    )
    found, wanted = of(pool, rows[:1]), of(near, torch.full_like(rows[:1], 5))
    return bool((found - wanted).norm() <= 1e-5 * wanted.norm())
