"""P26: the cost model's bytes of a decode step are those that it reads, and the fit uses the right rows. See
cost_model.md."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from dsv4.cost_model import step
from dsv4.probes.compare import tokens
from dsv4.probes.probe import Probe
from dsv4.probes.result import Check, vacuous
from dsv4.probes.scenes.control import attempted_all
from dsv4.probes.scenes.cost_audit import latents, weights
from dsv4.probes.scenes.cost_audit.fitting import fitted
from dsv4.probes.scenes.cost_audit.mistakes import weight_mistakes
from dsv4.probes.scenes.cost_audit.shapes import Shapes
from dsv4.probes.scenes.cost_audit.watching import Calls
from dsv4.probes.scenes.patching import wrapped
from dsv4.probes.subject import Subject
from dsv4.runtime.planning import held_tensors

BATCHES = (2, 1)
READ = "rows that an output depends on, and summaries that a choice depends on, × bytes of a row in its storage"
TREE = (
    "parameters of the loaded modules, each once; of experts those that the router chose, of the embedding and "
    "of tables a row a token"
)


@dataclass(frozen=True)
class CostModelProbe(Probe):
    """Steps of one token over caches of many lengths. Their reads are counted, one kind of layer after the other, and
    compared with `dsv4.cost_model.step`. The fit of β, c₀ and c₁ is checked on made-up machines, and does not depend on
    the model."""

    name: ClassVar[str] = "cost_model"
    title: ClassVar[str] = "the cost model of a decode step: bytes that it reads, and rows that are fitted"
    needs: ClassVar[frozenset[str]] = frozenset({"run", "cache", "kernels", "batch"})
    # rows of a batch; more rows may share experts: the cost model then gives an upper bound
    weight_rows: ClassVar[tuple[int, ...]] = (1,)

    def run(self, subject: Subject) -> list[Check]:
        checks = attempted_all("the cost model's weights", "", "cost model, weights", lambda: self._weights(subject))
        checks += self._caches(subject)
        return checks + attempted_all("the cost model's fit", "made-up rows", "cost model, fit", fitted)

    def _caches(self, subject: Subject) -> list[Check]:
        return attempted_all("the cost model's caches", "", "cost model, caches", lambda: self._latents(subject))

    def _weights(self, subject: Subject) -> Iterator[Check]:
        model, config = subject.model, subject.config
        held = held_tensors(config, subject.files, model.numerics)
        for rows in self.weight_rows:
            with weights.routed(model) as chosen:
                model.append(tokens(subject, 1, self.seed, rows=rows), model.new_cache(rows, 1))
            found, said = weights.counted(model, rows, chosen), step.weights_read(held, config, rows)
            mistakes = weight_mistakes(held, config, rows)
            shapes = Shapes(f"one token of {rows} rows")
            shapes.see(found, said, mistakes, "")
            yield from shapes.checks(TREE, "weights")

    def _latents(self, subject: Subject) -> Iterator[Check]:
        model, c = subject.model, subject.config
        # below them every token is in the window, and every entry is selected
        W, k = c.sliding_window, 4 * c.index_topk
        wanted = sorted(n for n in {W - 3, W + 2, k + 3, k + 4, k + 7, 2 * 128 + 1} if n > 0)
        contexts = [n for n in wanted if n <= c.max_position_embeddings]
        if len(contexts) < len(wanted):
            yield vacuous(
                "bytes of attention",
                f"{max(wanted)} tokens are needed, the checkpoint allows {c.max_position_embeddings}",
                part="cost model",
            )
        shapes, scored = Shapes("decode"), []
        indexers = [(i, block.attn.indexer) for i, block in enumerate(model.layers) if hasattr(block.attn, "indexer")]

        def around(i, _, real):
            def call(*given):
                scored.append((i, found := real(*given)))
                return found

            return call

        for batch in BATCHES if contexts else ():
            ids, cache = tokens(subject, max(contexts), self.seed, rows=batch), model.new_cache(batch, max(contexts))
            for n in contexts[-1:] if batch == 1 else contexts:
                if n - 1 > cache.lengths[0]:
                    model.append(ids[:, cache.lengths[0] : n - 1], cache, logits="none")
                scored.clear()
                with (
                    wrapped(indexers, "scored", around),
                    Calls(model, (b.attn for b in model.layers), *latents.OPERATIONS) as watched,
                ):
                    model.append(ids[:, n - 1 : n], cache)
                    found = latents.counted(c, watched, watched.taken(), scored, model.op.index_scores)
                shape = c, model.numerics, batch, n
                shapes.see(found, step.attention_parts(*shape), latents.mistakes(*shape), f"batch {batch}, {n} tokens")
        yield from shapes.checks(READ, "attention")


if __name__ == "__main__":
    from dsv4.probes.main import main

    main(CostModelProbe)
