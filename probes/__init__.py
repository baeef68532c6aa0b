"""Probes: one file each, with a page beside it. They emit the checks of an audit."""
