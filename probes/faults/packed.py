"""Sections 1.2 and 1.10: rows of a cache as bytes. Planted where rows are written, or where their bytes are read."""

from collections.abc import Callable

import torch

from dsv4.kernels.cache_rows import PAGE, PackedRows, RowFormat, encode_rows, index_fp4, reference
from dsv4.kernels.quantize.reference import simulate_fp8_blocks
from dsv4.probes.faults import Site, mutation

FP4, FP8 = ("fp8", "fp4"), ("fp8", "fp8")


def written(site: Site, change: Callable) -> None:
    """Rows are stored as change(rows, slots, values, payload uint8 [M, ·], scales uint8 [M, ·]) says: it stores them
    itself."""
    site.kernel(
        "write_rows",
        lambda real: (
            lambda rows, slots, values: change(rows, slots, values, *encode_rows(values, rows.format, rows.rope))
        ),
    )


def stored(
    rows: PackedRows, payload_at: torch.Tensor, scales_at: torch.Tensor, payload: torch.Tensor, scales: torch.Tensor
) -> None:
    """The bytes of rows, at places int64 [M] of the pool each; beyond its end they come in again at its beginning."""
    flat = rows.data.view(-1)
    for at, part in ((payload_at, payload), (scales_at, scales)):
        flat[(at.unsqueeze(-1) + torch.arange(part.shape[-1], device=at.device)) % len(flat)] = part


