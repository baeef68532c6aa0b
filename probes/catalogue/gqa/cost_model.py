"""`cost_model` on GQA models, by each kind of policy."""

from collections.abc import Iterator
from typing import ClassVar

from dsv4.cache.cache import Cache
from dsv4.cost_model import gqa, step
from dsv4.kernels.block_choice import Policy, dense
from dsv4.model.gqa.choice import Attention
from dsv4.probes.catalogue.cost_model import BATCHES, READ, CostModelProbe
from dsv4.probes.compare import tokens
from dsv4.probes.result import Check, compare, vacuous
from dsv4.probes.scenes.control import attempted_all
from dsv4.probes.scenes.cost_audit import grouped
from dsv4.probes.scenes.cost_audit.shapes import Shapes
from dsv4.probes.scenes.cost_audit.watching import Calls
from dsv4.probes.scenes.gqa.steps import poisoned
from dsv4.probes.scenes.patching import kept
from dsv4.probes.subject import Subject

POLICIES = (
    dense(),
    Policy("block-16 bound", "bound", 16, 1, 2, 3),
    Policy("block-16 mean", "mean", 16, 2, 1, 3),
    Policy("sink and window", None, 16, 1, 5),
)
# fewer blocks than are kept; all of them; one token more; blocks to choose from, the last not full
CONTEXTS = (40, 96, 97, 135)
ALLOCATED = "sizes of the storages"


class GQACostModel(CostModelProbe):
    """Steps read what the policy keeps, and score summaries of blocks."""

    weight_rows: ClassVar[tuple[int, ...]] = BATCHES

    def _caches(self, subject: Subject) -> list[Check]:
        checks = []
        with kept(subject.model, "attention"):
            for policy in POLICIES:
                checks += attempted_all(
                    "the cost model's caches",
                    policy.name,
                    "cost model, caches",
                    lambda: self._grouped(subject, policy),
                )
        return checks

    def _grouped(self, subject: Subject, policy: Policy) -> Iterator[Check]:
        model, config, most = subject.model, subject.config, subject.config.max_position_embeddings
        contexts = [n for n in CONTEXTS if n <= most]
        if len(contexts) < len(CONTEXTS):
            yield vacuous(
                "bytes of attention",
                f"{max(CONTEXTS)} tokens are needed, the checkpoint allows {most}",
                where=policy.name,
                part="cost model",
            )
        model.attention, shapes = Attention(policy), Shapes(policy.name)
        for batch in BATCHES if contexts else ():
            ids, cache = tokens(subject, max(contexts), self.seed, rows=batch), poisoned(model, batch, max(contexts))
            for n in contexts[-1:] if batch == 1 else contexts:
                if n - 1 > cache.lengths[0]:
                    model.append(ids[:, cache.lengths[0] : n - 1], cache, logits="none", prompt=True)
                with Calls(model, (layer.self_attn for layer in model.layers), *grouped.OPERATIONS) as watched:
                    model.append(ids[:, n - 1 : n], cache, prompt=False)
                    found = grouped.counted(watched, watched.taken(), n)
                shape = config, model.numerics, batch, n, policy
                shapes.see(found, step.attention_parts(*shape), grouped.mistakes(*shape), f"batch {batch}, {n} tokens")
        yield from shapes.checks(READ, "attention")
        if contexts:
            yield from self._held(subject, policy, cache)

    def _held(self, subject: Subject, policy: Policy, cache: Cache) -> Iterator[Check]:
        """The bytes of a layer's cache in `dsv4 regime`, which it uses to see what fits: whole tiles, as caches are
        made."""
        g, rows = gqa.Geometry.of(subject.config, subject.model.numerics), cache.layers
        full = [layer for layer in rows if set(layer.tensors) > {"keys", "values"}] or rows
        slots = full[0].keys.shape[2]
        said = (
            g.cache(cache.batch, slots) if len(full[0].tensors) == 2 else gqa.held_bytes(g, policy, cache.batch, slots)
        )
        yield compare(
            "bytes that one layer's cache takes",
            said,
            "==",
            sum(t.untyped_storage().nbytes() for t in full[0].tensors.values()),
            ALLOCATED,
            1,
            unit="B",
            where=f"{policy.name}, batch {cache.batch}, {slots} slots",
            part="cost model, bytes held",
        )
