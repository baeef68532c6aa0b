"""A drafter of a text that the probe knows: any number of drafts is right, and the model's logits are not changed.

Also the common parts of probes that compare one decoded text.
"""

from dataclasses import dataclass

import torch

from dsv4.cache.cache import Cache
from dsv4.model.causal import CausalLM, capacity
from dsv4.model.cut_values import whole
from dsv4.probes.compare import TOLERANCES
from dsv4.probes.subject import Subject
from dsv4.speculation.draft import Drafter, Drafts
from dsv4.speculation.passes import SingleSteps
from dsv4.speculation.verify import default

# stated here, not read from the audited code
ON_HOST = ("cpu", "reference")


class KnownDrafter(Drafter):
    """Drafts the next tokens of `texts` after a row's tokens. In pass k of row b the first right[k] drafts are right,
    and later ones are the right token + 1; the last number holds for all later passes."""

    name = "known"

    def __init__(self, texts: list[list[int]], right: list[int], vocab: int):
        self.texts, self.right, self.vocab = texts, right, vocab

    def begin(self, prompts: list[list[int]], model: CausalLM, cache: Cache, choose) -> None:
        self.at, self.passes = [0] * len(self.texts), [0] * len(self.texts)

    def join(self, b: int, prompt: list[int]) -> None:
        self.at[b] = self.passes[b] = 0

    def commit(self, streams: torch.Tensor | None, tokens: torch.Tensor, counts: list[int]) -> None:
        self.at = [at + n for at, n in zip(self.at, counts)]

    def draft(self, sizes: list[int]) -> Drafts:
        found = torch.zeros(len(sizes), max(sizes, default=0), dtype=torch.int64)
        for b, size in enumerate(sizes):
            right = self.right[min(self.passes[b], len(self.right) - 1)]
            self.passes[b] += size > 0
            for i, token in enumerate((self.texts[b] + [0] * size)[self.at[b] : self.at[b] + size]):
                found[b, i] = token if i < right else (token + 1) % self.vocab
        return Drafts(found, list(sizes), None, [0] * len(sizes))


def promises_bits(subject: Subject) -> bool:
    """Whether the default verification promises plain decoding's logits bit for bit: on a host backend in every
    numerics but fp32, where a pass is one append whose sums may run in another order. This is the promise of
    dsv4/speculation/README.md; it does not depend on what `default` returns."""
    return subject.model.backend in ON_HOST and subject.numerics != "fp32"


@dataclass
class Plain:
    """Greedy text without drafts. tokens: those chosen; logits fp32 [n, vocab] that they were chosen from."""

    tokens: list[int]
    logits: torch.Tensor

    def tells(self, at: int, subject: Subject) -> bool:
        """Whether a decoder must choose the token of this text at `at`. If logits need not be equal to the last bit, it
        must only if no difference that the numerics explain could have put another token first."""
        first, second = self.logits[at].topk(2).values.tolist()
        allowed = 2 * TOLERANCES[subject.numerics][1] * self.logits[at].norm().item()
        return promises_bits(subject) or first - second > allowed

    def differs(self, found: list[int], subject: Subject) -> int | None:
        """The first place where another text differs and must not; None if there is none."""
        at = next((i for i, (a, b) in enumerate(zip(found, self.tokens)) if a != b), None)
        if at is None:
            return None if len(found) == len(self.tokens) else min(len(found), len(self.tokens))
        return at if self.tells(at, subject) else None


def single(model: CausalLM, cache: Cache):
    """Plain decoding's own step: on the host one token of `append`, on a GPU the captured step of one token."""
    return (SingleSteps if model.backend in ON_HOST else default)(model, cache)


def decoded(subject: Subject, prompt: list[int], n: int) -> Plain:
    """n greedy tokens after a prompt, one step each."""
    model = subject.model
    cache = model.new_cache(1, capacity(model, len(prompt) + n))
    logits = [model.append(torch.tensor([prompt]), cache, logits="last")[0, -1].float().cpu()]
    tokens, step = [int(logits[0].argmax())], single(model, cache)
    while len(tokens) < n:
        found, _ = step(torch.tensor([[tokens[-1]]], device=model.device), [1], False)
        logits.append(whole(found)[0, 0].float().cpu().clone())
        tokens.append(int(logits[-1].argmax()))
    return Plain(tokens, torch.stack(logits))
