"""Run-time termination of attention: the share of tiles it skips, the error, and whether it stops at the right tile.
See README.md.

walk: a query's output after each tile, from its definition in fp64. stops: where the probe and the oracle stop, the
error, the bound. orders: the tiles of a GQA model's policies, of CSA and of HCA. measure: walks of a model, needles,
sweeps. settings, document, markdown, plots: the report. measurement: `dsv4 termination`.
"""
