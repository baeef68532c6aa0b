"""The probes: one file each, with a page beside it."""
