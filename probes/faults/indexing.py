"""Section 1.5: the lightning indexer."""

from collections.abc import Callable

import torch

from dsv4.model.attention import CSAAttention, IndexerKeyCompressor, LightningIndexer
from dsv4.probes.faults import Site, mutation
from dsv4.probes.faults.masks import over_the_window

SECTION = "1.5", "Indexer scoring"

INF = float("inf")


def scored(site: Site, change: Callable) -> None:
    """Operation index_scores is change(what it was)."""
    site.kernel("index_scores", change)


def products(of: Callable) -> Callable:
    """A change of index_scores: of(weights [B, T, H, 1], dots [B, T, H, n]) → [B, T, n], −inf where invisible."""

    def change(real):
        def index_scores(q, weights, keys, visible):
            dots = torch.einsum("bthd,bnd->bthn", q.float(), keys.float())
            hidden = torch.arange(keys.shape[1], device=keys.device) >= visible.unsqueeze(-1)
            return of(weights.unsqueeze(-1), dots).masked_fill(hidden, -INF)

        return index_scores

    return change


def read_as(change_keys: Callable) -> Callable:
    """A change of index_scores: keys [B, n, D] are read as change_keys(keys)."""
    return lambda real: lambda q, weights, keys, visible: real(q, weights, change_keys(keys), visible)


def picked(site: Site, change: Callable) -> None:
    """The indexer's answer int64 [B, T, k] is change(indexer, step, cache, what it was)."""
    real = site.patch(
        LightningIndexer,
        "forward",
        lambda indexer, x, qr, step, cache: change(indexer, step, cache, real(indexer, x, qr, step, cache)),
    )


def in_scores(site: Site, change: Callable) -> None:
    """The indexer's scores fp32 [B, T, n] are change(indexer, step, what they were)."""
    site.unfused("index_scores")
    real = site.patch(
        LightningIndexer,
        "scores",
        lambda indexer, x, qr, step, cache: change(indexer, step, real(indexer, x, qr, step, cache)),
    )


def places(t: torch.Tensor) -> torch.Tensor:
    """Numbers of the last dimension's places."""
    return torch.arange(t.shape[-1], device=t.device)


def indexers(site: Site, change: Callable) -> None:
    """change(indexer) of every CSA layer after loading."""
    site.after_load(
        lambda subject: [change(b.attn.indexer) for b in subject.model.layers if hasattr(b.attn, "indexer")]
    )


@mutation("1.5", bugs=(64,), parts=("indexer keys", "Hadamard"), probes=("index_oracle",), numerics="qat:fp32")
def hadamard_missing(site: Site) -> None:
    """Neither queries nor keys pass through the Hadamard transform before FP4."""
    site.kernel("hadamard", lambda real: lambda x: x)


@mutation("1.5", bugs=(64,), parts=("indexer keys",), probes=("index_oracle",), numerics="qat:fp32")
def hadamard_of_queries_only(site: Site) -> None:
    """Index queries pass through the Hadamard transform, keys do not: scores of chance."""
    site.kernel("hadamard", lambda real: lambda x: real(x) if x.dim() > 2 else x)


@mutation("1.5", bugs=(64,), parts=("FP4 simulation",), probes=("format_decode",), numerics="qat:fp32")
def fp4_simulation_a_stub(site: Site) -> None:
    """The FP4 simulation of index queries and keys is a stub that returns its input."""
    site.kernel("simulate_fp4_blocks", lambda real: lambda x, block=32: x)


@mutation("1.5", bugs=(65,), parts=("compressed entries", "selection"), probes=("influence",), numerics="qat:fp32")
def quantised_kv_diverted_to_raw_attention(site: Site) -> None:
    """With quantised KV, dispatch leaves every sparse path: CSA layers attend to their window only."""
    real = CSAAttention._attend
    path = lambda attn: over_the_window if attn.numerics.simulate else real
    site.patch(CSAAttention, "_attend", lambda attn, *rest: path(attn)(attn, *rest))


@mutation("1.5", bugs=(66, 68), parts=("indexer scores",), probes=("index_oracle",))
def relu_missing(site: Site) -> None:
    """No ReLU: negative products of a head count; 95 % of the picks stay."""
    scored(site, products(lambda weights, dots: (weights * dots).sum(2)))


@mutation("1.5", bugs=(67,), parts=("indexer scores",), probes=("index_oracle",))
def relu_after_the_sum_over_heads(site: Site) -> None:
    """The weighted sum over heads is taken before the ReLU."""
    scored(site, products(lambda weights, dots: torch.relu((weights * dots).sum(2))))


