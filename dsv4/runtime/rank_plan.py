"""What each of several ranks that hold one model together allocates: its parameters, by the model's own cuts, its
caches, and what a step takes beside them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from dsv4.kernels.indexer.triton import SCRATCH_BYTES, codes_scratch
from dsv4.loaders.files import DTYPE_NAMES
from dsv4.model import families
from dsv4.model.causal import CausalLM
from dsv4.model.family import Asking
from dsv4.model.ranks import Ranks
from dsv4.model.together import part_of
from dsv4.runtime.memory import Plan, Row, weight_rows


@dataclass(frozen=True)
class RankPlan:
    """One rank's rows, by group as in `Row`, and 'step'. tensors: parameter → (dtype as in safetensors, shape);
    replicated: bytes of those parameters that every rank holds whole."""

    rank: int
    rows: tuple[Row, ...]
    tensors: dict[str, tuple[str, tuple[int, ...]]]
    replicated: int

    def total(self, *groups: str) -> int:
        return sum(Plan(self.rows).total(group) for group in groups)

    @property
    def device_bytes(self) -> int:
        return self.total("weights", "cache", "staging", "step")

    def document(self) -> dict:
        """As JSON values."""
        return {
            "rank": self.rank,
            "weights_bytes": self.total("weights"),
            "replicated_bytes": self.replicated,
            "cache_bytes": self.total("cache"),
            "staging_bytes": self.total("staging"),
            "pinned_bytes": self.total("pinned"),
            "step_bytes": self.total("step"),
            "rows": [{"group": r.group, "name": r.name, "nbytes": r.nbytes, "formula": r.formula} for r in self.rows],
        }


def rank_plans(
    asking: Asking, size: int, caches: Callable[[Asking], Sequence[Row]], chunk: int | None
) -> list[RankPlan]:
    """The plan of each of `size` ranks, from the model that it builds, on the meta device. caches: gives the rows of a
    rank's caches; chunk: tokens of a row in one step, None: as on a GPU. Raises InputError for numbers that so many
    ranks cannot share."""
    family, found = families.of(asking.config), []
    for rank in range(size):
        ranks = Ranks(rank, size)
        model = family.rank_model(asking.config, asking.inventory, asking.numerics, ranks)
        held = dict(model.named_parameters())
        tensors = {name: (DTYPE_NAMES[p.dtype], tuple(p.shape)) for name, p in held.items()}
        replicated = sum(p.nbytes for name, p in held.items() if part_of(model, name) is None)
        weights, kept = weight_rows(tensors, asking.embedding_memory), caches(replace(asking, ranks=ranks))
        rows = (
            *weights,
            *kept,
            *step_rows(model, asking, size, chunk or model.gpu_chunk(asking.batch, asking.context)),
        )
        found.append(RankPlan(rank, rows, tensors, replicated))
    return found


def step_rows(model: CausalLM, asking: Asking, size: int, chunk: int) -> list[Row]:
    """The largest tensors of a prefill chunk of every row that exist at once: an estimate, by what the triton backend
    allocates. Attention, experts (or the MLP) and a sum over ranks take turns, so the largest of them counts."""
    c, wide, tokens = asking.config, asking.numerics.activation.itemsize, min(chunk, asking.context)
    N, d, streams = asking.batch * tokens, c.hidden_size, getattr(c, "hc_mult", 1)
    count = f"{asking.batch} rows × {tokens} tokens"
    scores = codes_scratch(asking.context // 4) if asking.numerics.simulate_index else SCRATCH_BYTES
    row = lambda name, nbytes, formula: Row("step", name, nbytes, formula)
    sums = row("sum over ranks", (size + 2) * N * d * 4, f"({size} ranks + 2) × {count} × {d} × 4 B")
    turns = (*_sublayers(model, c, N, count, wide, scores), sums)
    return [
        row("streams", 2 * N * streams * d * wide, f"2 × {count} × {streams} × {d} × {wide} B"),
        max(turns, key=lambda one: one.nbytes),
        row("logits", 3 * asking.batch * c.vocab_size * 4, f"3 × {asking.batch} rows × {c.vocab_size} × 4 B"),
    ]


def _sublayers(model: CausalLM, c, N: int, count: str, wide: int, scores: int) -> Iterator[Row]:
    """Attention and what follows it, of N tokens (`count` in words) in numbers of `wide` bytes. scores: bytes of index
    scores at a time."""
    layer = model.layers[0]
    if hasattr(layer, "mlp"):
        H, KV, I = layer.self_attn.H, layer.self_attn.KV, len(layer.mlp.up_proj.weight)
        size, formula = 2 * (H + KV) * c.head_dim, f"2 × ({H} + {KV}) heads × {c.head_dim}"
        yield Row("step", "attention", N * size * wide, f"{count} × {formula} × {wide} B")
        yield Row("step", "MLP", 3 * N * I * wide, f"3 × {count} × {I} × {wide} B")
        return
    heads, k, d, I = layer.attn.H, c.num_experts_per_tok, c.hidden_size, c.moe_intermediate_size
    size, formula = 3 * N * heads * c.head_dim * wide, f"3 × {count} × {heads} heads × {c.head_dim} × {wide} B"
    yield Row("step", "attention", size + scores, f"{formula} + {scores} B of index scores")
    size, formula = N * k * (3 * I + d) * wide, f"{count} × {k} experts × (3 × {I} + {d}) × {wide} B"
    yield Row("step", "routed experts", size, formula)


def summed(plans: Sequence[RankPlan]) -> list[Row]:
    """Rows of all ranks together."""
    found: dict[tuple[str, str], list[Row]] = {}
    for plan in plans:
        for row in plan.rows:
            found.setdefault((row.group, row.name), []).append(row)
    return [Row(group, name, sum(r.nbytes for r in rows), _formula(rows)) for (group, name), rows in found.items()]


def _formula(rows: Sequence[Row]) -> str:
    if len({row.formula for row in rows}) == 1:
        return f"{len(rows)} ranks × ({rows[0].formula})"
    return " + ".join(str(row.nbytes) for row in rows) + " B of ranks in their order"
