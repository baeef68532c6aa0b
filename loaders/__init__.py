"""Checkpoints: number formats, names of each layout, reading, writing, and the load ledger."""
