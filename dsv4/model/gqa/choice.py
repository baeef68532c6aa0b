"""What a GQA model reads of its cache: a policy of blocks, when to stop, and how prompts attend."""

from dataclasses import asdict, dataclass

from dsv4.errors import InputError
from dsv4.kernels.block_choice import POLICIES, Policy, dense
from dsv4.kernels.chunked_prefill import RULES, Chunking
from dsv4.kernels.grouped_attention import Termination
from dsv4.model.gqa.cache import BLOCK
from dsv4.named_values import NUMBER, WHOLE, named_values, one_of
from dsv4.units import count_named, parse_count

NAMES = {name.replace("+", "-"): make for name, make in POLICIES.items()}  # of the command line
NOT_GQA = (
    "another attention was asked for; a DeepSeek-V4 model has learnt what it reads (CSA, HCA): leave out "
    "--attention, --attention-tokens, --terminate, --terminate-rule and --prefill-chunks"
)
RULE = {"tau": NUMBER, "phi": NUMBER, "patience": WHOLE}  # the parameters of a termination that the command line sets
CHUNKS = "CHUNK,LOCAL,HEAVY[,score=…][,heads=…], such as 1024,128,384 or 1024,256,256,score=memory,heads=query"
TOKENS = 4096  # tokens that a policy keeps by default


@dataclass(frozen=True)
class Attention:
    """policy: the blocks that a decoding token reads. termination: when it stops reading them; it reads the most
    important first or, without a choice of blocks, the newest first (None: it never stops). prefill: prompts attend to
    chunks and a memory (None: densely and exactly).

    Layers with a sliding window ignore all this: they attend densely within their window. Raises InputError for blocks
    that are not whole parts of a cache's tile, and for a policy that chooses by a prompt's queries beside chunks.
    """

    policy: Policy = dense()
    termination: Termination | None = None
    prefill: Chunking | None = None

    def __post_init__(self):
        if not self.policy.dense and BLOCK % self.policy.block:
            raise InputError(
                f"policy {self.policy.name} has blocks of {self.policy.block} tokens; a GQA cache is made of tiles of "
                f"{BLOCK}: choose a divisor of {BLOCK}"
            )
        if self.policy.once and self.prefill is not None:
            raise InputError(
                f"--attention {self.policy.name} was given with --prefill-chunks; it chooses by what queries attend to "
                "in all of a prompt, and chunks do not attend to all: leave out one of them"
            )

    @property
    def plain(self) -> bool:
        """Whether everything is dense and exact."""
        return self.policy.dense and self.termination is None and self.prefill is None

    def document(self) -> dict:
        """As JSON values."""
        policy = (
            {"name": "dense"}
            if self.policy.dense
            else asdict(self.policy) | {"kept_blocks": self.policy.kept, "kept_tokens": self.policy.tokens}
        )
        return {
            "policy": policy,
            "termination": None if self.termination is None else asdict(self.termination),
            "prefill": None if self.prefill is None else asdict(self.prefill),
        }


def attention_named(
    name: str | None,
    tokens: int | float | str | None = None,
    terminate: bool = False,
    prefill_chunks: str | None = None,
    rule: str | None = None,
) -> Attention | None:
    """The `Attention` of the command line's options; None if none was given.

    name: one of NAMES (None: dense); tokens: that a policy keeps, a number or as '4K', or of a policy that chooses once
    a share of the prompt ('0.2'); prefill_chunks: as `chunking_named` takes it; rule: of terminating,
    'tau=1e-5,phi=1e-3,patience=5' or some of these. Raises InputError for what contradicts itself or is no such option,
    UnsupportedInput for chunks that are no such cut and for values that no rule has.
    """
    if name is None and tokens is None and not terminate and prefill_chunks is None and rule is None:
        return None
    if name is not None and name not in NAMES:
        raise InputError(f"--attention {name!r} is unknown; expected {', '.join(NAMES)}")
    if name in (None, "dense") and tokens is not None:
        raise InputError(
            f"--attention-tokens {tokens} was given, and dense attention reads every token; add --attention block-bound"
        )
    if rule is not None and not terminate:
        raise InputError(f"--terminate-rule {rule} was given, and nothing ends before its last token; add --terminate")
    policy = (
        dense()
        if name in (None, "dense")
        else _kept(name, TOKENS if tokens is None else amount_named("--attention-tokens", tokens))
    )
    stops = (
        Termination(**named_values("--terminate-rule", rule or "", RULE, "tau=1e-5,phi=1e-3,patience=5"))
        if terminate
        else None
    )
    return Attention(
        policy, stops, None if prefill_chunks is None else chunking_named("--prefill-chunks", prefill_chunks)
    )


def amount_named(option: str, text: int | float | str) -> int | float:
    """'4K' → 4096 tokens, '0.2' → a share of the prompt. Raises InputError for neither."""
    try:
        share = text if isinstance(text, float) else float(text) if "." in str(text) else None
    except ValueError:
        share = None  # such as 1.5K
    if share is None:
        return count_named(option, text)
    if not 0 < share <= 1:
        raise InputError(f"{option} is {text}; expected tokens, such as 4K, or a share of the prompt, such as 0.2")
    return share


def _kept(name: str, tokens: int | float) -> Policy:
    """The policy `name` that keeps `tokens` tokens, sink and local blocks, or the window, included."""
    usual = NAMES[name]()
    if usual.once:
        if isinstance(tokens, int) and tokens <= usual.window:
            raise InputError(
                f"--attention-tokens is {tokens}; {name} keeps the last {usual.window} tokens of a prompt in any case: "
                f"expected more, or a share of the prompt, such as 0.2"
            )
        return NAMES[name](tokens)
    if isinstance(tokens, float):
        raise InputError(
            f"--attention-tokens is {tokens}; {name} keeps a fixed number of tokens, such as 4K: shares are for "
            f"{' and '.join(known for known, make in NAMES.items() if make().once)}"
        )
    least = usual.sink + (usual.local + 1 if usual.topk else 1)
    if tokens % usual.block or tokens < least * usual.block:
        raise InputError(
            f"--attention-tokens is {tokens}; {name} keeps whole blocks of {usual.block} tokens, sink and local ones "
            f"among them: expected a multiple of {usual.block} from {least * usual.block}"
        )
    return NAMES[name](tokens)


def chunking_named(option: str, text: str) -> Chunking:
    """'1K,256,256,score=memory' → Chunking(1024, 256, 256, score="memory"). option: its name on the command line.

    Raises InputError for a text of another form, UnsupportedInput for a cut that cannot be.
    """
    *parts, rest = text.split(",", 3) if text.count(",") > 2 else (*text.split(","), "")
    if len(parts) != 3:
        raise InputError(f"{option} has {text!r}; expected {CHUNKS}")
    known = {name: one_of(*names) for name, names in RULES.items()}
    return Chunking(*map(parse_count, parts), **named_values(option, rest, known, "score=memory,heads=query"))
