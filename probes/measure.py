"""How far two runs are apart, token by token, and how far they may be by the numerics that both used."""

import torch

TOLERANCES = {  # numerics → (share of tokens that must agree, relative error allowed of those), and why
    "fp32": (1.0, 2e-4, "fp32 sums in another order, measured against transformers: 2e-4 of logits of size 10"),
    "native": (0.9, 5e-2, "bf16 activations: 8 bits, some 20 roundings a layer; a pick beside the k boundary may differ"),
    "qat": (0.8, 1e-1, "simulated FP8 and FP4: a value beside a rounding boundary moves by a whole step"),
    "qat:fp32": (0.8, 1e-1, "simulated FP8 and FP4: a value beside a rounding boundary moves by a whole step"),
}


def token_errors(found: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    """‖found − wanted‖ / ‖wanted‖ of each token, [B, T] of [B, T, ...]. NaN where either holds one."""
    a, b = found.double().flatten(2), wanted.double().flatten(2)
    return (a - b).norm(dim=-1) / b.norm(dim=-1).clamp(min=1e-12)


def agreeing(errors: torch.Tensor, numerics: str) -> tuple[float, str, float]:
    """(the error that the required share of tokens stays below, where its limit comes from, the limit).

    A NaN anywhere makes the error infinite: it is never within what numerics explain.
    """
    share, limit, source = TOLERANCES.get(numerics, TOLERANCES["native"])
    flat = errors.flatten()
    if flat.numel() == 0:
        return float("nan"), source, limit
    if torch.isnan(flat).any():
        return float("inf"), source, limit
    return torch.quantile(flat, share).item(), f"{share:.0%} of tokens; {source}", limit


def tokens(subject, T: int, seed: int, rows: int = 1) -> torch.Tensor:
    """Random ids int64 [rows, T] of the subject's vocabulary."""
    return torch.randint(0, subject.config.vocab_size, (rows, T), generator=torch.Generator().manual_seed(seed))


def pieces_of(T: int, size: int) -> list[int]:
    """T in steps of `size`, the last shorter."""
    return [min(size, T - start) for start in range(0, T, size)]
