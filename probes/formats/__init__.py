"""Formats of a report. Each module has `render(report, stem) -> str`; see probes/report.py."""
