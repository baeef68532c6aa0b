"""Grouped-query attention over a position-addressed cache of keys and values."""

from kernels.dispatch import Operation
from kernels.grouped_attention import reference, training

grouped_attention = Operation("grouped_attention", {"reference": reference.grouped_attention, "training": training.grouped_attention})
