"""Sections 1.6 and 1.10: what a process leaves in a run: memory that nobody wrote, and state of the first run."""

import torch

from dsv4.probes.faults import Site, mutation

TAKEN = 0x7E000000  # a counter that no row reaches: large bytes of whoever had the memory


@mutation("1.6", bugs=(87, 88), parts=("unwritten memory, selections",), probes=("fresh_process",))
def counters_of_picks_are_never_cleared(site: Site) -> None:
    """Each query counts its picks in a buffer that is not cleared: where it holds a large number, the first pick is
    taken again in place of the last."""

    def change(real):
        def topk(scores, k, *rest):
            found = real(scores, k, *rest)
            count = torch.empty(*found.shape[:2], dtype=torch.int32, device=found.device)
            if found.shape[-1]:
                found[..., -1] = torch.where(count >= TAKEN, found[..., 0], found[..., -1])
            return found

        return topk

    site.kernel("topk_entries", change)


@mutation("1.10", bugs=(135,), parts=("state kept between runs",), probes=("fresh_process",))
def the_first_run_sets_a_scale_for_good(site: Site) -> None:
    """The scale of attention's sums is taken from the first step that a process runs and kept: within every tolerance,
    and the same in every repeat."""

    def change(real):
        held = {}

        def attend(q, *rest):
            scale = held.setdefault("scale", 1 + 1e-7 * (1 + q.shape[0] % 97))
            return (real(q, *rest).float() * scale).to(q.dtype)

        return attend

    site.kernel("sparse_attention", change)
