"""What the measurements share. No room of a measurement imports another one's (tests/dsv4/test_layers.py).

measurement: what a command runs (`dsv4.commands.measuring`). models: the model that is measured, its family, layers and
reach. settings: contexts and numbers, checked. text, haystack, needles: what is read, and asking for something hidden.
variants: ways to read a context. attending, mass: what layers attend to. logits: agreement, KL, perplexity. document,
tables, markdown, plots: the report.
"""
