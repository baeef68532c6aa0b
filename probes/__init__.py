"""Probes: one file each, emitting checks for the audits. None exists yet."""
