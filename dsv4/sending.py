"""Small tensors on their way to the device."""

from collections.abc import Sequence

import torch


def sent(values: Sequence | torch.Tensor, device: torch.device) -> torch.Tensor:
    """Numbers of the host as a tensor on `device`, without waiting for it. What is there already stays."""
    return _readable(values, device).to(device, non_blocking=True)


def send(values: Sequence | torch.Tensor, to: torch.Tensor) -> None:
    """Copy numbers of the host into the tensor `to`, without waiting for the device."""
    to.copy_(_readable(values, to.device), non_blocking=True)


def _readable(values: Sequence | torch.Tensor, device: torch.device) -> torch.Tensor:
    """In memory that a GPU reads by itself, and that is taken for other numbers only when it has."""
    held = torch.as_tensor(values)
    return held.pin_memory() if device.type == "cuda" and held.device.type == "cpu" else held
