"""Formats of a report. Each module has `render(report, stem) -> str`; see `files`, which writes them."""

from dsv4.moved import former

__getattr__ = former(__name__, "dsv4.probes.report.files")  # the names that `dsv4.probes.report` had as a module
