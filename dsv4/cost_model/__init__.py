"""The cost model of a decode step over a long cache, fitted to measured rows, and where sparse reading pays.

time of one layer's attention = bytes / β + c₀   (+ c₁ where blocks must be found first)
"""
