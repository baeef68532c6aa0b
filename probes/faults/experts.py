"""Section 1.9: the router and the experts."""

import torch
import torch.nn.functional as F

from dsv4.model.moe import Experts, Gate, MoE
from dsv4.probes.faults import Site, mutation

SECTION = "1.9", "Experts"


def routing(site: Site, scores=None, chosen=None, weights=None, hashed=True) -> None:
    """Both routing operations by other scores(logits), chosen(scores, bias, k) or weights(picked, their bias,
    factor)."""
    plain = lambda z: F.softplus(z.double()).sqrt()
    share = lambda picked, bias, factor: picked / picked.sum(-1, keepdim=True) * factor
    score, pick, weigh = (
        scores or plain,
        chosen or (lambda s, bias, k: (s + bias).topk(k, -1).indices),
        weights or share,
    )

    def scored(real):
        def route(x, weight, bias, k, factor):
            s = score(x.float() @ weight.float().T)
            indices = pick(s, bias, k)
            return indices, weigh(s.gather(1, indices), bias[indices], factor).float()

        return route

    def by_id(real):
        def route(x, weight, table, ids, factor):
            indices = table[ids]
            picked = score(x.float() @ weight.float().T).gather(1, indices)
            return indices, weigh(picked, torch.zeros_like(picked), factor).float()

        return route

    site.kernel("route_scored", scored)
    if hashed:
        site.kernel("route_hashed", by_id)


def experts(site: Site, activation, routed: bool = True, shared: bool = True) -> None:
    """Experts with another activation(gate, up, limit), weights dequantised."""
    from dsv4.kernels.quantize import to_float

    def of_all(real):
        def run(x, indices, weights, w13, w2, limit, simulate):
            up, down, out = to_float(w13), to_float(w2), torch.zeros(x.shape, device=x.device)
            for e in indices.unique().tolist():
                token, slot = torch.nonzero(indices == e, as_tuple=True)
                gate, value = (x[token].float() @ up[e].T).chunk(2, -1)
                out.index_add_(
                    0, token, activation(gate, value, limit) * weights[token, slot].unsqueeze(-1) @ down[e].T
                )
            return out

        return run

    def of_one(real):
        return lambda x, w1, w3, w2, limit, simulate: (
            activation(x.float() @ to_float(w1).T, x.float() @ to_float(w3).T, limit) @ to_float(w2).T
        )

    if routed:
        site.kernel("experts", of_all)
    if shared:
        site.kernel("shared_expert", of_one)


# ---- router -------------------------------------------------------------------------------


@mutation("1.9", bugs=(117, 118), parts=("router",), probes=("moe_edges",))
def softplus_as_log_of_1_plus_exp(site: Site) -> None:
    """log(1 + exp(x)) in fp32: 0 below −16.6, so that weights are 0 or NaN, and infinite above 88.7."""
    routing(site, scores=lambda z: torch.log(1 + torch.exp(z)).sqrt())


@mutation("1.9", bugs=(117,), parts=("router",), probes=("moe_edges",))
def softplus_vanishes(site: Site) -> None:
    """log(1 + exp(x)) in fp32 below 20, x above: scores below −16.6 are 0."""
    routing(site, scores=lambda z: torch.where(z > 20, z, torch.log(1 + torch.exp(z.clamp(max=20)))).sqrt())


@mutation("1.9", bugs=(117,), parts=("router",), probes=("moe_edges",))
def softplus_overflows(site: Site) -> None:
    """log(exp(x)) forms exp(x) first: infinite above 88.7 in fp32."""
    routing(site, scores=lambda z: torch.log1p(torch.exp(z)).sqrt())


@mutation("1.9", bugs=(120,), parts=("router",), probes=("moe_edges",))
def softplus_in_bf16(site: Site) -> None:
    """Scores are computed in bf16."""
    routing(site, scores=lambda z: F.softplus(z.bfloat16()).sqrt().float())


@mutation("1.9", bugs=(), parts=("router",), probes=("moe_edges",))
def scores_by_sigmoid(site: Site) -> None:
    """Scores are sigmoids, as in the generation before."""
    routing(site, scores=torch.sigmoid)


@mutation("1.9", bugs=(), parts=("router",), probes=("moe_edges",))
def root_of_the_softplus_missing(site: Site) -> None:
    """Scores are softplus, without the root."""
    routing(site, scores=lambda z: F.softplus(z.double()))


