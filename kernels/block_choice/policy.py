"""What a decode step reads of a long cache: policies with one interface."""

from dataclasses import dataclass

from dsv4.kernels.errors import UnsupportedInput

SELECTORS = (None, "mean", "bound")
POOLINGS = ("avg", "max")


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
    def tokens(self) -> int | None:
        """The most tokens of a keep-set; None where that is a share of the prompt."""
        return self.kept * self.block

    @property
    def size(self) -> str:
        """`tokens` in words."""
        return f"{self.tokens} tokens"

    @property
    def once(self) -> bool:
        """Whether the keep-set is chosen once, after a prompt, and not by every step."""
        return False

    def budget(self, layer: int, layers: int, prompt: int) -> int:
        """Tokens of a text of `prompt` tokens that its last token reads, or the next one if the policy chooses once, in
        the `layer`-th of the `layers` layers that choose. The own block of the last token ends with it."""
        if self.dense:
            return prompt
        return min(self.kept, -(-prompt // self.block)) * self.block - -prompt % self.block


@dataclass(frozen=True)
class Observed(Policy):
    """A keep-set of single tokens that is chosen once, after the prompt, by what the prompt's last tokens attend to.
    All later tokens are kept.

    The queries of the last `window` tokens of the prompt attend causally to all of it. Their probabilities over the
    tokens before the window are summed over these queries, pooled over `kernel` neighbouring tokens (stride 1, zeros
    beyond the ends), and averaged over the query heads of a KV head. Each KV head keeps the tokens of the highest
    scores, and the window. Sources: SnapKV (arXiv 2404.14469), whose code pools with an average and chooses by query
    head; the average over a group is that of kvpress, because grouped heads share one cache.

    retention: tokens of the prompt that a layer keeps, the window among them: a number, or a share of the prompt
    (float, 0 < share ≤ 1, rounded). Never less than the window. beta: None, or budgets fall from the first layer to the
    last by equal steps with `retention` as their mean (PyramidKV, arXiv 2406.02069): with the mean m = retention −
    window, the last keeps ⌊m / beta⌋ tokens beside the window and the first 2m − ⌊m / beta⌋, but at most all tokens
    before the window, and the last then what keeps the mean. Steps are rounded down, as in the authors' code, so the
    mean may exceed m by up to (layers − 1) / 2. Their code keeps even budgets for prompts shorter than 2m; here the
    rule is the same for all.
    """

    retention: int | float = 4096
    window: int = 32
    kernel: int = 5
    pooling: str = "avg"
    beta: int | None = None
    block: int = 1
    sink: int = 0
    local: int = 0

    def __post_init__(self):
        share = isinstance(self.retention, float)
        problem = (
            f"retention {self.retention}; expected a number of tokens, or a share above 0 and up to 1.0"
            if self.retention <= 0 or share and self.retention > 1
            else f"a window of {self.window} tokens; expected at least 1"
            if self.window < 1
            else f"pooling {self.pooling!r} over {self.kernel} tokens; expected avg or max over an odd number"
            if self.pooling not in POOLINGS or self.kernel < 1 or self.kernel % 2 == 0
            else f"beta {self.beta}; expected at least 1, or None"
            if self.beta is not None and self.beta < 1
            else f"blocks of {self.block} tokens and selector {self.selector!r}; expected single tokens and none"
            if self.block != 1 or self.selector is not None or self.dense
            else None
        )
        if problem:
            raise UnsupportedInput(f"policy {self.name}: {problem}")

    @property
    def kept(self) -> int | None:
        """Tokens of the prompt, the mean of the layers; None for a share."""
        return self.tokens

    @property
    def tokens(self) -> int | None:
        """Of the prompt, the mean of the layers; None for a share."""
        return None if isinstance(self.retention, float) else max(self.retention, self.window)

    @property
    def size(self) -> str:
        return f"{self.retention:.0%} of the prompt" if self.tokens is None else f"{self.tokens} tokens of the prompt"

    @property
    def once(self) -> bool:
        return True

    def budget(self, layer: int, layers: int, prompt: int) -> int:
        asked = self.tokens or max(self.window, round(self.retention * prompt))
        if asked >= prompt:
            return prompt
        if self.beta is None or layers == 1:
            return asked
        mean, before = asked - self.window, prompt - self.window
        most = min(2 * mean - mean // self.beta, before)
        return self.window + most - layer * ((most - (2 * mean - most)) // (layers - 1))


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


def snapkv(tokens: int | float = 4096) -> Observed:
    """SnapKV with the settings of its authors' code: a window of 32, average pooling over 5."""
    return Observed("snapkv", retention=tokens)


def pyramidkv(tokens: int | float = 4096) -> Observed:
    """PyramidKV with the settings of its authors' code: SnapKV's, and beta 20."""
    return Observed("pyramidkv", retention=tokens, beta=20)


POLICIES = {
    "dense": dense,
    "sink+window": sink_window,
    "page-bound": page_bounds,
    "block-bound": block_bounds,
    "block-mean": block_means,
    "snapkv": snapkv,
    "pyramidkv": pyramidkv,
}
