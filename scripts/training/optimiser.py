"""Muon for the matrices inside the blocks, AdamW for everything else.

Muon replaces a matrix's momentum by the nearest orthogonal one (a quintic Newton–Schulz iteration), scaled so that
an update has the root mean square of AdamW's. Stacks are taken as the matrices they are made of, and all matrices of
one shape go through the iteration as one batch.
"""

from collections import defaultdict

import torch

COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonal(m: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """m [S, O, K] → matrices of nearly unit singular values, bf16."""
    a, b, c = COEFFICIENTS
    x = m.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.float().norm(dim=(-2, -1), keepdim=True) + 1e-7).bfloat16()
    for _ in range(steps):
        g = x @ x.mT
        x = a * x + (b * g + c * g @ g) @ x
    return x.mT if tall else x


class Optimiser:
    """One learning rate for both. State: momenta, which a restart may leave behind."""

    def __init__(self, named: dict[str, torch.nn.Parameter], weight_decay: float = 0.1):
        wanted = {n: p for n, p in named.items() if p.requires_grad}
        self.matrices = {n: p for n, p in wanted.items() if is_muon(n, p)}
        rest = [p for n, p in wanted.items() if n not in self.matrices]
        self.adam = torch.optim.AdamW(
            [
                {"params": [p for p in rest if p.dim() > 1], "weight_decay": weight_decay},
                {"params": [p for p in rest if p.dim() <= 1], "weight_decay": 0.0},
            ],
            lr=0.0,
            betas=(0.9, 0.95),
            eps=1e-10,
            fused=next(iter(wanted.values())).is_cuda,
        )
        self.momenta = {n: torch.zeros_like(p) for n, p in self.matrices.items()}
        self.weight_decay = weight_decay
        self.shapes = defaultdict(list)
        for name, p in self.matrices.items():
            self.shapes[tuple(split(name, p).shape[-2:])].append(name)

    @torch.no_grad()
    def step(self, lr: float) -> None:
        for group in self.adam.param_groups:
            group["lr"] = lr
        self.adam.step()
        names = list(self.matrices)
        momenta, grads = [self.momenta[n] for n in names], [self.matrices[n].grad for n in names]
        torch._foreach_lerp_(momenta, grads, 0.05)
        ahead = dict(zip(names, torch._foreach_lerp(grads, momenta, 0.95)))  # Nesterov
        torch._foreach_mul_([self.matrices[n] for n in names], 1 - lr * self.weight_decay)
        for (O, K), group in self.shapes.items():
            parts = [split(n, ahead[n]) for n in group]
            update = orthogonal(torch.cat(parts)).float() * (-lr * 0.2 * max(O, K) ** 0.5)
            for name, part in zip(group, update.split([p.shape[0] for p in parts])):
                self.matrices[name].add_(part.reshape(self.matrices[name].shape))


def is_muon(name: str, p: torch.Tensor) -> bool:
    """Matrices of blocks; not embeddings, routers, hyper-connections or position biases."""
    return p.dim() > 1 and (".layers." in name or ".mtp." in name) and name.endswith(".weight") and ".gate." not in name


def split(name: str, p: torch.Tensor) -> torch.Tensor:
    """The matrices [S, O, K] that a parameter stacks."""
    if name.endswith(("w13.weight", "wkv_gate.weight")):  # two matrices along the rows
        return p.reshape(-1, p.shape[-2] // 2, p.shape[-1])
    return p.reshape(-1, *p.shape[-2:])
