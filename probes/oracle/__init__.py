"""The model's mathematics in float64, written from the specification alone: what the probes hold every subject against.

Nothing here is taken from the code that it judges: no module of `kernels`, none of `dsv4` but its errors, and of
`loaders` only what `weights_of(path, independent=False)` wraps. § numbers are those of the specification
(deepseek_v4.md).

config: config.json in its published forms. formats: number formats, their decoders, and the quantisation simulation.
weights: tensors of a checkpoint directory by official name. attention: one function a step of an attention layer.
blocks: hyper-connections, router, experts. model: all together.
"""

from dsv4.probes.oracle.config import OracleConfig
from dsv4.probes.oracle.model import Oracle, Run
from dsv4.probes.oracle.weights import Weights, weights_of

__all__ = ["Oracle", "OracleConfig", "Run", "Weights", "weights_of"]
