"""Uniform numbers by counting: each is a function of a row's seed, a position of its text and what the number decides.

The n-th output of SplitMix64 (Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators", figure 17;
the finalizer is Stafford's mix 13) is mix(state + n · γ), so any of them can be had without those before it. Integers
of 64 bits that wrap are the same on every device: a captured graph needs no state of the host, and draws what an eager
run on a CPU draws.

**What may be drawn twice.** A round drafts beyond the place that turns out to be its last, and a later round draws
there again, with the same numbers. That biases nothing. Let t be the last position that has come out after some round.
Everything decided so far (tokens, how many drafts stayed, the sizes that policies chose by that, and so where the next
round begins) is a function of numbers at positions up to t: a draft at a position decides only about itself and, if it
stays, about places behind it; the first draft that goes ends what the round says. Sizes that adapt are such functions
too. Given all that, the numbers beyond t are still independent and uniform, whatever was computed of them and thrown
away; t is a stopping time of the sequence of positions. Numbers at positions up to t are never read again:
positions only rise. Rows of a batch must have seeds of their own, because policies may choose one row's size by
another's luck.
"""

import torch

DRAFT, KEEP, OWN = range(3)  # which token is drafted; whether the draft stays; the model's own token
ROLES = 3


def _signed(word: int) -> int:
    """A word of 64 bits as torch holds it."""
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
    state = splitmix64(seeds, 1)  # else neighbouring seeds would be one sequence, shifted
    word = splitmix64(state.view(-1, *[1] * (at.dim() - 1)), at * ROLES + (role + 1))
    return _shifted(word, 11).double() * 2.0**-53


def row_seeds(seed: int, batch: int, device: torch.device | str) -> torch.Tensor:
    """int64 [batch]: seed + b of row b, so that a row by itself with that seed draws what it draws here."""
    return torch.full((batch,), seed, dtype=torch.int64, device=device) + torch.arange(batch, device=device)
