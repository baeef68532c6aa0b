"""Losses and gradients of a batch as one CUDA graph: a step is thousands of small kernels, and a host launches them
slower than they run."""

import torch
from torch.func import functional_call

from dsv4.runtime.capture import capturing

LIMIT = 48  # graphs of one shape; each keeps a gradient of every parameter


class Gradients:
    """Computes losses and gradients for one trainee (`trainee.Trainee` or `gqa.Trainee`); what it has seen before, on a
    GPU, it replays.

    A graph is bound to the shape, to what is wanted and to where the indexer's chunk begins. The first batch of a kind
    runs eagerly (kernels compile then), the second is captured; past `limit` kinds the rest stay eager. A new shape
    frees the others.
    """

    def __init__(self, trainee, parameters: dict[str, torch.Tensor], simulate: bool, limit: int = LIMIT):
        self.trainee, self.simulate = trainee, simulate
        self.parameters, self.limit = parameters, limit
        self.trained = [p for p in parameters.values() if p.requires_grad]
        self.shape, self.seen, self.graphs = None, set(), {}

    def __call__(self, ids: torch.Tensor, weight: torch.Tensor, wanted, at: int) -> dict[str, torch.Tensor]:
        """ids, weight, at as in `Trainee`. Sets every parameter's `grad`, and the trainee's `chosen`; returns the
        losses.

        What a replay returns is overwritten by the next one of its kind.
        """
        if not ids.is_cuda:
            return self._publish(*self._compute(ids, weight, wanted, at))
        if self.shape != (ids.shape, wanted):
            self.shape, self.seen, self.graphs = (ids.shape, wanted), set(), {}
        if at in self.graphs:
            graph, held_ids, held_weight, made = self.graphs[at]
            held_ids.copy_(ids), held_weight.copy_(weight)
            graph.replay()
            return self._publish(*made)
        if self.seen and len(self.graphs) < self.limit and (at in self.seen or len(self.seen) > 2):
            return self._capture(ids.clone(), weight.clone(), wanted, at)
        self.seen.add(at)
        return self._publish(*self._compute(ids, weight, wanted, at))

    def _capture(self, ids, weight, wanted, at):
        graph = torch.cuda.CUDAGraph()
        pool = next(iter(self.graphs.values()))[0].pool() if self.graphs else None
        with capturing(graph, pool=pool, capture_error_mode="thread_local"):  # the loader pins memory meanwhile
            made = self._compute(ids, weight, wanted, at)
        self.graphs[at] = graph, ids, weight, made
        graph.replay()
        return self._publish(*made)

    def _compute(self, ids, weight, wanted, at):
        out = functional_call(
            self.trainee, self.trainee.cast(self.parameters, self.simulate), (ids, weight, wanted, at)
        )
        grads = torch.autograd.grad(out["total"], self.trained, allow_unused=True)
        return {name: value.detach() for name, value in out.items()}, grads, list(self.trainee.chosen)

    def _publish(self, out, grads, chosen):
        for p, grad in zip(self.trained, grads):
            p.grad = grad
        self.trainee.chosen = list(chosen)  # the trainee clears its list; a graph's own must stay
        return out
