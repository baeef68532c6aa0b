"""Caches in host memory, of which a step reads what its selector chooses. See README.md beside this file.

`choice` is what a model is loaded with. `memory` pins pages and maps them, `grouped` keeps keys and values of a GQA
layer there, `layer` makes them the cache of a GQA model, `entries` keeps the main entries of a CSA layer, `stream`
brings a whole layer at a time (prompts, dense attention, and the yardstick), `ahead` overlaps a guess with other work,
`planning` counts the bytes.
"""
