"""Speculative generation: drafts from a cheap source, one pass of the model that verifies them all, and a rewind of the
wrong ones.

- `draft`: where drafts come from (the MTP block, or the text itself); `accept`: which of them stay; `rounds`: passes
  that stay on the device, with `device_drafters`, `choosing` and `noise`; `result`: what is counted. Requests that use
  them are advanced by `dsv4.engine`.
- `policy`: how many tokens to draft, the specification; `policy_device`: the policies for a batch on the device;
  `costs`, `trace`, `oracle`, `simulate`: what each size costs, which drafts would have been accepted, and what each
  policy gains.
"""

from dsv4.cache.paging import under_pressure
from dsv4.cache.streams import MAX_DRAFTS
from dsv4.speculation.cost_aware import CostAware, CostAwareParameters
from dsv4.speculation.costs import CostTable, read_costs
from dsv4.speculation.oracle import Informed, Oracle
from dsv4.speculation.policy import LARGEST, Adaptive, AdaptiveParameters, Policy, Static, room
from dsv4.speculation.policy_device import DevicePolicy, on_device
from dsv4.speculation.simulate import Run, simulate
from dsv4.speculation.trace import Request, Trace, read_trace, write_trace

__all__ = [
    "LARGEST",
    "MAX_DRAFTS",
    "Adaptive",
    "AdaptiveParameters",
    "CostAware",
    "CostAwareParameters",
    "CostTable",
    "DevicePolicy",
    "Informed",
    "Oracle",
    "Policy",
    "Request",
    "Run",
    "Static",
    "Trace",
    "on_device",
    "read_costs",
    "read_trace",
    "room",
    "simulate",
    "under_pressure",
    "write_trace",
]
