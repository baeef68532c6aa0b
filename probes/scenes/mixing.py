"""The mixing matrices of hyper-connections as a model used them for prompts of text: their sums, and what more
iterations of Sinkhorn would leave."""

from collections.abc import Callable
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path

import torch

from dsv4.model.tokenizer import Tokenizer
from dsv4.probes.compare import oracle_of, tokens
from dsv4.probes.oracle.attention import Layer
from dsv4.probes.oracle.blocks import mixes, sinkhorn
from dsv4.probes.report.markdown import table
from dsv4.probes.result import Check, Status, compare, vacuous
from dsv4.probes.scenes.patching import wrapped
from dsv4.probes.subject import Subject

NAMES = "mhc_pre", "mhc_pre_norm", "mhc_post_pre_norm"  # what makes a matrix, alone or with what is beside it
SUBLAYERS = "hc_attn", "hc_ffn"
TOKENS = 384  # of a prompt; more than kernels and steps take in one piece (256)
CHARACTERS = 8 * TOKENS
MORE = 2, 5  # times as many iterations
PART = "Sinkhorn"
COLUMNS = "columns of the mixing matrices sum to 1 / (1 + hc_eps)"
MATRIX = "mixing matrices are what hc_sinkhorn_iters iterations give"
ROWS = "rows of the mixing matrices sum to 1 as far as the iterations converge"
NORM = "|X| that enters the layer, rms"
OFF = "row sums off 1 by the definition"
EXACT = "the last step divides columns by their sum, about 1, plus hc_eps; 2.4e-7 found in fp32; allowed 1e-6"
SLOPE = "fp32 logits of size 20 carry 2e-6, times the slope of the iteration"
REPORTED = "reported, not judged: the iteration ends on columns, and the reference itself leaves up to 8e-2"

Mixed = list[tuple[torch.Tensor, torch.Tensor]]


def prompts(subject: Subject, seed: int) -> list[torch.Tensor]:
    """ids int64 [1, T] of prose and of code that every installation has; random ids where there is no tokenizer."""
    folder, most = Path(subject.provenance["path"]), min(TOKENS, subject.config.max_position_embeddings)
    if not (folder / "tokenizer.json").is_file():
        return [tokens(subject, most, seed)]
    tokenizer, home = Tokenizer(folder, subject.config.vocab_size), Path(import_module("dsv4.probes").__file__).parent
    found = []
    for pattern in ("catalogue/*.md", "oracle/*.py"):
        text = "\n\n".join(file.read_text(encoding="utf-8") for file in sorted(home.glob(pattern)))
        found.append(torch.tensor([tokenizer.encode(text[:CHARACTERS])[:most]]))
    return found


