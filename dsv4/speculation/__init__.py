"""Speculative generation: drafts from a cheap source, one pass of the model that verifies them all, and rewinding of what was wrong.

- `draft`: where drafts come from (the MTP block, or the text itself); - `accept`: which of them stay; - `loop`: the generation;
- `result`: what is counted.
"""
