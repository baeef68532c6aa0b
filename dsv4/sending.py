"""Copies small tensors to the device."""

from collections.abc import Sequence

import torch


def sent(values: Sequence | torch.Tensor, device: torch.device) -> torch.Tensor:
    """Numbers of the host as a tensor on `device`, without waiting for it. A tensor that is already there is
    returned."""
    return _readable(values, device).to(device, non_blocking=True)


def send(values: Sequence | torch.Tensor, to: torch.Tensor) -> None:
    """Copy numbers of the host into the tensor `to`, without waiting for the device."""
    to.copy_(_readable(values, to.device), non_blocking=True)


def _readable(values: Sequence | torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy in memory that a GPU reads directly; it is reused for other numbers only after the GPU has read it."""
    held = torch.as_tensor(values)
    return held.pin_memory() if device.type == "cuda" and held.device.type == "cpu" else held
