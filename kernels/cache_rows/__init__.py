"""Rows of a cache as bytes: the public FP8 and FP4 layouts."""

from collections.abc import Mapping
from types import MappingProxyType

from dsv4.kernels.cache_rows import index_fp4, index_fp8, index_mxfp8, kv_fp8, reference
from dsv4.kernels.cache_rows import triton as triton_kernels
from dsv4.kernels.cache_rows.formats import PAGE, PackedRows, RowFormat, pack_layout
from dsv4.kernels.cache_rows.reference import decode_rows, encode_rows, read_rows
from dsv4.kernels.dispatch import Operation

for _format in (kv_fp8.KV_FP8, index_fp8.INDEX_FP8, index_fp4.INDEX_FP4, index_mxfp8.INDEX_MXFP8):
    setattr(RowFormat, _format.name, _format)


def _options(*formats: RowFormat) -> Mapping[str, RowFormat | None]:
    return MappingProxyType({"bf16": None} | {format.option: format for format in formats})


# by stream, the formats that it may take, by their names on the command line; None: plain numbers
STREAM_FORMATS = {
    "kv": _options(RowFormat.KV_FP8),  # window rows and entries
    "index": _options(RowFormat.INDEX_FP8, RowFormat.INDEX_FP4, index_mxfp8.INDEX_MXFP8),  # index keys
}

KEY_FORMATS: tuple[RowFormat, ...] = tuple(form for form in STREAM_FORMATS["index"].values() if form is not None)

write_rows = Operation("write_rows", {"reference": reference.write_rows, "triton": triton_kernels.write_rows})

__all__ = [
    "KEY_FORMATS",
    "PAGE",
    "STREAM_FORMATS",
    "PackedRows",
    "RowFormat",
    "decode_rows",
    "encode_rows",
    "pack_layout",
    "read_rows",
    "write_rows",
]
