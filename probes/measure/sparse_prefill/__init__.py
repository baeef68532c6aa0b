"""What chunked sparse prefill costs in quality, on a checkpoint: `dsv4 sparse-prefill`. The README beside this file has
the definitions."""
