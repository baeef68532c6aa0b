"""Section 1.19: what the cost model says a decode step reads, and which rows its β, c₀ and c₁ are fitted on."""

from collections.abc import Callable
from dataclasses import replace

from dsv4.cost_model import csa, fit, gqa, latent, session, step
from dsv4.cost_model.fit import CostModel, Price
from dsv4.kernels.cache_rows import pack_layout
from dsv4.model.spec import LayerKind
from dsv4.probes.faults import Site, mutation

SECTION = "1.19", "The cost model of a decode step"

GROUPED = dict(probes=("cost_model",), profile="qwen2")
LATENT = dict(probes=("cost_model",))
PACKED = dict(probes=("cost_model",), numerics="qat", caches=("fp8", "fp4"))


def patched(site: Site, name: str, change: Callable[[Callable], Callable]) -> None:
    """Function `name` of the cost model made change(what it was), wherever it was imported."""
    for module in (csa, fit, gqa, latent, session, step):
        if name in vars(module):
            site.patch(module, name, change(getattr(module, name)))


def refitted(site: Site, change: Callable[[Callable, list], CostModel]) -> None:
    """The cost model is change(the fit, rows)."""
    patched(
        site,
        "fit",
        lambda real: lambda measured, constant=False: change(lambda rows: real(rows, constant), list(measured)),
    )


# ---- GQA models ---------------------------------------------------------------------------


@mutation("1.19", bugs=(), parts=("cost model, values",), **GROUPED)
def values_are_not_counted(site: Site) -> None:
    """Keys are counted, and the values that stand beside them are not."""
    patched(site, "dense_parts", lambda real: lambda *given: real(*given) | {"values": 0})