def places(rows: PackedRows, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Where payload and scales of slots belong."""
    layout, page, slot = rows.layout, slots // PAGE, slots % PAGE
    return page * layout.page + slot * layout.payload, page * layout.page + PAGE * layout.payload + slot * layout.scales


@mutation("1.2", bugs=(29,), parts=("scales of packed rows",), probes=("memory_map",), numerics="qat", caches=FP4)
def scales_of_neighbouring_rows_exchanged(site: Site) -> None:
    """Scales are stored for the row beside their own: each pair of rows is read with the other's."""

    def change(rows, slots, values, payload, scales):
        stored(rows, places(rows, slots)[0], places(rows, slots ^ 1)[1], payload, scales)

    written(site, change)


@mutation("1.2", bugs=(29,), parts=("scales of packed rows",), probes=("memory_map",), numerics="qat", caches=FP8)
def key_scales_never_stored(site: Site) -> None:
    """The scale of an FP8 key is computed and not stored: what lay there is read."""

    def change(rows, slots, values, payload, scales):
        at = places(rows, slots)
        stored(rows, at[0], at[1], payload, scales[:, :0] if rows.format is RowFormat.INDEX_FP8 else scales)

    written(site, change)


@mutation("1.2", bugs=(17,), parts=("packed rows",), probes=("memory_map",), numerics="qat", caches=FP4)
def scale_bytes_of_the_cache_read_as_numbers(site: Site) -> None:
    """The E8M0 byte of a packed row is taken for its value: 120 for 2^−7."""
    site.patch(index_fp4, "decode_e8m0", lambda scale: scale.view(torch.uint8).float())


@mutation("1.2", bugs=(30,), parts=("payload of packed rows",), probes=("memory_map",), numerics="qat", caches=FP4)
def nibbles_of_packed_keys_swapped(site: Site) -> None:
    """The high nibble of a packed key holds the even dim; queries are not packed that way."""

    def change(rows, slots, values, payload, scales):
        payload = payload >> 4 | payload << 4 if rows.format is RowFormat.INDEX_FP4 else payload
        stored(rows, *places(rows, slots), payload, scales)

    written(site, change)


@mutation("1.2", bugs=(30,), parts=("payload of packed rows",), probes=("memory_map",), numerics="qat", caches=FP4)
def nibbles_swapped_in_writing_and_in_reading(site: Site) -> None:
    """Keys are packed and unpacked with the high nibble first: the model is right, and no other program can read its
    pages."""
    swapped = lambda packed: packed >> 4 | packed << 4
    pack = site.patch(index_fp4, "pack_e2m1", lambda code: swapped(pack(code)))
    unpack = site.patch(index_fp4, "unpack_e2m1", lambda packed: unpack(swapped(packed)))
    site.kernel("write_rows", lambda real: reference.write_rows)


@mutation("1.2", bugs=(), parts=("payload of packed rows",), probes=("memory_map",), numerics="qat", caches=FP4)
def rotated_columns_of_packed_rows_quantised(site: Site) -> None:
    """The rotated columns pass through FP8 like the others before they are stored in bf16."""

    def change(rows, slots, values, payload, scales):
        if rows.rope:
            values = torch.cat(
                (values[:, : -rows.rope], simulate_fp8_blocks(values[:, -rows.rope :].contiguous(), 64)), 1
            )
        stored(rows, *places(rows, slots), *encode_rows(values, rows.format, rows.rope))

    written(site, change)


@mutation("1.10", bugs=(108, 136), parts=("place of packed rows",), probes=("memory_map",), numerics="qat", caches=FP4)
def pages_without_their_padding(site: Site) -> None:
    """Pages are addressed as 64 rows, without what pads them: from the second page on, rows are written too early."""

    def change(rows, slots, values, payload, scales):
        short = slots // PAGE * (rows.layout.page - PAGE * rows.layout.row)
        stored(rows, *(at - short for at in places(rows, slots)), payload, scales)

    written(site, change)


@mutation("1.10", bugs=(), parts=("place of packed rows",), probes=("memory_map",), numerics="qat", caches=FP4)
def padding_of_the_scales_counted_into_the_row(site: Site) -> None:
    """The bytes that pad a row's scales are taken for a part of its payload: rows are that much longer, and scales
    shorter."""

    def change(rows, slots, values, payload, scales):
        layout, page, slot = rows.layout, slots // PAGE, slots % PAGE
        used = -(-(rows.width - rows.rope) // 64) if rows.format is RowFormat.KV_FP8 else layout.scales
        longer = layout.payload + layout.scales - used
        at = page * layout.page + slot * longer, page * layout.page + PAGE * longer + slot * used
        stored(rows, *at, payload, scales[:, :used])

    written(site, change)


@mutation("1.10", bugs=(108,), parts=("place of packed rows",), probes=("memory_map",), numerics="qat", caches=FP4)
def scales_beside_each_row(site: Site) -> None:
    """Each row's scales follow its payload, as in the cache of the generation before: read and written alike."""

    def beside(offset, width):
        def view(rows):
            data, row = rows.data, rows.layout.row
            at = data.storage_offset() + (rows.layout.payload if offset else 0)
            return data.as_strided((*data.shape[:-1], PAGE, width(rows.layout)), (*data.stride()[:-1], row, 1), at)

        return property(view)

    site.patch(PackedRows, "payload", beside(False, lambda layout: layout.payload))
    site.patch(PackedRows, "scales", beside(True, lambda layout: layout.scales))
    site.kernel("write_rows", lambda real: reference.write_rows)


@mutation("1.10", bugs=(128,), parts=("beyond 2^31",), probes=("memory_map",), numerics="qat", caches=FP4)
def byte_offsets_of_packed_rows_in_32_bits(site: Site) -> None:
    """Byte offsets of packed rows are 32 bits wide: beyond 2 GiB they wrap, and far rows land on near ones."""

    def change(rows, slots, values, payload, scales):
        stored(rows, *(at.to(torch.int32).long() for at in places(rows, slots)), payload, scales)

    written(site, change)


@mutation("1.10", bugs=(134,), parts=("buffers of the other row",), probes=("memory_map",), numerics="qat", caches=FP4)
def a_page_is_cleared_with_its_first_row(site: Site) -> None:
    """Writing the first row of a page clears the page: rows of another request share pages of the window, and lose
    theirs."""

    def change(rows, slots, values, payload, scales):
        for page in (slots[slots % PAGE == 0] // PAGE).tolist():
            rows.data[page].fill_(1)
        stored(rows, *places(rows, slots), payload, scales)

    written(site, change)
