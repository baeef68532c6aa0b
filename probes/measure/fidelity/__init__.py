"""What reading a context sparsely costs: a policy, or a k of CSA, held against the same model reading everything. See
README.md.

variants: a name and how to make a model run that way. measures: agreement, KL, perplexity, exact prefixes, as pure
functions. runs:
the texts that they are measured on. findability: what a selector keeps of the dense attention. needles: hidden values,
with bounds.
settings, document, markdown, tables, plots: the report. cli: `dsv4 fidelity`.
"""
