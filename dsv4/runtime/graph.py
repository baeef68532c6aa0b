"""A decode step as one CUDA graph: captured once, replayed at every position of a ragged batch."""

from collections.abc import Callable

import torch

from dsv4.cache.cache import Cache, Lengths
from dsv4.errors import ContextOverrun, InputError
from dsv4.kernels.launch import captured_in
from dsv4.model.arguments import check_cache, check_whole
from dsv4.model.causal import CausalLM, captures
from dsv4.model.causal import capacity as capacity  # its old place, until 0.4
from dsv4.model.cut_values import Logits, whole
from dsv4.model.mtp import run_block
from dsv4.model.step import CapturedStep
from dsv4.runtime.capture import capturing
from dsv4.runtime.driver import MPS, attribute
from dsv4.sending import send

WARM_UP = 2  # runs before capture: kernels compile and libraries take their workspaces


def captured_graph(
    run: Callable[[], None], pool=None, undo: Callable[[], None] = lambda: None, keep: bool = False
) -> torch.cuda.CUDAGraph:
    """The launches of `run` as a graph, after a few warm-up runs; undo is called after each of those. pool: memory pool
    of graphs that never run at the same time. keep: it can be part of another graph, and is made ready to run by itself
    when it first does."""
    # Where processes share a GPU by MPS, bodies of conditional nodes have no cooperative kernels.
    cooperative = not (keep and attribute(MPS, torch.cuda.current_device()))
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph(**({"keep_graph": True} if keep else {}))
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        with captured_in(None, cooperative):
            for _ in range(WARM_UP):
                run()
                undo()
        with capturing(graph, cooperative, stream=stream, pool=pool):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    return graph


