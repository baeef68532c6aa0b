"""Modules of this project's model, replaced by the oracle."""

from contextlib import ExitStack

import torch

from dsv4.probes.blame.swaps.reference import LINEARS, NORMS, Reference, turned
from dsv4.probes.scenes.buffers import numbers
from dsv4.probes.subjects.ours import OurSubject


class OurSwap:
    """Hooks on one block; x is [T, ...], as the modules take it in a step of one row."""

    MODULES = frozenset(
        {
            *LINEARS,
            *NORMS,
            "embed",
            "hc_head",
            "norm",
            "head",
            "hc_attn",
            "hc_ffn",
            "attn",
            "attn.wo_a",
            "attn.attn_sink",
            "attn.rope",
            "attn.queries",
            "attn.latent",
            "attn.compressor",
            "attn.indexer",
            "attn.indexer.compressor",
            "ffn",
            "ffn.gate",
            "ffn.experts",
            "ffn.shared_experts",
        }
    )

    def __init__(self, subject: OurSubject, i: int, reference: Reference, undo: ExitStack):
        self.model, self.block, self.ref, self.undo = subject.model, subject.model.layers[i], reference, undo

    def install(self, name: str) -> None:
        ref, attn = self.ref, self.block.attn
        if name in LINEARS or name in NORMS:
            return self._output(name, lambda args: ref.leaf(name, args[0]))
        if name in ("hc_attn", "hc_ffn"):
            return self._connection(name)
        match name:
            case "embed":
                table = ref.layer.weights("embed.weight")
                self._hook(self.model.embed, lambda args, out: table[args[0]].to(out.dtype))
            case "hc_head" | "norm" | "head":
                self._hook(getattr(self.model, name), lambda args, out: ref.head(name, args[0]).to(out.dtype))
            case "attn":
                self._output(name, lambda args: ref.attention(args[0]))
            case "attn.wo_a":
                self._output(name, lambda args: ref.grouped(args[0]))
            case "attn.attn_sink":
                self.set(attn.attn_sink, "data", ref.layer.w(name).to(attn.attn_sink.dtype))
            case "attn.rope":
                self._rotation(attn)
            case "attn.queries":
                dtype = self.model.numerics.activation
                self.set(attn, "queries", lambda x, step: tuple(v.to(dtype) for v in ref.queries(x)))
            case "attn.latent":
                self.set(attn, "latent", lambda x, step: ref.latent(x).to(self.model.numerics.activation))
            case "attn.compressor":
                self._entries(attn.compressor, ref.entries)
            case "attn.indexer.compressor":
                self._entries(attn.indexer.compressor, ref.keys)
            case "attn.indexer":
                self._indexer(attn.indexer)
            case "ffn" | "ffn.shared_experts":
                self._output(name, lambda args: (ref.ffn if name == "ffn" else ref.shared)(args[0]))
            case "ffn.gate":
                self._hook(
                    self.block.ffn.gate, lambda args, out: tuple(v.to(o.dtype) for v, o in zip(ref.gate(args[0]), out))
                )
            case "ffn.experts":
                self._output(name, lambda args: ref.experts(*args))

    def set(self, owner, name: str, value) -> None:
        """Replace an attribute of one object."""
        own, before = name in vars(owner), getattr(owner, name)
        restore = (
            (lambda: setattr(owner, name, before))
            if own or isinstance(owner, torch.Tensor)
            else (lambda: delattr(owner, name))
        )
        setattr(owner, name, value)
        self.undo.callback(restore)

    def _hook(self, module: torch.nn.Module, change) -> None:
        """change(args, out) → what the module returns instead."""
        self.undo.callback(module.register_forward_hook(lambda _, args, out: change(args, out)).remove)

    def _output(self, name: str, of) -> None:
        """of(args) in the dtype and shape of what the module returned."""
        self._hook(self.block.get_submodule(name), lambda args, out: of(args).to(out.dtype).reshape(out.shape))

    def _entries(self, compressor, of) -> None:
        """What the compressor has written to the cache is written over; its args are x, step, cache."""

        def write(args, out):
            x, step, cache = args
            values = of(x)
            if len(values):
                cache.entries.write(step, values)

        self._hook(compressor, write)

    def _indexer(self, indexer) -> None:
        """Scores and selection, on the subject's own keys."""

        def scores(x, qr, step, cache):
            return self.ref.scores(x, qr, numbers(cache.index.entries.visible(step))[0]).float()[None]

        self.set(indexer, "scores", scores)
        self._hook(indexer, lambda args, out: self.ref.select(scores(*args)) if out.shape[-1] else out)

    def _connection(self, name: str) -> None:
        """Reading the streams, and writing them with what was read: both belong to the connection."""
        ours = {}

        def read(args, out):
            x, post, comb = (v.to(o.dtype) for v, o in zip(self.ref.before(name, args[0]), out))
            ours["comb"] = comb
            return x, post, comb

        def write(out, streams, post, comb):
            if comb is not ours.get("comb"):
                return real(out, streams, post, comb)
            return self.ref.after(out, streams, post, comb).to(streams.dtype)

        real = self.block.op.mhc_post
        self._hook(getattr(self.block, name), read)
        self.set(self.block, "op", _Operations(self.block.op, mhc_post=write))

    def _rotation(self, attn) -> None:
        """Angles and the rotation itself, of everything in the layer that is rotated."""
        rotate = lambda x, cis: turned(x, cis.to(torch.complex128).angle()).to(x.dtype)
        compressor, indexer = getattr(attn, "compressor", None), getattr(attn, "indexer", None)
        for owner in (attn, compressor, indexer, getattr(indexer, "compressor", None)):
            if owner is not None:
                self.set(owner, "op", _Operations(owner.op, rotate=rotate))
        before = lambda _, args: (args[0], _Rotations(args[1], self.ref), *args[2:])
        self.undo.callback(attn.register_forward_pre_hook(before).remove)


class _Operations:
    """Operations of which some are others."""

    def __init__(self, real, **others):
        self.__dict__ |= others
        self._real = real

    def __getattr__(self, name: str):
        return getattr(self._real, name)


class _Rotations:
    """A step whose rotations are the oracle's, whatever base is asked for."""

    def __init__(self, step, reference: Reference):
        self._step, self._ref = step, reference

    def __getattr__(self, name: str):
        return getattr(self._step, name)

    def _unit(self, positions: torch.Tensor) -> torch.Tensor:
        angles = self._ref.angles(positions)
        return torch.polar(torch.ones_like(angles), angles)

    def cis(self, base: str) -> torch.Tensor:
        return self._unit(self._step.pos.flatten())

    def inverse_cis(self, base: str) -> torch.Tensor:
        return self.cis(base).conj().resolve_conj()

    def window_cis(self, ratio: int, base: str) -> torch.Tensor:
        return self._unit((self._step.new_windows(ratio) * ratio).flatten())
