"""Recall of the lightning indexer, and whether the model finds needles with it. See README.md.

measure: the whole of it. observe: what a subject's CSA layers did at the measured queries. oracle: what they should
have done.
figures: recall, mass kept, overlap, distance. mass: the dense attention beside the sparse one. haystack, needles:
asking for something hidden. text: what the subject reads. document, markdown, plots: the report. cli: `dsv4 recall`.
"""
