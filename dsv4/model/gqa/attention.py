"""Attention of a GQA layer: dense, or over what `Attention` chooses of the cache."""

import torch

from dsv4.errors import MissingSummaries
from dsv4.loaders.cuts import Cut
from dsv4.model.gqa.cache import LayerRows, Summaries
from dsv4.model.gqa.choice import Attention
from dsv4.model.gqa.config import AttentionKind, GQAConfig
from dsv4.model.gqa.heads import Heads
from dsv4.model.gqa.projection import Projection, maps
from dsv4.model.gqa.selection import Selection
from dsv4.model.linear import RMSNorm
from dsv4.model.module import Module
from dsv4.model.numerics import Numerics
from dsv4.model.ranks import Ranks
from dsv4.model.step import Step


class SelfAttention(Module):
    """softmax(q·kᵀ/√D)·v with H query heads over KV heads of keys and values, rotated by position, causal, perhaps in a
    window. With `head_norms` each head of q and of k is normalised before it is rotated. Of several ranks each has
    `heads`, and adds the others' results.

    reading: what decoding tokens and prompts read of the cache. A layer with a window reads only that window, whatever
    `reading` says.

    With a rule that never stops, the output equals attention without a rule bit for bit, because both add the same
    tiles in the same order, on a GPU in as many splits. That holds for dense attention (there in tiles of 128), and for
    one list given to both, as a policy that chooses once does. But a policy that searches lists its blocks by
    importance under a rule, and ascending without one, so those two logits may differ by rounding, on every backend.
    """

    def __init__(
        self, config: GQAConfig, heads: Heads, window: int | None, numerics: Numerics, store, op, ranks: Ranks
    ):
        super().__init__()
        c, self.op = config, op
        self.H, self.KV, self.D, self.window, self.scale = heads.H, heads.KV, c.head_dim, window, c.softmax_scale
        self.kind = AttentionKind.FULL if window is None else AttentionKind.SLIDING

        def projection(name: str, rows: int, columns: int, biased: bool, cut: Cut) -> Projection:
            bias = store(f"{name}.bias").dtype if biased else None
            return Projection(rows, columns, store(f"{name}.weight"), bias, numerics, op, cut, ranks)

        query, kv, d = heads.query_rows, heads.kv_rows, c.hidden_size
        self.q_proj = projection("q_proj", query.size, d, c.qkv_bias, query)
        self.k_proj, self.v_proj = (projection(name, kv.size, d, c.qkv_bias, kv) for name in ("k_proj", "v_proj"))
        self.o_proj = projection("o_proj", d, query.size, c.output_bias, query.columns)
        self.q_norm, self.k_norm = (
            RMSNorm(self.D, c.rms_norm_eps, store(f"{name}.weight").dtype, op) if c.head_norms else None
            for name in ("q_norm", "k_norm")
        )
        self.reading = Attention()
        self.selection: Selection | None = None  # of the cache that the last step used
        self.path: dict = {}
        self.tiles: torch.Tensor | None = None  # int32 [B, T, KV] tiles that the last step read before it terminated
        # tokens that a query of that step could have read, by the size of the memory
        self.reach = 0

    def forward(self, x: torch.Tensor, norm: RMSNorm, step: Step, cache: LayerRows) -> torch.Tensor:
        """x [N, d], not yet normalised by `norm`, → [N, d]; writes this step's rows, and summaries of their blocks, to
        the cache."""
        (q, k, v), biases = self._qkv(x, norm)
        self.selection, self.tiles = cache.selection, None
        self.path = self.path_at(step.end, step.prompt)
        rows = cache.staged(step, self.reading.policy)
        if rows is not None:
            self.reach = self.reading.policy.tokens
            o, self.tiles = rows.decode(
                self.op,
                q,
                k,
                v,
                biases,
                step.cis("main"),
                self._places(rows, step),
                self.scale,
                self.reading.policy,
                self.reading.termination,
            )
        else:
            o = self._whole((q, k, v), biases, step, cache)
        return self.o_proj(o.view(step.N, -1))

    def _qkv(self, x: torch.Tensor, norm: RMSNorm) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...] | None]:
        """Queries, keys and values [N, heads · D] of norm(x), x [N, d], as `rotary_rows` takes them, and the biases
        that it must still add (None: none). Norms of heads come after the biases, so they leave none to add."""
        (q, k, v), biases = maps(self.op, x, norm, self.q_proj, self.k_proj, self.v_proj)
        if self.q_norm is None:
            return (q, k, v), biases
        if biases is not None:
            q, k, v = ((y + bias).to(y.dtype) for y, bias in zip((q, k, v), biases))
        q, k = (n(y.unflatten(1, (-1, self.D))).flatten(1) for n, y in ((self.q_norm, q), (self.k_norm, k)))
        return (q, k, v), None

    def _whole(self, qkv: tuple[torch.Tensor, ...], biases, step: Step, cache: LayerRows) -> torch.Tensor:
        """Write the step, where keys and values of every token are available: [B, T, H, D]."""
        keys, values = cache.of(step)
        q = self.op.rotary_rows(*qkv, biases, step.cis("main"), keys, values, step.start)
        cache.written(step, keys, values)
        summaries = cache.summaries(step)
        if summaries is not None:
            self.op.summarise_blocks(
                keys, step.start, step.T, summaries.low, summaries.high, summaries.mean, summaries.block
            )
            cache.summarised(step, summaries)
        if step.prompt and self.selection is not None:
            self.selection.observe(step, q, keys, self.scale)
        if step.piece is None or self.window is not None:
            return self.attend(q, keys, values, summaries, step)
        before = cache.memory_of(step) if step.piece.start else None
        o, memory = self.op.chunked_prefill(
            q, keys, values, step.piece.start, step.piece.lengths, self.reading.prefill, self.scale, before
        )
        cache.remember(step, memory)
        return o

    @staticmethod
    def _places(rows, step: Step):
        return step.memo(("staged", rows.block, rows.slots), lambda: rows.places(step.start, step.T))

    def guess(self, x: torch.Tensor, norm: RMSNorm, step: Step, rows) -> None:
        """Fetch the blocks that x [N, d] chooses here. x is the stream before the MLP of the layer before; it chooses
        mostly the blocks that the right stream will choose. rows: of `LayerRows.staged`. The key and value that come
        with the query go to the place of the token's own."""
        (q, k, v), biases = self._qkv(x, norm)
        ((start, here),) = self._places(rows, step)
        q = self.op.rotary_rows(q, k, v, biases, step.cis("main"), rows.keys, rows.values, here)
        rows.prefetch(self.op, q, start, policy=self.reading.policy)

    def attend(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, summaries: Summaries | None, step: Step
    ) -> torch.Tensor:
        """q [B, T, H, D], rotated; keys, values [B, KV, S, D], which hold the step's own → [B, T, H, D]."""
        policy, rule = self.reading.policy, self.reading.termination
        if step.prompt or self.window is not None or policy.dense and rule is None:
            return self.op.grouped_attention(q, keys, values, step.start, self.window, self.scale)
        if policy.once:
            return self._selected(q, keys, values, step)
        self.reach = keys.shape[2] if policy.dense else policy.tokens
        if policy.dense:
            o, self.tiles = self.op.grouped_attention(q, keys, values, step.start, None, self.scale, rule)
            return o
        if policy.selector is None:
            summaries = Summaries()
        elif summaries is None or not summaries.serve(policy):
            raise MissingSummaries(
                f"policy {policy.name} searches by {policy.selector} of blocks of {policy.block} tokens, and this "
                "cache keeps none such: make it after model.attention is set, or call cache.adopt(model.attention)"
            )
        blocks = self.op.choose_blocks(
            q, self.KV, summaries.low, summaries.high, summaries.mean, step.start, policy, rule is not None
        )
        return self._gathered(q, keys, values, blocks, step)

    def _selected(self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, step: Step) -> torch.Tensor:
        """Attention to what was chosen after the prompt, and to all later tokens."""
        policy = self.reading.policy
        if self.selection is None or self.selection.policy != policy:
            raise MissingSummaries(
                f"policy {policy.name} reads what it chose after the prompt, and this cache keeps no such choice: make "
                "it after model.attention is set, and append the prompt then"
            )
        tokens = self.selection.lists(step)
        self.reach = tokens.shape[3]
        return self._gathered(q, keys, values, tokens, step)

    def _gathered(self, q, keys, values, blocks: torch.Tensor, step: Step) -> torch.Tensor:
        """Attention over lists int32 [B, T, KV, n] of the policy's blocks."""
        policy, rule = self.reading.policy, self.reading.termination
        found = self.op.gather_attention(q, keys, values, blocks, step.start, None, self.scale, policy.block, rule)
        o, self.tiles = (found, None) if rule is None else found
        return o

    def path_at(self, end: int, prompt: bool = False) -> dict:
        """What the last token of a row that then holds `end` tokens reads: `tokens`, and the details of a policy if
        there is one."""
        if self.window is not None:
            return {"tokens": min(self.window, end)}
        policy, chunking = self.reading.policy, self.reading.prefill
        if prompt and chunking is not None:
            own = (end - 1) % chunking.chunk + 1
            return {"tokens": own + (chunking.memory if end > own else 0), "chunk": own}
        if prompt or policy.dense:
            return {"tokens": end}
        if policy.once:
            return {"tokens": end} if self.selection is None else self.selection.read(end)
        blocks = -(-end // policy.block)
        return {"tokens": policy.budget(0, 1, end), "blocks": min(policy.kept, blocks), "of_blocks": blocks}

    def described(self, path: dict) -> str:
        """`path_at` in words."""
        if "chunk" in path:
            return f"{path['chunk']} tokens of its chunk and {path['tokens'] - path['chunk']} of the memory"
        if "kept" in path:
            return (
                f"{path['kept']} of {path['prompt']} tokens of the prompt, {path['tokens']} in all, by "
                f"{self.reading.policy.name}"
            )
        if "blocks" in path:
            return (
                f"{path['blocks']} of {path['of_blocks']} blocks, {path['tokens']} tokens, by "
                f"{self.reading.policy.name}"
            )
        return f"{'the last' if self.window else 'all'} {path['tokens']} tokens"
