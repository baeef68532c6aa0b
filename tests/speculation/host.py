"""`Adaptive` over arrays, for tests: numpy rounds each fp32 operation as numpy.float32 scalars do."""

import numpy as np


def vector_means(policy, mean: np.ndarray, accepted: np.ndarray, proposed: np.ndarray) -> np.ndarray:
    """mean fp32 [B] after a pass."""
    ratio = accepted.astype(np.float32) / np.maximum(proposed, 1).astype(np.float32)
    counts = (proposed > 0) | (policy.parameters.undrafted == "decay")
    return np.where(counts, policy.weight * ratio + policy.keep * mean, mean)


def vector_sizes(policy, mean: np.ndarray, pressure: bool) -> np.ndarray:
    size = np.array(policy.parameters.sizes)[np.searchsorted(np.array(policy.thresholds), mean, side="right")]
    return np.minimum(size, policy.pressure_cap) if pressure else size
