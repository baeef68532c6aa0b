"""What the measurements share. No room of a measurement imports another one's (tests/dsv4/test_layers.py).

measurement: what a command runs (`dsv4.commands.measuring`). models: the model that is measured, its family, layers and
reach. settings: contexts and numbers, checked. text, haystack, planting: what is read, and what is hidden in it. tasks,
word_tasks, ground: tasks as in RULER. asking, needles: answers by teacher forcing and by generating, and their figures.
variants: ways to read a context. attending, mass: what layers attend to. logits: agreement, KL, perplexity. document,
tables, markdown, plots: the report.
"""
