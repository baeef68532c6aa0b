"""Runs that an inference engine dumped, as one file that `dsv4 audit run --subject FILE` reads. See docs/engines.md."""
