"""Speculative decoding: how many tokens to draft (`policy` is the specification), what that costs, and simulation."""

from dsv4.speculation.cost_aware import CostAware, CostAwareParameters
from dsv4.speculation.costs import CostTable, read_costs
from dsv4.speculation.oracle import Informed, Oracle
from dsv4.speculation.policy import LARGEST, Adaptive, AdaptiveParameters, Policy, Static, room, under_pressure
from dsv4.speculation.policy_device import DevicePolicy, on_device
from dsv4.speculation.simulate import Run, simulate
from dsv4.speculation.trace import Request, Trace, read_trace, write_trace

__all__ = [
    "LARGEST", "Adaptive", "AdaptiveParameters", "CostAware", "CostAwareParameters", "CostTable", "DevicePolicy", "Informed", "Oracle",
    "Policy", "Request", "Run", "Static", "Trace", "on_device", "read_costs", "read_trace", "room", "simulate", "under_pressure",
    "write_trace",
]
