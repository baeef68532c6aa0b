"""What the probe `cost_model` counts: bytes that a decode step reads, by what its output depends on, and weights by the
tree that holds them."""
