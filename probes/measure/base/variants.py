"""Ways in which one model reads its context: everything, or what a policy keeps."""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

from dsv4.cache.cache import Cache
from dsv4.errors import InputError, UnsupportedInput
from dsv4.kernels.block_choice import Policy, dense
from dsv4.model.causal import CausalLM
from dsv4.model.gqa.choice import NAMES
from dsv4.probes.measure.base.mass import window_only
from dsv4.probes.measure.base.models import csa_layers, reads_by_policy
from dsv4.probes.oracle import kinds
from dsv4.probes.scenes.patching import replaced


@dataclass(frozen=True)
class Variant:
    """A name, and a context manager under which a model runs that way; it leaves the model as it was.

    budget: tokens of the context that a query reads at most in the layers that choose, None: all, or a share of the
    prompt. Of a policy that chooses once: of the prompt, the mean of the layers. Caches are made and
    used inside the context. exact: reads everything, the run that others are held against. own: what the checkpoint
    itself does. control:
    known to lose what is distant. decode_only: acts in passes of at most 16 tokens; longer ones are dense and exact. k:
    entries of CSA; policy: of a GQA model.
    """

    name: str
    switch: Callable[[CausalLM], AbstractContextManager] = lambda model: nullcontext()
    budget: int | None = None
    exact: bool = False
    own: bool = False
    control: bool = False
    decode_only: bool = False
    k: int | None = None
    policy: Policy | None = None

    def on(self, model: CausalLM) -> AbstractContextManager:
        return self.switch(model)

    @property
    def resumable(self) -> bool:
        """Whether this way to decode goes on from a prompt that ran under any other that acts in decoding alone. A
        policy that chooses once needs the queries of its own prompt."""
        return self.decode_only and not (self.policy is not None and self.policy.once)

    @contextmanager
    def resumed(self, model: CausalLM, cache: Cache) -> Iterator[Cache]:
        """`on`, with a cache that was filled under another variant which acts in decoding alone, as this one does: it
        holds the keys and values that this one would have made, and gets the summaries that this one searches."""
        with self.on(model):
            if self.policy is not None and reads_by_policy(model):
                cache.adopt(self.policy)
            yield cache

    def budget_at(self, context: int) -> int | None:
        """`budget` of a context: a share is of so many tokens."""
        share = self.budget is None and self.policy is not None and self.policy.once
        return self.policy.budget(0, 1, context) if share else self.budget

    def keeps_all(self, context: int) -> bool:
        """Whether nothing is left out of `context` tokens: a measurement there proves nothing."""
        if self.k is not None and not self.exact:
            return self.k >= context // kinds.CSA
        budget = self.budget_at(context)
        return not self.control and (budget is None or budget >= context)

    def about(self) -> dict:
        """As JSON values."""
        policy = None if self.policy is None else dataclasses.asdict(self.policy)
        return {
            "name": self.name,
            "budget": self.budget,
            "exact": self.exact,
            "own": self.own,
            "control": self.control,
            "decode_only": self.decode_only,
            "k": self.k,
            "policy": policy,
        }


# ---- CSA ------------------------------------------------------------------------------------


def csa_variants(model: CausalLM, ks: list[int] | None, longest: int) -> list[Variant]:
    """Dense over entries first, then each k (default: a quarter, a half, once and twice the checkpoint's own), the
    checkpoint's own k among them, and windows alone as the control. longest: tokens of any context. Raises
    InputError."""
    own = model.config.index_topk
    if not csa_layers(model.config):
        raise InputError("the checkpoint has no CSA layer (compress_ratio 4): there is no k to choose")
    ks = sorted({*(ks or [max(1, own // 4), max(1, own // 2), 2 * own]), own})
    if ks[0] < 1:
        raise InputError(f"--topk {ks[0]}; expected at least 1")
    found = [of_csa(-(-longest // kinds.CSA), exact=True)]
    found += [of_csa(k, window=model.config.sliding_window, own=k == own) for k in ks]
    return [*found, Variant("window only", window_only, model.config.sliding_window, control=True)]


def of_csa(k: int, exact: bool = False, own: bool = False, window: int = 0) -> Variant:
    """All CSA layers select k entries; each stands for the `kinds.CSA` tokens that end with it."""
    name = "dense over entries" if exact else f"k = {k}{' (own)' if own else ''}"

    def switch(model: CausalLM) -> AbstractContextManager:
        return replaced([model.layers[i].attn.indexer for i in csa_layers(model.config)], "topk", k)

    return Variant(name, switch, None if exact else window + kinds.CSA * k, exact, own, k=k)


# ---- policies of a GQA model ----------------------------------------------------------------


def policy_variants(names: list[str] | None, budgets: list[int | float], block: int | None) -> list[Variant]:
    """Dense first, then each policy at each budget. names: of dsv4.kernels.block_choice.POLICIES (default: all);
    budgets: tokens, and shares of the prompt, which count for policies that choose once alone; block: tokens of a block
    instead of the policy's own, where it has blocks. Raises InputError for unknown names, for budgets below a keep-set,
    and for shares that no policy takes."""
    known = NAMES
    names = [name.replace("+", "-") for name in names or known]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise InputError(f"--policy {unknown[0]!r} is unknown; expected some of {', '.join(known)}")
    once = {name for name in names if known[name]().once}
    shares = [tokens for tokens in budgets if isinstance(tokens, float)]
    if shares and not once:
        raise InputError(f"--budget {shares[0]} is a share of the prompt, which no policy of {', '.join(names)} takes")
    sizes = lambda name: {} if block is None or name in once else {"block": block}
    takes = lambda name, tokens: name != "dense" and (name in once or not isinstance(tokens, float))
    try:
        found = [known[name](tokens, **sizes(name)) for name in names for tokens in budgets if takes(name, tokens)]
    except UnsupportedInput as error:
        raise InputError(
            f"--budget {','.join(map(str, budgets))} is too little: {error}; ask for a larger one, or a smaller --block"
        ) from None
    # budgets that are the same in whole blocks
    return [of_policy(dense()), *(of_policy(policy) for policy in dict.fromkeys(found))]


def of_policy(policy: Policy) -> Variant:
    """A GQA model under `policy`, by its `attention`."""
    name = "dense" if policy.dense else f"{policy.name}, {policy.size}"

    @contextmanager
    def switch(model: CausalLM) -> Iterator[None]:
        if getattr(model, "attention", None) is None:
            if policy.dense:  # what a model without the choice does
                yield
                return
            raise InputError(
                f"this model has no choice of attention, so {name} cannot be run; expected a GQA model with policies"
            )
        with replaced([model], "attention", dataclasses.replace(model.attention, policy=policy)):
            yield

    return Variant(name, switch, None if policy.dense else policy.tokens, policy.dense, decode_only=True, policy=policy)
