"""Caches in host memory, of which a step reads what its selector chooses.

`memory` pins pages and maps them, `grouped` keeps keys and values of a GQA layer there, `entries` the main entries of a CSA layer,
`stream` brings a whole layer at a time (dense attention, and the yardstick), `ahead` overlaps a guess with other work.
"""

from kernels.block_choice import choose_blocks
from kernels.gather_attention import gather_attention
from kernels.grouped_attention import grouped_attention
from kernels.rotary_rows import rotary_rows
from kernels.staging import fetch, write_back

HOST_OPERATIONS = {op.name: op for op in (choose_blocks, fetch, gather_attention, grouped_attention, rotary_rows, write_back)}
