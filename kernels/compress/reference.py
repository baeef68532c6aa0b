"""Gated pooling of raw rows into one compressed entry."""

import torch


def gated_pool(kv: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """C_w = Σ_j softmax_j(gate_j) ⊙ kv_j, the softmax per channel over the slots (eqs. 9–12, 20–23).

    kv, gate fp32 [M, S, D]; a slot with gate −inf contributes nothing. Returns fp32 [M, D].
    """
    return (torch.softmax(gate, 1) * kv).sum(1)
