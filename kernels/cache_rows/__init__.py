"""Rows of a cache as bytes: the public FP8 and FP4 layouts."""

from dsv4.kernels.cache_rows import reference
from dsv4.kernels.cache_rows import triton as triton_kernels
from dsv4.kernels.cache_rows.formats import PAGE, PackedRows, RowFormat, pack_layout
from dsv4.kernels.cache_rows.reference import decode_rows, encode_rows, read_rows
from dsv4.kernels.dispatch import Operation

write_rows = Operation("write_rows", {"reference": reference.write_rows, "triton": triton_kernels.write_rows})

__all__ = ["PAGE", "PackedRows", "RowFormat", "decode_rows", "encode_rows", "pack_layout", "read_rows", "write_rows"]
