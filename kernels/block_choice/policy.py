"""What a decode step reads of a long cache: policies with one interface."""

from dataclasses import dataclass

from dsv4.kernels.errors import UnsupportedInput

SELECTORS = (None, "mean", "bound")


@dataclass(frozen=True)
class Policy:
    """The keep-set of a step: the sink blocks, the local blocks and the top-k distant blocks, whatever the context
    length.

    selector: "bound" (upper bound on any token's dot product in the block, maximum over the query group), "mean"
    (mean-pooled keys, mean over the group; loses short needles), or None if no distant block is kept. block: tokens of
    a block. sink: first blocks of the sequence. local: the block of the current position and those before it, `local`
    in all. topk: distant blocks; distant are the complete blocks between the sink and the local ones. dense: everything
    is read, and the other fields are ignored. Raises UnsupportedInput for a policy that contradicts itself.
    """

    name: str
    selector: str | None = None
    block: int = 128
    sink: int = 1
    local: int = 2
    topk: int = 0
    dense: bool = False

    def __post_init__(self):
        problem = (
            f"selector {self.selector!r}; expected mean, bound or None"
            if self.selector not in SELECTORS
            else f"block {self.block}; expected a power of two from 16"
            if self.block < 16 or self.block & (self.block - 1)
            else f"{self.sink} sink, {self.local} local and {self.topk} distant blocks; expected none negative and at "
            "least the block of the current position"
            if min(self.sink, self.topk) < 0 or self.local < 1
            else f"{self.topk} distant blocks and selector {self.selector!r}; expected a selector exactly where "
            "topk is positive"
            if not self.dense and bool(self.topk) != (self.selector is not None)
            else None
        )
        if problem:
            raise UnsupportedInput(f"policy {self.name}: {problem}")

    @property
    def kept(self) -> int:
        """Number of blocks of a keep-set; it is fixed."""
        return self.sink + self.local + self.topk

    @property
    def tokens(self) -> int:
        """The most tokens of a keep-set."""
        return self.kept * self.block


def dense() -> Policy:
    return Policy("dense", dense=True)


def sink_window(tokens: int = 4096, block: int = 128, sink: int = 1) -> Policy:
    """StreamingLLM: the first and the last blocks. Keys keep the positions that they were cached with (no
    re-numbering)."""
    return Policy("sink+window", None, block, sink, tokens // block - sink)


def page_bounds(tokens: int = 4096, block: int = 16, sink: int = 1, local: int = 2) -> Policy:
    """Quest: pages of 16 tokens by their bounds."""
    return Policy(f"page-{block} bound", "bound", block, sink, local, tokens // block - sink - local)


def block_bounds(tokens: int = 4096, block: int = 128, sink: int = 1, local: int = 2) -> Policy:
    return Policy(f"block-{block} bound", "bound", block, sink, local, tokens // block - sink - local)


def block_means(tokens: int = 4096, block: int = 128, sink: int = 1, local: int = 2) -> Policy:
    """Mean-pooled blocks, kept as a warning: a needle of a few tokens vanishes in the mean of its block."""
    return Policy(f"block-{block} mean", "mean", block, sink, local, tokens // block - sink - local)


POLICIES = {
    "dense": dense,
    "sink+window": sink_window,
    "page-bound": page_bounds,
    "block-bound": block_bounds,
    "block-mean": block_means,
}
