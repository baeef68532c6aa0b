"""How a step is run and what a device has room for: captured graphs, devices, bytes, times, threads."""
