"""Recall of the lightning indexer, and whether the model finds needles with it. See README.md.

measure: the whole of it. observe: what a subject's CSA layers did at the measured queries. oracle: what they should
have done. figures: recall, mass kept, overlap, distance. needles: with and without the compressed branches. settings,
document, markdown, tables, plots: the report. measurement: `dsv4 recall`.
"""