class DecodeGraph:
    """Appends `tokens` tokens to rows of `cache` (what the model's `new_cache` gives) by replaying one graph.

    A replay neither allocates nor waits for the device, and runs no Python of the model. Each row has its own length. A
    row that is not `active` is computed and its result dropped: its slots lie beyond its length. Where nothing is
    captured (`captures`), the step runs without a graph.

    ids int64 [batch, tokens], start int64 [batch] and logits fp32 [batch, tokens, vocab] are the graph's own tensors.
    whole: False leaves logits of several ranks cut (`CutValues`), for those who only choose tokens.
    """

    def __init__(self, model: CausalLM, cache: Cache, tokens: int = 1, whole: bool = True):
        if model.layer_devices is not None:
            raise InputError(
                "a decode step cannot be captured while layers are spread over devices; load without --device-map"
            )
        check_cache(model, cache)
        if check_whole("tokens of a step", tokens, 1) > cache.max_rewind + 1:
            raise InputError(
                f"steps of {tokens} tokens need a cache with max_rewind >= {tokens - 1}; this one has "
                f"{cache.max_rewind}"
            )
        self.model, self.cache, self.tokens, self.whole = model, cache, tokens, whole
        self.ids = torch.zeros(cache.batch, tokens, dtype=torch.int64, device=model.device)
        self.start = torch.zeros(cache.batch, dtype=torch.int64, device=model.device)
        self._gpu = model.device.type == "cuda"
        self._said = torch.zeros(cache.batch, 1, dtype=torch.int64, pin_memory=self._gpu)
        self._held: list[int] | None = None  # the value of `start`, as far as the host knows
        self.graph, self.logits, self.streams, self.tiles = None, None, None, None
        self._attention, self._widths = model.attention, cache.widths
        if captures(model):
            self._capture()

    def step(self, ids: torch.Tensor | None = None, active: list[bool] | None = None) -> Logits:
        """Append ids int64 [batch, tokens] (None: the current `self.ids`) and return the graph's logits fp32 [batch,
        tokens, vocab].

        The next step overwrites them. active: rows whose length advances, by default all. Raises ContextOverrun if one
        would exceed max_context; nothing has run then.
        """
        lengths = self.lengths
        if self.model.attention is not self._attention:
            raise InputError("model.attention was changed after this step was made; make a new DecodeGraph")
        if self.graph is not None and any(now > then for now, then in zip(self.cache.widths, self._widths)):
            raise InputError(
                "a prompt was appended or dropped after this step was made, and its choice of tokens has longer lists; "
                "make a new DecodeGraph"
            )
        moving = [True] * self.cache.batch if active is None else active
        assert len(moving) == self.cache.batch, "one flag a row"
        for b, length in enumerate(lengths.now):
            if length + self.tokens > self.cache.max_context:
                raise ContextOverrun(
                    f"row {b} holds {length} tokens and would get {self.tokens} more, over the cache's max_context of "
                    f"{self.cache.max_context}; ask for a larger --max-context or fewer tokens"
                )
        if ids is not None:
            send(ids, self.ids)
        if self._held != lengths.now:
            self._place(lengths.now)
        if self.graph is None:
            self._run()
        else:
            self.graph.replay()
            self.model.ranks.went()
            self.model.tiles = self.tiles
        self._ran(max(lengths.now) + self.tokens)
        self._held = [length + self.tokens for length in lengths.now]
        for b, moves in enumerate(moving):
            lengths.wrote(b, self._held[b])
            if moves:
                lengths.advance(slice(b, b + 1), self.tokens)
        return self.logits

    def greedy(self, logits: Logits, more: bool, feed: torch.Tensor | None = None) -> tuple[list[int], Logits | None]:
        """The likeliest token of each row of logits [batch, …, vocab] and, if there is `more`, the logits after it
        (`step`; of one token).

        That step is running before the host knows the tokens: the device does not wait until the host has read them.
        feed int64 [batch, 1], on the device: appended in their place.
        """
        said = logits[:, -1:].argmax(-1)
        self._said.copy_(said, non_blocking=True)
        known = torch.cuda.Event() if self._gpu else None
        if known is not None:
            known.record()
        after = self.step(said if feed is None else feed) if more else None
        if known is not None:
            known.synchronize()
        return self._said.flatten().tolist(), after

    @property
    def lengths(self) -> Lengths:
        """Of the cache: a step advances them."""
        return self.cache._main

    def _ran(self, tokens: int) -> None:
        """Record that the longest row holds `tokens` tokens after a step."""
        self.model.replayed = tokens

    @torch.inference_mode()
    def _run(self) -> None:
        """One captured step. It advances `start` at its end, so that the next replay needs no host."""
        self.streams, logits = self._forward()
        logits = whole(logits) if self.whole else logits
        self.logits = logits.unflatten(0, (self.cache.batch, -1))  # of the graph: each replay writes it again
        self.start += self.tokens

    def _forward(self) -> tuple[torch.Tensor, Logits]:
        """Streams before the head [B·T, n, d], and logits fp32."""
        step = CapturedStep(self.ids, self.start, self.cache.max_context, self.model.rope_frequencies())
        return self.model.captured(step, self.cache)

    @torch.inference_mode()
    def _capture(self) -> None:
        """Warm-up runs use the rows' own positions: nothing has read those yet, and the first real step writes them
        again."""
        if max(self.lengths.now) + self.tokens > self.cache.max_context:
            return  # no room: `step` will report it
        self._place(self.lengths.now)
        for b, length in enumerate(self.lengths.now):
            self.lengths.wrote(b, length + self.tokens)
        self.graph = captured_graph(self._run, undo=lambda: self.start.sub_(self.tokens))
        self.tiles = self.model.tiles  # the graph's own: each replay writes them again

    def _place(self, lengths: list[int]) -> None:
        """Set `start` on the device without waiting for it."""
        send(lengths, self.start)
        self._held = list(lengths)


class BlockGraph(DecodeGraph):
    """A captured step of the MTP block, which appends `tokens` entries to rows of its own cache. `streams` [batch, n,
    d] and `logits` [batch, 1, vocab] are those after the last valid entry of each row.

    fed [batch, tokens, n, d]: the streams that it reads, also the graph's own tensor. last int64 [batch]: the number of
    that entry, by default the last of `tokens`; `ends` sets it.
    """

    def __init__(self, model: CausalLM, cache: Cache, tokens: int = 1, whole: bool = True):
        c = model.config
        self.fed = torch.zeros(
            cache.batch, tokens, c.hc_mult, c.hidden_size, dtype=model.numerics.activation, device=model.device
        )
        self._ends = [tokens] * cache.batch
        self.last = torch.full((cache.batch,), tokens - 1, device=model.device)
        super().__init__(model, cache, tokens, whole)

    def ends(self, counts: list[int]) -> None:
        """In the next step the first counts[b] entries of row b count; 0: none."""
        if counts != self._ends:
            self._ends = list(counts)
            send([max(0, n - 1) for n in counts], self.last)

    @property
    def lengths(self) -> Lengths:
        return self.cache._mtp

    def _ran(self, tokens: int) -> None:
        pass  # the main model has not run

    def _forward(self) -> tuple[torch.Tensor, Logits]:
        last = self.last if self.tokens > 1 else None
        features, streams = run_block(self.model, self.cache, self.fed.flatten(0, 1), self.ids, self.start, last)
        return streams, self.model.head.own(features)
