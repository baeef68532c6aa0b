"""Tiles of a cache in host memory, staged on the device when they are chosen."""

from dsv4.kernels.dispatch import Operation
from dsv4.kernels.staging import reference
from dsv4.kernels.staging import triton as triton_kernels
from dsv4.kernels.staging.table import Pool, SlotTable, items_of, new_table, paired

fetch = Operation("fetch", {"reference": reference.fetch, "triton": triton_kernels.fetch})
bring = Operation("bring", {"reference": reference.bring, "triton": triton_kernels.bring})
write_back = Operation("write_back", {"reference": reference.write_back, "triton": triton_kernels.write_back})

__all__ = ["Pool", "SlotTable", "bring", "fetch", "items_of", "new_table", "paired", "write_back"]