@mutation("1.5", bugs=(68,), parts=("indexer weights",), probes=("index_oracle",))
def sigmoid_of_the_head_weights(site: Site) -> None:
    """Head weights pass through a sigmoid."""

    def change(real):
        def index_scores(q, weights, keys, visible):
            scale = (q.shape[2] * q.shape[3]) ** -0.5
            return real(q, torch.sigmoid(weights / scale) * scale, keys, visible)

        return index_scores

    scored(site, change)


@mutation("1.5", bugs=(68,), parts=("indexer queries",), probes=("index_oracle",))
def half_of_the_index_heads(site: Site) -> None:
    """A kernel with a fixed number of heads sees half of them."""
    first = lambda t: t[:, :, : t.shape[2] // 2].contiguous()
    scored(site, lambda real: lambda q, weights, keys, visible: real(first(q), first(weights), keys, visible))


@mutation("1.5", bugs=(70,), parts=("temperature", "indexer weights"), probes=("index_oracle",))
def temperature_missing(site: Site) -> None:
    """Head weights lack the factor Di^−0.5 · Hi^−0.5: no pick changes, every score does."""
    indexers(site, lambda indexer: setattr(indexer, "scale", 1.0))


@mutation("1.5", bugs=(70,), parts=("indexer weights",), probes=("index_oracle",))
def temperature_lost_in_the_kernel(site: Site) -> None:
    """The kernel takes the temperature out again, where no attribute of a module shows it."""
    size = lambda q: (q.shape[2] * q.shape[3]) ** 0.5
    scored(site, lambda real: lambda q, weights, keys, visible: real(q, weights * size(q), keys, visible))


@mutation("1.5", bugs=(71,), parts=("indexer scores", "selection"), probes=("index_oracle",))
def index_keys_not_cached(site: Site) -> None:
    """Index keys are made of the running chunk only: nothing older can be selected, nothing at all by a single
    token."""
    in_scores(
        site,
        lambda indexer, step, scores: scores.masked_fill(
            places(scores) < (step.start // indexer.ratio).view(-1, 1, 1), -INF
        ),
    )


@mutation("1.5", bugs=(72,), parts=("indexer scores", "selection"), probes=("index_oracle",))
def scores_bounded_by_the_chunk(site: Site) -> None:
    """The loop over entries ends at the chunk's own count: with a context before it, the newest entries are never
    scored."""
    in_scores(
        site,
        lambda indexer, step, scores: (
            scores.masked_fill(places(scores) >= max(step.T // indexer.ratio, 1), -INF) if min(step.starts) else scores
        ),
    )


@mutation("1.5", bugs=(74,), parts=("indexer keys",), probes=("index_oracle",))
def index_keys_read_in_another_layout(site: Site) -> None:
    """Index keys are written flat and read shuffled: blocks of 8 dims change places."""
    scored(site, read_as(lambda keys: keys.unflatten(-1, (-1, 8)).transpose(-1, -2).flatten(-2).contiguous()))


@mutation("1.5", bugs=(75,), parts=("indexer scores",), probes=("index_oracle",))
def scores_zero_beyond_a_length(site: Site) -> None:
    """An offset overflows: scores of the last 40 % of the entries are exactly 0."""

    def change(indexer, step, scores):
        n = scores.shape[-1]
        late = (places(scores) >= n * 6 // 10) & (scores > -INF)
        return torch.where(late, 0.0, scores)

    in_scores(site, change)


@mutation("1.5", bugs=(74,), parts=("indexer keys",), probes=("index_oracle",))
def index_keys_off_by_one_row(site: Site) -> None:
    """Entry e is scored by the key of entry e − 1."""
    scored(site, read_as(lambda keys: keys.roll(1, 1)))


@mutation("1.5", bugs=(24, 74), parts=("indexer scores",), probes=("index_oracle",))
def rows_of_scores_lost_to_nan(site: Site) -> None:
    """A NaN in every sixteenth key makes its score −inf: those entries can never be selected."""
    in_scores(site, lambda indexer, step, scores: scores.masked_fill(places(scores) % 16 == 5, -INF))


@mutation("1.5", bugs=(78,), parts=("selection",), probes=("index_oracle",))
def random_picks_beyond_a_length(site: Site) -> None:
    """Beyond 40 entries the top-k kernel returns any of them."""

    def change(real):
        def topk_entries(scores, k):
            noise = torch.rand(scores.shape, generator=torch.Generator().manual_seed(0)).to(scores.device)
            return real(torch.where(scores > -INF, noise, scores) if scores.shape[-1] > 40 else scores, k)

        return topk_entries

    site.kernel("topk_entries", change)


@mutation("1.5", bugs=(80,), parts=("selection",), probes=("index_oracle",))
def most_slots_of_the_selection_zero(site: Site) -> None:
    """Three quarters of the slots of a selection are entry 0."""

    def change(real):
        def topk_entries(scores, k):
            found = real(scores, k)
            return torch.where((places(found) % 4 != 0) & (found >= 0), 0, found)

        return topk_entries

    site.kernel("topk_entries", change)


@mutation("1.5", bugs=(80,), parts=("selection",), probes=("index_oracle",))
def one_pick_too_few(site: Site) -> None:
    """The last of index_topk slots is never filled."""

    def change(real):
        def topk_entries(scores, k):
            found = real(scores, k)
            return (
                torch.cat((found[..., :-1], torch.full_like(found[..., -1:], -1)), -1)
                if found.shape[-1] == k
                else found
            )

        return topk_entries

    site.kernel("topk_entries", change)


@mutation("1.5", bugs=(68,), parts=("indexer weights",), probes=("index_oracle",))
def weights_from_the_token_before(site: Site) -> None:
    """Head weights are computed from the input of the token before the query."""

    def change(indexer):
        real = indexer.weights_proj.forward
        indexer.weights_proj.forward = lambda x: real(x.roll(1, 0))

    indexers(site, change)


@mutation("1.5", bugs=(68,), parts=("indexer queries",), probes=("index_oracle",))
def index_queries_normed_by_head(site: Site) -> None:
    """Index queries get the weightless norm by head that the attention's queries have."""

    def change(indexer):
        real = indexer.wq_b.forward
        normed = lambda q: q * torch.rsqrt(q.square().mean(-1, keepdim=True) + 1e-6)
        indexer.wq_b.forward = lambda qr: normed(real(qr).unflatten(-1, (indexer.H, indexer.D))).flatten(-2)

    indexers(site, change)


@mutation("1.5", bugs=(65, 81), parts=("compressed entries", "selection"), probes=("influence",))
def csa_layers_take_the_window_path(site: Site) -> None:
    """CSA layers run the window's attention whatever their indexer says: the text still looks fine."""
    site.patch(CSAAttention, "_attend", over_the_window)


@mutation("1.5", bugs=(71, 81), parts=("selection",), probes=("index_oracle",))
def indexer_inert_for_a_single_token(site: Site) -> None:
    """With one query a step the indexer selects nothing: decode attends to the window only."""
    picked(site, lambda indexer, step, cache, found: torch.full_like(found, -1) if step.T == 1 else found)


@mutation("1.5", bugs=(71,), parts=("indexer keys",), probes=("index_oracle",))
def index_keys_not_written_in_decode(site: Site) -> None:
    """Single-token steps write no index keys."""
    real = site.patch(
        IndexerKeyCompressor,
        "forward",
        lambda compressor, x, step, cache: None if step.T == 1 else real(compressor, x, step, cache),
    )


@mutation("1.5", bugs=(147,), parts=("selection",), probes=("index_oracle",))
def every_visible_entry_selected(site: Site) -> None:
    """The indexer selects every visible entry, whatever index_topk says."""
    picked(site, lambda indexer, step, cache, found: cache.index.entries.all_visible(step))


@mutation("1.5", bugs=(78,), parts=("selection",), probes=("index_oracle",))
def newest_entries_selected(site: Site) -> None:
    """The newest index_topk entries are selected instead of the best."""

    def change(indexer, step, cache, found):
        newest = step.visible(indexer.ratio).unsqueeze(-1) - 1 - places(found)
        return newest.clamp(min=-1)

    picked(site, change)


@mutation("1.5", bugs=(76,), parts=("determinism",), probes=("poison",))
def missing_synchronisation_in_the_scores(site: Site) -> None:
    """Scores are read before all heads have been added: now and then a query's are not complete."""
    generator = torch.Generator().manual_seed(0)

    def change(indexer, step, scores):
        early, scale = (
            torch.rand(shape, generator=generator).to(scores.device) for shape in ((*scores.shape[:2], 1), scores.shape)
        )
        return torch.where(early < 0.1, scores * scale, scores)

    in_scores(site, change)


@mutation("1.5", bugs=(77,), parts=("indexer scores", "indexer queries", "indexer keys"), probes=("index_oracle",))
def swizzle_for_another_head_dim(site: Site) -> None:
    """A swizzle that is right for 128 dims leaves out half the dims of a narrower head: deterministic garbage."""
    scored(
        site,
        lambda real: (
            lambda q, weights, keys, visible: real(torch.where(places(q) % 16 < 8, q, 0), weights, keys, visible)
        ),
    )


@mutation("1.5", bugs=(79,), parts=("row 1",), probes=("index_oracle",))
def keys_of_the_first_row_for_every_row(site: Site) -> None:
    """A stride of 0 over the batch: every row is scored with the first row's keys."""
    scored(site, read_as(lambda keys: keys[:1].expand_as(keys)))
