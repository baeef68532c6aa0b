"""Section 1.10: steps that are captured once and replayed, and sequences of operations that run as one."""

import torch

from dsv4.cache.rows import Tokens
from dsv4.model.step import CapturedStep
from dsv4.probes.faults import Site, mutation
from dsv4.runtime.graph import DecodeGraph

FP4 = ("fp8", "fp4")


def of_capture(site: Site, name: str, change) -> None:
    """Method `name` of captured steps is change(what it was, step, arguments)."""
    site.unfused("place")
    real = getattr(CapturedStep, name)
    site.patch(CapturedStep, name, lambda step, *args: change(real, step, *args))


@mutation("1.10", bugs=(136,), parts=("captured step, positions",), probes=("captured",))
def positions_frozen_at_capture(site: Site) -> None:
    """Positions are computed before the capture: every replay stands where the first step stood."""
    held = {}

    def init(step, ids, start, *rest):
        real(step, ids, start, *rest)
        step.pos = held.setdefault((id(start), step.T), step.pos)

    real = site.patch(CapturedStep, "__init__", init)


@mutation(
    "1.10", bugs=(136,), parts=("captured step, window slots", "captured step, window rows"), probes=("captured",)
)
def window_slots_of_the_hosts_start(site: Site) -> None:
    """Slots of the window come from the host's count of tokens, which a replay does not see."""
    held = {}

    def slots(tokens, step):
        found, ring = real(tokens, step), tokens.rows
        return held.setdefault((ring.R, step.N, id(step.start)), found) if step.captured and ring.keep >= 7 else found

    real = site.patch(Tokens, "slots", slots)


@mutation("1.10", bugs=(), parts=("captured step, windows that complete",), probes=("captured",))
def windows_complete_one_token_late_in_replays(site: Site) -> None:
    """A captured step pools the window that the token before has completed: its last token does not see its entry."""
    of_capture(
        site,
        "new_windows",
        lambda real, step, ratio: (
            (step.start.unsqueeze(1) - 1).clamp(min=0) // ratio
            + torch.arange(step.completed(ratio), device=step.device)
        ),
    )
    of_capture(
        site,
        "completes",
        lambda real, step, ratio: (
            (step.new_windows(ratio) + 1) * ratio <= step.start.unsqueeze(1) + step.T - 1
        ).flatten(),
    )


@mutation("1.10", bugs=(136, 137), parts=("captured step, visible entries",), probes=("captured",))
def visible_entries_from_the_capacity(site: Site) -> None:
    """A captured step has the buffers' length for the count of entries: queries see what nobody has written."""
    of_capture(site, "visible", lambda real, step, ratio: torch.full_like(step.pos, step.max_visible(ratio)))


@mutation("1.10", bugs=(138, 97), parts=("captured step, resting rows",), probes=("captured",))
def resting_rows_advance_in_replays(site: Site) -> None:
    """Every row of the batch gets longer with each replay, whether it was active or not."""
    real = site.patch(DecodeGraph, "step", lambda graph, ids=None, active=None: real(graph, ids, None))


@mutation("1.10", bugs=(136,), parts=("captured step, start",), probes=("captured",))
def start_not_moved_after_a_replay(site: Site) -> None:
    """The step does not move its start on, though the host takes it for moved: all replays overwrite one position."""

    def run(graph):
        real(graph)
        graph.start -= graph.tokens

    real = site.patch(DecodeGraph, "_run", run)


@mutation("1.10", bugs=(132,), parts=("captured step, start",), probes=("captured",))
def replays_do_not_see_a_rewind(site: Site) -> None:
    """The start on the device is set once: after a rewind the next replay goes on from where the last one ended."""

    def place(graph, lengths):
        if graph._held is None:
            real(graph, lengths)
        graph._held = list(lengths)

    real = site.patch(DecodeGraph, "_place", place)


@mutation("1.10", bugs=(129,), parts=("captured step, windows that complete",), probes=("captured",))
def one_window_a_captured_step(site: Site) -> None:
    """Room for one new window is captured, whatever the tokens of a step: a verify pass of five loses the second."""
    of_capture(site, "completed", lambda real, step, ratio: 1)


@mutation("1.10", bugs=(140,), parts=("captured step, entries", "captured step, index keys"), probes=("captured",))
def windows_in_replays_pool_tokens_that_do_not_exist(site: Site) -> None:
    """A replay pools a row of the ring for the tokens before the first one: whatever memory holds there."""

    def inputs(real):
        some = lambda w: w._replace(rows=torch.where((w.rows < 0).all(1, keepdim=True), w.rows, w.rows.clamp(min=0)))
        return lambda *args: real(*args[:-1], tuple(some(w) for w in args[-1]))

    site.composition("attention_inputs", inputs)


@mutation("1.10", bugs=(98,), parts=("linears",), probes=("backend_matrix",))
def fused_linears_without_their_norm(site: Site) -> None:
    """The kernel that multiplies several matrices by one input leaves out the norm before them."""
    site.composition("linears", lambda real: lambda x, norm, *rest: real(x, None, *rest))


@mutation("1.2", bugs=(), parts=("latent",), probes=("backend_matrix",), numerics="qat", caches=FP4)
def fused_latent_without_the_simulation(site: Site) -> None:
    """The kernel that norms and rotates the latent does not pass it through FP8: a step sees other rows than later
    steps do."""
    site.composition("latent", lambda real: lambda *args: real(*args[:-1], False))


@mutation("1.2", bugs=(21,), parts=("linears",), probes=("backend_matrix",), numerics="qat")
def fused_linears_forget_to_simulate(site: Site) -> None:
    """The kernel that multiplies several matrices by one input takes it as it is where FP8 was asked for."""

    def exact(real):
        return lambda x, norm, eps, weights, simulate, dtypes: real(
            x, norm, eps, weights, (False,) * len(simulate), dtypes
        )

    site.composition("linears", exact)


@mutation("1.10", bugs=(), parts=("moe",), probes=("backend_matrix",))
def fused_moe_without_the_shared_expert(site: Site) -> None:
    """The kernel that sums a token's experts leaves out the shared one."""

    def routed(real):
        def moe(x, indices, routing, w13, w2, shared, *rest):
            down = shared[2]
            nothing = down._replace(weight=torch.zeros_like(down.weight.view(torch.uint8)).view(down.weight.dtype))
            return real(x, indices, routing, w13, w2, (*shared[:2], nothing), *rest)

        return moe

    site.composition("moe", routed)
