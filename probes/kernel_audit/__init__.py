"""Audit of anybody's kernel for one operation: what `dsv4 kernel` runs."""
