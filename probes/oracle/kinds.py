"""Kinds of layers by compression ratio, as the specification (§2) has them. Nothing of dsv4's own spec is asked.

A window layer has no entries. A CSA layer pools overlapping windows, and an indexer selects among its entries. An HCA
layer pools windows one by one, and every visible entry is read.
"""

WINDOW, CSA, HCA = 0, 4, 128
NAMES = {WINDOW: "window", CSA: "csa", HCA: "hca"}
OVERLAP = {WINDOW: 0, CSA: 2, HCA: 1}  # windows of `ratio` tokens that one entry pools
PATHS = {WINDOW: "window only", CSA: "selected", HCA: "all"}  # which entries attention reads beside its window
