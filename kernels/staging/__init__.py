"""Tiles of a cache in host memory, staged on the device as they are chosen."""

from kernels.dispatch import Operation
from kernels.staging import reference
from kernels.staging import triton as triton_kernels
from kernels.staging.table import Pool, SlotTable, items_of, new_table, paired

fetch = Operation("fetch", {"reference": reference.fetch, "triton": triton_kernels.fetch})
write_back = Operation("write_back", {"reference": reference.write_back, "triton": triton_kernels.write_back})

__all__ = ["Pool", "SlotTable", "fetch", "items_of", "new_table", "paired", "write_back"]
