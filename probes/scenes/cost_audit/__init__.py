"""The counts of the probe `cost_model`: bytes that a decode step reads, by what its output depends on, and weights by
the tree of modules."""
