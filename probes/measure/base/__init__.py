"""What the measuring commands share: none of their rooms imports another one.

models: the model that is measured, its family and layers. settings: contexts and numbers, checked. text, haystack,
needles: what is read, and asking for something hidden. variants: ways to read a context. attending, mass: what layers
attend to. logits: agreement, KL, perplexity. document, tables, markdown, plots: the report. measurement: the parts of a
command.
"""
