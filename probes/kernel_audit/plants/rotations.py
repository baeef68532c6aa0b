"""Planted faults of the Hadamard transform and of rotary embedding."""

import torch

from dsv4.kernels.hadamard import reference as hadamard
from dsv4.probes.kernel_audit.plant import Plant
from dsv4.probes.kernel_audit.plants.wrappers import after, common, gates, in_place, replaced


def _walsh(result, x):
    """Columns by the number of their sign changes."""
    D = x.shape[-1]
    matrix = hadamard.hadamard(torch.eye(D, device=x.device))
    return result[..., (matrix[:, 1:] * matrix[:, :-1] < 0).sum(1).argsort()]


def _in_blocks(honest):
    """One transform of every 32 columns."""
    return lambda x: honest(x.unflatten(-1, (-1, 32))).flatten(-2)


HADAMARD = {
    "no factor": (92, after(lambda r, x: (r.float() * x.shape[-1] ** 0.5).to(r.dtype))),
    "the factor is 1 / D": (92, after(lambda r, x: (r.float() * x.shape[-1] ** -0.5).to(r.dtype))),
    "Walsh's order": (92, after(_walsh)),
    "columns in reverse": (92, after(lambda r, x: r.flip(-1))),
    "blocks of 32 columns": (92, _in_blocks),
    "the last column is skipped": (
        26,
        replaced(0, lambda x: torch.cat((x[..., :-1], torch.zeros_like(x[..., -1:])), -1)),
    ),
}


def _parts(x, half):
    return x[..., : -2 * half], x[..., -2 * half :]


def _written(x, result):
    """The result in x, as `rotate` leaves it."""
    return x.copy_(result)


def _halves(honest):
    """Column i turns with column i + pairs."""

    def faulty(x, cis):
        kept, turned = _parts(x, cis.shape[-1])
        a, b = turned.float().chunk(2, -1)
        y = torch.cat((a * cis.real - b * cis.imag, a * cis.imag + b * cis.real), -1)
        return _written(x, torch.cat((kept, y.to(x.dtype)), -1))

    return faulty


def _first_columns(honest):
    def faulty(x, cis):
        half = cis.shape[-1]
        front = honest(x[..., : 2 * half].contiguous(), cis)
        return _written(x, torch.cat((front, x[..., 2 * half :]), -1))

    return faulty


def _table(change):
    """The rotations through `change` of their real and imaginary parts."""
    return replaced(1, lambda cis: torch.view_as_complex(change(torch.view_as_real(cis.resolve_conj())).contiguous()))


def _not_stored(honest):
    """The rotated rows are returned, and x stays as it was."""
    return lambda x, cis: honest(x.clone(), cis)


ROTATE = {
    "pairs of columns i and i + pairs": (91, _halves),
    "the first columns instead of the last": (91, _first_columns),
    "the other direction": (91, replaced(1, lambda cis: cis.conj().resolve_conj())),
    "cos and sin are swapped": (91, _table(lambda t: t.flip(-1))),
    "frequencies in reverse": (91, replaced(1, lambda cis: cis.flip(-1))),
    "the position of the row before": (91, replaced(1, lambda cis: cis.roll(1, 0))),
    "the position of the first row": (73, replaced(1, lambda cis: cis[:1].expand_as(cis).contiguous())),
    "the last pair is skipped": (
        26,
        replaced(1, lambda cis: torch.cat((cis[..., :-1], torch.ones_like(cis[..., -1:])), -1)),
    ),
    "x is not written": (91, _not_stored),
}


PLANTS = (
    *gates("hadamard", HADAMARD),
    *common("hadamard"),
    *gates("rotate", ROTATE),
    Plant("the table in bf16", "rotate", "gate", 91, _table(lambda t: t.bfloat16().float()), dtype=torch.float32),
    *in_place("rotate", (0,)),
)
