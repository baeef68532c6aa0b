"""Caches in host memory, of which a step reads what its selector chooses. See README.md beside this file.

`choice` is what a model is loaded with. `memory` pins pages and maps them, `grouped` keeps keys and values of a GQA
layer there, `layer` makes them the cache of a GQA model, `entries` keeps the main entries of a CSA layer, `stream`
copies a whole layer at a time (prompts, and dense attention as the baseline), `ahead` overlaps a guessed fetch with
other work, `planning` counts the bytes.
"""
