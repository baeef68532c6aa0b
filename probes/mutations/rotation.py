"""Section 1.3: RoPE and YaRN."""

import torch

from probes.mutations import Site, mutation


@mutation("1.3", bugs=(32, 34), parts=("rotation",), probes=("rope",))
def half_split_rotation(site: Site) -> None:
    """Dims j and j + R/2 are rotated as a pair, as Llama does, instead of neighbours."""
    def halves(real):
        def rotate(x, cis):
            R = 2 * cis.shape[-1]
            order = torch.arange(R).view(2, -1).T.flatten()
            y, out = x.clone(), x.clone()
            y[..., -R:] = x[..., -R:][..., order]
            out[..., -R:][..., order] = real(y, cis)[..., -R:]
            return out
        return rotate
    site.kernel("rotate", halves)
