"""Expert routing by score (sqrtsoftplus, with a bias for selection only) and by token hash."""

from dsv4.kernels.dispatch import Operation
from dsv4.kernels.router import cpu, reference, training
from dsv4.kernels.router import triton as triton_kernels

route_scored = Operation(
    "route_scored",
    {
        "reference": reference.route_scored,
        "cpu": cpu.route_scored,
        "training": training.route_scored,
        "triton": triton_kernels.route_scored,
    },
)
route_hashed = Operation(
    "route_hashed",
    {
        "reference": reference.route_hashed,
        "cpu": cpu.route_hashed,
        "training": training.route_hashed,
        "triton": triton_kernels.route_hashed,
    },
)
