"""P35: routed experts in host memory give the bits of experts on the device. See expert_memory.md."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from dsv4.cache.host_tier.memory import PinnedMemoryError
from dsv4.kernels.quantize.kept import keeping
from dsv4.model.expert_memory import ExpertMemory
from dsv4.model.load import load_model
from dsv4.model.moe import Experts
from dsv4.probes.catalogue.placement import LARGEST
from dsv4.probes.compare import tokens
from dsv4.probes.probe import Probe
from dsv4.probes.result import Check, vacuous
from dsv4.probes.scenes.control import attempted_all
from dsv4.probes.scenes.gqa.steps import Tally
from dsv4.probes.scenes.slotted_experts import Watch
from dsv4.probes.subject import Subject

PROMPT, STEPS = 40, (*[1] * 10, 3, *[1] * 8)  # tokens
PART = "expert memory, "
SAME = "the same operations on the same numbers in the same order: equal bits, whatever the numerics"


@dataclass(frozen=True)
class ExpertMemoryProbe(Probe):
    """The checkpoint loaded again with one slot more in each layer than a token chooses, so that slots change hands."""

    name: ClassVar[str] = "expert_memory"
    title: ClassVar[str] = "routed experts in host memory give the bits of experts on the device"
    needs: ClassVar[frozenset[str]] = frozenset({"files", "run", "cache", "kernels"})

    def run(self, subject: Subject) -> list[Check]:
        model, c = subject.model, subject.config
        no = lambda why: [vacuous(self.title, why, part="expert memory")]
        if model.layer_devices is not None or model.ranks.size > 1:
            return no("the subject lies in several places, and slots are on one device")
        if c.n_routed_experts <= c.num_experts_per_tok + 1:
            return no(f"{c.num_experts_per_tok} of {c.n_routed_experts} experts are chosen: slots would never change")
        size = sum(p.nbytes for p in model.parameters())
        if size > LARGEST * self.effort:
            why = f"the model holds {size:,} bytes and would be loaded again; {LARGEST * self.effort:,.0f} are allowed"
            return no(why)
        where = f"{c.num_experts_per_tok + 1} of {c.n_routed_experts} experts have slots"
        try:
            return attempted_all("a model runs", where, "expert memory", lambda: self._checks(subject, where))
        except PinnedMemoryError as error:
            return no(str(error))

    def _checks(self, subject: Subject, where: str) -> Iterator[Check]:
        plain, tier, output = subject.model, again(subject), Tally()
        caches, ids = [m.new_cache(1, 100) for m in (plain, tier)], tokens(subject, PROMPT + sum(STEPS), self.seed, 1)
        watches, done = watched(tier), 0
        for number, n in enumerate((PROMPT, *STEPS)):
            for watch in watches:
                watch.where = f"{watch.layer}, step {number}"
            with keeping():  # dequantised weights, as where several tokens run one after another
                want, got = (m.append(ids[:, done : done + n], cache) for m, cache in zip((plain, tier), caches))
            output.see(int((want != got).sum()), want.numel(), f"step {number}")
            done += n
        yield host_rows(plain, tier).counted(
            "experts in host memory that are not the model's", f"{PART}host rows", "a file is loaded alike", where
        )
        yield output.counted(
            "logits in which a model with experts in host memory differs", f"{PART}output", SAME, where
        )
        read, slots, counts = (
            Tally.joined([getattr(w, name) for w in watches]) for name in ("read", "slots", "counts")
        )
        yield read.counted(
            "matrices given to the kernels that are not the chosen expert's", f"{PART}matrices", "bytes", where
        )
        yield slots.counted("slots that do not hold the expert that their table says", f"{PART}slots", "bytes", where)
        yield counts.counted("fetches that count other hits and misses", f"{PART}traffic", "the table before", where)
        seen = [sum(getattr(w, name) for w in watches) for name in ("hits", "misses", "evicted", "wholes")]
        if min(seen) == 0:
            why = "{} hits, {} misses, {} evictions, {} steps over the slots".format(*seen)
            yield vacuous("all ways of fetching are taken", why, where=where, part=f"{PART}slots")


def again(subject: Subject) -> Any:
    """The subject's checkpoint with its experts in host memory, run as the subject is."""
    model, (main, index) = subject.model, subject.caches
    return load_model(
        subject.files.path,
        numerics=subject.numerics,
        backend=model.backend,
        device=str(model.device),
        mtp=bool(len(model.mtp)),
        cache=main,
        index_cache=index,
        kernels=model.replacements,
        expert_memory=ExpertMemory(subject.config.num_experts_per_tok + 1),
    )


def watched(tier: Any) -> list[Watch]:
    """A watch over the experts of each layer, in the model's order."""
    found = [(name, m) for name, m in tier.named_modules() if isinstance(m, Experts)]
    return [Watch(name.removesuffix(".ffn.experts"), m) for name, m in found]


def host_rows(plain: Any, tier: Any) -> Tally:
    """Parameters of experts that differ."""
    found, held = Tally(), dict(tier.named_parameters())
    for name, value in plain.named_parameters():
        if ".experts." in name:
            same = torch.equal(value.cpu().view(torch.uint8), held[name].cpu().view(torch.uint8))
            found.see(int(not same), 1, name)
    return found


if __name__ == "__main__":
    from dsv4.probes.main import main

    main(ExpertMemoryProbe)
