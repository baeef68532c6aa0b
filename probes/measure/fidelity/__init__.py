"""What reading a context sparsely costs: a policy, or a k of CSA, held against the same model reading everything. See
README.md.

runs: the texts that it is measured on. findability: what a selector keeps of the dense attention. settings, document,
markdown, tables, plots: the report. measurement: `dsv4 fidelity`. Variants, needles, agreement and KL are in the base.
"""