def watched(model, prompt: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(streams [N, n, d] that a sublayer read, comb [N, n, n] that it was given) of every call, in their order, while
    ids [1, T] run as a prompt. Kernels that make the matrix together with other things run as they do."""
    calls, inside = [], []

    def around(_, __, real: Callable) -> Callable:
        def run(*given):
            if inside:
                return real(*given)
            inside.append(True)
            try:
                out = real(*given)
            finally:
                inside.pop()
            calls.append(((out if len(out) == 4 else given)[0].double().cpu(), out[-1].double().cpu()))
            return out

        return run

    with ExitStack() as stack:
        for name in NAMES:
            stack.enter_context(wrapped([(0, model.op)], name, around))
        model.append(prompt, model.new_cache(1, prompt.shape[1]), logits="none", prompt=True)
    return calls


def logits_of(layer: Layer, name: str, streams: torch.Tensor) -> torch.Tensor:
    """Logits [N, n, n] in float64 from which the definition makes the matrices of streams [N, n, d]."""
    c, n = layer.config, layer.config.hc_mult
    m = mixes(streams[None], layer.w(f"{name}_fn"), c.rms_norm_eps)[0, :, 2 * n :]
    return (m * layer.w(f"{name}_scale")[2] + layer.w(f"{name}_base")[2 * n :]).unflatten(-1, (n, n))


def off(comb: torch.Tensor, axis: int) -> float:
    """The sum over `axis` that is farthest from 1."""
    return (comb.sum(axis) - 1).abs().max().item()


def runtime(subject: Subject, seed: int) -> list[Check]:
    """Column and row sums of every layer's matrices on prompts of text, and |X| beside them."""
    oracle, L = oracle_of(subject), subject.config.num_hidden_layers
    calls: list[Mixed] = [[] for _ in range(2 * L)]
    for prompt in prompts(subject, seed):
        found = watched(subject.model, prompt)
        if not found or len(found) % (2 * L):
            return [vacuous(COLUMNS, f"{len(found)} calls of {L} layers; expected two of each a step", part=PART)]
        for i, call in enumerate(found):
            calls[i % (2 * L)].append(call)
    checks = []
    for i in range(L):
        checks += of_layer(oracle.layer(i), f"layer {i}", calls[2 * i : 2 * i + 2])
    return checks


def of_layer(layer: Layer, where: str, calls: list[Mixed]) -> list[Check]:
    """The checks of one layer, of both its sublayers together."""
    c = layer.config
    streams, combs = (
        [torch.cat([call[place] for call in of]) for of in calls] for place in (0, 1)
    )  # of attention, of the experts
    logits = [logits_of(layer, name, x) for name, x in zip(SUBLAYERS, streams)]
    by_definition = lambda times: [sinkhorn(one, times * c.hc_sinkhorn_iters, c.hc_eps) for one in logits]
    comb, wanted, samples = torch.cat(combs), torch.cat(by_definition(1)), sum(map(len, combs))
    worst = [name for name, a, b in zip(SUBLAYERS, combs, by_definition(1)) if (a - b).abs().max() > 2e-5]
    reported = lambda name, value, note="": Check(
        name, Status.PASS, where=where, part=PART, measured=value, samples=samples, source=REPORTED, note=note
    )
    columns = (comb.sum(-2) - 1 / (1 + c.hc_eps)).abs().max().item()
    about = dict(where=where, part=PART)
    found = ", ".join(worst)
    return [
        compare(COLUMNS, columns, "<=", 1e-6, EXACT, samples, note=f"off 1 by at most {off(comb, -2):.3g}", **about),
        compare(MATRIX, (comb - wanted).abs().max().item(), "<=", 2e-5, SLOPE, samples, found=found, **about),
        reported(ROWS, off(comb, -1), f"median of the tokens {_typical(comb):.2g}"),
        *(
            reported(f"{OFF}, {times * c.hc_sinkhorn_iters} iterations", off(torch.cat(by_definition(times)), -1))
            for times in (1, *MORE)
        ),
        reported(NORM, streams[0].square().mean().sqrt().item()),
    ]


def _typical(comb: torch.Tensor) -> float:
    """Of each token the row that is farthest from 1: the median of the tokens."""
    return (comb.sum(-1) - 1).abs().amax(-1).median().item()


def shown(checks: list[Check]) -> str:
    """Markdown: a row a layer, of the checks that `runtime` made; '' where there are none."""
    layers = [check.where for check in checks if check.name == ROWS]
    if not layers:
        return ""
    by = {(check.where, check.name): check for check in checks}
    definitions = list(dict.fromkeys(check.name for check in checks if check.name.startswith(OFF)))
    rows = []
    for where in layers:
        columns, measured = by[where, COLUMNS].note.rpartition(" ")[2], by[where, ROWS]
        values = [by[where, NORM].measured, measured.measured, *(by[where, name].measured for name in definitions)]
        norm, as_run, *rest = (f"{value:.3g}" for value in values)
        typical = measured.note.rpartition(" ")[2]
        rows.append([where.removeprefix("layer "), norm, columns, as_run, typical, *rest])
    iterations = [f">{name.removeprefix(OFF + ', ')}" for name in definitions]
    head = [">layer", ">\\|X\\|", ">columns off 1", ">rows off 1, as run", ">median", *iterations]
    return (
        "Mixing matrices of both sublayers on prompts of text, as they ran: the largest distance of a sum from 1. The "
        "iteration ends on columns, so rows are off by construction. The last columns: rows by the definition in "
        "float64 after so many iterations. \\|X\\|: rms of the streams that enter the layer.\n\n" + table(head, rows)
    )