@mutation("1.9", bugs=(), parts=("router",), probes=("moe_edges",))
def bias_weighs(site: Site) -> None:
    """The bias that should only select is part of the weights."""
    routing(site, weights=lambda picked, bias, factor: (picked + bias) / (picked + bias).sum(-1, keepdim=True) * factor)


@mutation("1.9", bugs=(), parts=("router",), probes=("moe_edges",))
def bias_does_not_select(site: Site) -> None:
    """Experts are chosen by score alone: the bias is loaded and unused."""
    routing(site, chosen=lambda s, bias, k: s.topk(k, -1).indices)


@mutation("1.9", bugs=(), parts=("router",), probes=("moe_edges",))
def weights_not_normalised(site: Site) -> None:
    """The weights of a token's experts do not sum to the scaling factor: no renormalisation."""
    routing(site, weights=lambda picked, bias, factor: picked * factor)


@mutation("1.9", bugs=(), parts=("router",), probes=("moe_edges",))
def scaling_factor_missing(site: Site) -> None:
    """routed_scaling_factor is not applied."""
    routing(site, weights=lambda picked, bias, factor: picked / picked.sum(-1, keepdim=True))


@mutation("1.9", bugs=(), parts=("routing weights", "router"), probes=("moe_edges",))
def scaling_factor_twice(site: Site) -> None:
    """Router and experts both apply routed_scaling_factor."""

    def scaled(self, x, indices, weights):
        return real(self, x, indices, weights) * 1.5

    real = site.patch(Experts, "forward", scaled)


@mutation("1.9", bugs=(), parts=("routing weights", "router"), probes=("moe_edges",))
def one_expert_fewer(site: Site) -> None:
    """A token goes to one expert fewer than num_experts_per_tok."""

    def fewer(self, x, ids):
        indices, weights = real(self, x, ids)
        return indices[:, :-1].contiguous(), (weights[:, :-1] / weights[:, :-1].sum(-1, keepdim=True) * self.factor)

    real = site.patch(Gate, "forward", fewer)


# ---- hash layers --------------------------------------------------------------------------


@mutation("1.9", bugs=(125,), parts=("hash table",), probes=("moe_edges",))
def every_token_routes_as_id_0(site: Site) -> None:
    """Hash layers get no ids and take zeros: every token goes to the experts of token 0."""
    real = Gate.forward
    site.patch(Gate, "forward", lambda self, x, ids: real(self, x, torch.zeros_like(ids)))


@mutation("1.9", bugs=(), parts=("hash table",), probes=("moe_edges",))
def hash_table_one_row_off(site: Site) -> None:
    """The table is read at the next token id."""
    site.kernel(
        "route_hashed",
        lambda real: lambda x, weight, table, ids, factor: real(x, weight, table, (ids + 1) % len(table), factor),
    )


@mutation("1.9", bugs=(126,), parts=("hash table",), probes=("moe_edges",))
def token_ids_pass_through_bf16(site: Site) -> None:
    """Token ids are cast with the activations to bf16 and lose their low bits beyond 256."""
    real = Gate.forward
    site.patch(
        Gate,
        "forward",
        lambda self, x, ids: real(
            self, x, ids if self.tid2eid is None else ids.bfloat16().long().clamp(max=len(self.tid2eid) - 1)
        ),
    )


@mutation("1.9", bugs=(), parts=("hash table",), probes=("moe_edges",))
def hash_table_ignored(site: Site) -> None:
    """Hash layers choose experts by score like the others."""

    def by_score(real):
        def route(x, weight, table, ids, factor):
            s = F.softplus(x.float() @ weight.float().T).sqrt()
            best = s.topk(table.shape[1], -1)
            return best.indices, best.values / best.values.sum(-1, keepdim=True) * factor

        return route

    site.kernel("route_hashed", by_score)


@mutation("1.9", bugs=(), parts=("routing weights", "router"), probes=("moe_edges",))
def hash_layers_weigh_equally(site: Site) -> None:
    """Hash layers give each of a token's experts the same weight: scores are not looked at."""

    def equal(real):
        def route(x, weight, table, ids, factor):
            indices = table[ids]
            return indices, torch.full(indices.shape, factor / indices.shape[1], device=x.device)

        return route

    site.kernel("route_hashed", equal)


@mutation("1.9", bugs=(), parts=("routing weights", "router"), probes=("moe_edges",))
def hash_layers_weigh_by_the_best_scores(site: Site) -> None:
    """On hash layers the weights are those of the best experts, not of the experts that the table names."""

    def other(real):
        def route(x, weight, table, ids, factor):
            s = F.softplus(x.double() @ weight.double().T).sqrt().topk(table.shape[1], -1).values
            return table[ids], (s / s.sum(-1, keepdim=True) * factor).float()

        return route

    site.kernel("route_hashed", other)


