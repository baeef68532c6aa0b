"""Subjects of an audit, and what each kind can do.

A probe names what it `needs`; a subject says what it `can`. If a subject lacks a capability, the probe's checks are
VACUOUS, never PASS. The kinds: a checkpoint directory alone (`dsv4.probes.subjects.files`), this project's model
(`dsv4.probes.subjects.ours`), transformers' model (`dsv4.probes.subjects.transformers`), a recorded dump
(`dsv4.probes.subjects.dump`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

POINTS = {  # name → shape; B rows, T tokens, n entries, k picks, H heads of D dims, S streams
    "attn_in": "[B, T, d], normalised input of attention",
    "q_after_rope": "[B, T, H, D]",
    "kv_window": "[B, T, D], rotated; as the cache holds it",
    "compressed_kv": "[B, n, D], CSA and HCA, rotated; as the cache holds it",
    "index_keys": "[B, n, Di], CSA; as the cache holds it",
    "index_scores": "[B, T, n], CSA, −inf where invisible",
    "selection": "int64 [B, T, k], CSA, −1 where absent",
    "attn_out": "[B, T, d], after the output projection",
    "ffn_out": "[B, T, d]",
    "streams": "[B, T, S, d], after the layer",
}
GQA_POINTS = {  # of GQA models; KV heads of keys and values
    "attn_in": "[B, T, d], the residual stream before attention, not yet normalised",
    "q_after_rope": "[B, T, H, D], without YaRN's factor of cos and sin, as keys are",
    "keys": "[B, T, KV, D], rotated; as the cache holds them",
    "values": "[B, T, KV, D]; as the cache holds them",
    "attn_out": "[B, T, d], after the output projection",
    "ffn_out": "[B, T, d]",
    "streams": "[B, T, d], after the layer",
}
CAPABILITIES = {
    "files": "the checkpoint's tensors and config can be read (`files`)",
    "run": "whole forward passes with captures, in any schedule (`run`)",
    "layer": "one layer's attention on given inputs (`attention`)",
    "block": "one whole layer on given streams (`block`)",
    "recorded": "one run with captures, made elsewhere (`run` and `stream` answer for that run alone)",
    "rewind": "tokens can be forgotten (`run` with negative steps in its schedule)",
    "batch": "several rows at once, of different lengths",
    "cache": "the bytes of each cache stream (`cache_bytes`)",
    "pages": "a cache in pages, whose prefixes other requests borrow",
    "drafts": "this project's speculative decoders",
    "kernels": "this project's operations, by backend",
    "training": "this project's differentiable operations over whole sequences",
}


@dataclass
class Capture:
    """What a run gave. points[(layer, name)] as in POINTS; logits fp32 [B, T, vocab] of every position that was run
    last."""

    logits: torch.Tensor | None = None
    points: dict[tuple[int, str], torch.Tensor] = field(default_factory=dict)


class Subject:
    """The interface. A subject implements what it `can` and leaves the rest.

    name: for the report; family: a name of `dsv4.probes.families.FAMILIES`; config: dsv4.model.config.ModelConfig, of
    GQA models GQAConfig; numerics: how its numbers are held, by the names of dsv4.model.numerics, or 'bf16' / 'fp32'
    for others; provenance: what identifies it (paths, versions, hashes); without: capabilities that such a subject
    cannot have, or probes by name, and why: those probes, and probes that need such a capability, do not apply.
    """

    name: str = ""
    can: frozenset[str] = frozenset()
    family: str = "deepseek_v4"
    config: Any = None
    numerics: str = ""
    provenance: dict = {}
    without: dict[str, str] = {}

    def run(self, ids: torch.Tensor, schedule: Sequence[int] = (), want: Sequence[str] = ()) -> Capture:
        """Forward of ids int64 [B, T] from an empty context, with the points named in `want`, of every layer.

        schedule: tokens a step, in order (one step of T if empty); a negative number forgets as many tokens, which are
        then run again by the steps after it. Points and logits are those of all T positions, however they were cut.
        """
        raise NotImplementedError

    def stream(self, ids: torch.Tensor, want: Sequence[str], see: Callable[[int, dict], None]) -> torch.Tensor | None:
        """`run` in one step, handing over each layer when it is done: see(layer, {point: tensor}). Returns the logits.

        Subjects that can do so forget a layer's points after `see`, so that memory does not grow with the layers.
        """
        capture = self.run(ids, want=want)
        for layer in range(self.config.num_hidden_layers):
            see(layer, {point: value for (i, point), value in capture.points.items() if i == layer})
        return capture.logits

    def block(self, layer: int, streams: torch.Tensor, ids: torch.Tensor, want: Sequence[str] = ()) -> Capture:
        """One whole layer alone, on the streams [B, T, S, d] that enter it (and token ids), in one step from position
        0."""
        raise NotImplementedError

    def attention(
        self,
        layer: int,
        attn_in: torch.Tensor,
        ids: torch.Tensor,
        schedule: Sequence[int] = (),
        want: Sequence[str] = (),
    ) -> Capture:
        """One layer's attention alone on attn_in [B, T, d] (and token ids), with its points; `attn_out` always."""
        raise NotImplementedError

    def weight(self, name: str) -> torch.Tensor:
        """A tensor as the subject itself holds it, by official name, dequantised to fp32."""
        raise NotImplementedError

    def cache_bytes(self, batch: int, max_context: int) -> dict[tuple[str, str], int]:
        """(layer label, stream) → bytes that are really allocated."""
        raise NotImplementedError
