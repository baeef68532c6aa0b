"""Rows of `scripts/bench_expert_memory.py`: what steps fetch, how long they take, and what the link allows."""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch

from dsv4.model.causal import CausalLM
from dsv4.runtime.graph import DecodeGraph
from dsv4.units import format_bytes
from scripts.bench import report


@dataclass(frozen=True)
class Row:
    """One way of running, in all layers of the model. tokens: of all its steps and rows; link: bytes a second of the
    copy engine, None where there is no link."""

    name: str
    tokens: int
    seconds: float
    hits: int
    misses: int
    fetched: int
    layers: int
    link: float | None

    @property
    def token_ms(self) -> float:
        return 1e3 * self.seconds / self.tokens

    @property
    def link_ms(self) -> float | None:
        """The time that a token's bytes take at the link's rate."""
        return None if self.link is None else 1e3 * self.fetched / self.tokens / self.link

    def document(self, whole: int) -> dict:
        """As JSON values. whole: layers with experts of the whole model, to which times are scaled."""
        scale, allowed = whole / self.layers, self.link_ms
        return asdict(self) | {
            "hit_rate": self.hits / max(1, self.hits + self.misses),
            "token_ms": self.token_ms,
            "link_ms": allowed,
            "tokens_per_second": 1e3 / self.token_ms,
            "whole_tokens_per_second": 1e3 / (self.token_ms * scale),
            "whole_link_tokens_per_second": 1e3 / (allowed * scale) if allowed else None,
        }


def measure(model: CausalLM, prompt: int, tokens: int, batches: tuple[int, ...]) -> list[Row]:
    """A prompt's chunk; decode steps of random tokens, which choose others every time; of one token again and again,
    whose experts stay in their slots."""
    g, vocab, link = torch.Generator().manual_seed(0), model.config.vocab_size, model.expert_tier.link()
    new = lambda *shape: torch.randint(0, vocab, shape, generator=g)
    rows, run = [], lambda name, n, f: rows.append(_timed(model, name, n, link, f))
    cache = model.new_cache(1, prompt + tokens)
    model.append(new(1, 64), model.new_cache(1, 64), logits="last")  # compiles
    run(f"a prompt of {prompt} tokens", prompt, lambda: model.append(new(1, prompt), cache, logits="last"))
    for batch in batches:
        held = model.new_cache(batch, 2 * tokens + 80)
        model.append(new(batch, 16), held, logits="none")
        graph, fixed = DecodeGraph(model, held), new(batch, 1)
        graph.step(new(batch, 1))
        steps = lambda ids: [graph.step(ids()) for _ in range(tokens)]
        run(f"batch {batch}, random tokens", batch * tokens, lambda: steps(lambda: new(batch, 1)))
        graph.step(fixed)
        run(f"batch {batch}, one token again", batch * tokens, lambda: steps(lambda: fixed))
    return rows


def _timed(model: CausalLM, name: str, tokens: int, link: float | None, run: Callable[[], object]) -> Row:
    tier, wait = model.expert_tier, torch.cuda.synchronize if model.device.type == "cuda" else lambda: None
    before = tier.counts()
    wait()
    begun = time.perf_counter()
    run()
    wait()
    seconds = time.perf_counter() - begun
    found = tier.counts().since(before)
    return Row(name, tokens, seconds, found.hits, found.misses, found.nbytes, len(tier.layers), link)


def document(model: CausalLM, rows: list[Row], whole: int, about: dict) -> dict:
    tier = model.expert_tier
    held = {
        "resident": tier.slots,
        "of": tier.sizes.experts,
        "layers": len(tier.layers),
        "whole_layers": whole,
        "pinned_bytes": tier.host_bytes,
        "device_bytes": tier.device_bytes,
        "link_bytes_per_second": rows[0].link,
    }
    return {"about": about, "experts": held, "rows": [row.document(whole) for row in rows]}


def markdown(found: dict) -> str:
    about, held = found["about"], found["experts"]
    link, whole = held["link_bytes_per_second"], held["whole_layers"]
    rate = "not measured on a CPU" if link is None else f"{link / 1e9:.1f} GB/s by the copy engine"
    shown = lambda value, form: "–" if value is None else format(value, form)
    lines = [
        "# Routed experts in pinned host memory",
        "",
        f"{report.headline(about)}.",
        "",
        f"    {about['command']}",
        "",
        f"{held['layers']} layers ran: {held['resident']} of {held['of']} experts of each have slots "
        f"({format_bytes(held['device_bytes'])} on the device), all are in {format_bytes(held['pinned_bytes'])} of "
        f"host memory. Random weights choose experts evenly. Link: {rate}. Tokens/s of {whole} layers are those of the "
        "layers that ran, scaled by their number.",
        "",
        f"| steps | hit | fetched a token | ms a token | of the link | tokens/s, {whole} layers | the link allows |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for row in found["rows"]:
        lines.append(
            f"| {row['name']} | {row['hit_rate']:.1%} | {format_bytes(row['fetched'] / row['tokens'])} | "
            f"{row['token_ms']:.3f} | {shown(row['link_ms'], '.3f')} | {row['whole_tokens_per_second']:.1f} | "
            f"{shown(row['whole_link_tokens_per_second'], '.1f')} |"
        )
    return "\n".join(lines) + "\n"