@mutation("1.19", bugs=(), parts=("query heads in place of KV heads",), **GROUPED)
def keys_counted_for_every_query_head(site: Site) -> None:
    """Keys and values are counted once a query head; the heads of a group share them."""
    real = gqa.Geometry.rows
    site.patch(gqa.Geometry, "rows", lambda g, batch, tokens: real(g, batch, tokens) * g.query_heads // g.kv_heads)


@mutation("1.19", bugs=(), parts=("block summaries, not counted",), **GROUPED)
def finding_is_free_in_the_cost_model(site: Site) -> None:
    """Summaries, which are read to find the blocks, are not counted."""
    patched(
        site,
        "policy_parts",
        lambda real: lambda *given: {k: n for k, n in real(*given).items() if k != "block summaries"},
    )


@mutation("1.19", bugs=(), parts=("one vector of two",), **GROUPED)
def one_bound_of_two_is_counted(site: Site) -> None:
    """A bound is counted as one vector a block; minimum and maximum are two."""
    mean = lambda policy: policy if policy.selector is None else replace(policy, selector="mean")
    patched(site, "summary_bytes", lambda real: lambda g, policy, blocks: real(g, mean(policy), blocks))


@mutation("1.19", bugs=(), parts=("block summaries, every block",), **GROUPED)
def blocks_that_are_kept_unseen_are_counted(site: Site) -> None:
    """Sinks and local blocks are counted as scored; they are kept whatever their summaries."""
    patched(
        site,
        "searched",
        lambda real: (
            lambda *given: (
                real(*given)
                if len(given) == 2
                else (
                    0 if given[1].selector is None else given[2] * given[0].kv_heads * gqa.blocks_of(given[1], given[3])
                )
            )
        ),
    )


@mutation("1.19", bugs=(), parts=("the whole context",), **GROUPED)
def gathered_step_counted_with_its_whole_context(site: Site) -> None:
    """A step that gathers blocks is counted as one that reads every token."""
    patched(site, "read_tokens", lambda real: lambda policy, context, *place: context)


@mutation("1.19", bugs=(), parts=("whole blocks",), **GROUPED)
def last_block_is_counted_whole(site: Site) -> None:
    """The block of the position itself is counted with the slots behind it, which nothing reads."""
    patched(site, "read_tokens", lambda real: lambda policy, context, *place: min(policy.tokens, context))


@mutation("1.19", bugs=(), parts=("windows ignored",), probes=("cost_model",), profile="mistral")
def layers_with_a_window_counted_as_full(site: Site) -> None:
    """Layers that read a window are counted with every token."""
    patched(
        site,
        "attention_parts",
        lambda real: lambda config, *given: real(replace(config, windows=(None,) * len(config.windows)), *given),
    )


@mutation("1.19", bugs=(), parts=("cost model, bytes held",), **GROUPED)
def summaries_take_no_room_in_the_cost_model(site: Site) -> None:
    """A cache under a policy is counted as keys and values alone where it is asked what fits."""
    patched(site, "held_bytes", lambda real: lambda g, policy, batch, context: g.cache(batch, context))


def weighed(site: Site, change: Callable[..., dict]) -> None:
    """Weights are change(what the cost model says, tensors, config, rows)."""

    def reading(real):
        return lambda tensors, config, rows=1: (
            (found := real(tensors, config, rows)) | change(found, tensors, config, rows)
        )

    patched(site, "weights_read", reading)


@mutation("1.19", bugs=(), parts=("output head, not read",), **GROUPED)
def tied_head_is_not_counted(site: Site) -> None:
    """The embedding is left out as a table of which a row is read, and with it the head that is the same matrix."""
    weighed(site, lambda found, tensors, config, rows: {"output head": 0})


@mutation("1.19", bugs=(), parts=("output head, counted twice",), **GROUPED)
def tied_head_is_counted_twice(site: Site) -> None:
    """The one matrix is counted as the embedding and as the head."""
    weighed(site, lambda found, tensors, config, rows: {"output head": 2 * found["output head"]})


@mutation("1.19", bugs=(), parts=("embedding, counted whole",), probes=("cost_model",), profile="llama3")
def embedding_is_counted_whole(site: Site) -> None:
    """The table is counted; a token reads a row of it."""
    weighed(
        site,
        lambda found, tensors, config, rows: (
            {"embedding": found["embedding"] // rows * config.vocab_size} if "embedding" in found else {}
        ),
    )


# ---- DeepSeek-V4 models -------------------------------------------------------------------


def parted(site: Site, change: Callable[..., dict[str, int]]) -> None:
    """Bytes of a layer's attention are change(what they were, geometry, kind, batch, context)."""
    real = latent.LatentGeometry.parts
    site.patch(latent.LatentGeometry, "parts", lambda g, *shape: (found := real(g, *shape)) | change(found, g, *shape))


@mutation("1.19", bugs=(), parts=("index keys, not counted",), **LATENT)
def index_keys_are_not_counted(site: Site) -> None:
    """CSA's index keys, all of which are read to choose, are not counted."""
    parted(site, lambda found, *shape: {"index keys": 0} if "index keys" in found else {})


@mutation("1.19", bugs=(), parts=("cost model, index scores",), **LATENT)
def index_scores_are_counted_once(site: Site) -> None:
    """Scores are counted as written; what chooses reads them again."""
    parted(site, lambda found, *shape: {"index scores": found["index scores"] // 2} if "index scores" in found else {})


@mutation("1.19", bugs=(), parts=("hca entries, at CSA's ratio",), **LATENT)
def hca_counted_at_the_ratio_of_csa(site: Site) -> None:
    """Entries of HCA are counted one every 4 tokens; they are one every 128."""
    site.patch(latent.LatentGeometry, "ratio", lambda g, kind: g.csa_ratio)


@mutation("1.19", bugs=(), parts=("csa entries, every entry",), **LATENT)
def entries_that_are_not_picked_are_counted(site: Site) -> None:
    """CSA is counted with every visible entry; it reads index_topk of them."""
    site.patch(
        latent.LatentGeometry,
        "entries",
        lambda g, kind, context: 0 if kind is LayerKind.WINDOW else context // g.ratio(kind),
    )


@mutation("1.19", bugs=(), parts=("scored where nothing is to be chosen",), **LATENT)
def index_counted_where_nothing_is_chosen(site: Site) -> None:
    """Index keys are counted also where every entry is selected and none is scored."""
    site.patch(
        latent.LatentGeometry, "scored", lambda g, kind, context: context // g.csa_ratio if kind is LayerKind.CSA else 0
    )


@mutation("1.19", bugs=(), parts=("windows that are not complete",), **LATENT)
def entries_counted_before_they_are_complete(site: Site) -> None:
    """Entries are rounded up: the begun window has none yet."""
    real = latent.LatentGeometry.entries, latent.LatentGeometry.scored
    up = lambda context: -(-context // 4) * 4
    for name, method in zip(("entries", "scored"), real):
        site.patch(latent.LatentGeometry, name, lambda g, kind, context, method=method: method(g, kind, up(context)))


@mutation("1.19", bugs=(), parts=("a window that is not full",), **LATENT)
def window_is_counted_before_it_is_full(site: Site) -> None:
    """A short text is counted with the rows of a whole window."""
    parted(site, lambda found, g, kind, batch, context: {"window": batch * g.window * g.row})


@mutation("1.19", bugs=(), parts=("rows as plain numbers", "keys as plain numbers"), **PACKED)
def packed_rows_counted_as_plain_numbers(site: Site) -> None:
    """Rows of FP8 and keys of FP4 are counted in the activations' dtype."""
    patched(site, "row_bytes", lambda real: lambda format, width, rope, itemsize: width * itemsize)


@mutation("1.19", bugs=(), parts=("cost model, window", "cost model, index keys"), **PACKED)
def scales_of_packed_rows_are_not_counted(site: Site) -> None:
    """Of packed rows the numbers are counted, and their scales are not."""
    patched(
        site,
        "row_bytes",
        lambda real: (
            lambda format, width, rope, itemsize: (
                width * itemsize if format is None else pack_layout(format, width, rope).payload
            )
        ),
    )


@mutation("1.19", bugs=(), parts=("routed experts, every expert",), **LATENT)
def every_expert_is_counted(site: Site) -> None:
    """All routed experts are counted; a token reads those that it is routed to."""
    weighed(
        site,
        lambda found, tensors, config, rows: {
            "routed experts": found["routed experts"]
            * config.n_routed_experts
            // min(config.n_routed_experts, rows * config.num_experts_per_tok)
        },
    )


@mutation("1.19", bugs=(), parts=("drafts counted",), **LATENT)
def drafts_are_counted_in_a_plain_step(site: Site) -> None:
    """MTP's weights are counted, which no plain step reads."""
    site.patch(step, "GROUPS", tuple((pattern, part or "layers and norms") for pattern, part in step.GROUPS))


@mutation("1.19", bugs=(), parts=("hash tables, counted whole",), **LATENT)
def hash_tables_are_counted_whole(site: Site) -> None:
    """Tables of experts by token id are counted; a token reads a row of each."""
    weighed(
        site, lambda found, tensors, config, rows: {"hash tables": found["hash tables"] // rows * config.vocab_size}
    )


# ---- the fit ------------------------------------------------------------------------------


def recoloured(rows: list, which: Callable, **more) -> list:
    """Rows, those of `which` with other fields."""
    return [replace(r, **more) if which(r) else r for r in rows]


@mutation("1.19", bugs=(), parts=("β and c₀, sparse rows",), **GROUPED)
def beta_is_fitted_on_sparse_rows_too(site: Site) -> None:
    """β and c₀ are fitted on every row, with what finding costs."""

    def change(real, rows):
        whole = real(recoloured(rows, lambda r: True, dense=True, finding=None))
        return CostModel(whole.bandwidth, whole.c0, real(rows).finding)

    refitted(site, change)


@mutation("1.19", bugs=(), parts=("rows that search nothing",), **GROUPED)
def rows_that_search_nothing_are_fitted(site: Site) -> None:
    """Rows that keep blocks without looking count as dense; they may be predicted only."""
    refitted(site, lambda real, rows: real(recoloured(rows, lambda r: r.finding is None, dense=True)))


@mutation("1.19", bugs=(), parts=("cost model, fit, held-out rows",), **GROUPED)
def held_out_rows_are_fitted(site: Site) -> None:
    """The fit looks at every row that it is given."""
    refitted(site, lambda real, rows: real(recoloured(rows, lambda r: True, held_out=False)))


@mutation("1.19", bugs=(), parts=("cost model, fit, held-out rows",), **GROUPED)
def shapes_are_held_out_and_fitted(site: Site) -> None:
    """A plan fits every shape, and holds a third of them out as well."""
    real = session.Plan.of
    site.patch(
        session.Plan,
        "of",
        classmethod(lambda cls, *given: (p := real(*given)) and cls(p.fitted + p.held_out, p.held_out)),
    )


@mutation("1.19", bugs=(), parts=("cost model, fit, held-out rows",), **GROUPED)
def held_out_rows_run_before_they_are_predicted(site: Site) -> None:
    """What is held out is measured with the rest, and predicted afterwards."""
    real = session.run

    def run(source, timer, plan, *given):
        for shape in plan.held_out:
            timer.shape(source, *shape, True)
        return real(source, timer, plan, *given)

    site.patch(session, "run", run)


@mutation("1.19", bugs=(), parts=("cost model, fit, c₀",), **GROUPED)
def c1_is_absorbed_in_c0(site: Site) -> None:
    """What finding costs is in the constant of every row, and no price of its own."""

    def change(real, rows):
        costs = real(rows)
        most = max((price.fixed for price in costs.finding.values()), default=0.0)
        return CostModel(costs.bandwidth, costs.c0 + most, {name: Price(0.0) for name in costs.finding})

    refitted(site, change)


@mutation("1.19", bugs=(), parts=("c₁ of a row of the batch",), **GROUPED)
def rows_of_the_batch_are_found_for_nothing(site: Site) -> None:
    """c₁ has no part that grows with the batch."""
    refitted(site, lambda real, rows: real([replace(r, batch=1) for r in rows]))


@mutation("1.19", bugs=(), parts=("c₁, rows of another policy",), **GROUPED)
def one_price_for_every_policy(site: Site) -> None:
    """What one policy pays for finding is fitted on the rows of all."""

    def change(real, rows):
        costs, names = real(rows), {r.finding for r in rows if r.finding}
        one = real(recoloured(rows, lambda r: r.finding, finding="all")).finding.get("all", Price(0.0))
        return CostModel(costs.bandwidth, costs.c0, dict.fromkeys(names, one))

    refitted(site, change)


@mutation("1.19", bugs=(), parts=("cost model, fit, seconds of a row",), **GROUPED)
def c0_is_not_in_predictions(site: Site) -> None:
    """Seconds are bytes / β and c₁; the constant of a layer is fitted and left out."""
    real = CostModel.seconds
    site.patch(CostModel, "seconds", lambda costs, *given: real(costs, *given) - costs.c0 * (len(given) > 1))