# ---- experts ------------------------------------------------------------------------------


@mutation("1.9", bugs=(123,), parts=("experts",), probes=("moe_edges",))
def gate_not_clamped(site: Site) -> None:
    """The gate is not clamped at swiglu_limit."""
    experts(site, lambda gate, up, limit: F.silu(gate) * up.clamp(-limit, limit))


@mutation("1.9", bugs=(123,), parts=("experts",), probes=("moe_edges",))
def value_not_clamped(site: Site) -> None:
    """The value beside the gate is not clamped to ± swiglu_limit."""
    experts(site, lambda gate, up, limit: F.silu(gate.clamp(max=limit)) * up)


@mutation("1.9", bugs=(), parts=("experts",), probes=("moe_edges",))
def value_clamped_above_only(site: Site) -> None:
    """The value is clamped like the gate, on one side."""
    experts(site, lambda gate, up, limit: F.silu(gate.clamp(max=limit)) * up.clamp(max=limit))


@mutation("1.9", bugs=(), parts=("experts",), probes=("moe_edges",))
def gate_clamped_on_both_sides(site: Site) -> None:
    """The gate is clamped like the value, on both sides."""
    experts(site, lambda gate, up, limit: F.silu(gate.clamp(-limit, limit)) * up.clamp(-limit, limit))


@mutation("1.9", bugs=(123,), parts=("experts",), probes=("moe_edges",))
def shared_expert_not_clamped(site: Site) -> None:
    """The shared expert has no clamps."""
    experts(site, lambda gate, up, limit: F.silu(gate) * up, routed=False)


@mutation("1.9", bugs=(), parts=("experts",), probes=("moe_edges",))
def clamp_after_the_product(site: Site) -> None:
    """What is clamped is silu(gate) · value, not its factors."""
    experts(site, lambda gate, up, limit: (F.silu(gate) * up).clamp(-limit, limit))


@mutation("1.9", bugs=(), parts=("experts",), probes=("moe_edges",))
def gate_and_value_swapped(site: Site) -> None:
    """w1 and w3 are exchanged: the value goes through silu."""
    experts(site, lambda gate, up, limit: F.silu(up.clamp(max=limit)) * gate.clamp(-limit, limit))


@mutation("1.9", bugs=(), parts=("experts",), probes=("moe_edges",))
def activation_is_gelu(site: Site) -> None:
    """The gate goes through gelu instead of silu."""
    experts(site, lambda gate, up, limit: F.gelu(gate.clamp(max=limit)) * up.clamp(-limit, limit))


@mutation("1.9", bugs=(), parts=("expert order",), probes=("moe_edges",))
def experts_one_off(site: Site) -> None:
    """Expert e runs with the weights of expert e + 1."""
    real = Experts.forward
    site.patch(
        Experts,
        "forward",
        lambda self, x, indices, weights: real(self, x, (indices + 1) % self.w13.weight.shape[0], weights),
    )


@mutation("1.9", bugs=(127,), parts=("expert order",), probes=("moe_edges",))
def global_ids_into_local_experts(site: Site) -> None:
    """Expert numbers are global and the stack holds half of them: the second half runs as the first."""
    real = Experts.forward
    site.patch(
        Experts,
        "forward",
        lambda self, x, indices, weights: real(self, x, indices % (self.w13.weight.shape[0] // 2), weights),
    )


@mutation("1.9", bugs=(), parts=("shared expert",), probes=("moe_edges",))
def shared_expert_dropped(site: Site) -> None:
    """Only routed experts are summed."""

    def routed(self, x, ids):
        return self.experts(x, *self.gate(x, ids)).to(x.dtype)

    site.patch(MoE, "forward", routed)


@mutation("1.9", bugs=(), parts=("shared expert",), probes=("moe_edges",))
def shared_expert_scaled(site: Site) -> None:
    """routed_scaling_factor multiplies the shared expert as well."""

    def scaled(self, x, ids):
        return (self.experts(x, *self.gate(x, ids)) + self.gate.factor * self.shared_experts(x)).to(x.dtype)

    site.patch(MoE, "forward", scaled)


@mutation("1.9", bugs=(), parts=("routing weights",), probes=("moe_edges",))
def weights_before_and_after_the_experts(site: Site) -> None:
    """The routing weight multiplies before w2 and again after it."""
    site.kernel("experts", lambda real: lambda x, indices, weights, *rest: real(x, indices, weights * weights, *rest))
