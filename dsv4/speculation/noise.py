"""Counter-based uniform numbers: each is a function of a row's seed, a position of its text and the decision it is for.

The n-th output of SplitMix64 (Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators", figure 17;
the finalizer is Stafford's mix 13) is mix(state + n · γ), so each can be computed without those before it. 64-bit
integers wrap alike on every device: a captured graph needs no state of the host, and draws the numbers of an eager run
on a CPU.

**Numbers that are drawn twice.** A round drafts beyond the position that becomes its last, and a later round draws
there again, with the same numbers. This causes no bias. Let t be the last output position after some round. Every
decision so far (tokens, accepted drafts, sizes that policies chose, and so where the next round begins) is a function
of numbers at positions up to t: a draft influences only its own position and, if it is accepted, later ones, and the
first rejected draft ends the round's output. Adaptive sizes are such functions too. So the numbers beyond t are still
independent and uniform, whatever was computed from them and discarded: t is a stopping time of the sequence of
positions. Numbers at positions up to t are never read again, because positions only rise. Each row of a batch needs its
own seed, because a policy may choose one row's size by another row's draws.
"""

import torch

DRAFT, KEEP, OWN = range(3)  # which token is drafted; whether the draft is accepted; the model's own token
ROLES = 3


def _signed(word: int) -> int:
    """A 64-bit word as torch's signed int."""
    return word - (1 << 64) if word >> 63 else word


GAMMA = _signed(0x9E3779B97F4A7C15)
ROUNDS = ((30, _signed(0xBF58476D1CE4E5B9)), (27, _signed(0x94D049BB133111EB)))
LAST_SHIFT = 31


def _shifted(z: torch.Tensor, n: int) -> torch.Tensor:
    """z >> n of unsigned words: torch's shift keeps the sign."""
    return (z >> n) & ((1 << (64 - n)) - 1)


def splitmix64(state: torch.Tensor, n: torch.Tensor | int) -> torch.Tensor:
    """Output number n ≥ 1 of the generator that begins at `state`; int64 tensors that broadcast, read as words of 64
    bits."""
    z = state + n * GAMMA
    for shift, factor in ROUNDS:
        z = (z ^ _shifted(z, shift)) * factor
    return z ^ _shifted(z, LAST_SHIFT)


def uniforms(seeds: torch.Tensor, at: torch.Tensor, role: int) -> torch.Tensor:
    """fp64 in [0, 1), multiples of 2⁻⁵³, of seeds int64 [B] and positions `at` int64 [B] or [B, W]; role: DRAFT, KEEP
    or OWN."""
    state = splitmix64(seeds, 1)  # otherwise neighbouring seeds would give one sequence, shifted
    word = splitmix64(state.view(-1, *[1] * (at.dim() - 1)), at * ROLES + (role + 1))
    return _shifted(word, 11).double() * 2.0**-53


def row_seeds(seed: int, batch: int, device: torch.device | str) -> torch.Tensor:
    """int64 [batch]: seed + b of row b, so that a row alone with that seed draws the same numbers."""
    return torch.full((batch,), seed, dtype=torch.int64, device=device) + torch.arange(batch, device=device)
