"""What the probe `bill` counts: bytes that a decode step reads, by what its output depends on, and weights by the tree
that holds them."""
