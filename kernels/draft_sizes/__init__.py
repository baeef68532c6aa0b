"""The cost-aware policy of `dsv4.speculation` on a GPU, in three launches a round, where tensor operations would be
fifty."""

from dsv4.kernels.draft_sizes.triton import choose, observe, weigh

__all__ = ["choose", "observe", "weigh"]
