"""Reading a checkpoint into parameters, one piece at a time."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from dsv4.kernels.quantize import PackedWeight, WeightFormat, to_float
from dsv4.loaders.config_files import family_of, read_config
from dsv4.loaders.cuts import Cut
from dsv4.loaders.decoders import DECODER, DECODERS
from dsv4.loaders.errors import CheckpointError
from dsv4.loaders.files import DTYPES, Files, Progress, open_checkpoint, read_json
from dsv4.loaders.layouts import Layout, Source, canonical_sources, detect_layout, matrix_formats
from dsv4.loaders.ledger import SAME_BYTES, Piece, keeps_value, poisoned

EMBEDDING, HEAD = "embed.weight", "head.weight"


@dataclass(frozen=True)
class Inventory:
    """What a checkpoint directory holds, from its headers: nothing of the data is read.

    sources: official tensor name → where it is. formats: matrix name without suffix → WeightFormat. config: official
    dictionary (of a GQA model: as it is); config_notes: where values came from that the file does not state as such.
    family:
    'deepseek_v4' or 'gqa'.
    """

    path: Path
    files: Files
    layout: Layout
    sources: Mapping[str, Source]
    formats: Mapping[str, WeightFormat]
    config: dict
    config_notes: dict
    family: str = "deepseek_v4"

    @classmethod
    def open(cls, path: str | Path) -> "Inventory":
        """Raises CheckpointError for anything broken, unknown or contradictory."""
        files = open_checkpoint(path)
        raw = read_json(files.root / "config.json")
        if family_of(raw) == "gqa":
            return cls._of_decoder(files, raw)
        config, notes = read_config(files.root)
        layout = detect_layout(files.tensors)
        sources = canonical_sources(files.tensors, layout)
        if config.get("tie_word_embeddings") is True and HEAD not in sources and EMBEDDING in sources:
            sources[HEAD] = sources[EMBEDDING]
            notes["tie_word_embeddings"] = "the head is read from the embedding's tensor"
        return cls(files.root, files, layout, sources, matrix_formats(sources), config, notes)

    @classmethod
    def _of_decoder(cls, files: Files, raw: dict) -> "Inventory":
        notes = {}
        if "model_type" not in raw:
            raw = raw | {"model_type": next(kind for kind, name in DECODERS.items() if name == raw["architectures"][0])}
            notes["model_type"] = "from architectures"
        sources = canonical_sources(files.tensors, detect_layout(files.tensors, (DECODER,)))
        return cls(files.root, files, DECODER, sources, matrix_formats(sources), raw, notes, "gqa")

    @property
    def mtp_blocks(self) -> int:
        """MTP blocks in the file, complete or not: what one lacks is the ledger's to name. DSpark stages are none."""
        return 0 if self.has_dspark else len({n.split(".")[1] for n in self.sources if n.startswith("mtp.")})

    @property
    def has_dspark(self) -> bool:
        """Whether `mtp.*` are DSpark draft stages, by a tensor that only these have: an MTP block that merely lacks one
        must not pass for them."""
        return "mtp.0.main_norm.weight" in self.sources

    def read(self, name: str, cut: Cut | None = None) -> torch.Tensor:
        """An official tensor, or a part of it, with its stored dtype and shape. Raises CheckpointError if it holds
        NaN."""
        source = self.sources[name]
        if cut is None:
            raw, shape = self.files.read(source.tensor, source.start, source.nbytes), source.shape
        else:
            shape = *source.shape[: cut.axis], cut.stop - cut.start, *source.shape[cut.axis + 1 :]
            raw = self.files.read_part(source.tensor, source.start, source.nbytes, source.shape, cut)
        tensor = raw.view(DTYPES[source.dtype]).view(shape)
        bad = poisoned(tensor)
        if bad:
            what = "negative indices" if not tensor.is_floating_point() else "NaN"
            raise CheckpointError(f"tensor {source.tensor.key} holds {bad} {what}; the file is damaged")
        return tensor

    def check_tied(self) -> None:
        """Raise CheckpointError where a tied head has a tensor of its own in the file, and another than the
        embedding."""
        if self.config.get("tie_word_embeddings") is True and HEAD in self.sources:
            if self.sources[HEAD] != self.sources[EMBEDDING] and not torch.equal(self.read(HEAD), self.read(EMBEDDING)):
                raise CheckpointError(
                    f"tie_word_embeddings is true in config.json, but {HEAD} is not {EMBEDDING}; correct one of them"
                )

    def read_matrix(self, base: str, block: tuple[int, int], cut: Cut | None = None) -> torch.Tensor:
        """A matrix by its official name without suffix, or a part of it, dequantised to fp32 [O, K]."""
        return to_float(self.read_packed(base, block, cut))

    def read_packed(self, base: str, block: tuple[int, int], cut: Cut | None = None) -> PackedWeight:
        """A matrix, or a part of it, as stored."""
        form = self.formats[base]
        cuts = stored_cuts(form, block, cut, base)
        tensors = {role: self.read(name, cuts.get(role)) for role, name in matrix_names(base, form).items()}
        weight = tensors["weight"]
        if weight.dtype is torch.int8:
            weight = weight.view(torch.uint8)
        scale = tensors.get("global")
        return PackedWeight(form, weight, tensors.get("scale"), None if scale is None else scale.view(1), block)


def matrix_names(base: str, form: WeightFormat) -> dict[str, str]:
    """Official tensor names of a matrix by role."""
    match form:
        case WeightFormat.DENSE:
            return {"weight": f"{base}.weight"}
        case WeightFormat.NVFP4:
            return {"weight": f"{base}.weight", "scale": f"{base}.weight_scale", "global": f"{base}.weight_scale_2"}
    return {"weight": f"{base}.weight", "scale": f"{base}.scale"}


def stored_cuts(form: WeightFormat, block: tuple[int, int], cut: Cut | None, name: str) -> dict[str, Cut]:
    """The part of each stored tensor of a matrix, by role, that a part of the matrix needs: codes that are packed by
    pairs, and scales of blocks. Raises UnsupportedInput for a cut within a block."""
    if cut is None:
        return {}
    if form is WeightFormat.DENSE:
        return {"weight": cut}
    if form is WeightFormat.FP8:
        return {"weight": cut, "scale": cut.stored(block[cut.axis], name)}
    codes, scales = (2, 32 if form is WeightFormat.MXFP4 else 16) if cut.axis == 1 else (1, 1)
    return {"weight": cut.stored(codes, name), "scale": cut.stored(scales, name)}


def fill(
    pieces: Iterable[Piece],
    inventory: Inventory,
    parameters: Mapping[str, torch.Tensor],
    progress: Progress | None = None,
) -> None:
    """Read each piece and write it to its parameter. Host memory: the parameters and one piece.

    Raises CheckpointError for NaN in the file, and for a stored dtype that would have to be narrowed.
    """
    pieces = list(pieces)
    size = lambda piece: int(
        sum(inventory.sources[n].nbytes for n in piece.names.values()) * (piece.cut.share if piece.cut else 1)
    )
    total, done = sum(map(size, pieces)), 0
    for piece in pieces:
        if piece.cut is not None and not piece.cut.size:  # other ranks have all of it
            continue
        target = parameters[piece.parameter][piece.index]
        if "raw" in piece.names:
            value = _as(inventory.read(piece.names["raw"], piece.cut), target.dtype, piece.names["raw"])
        else:
            value = inventory.read_matrix(piece.names["weight"].removesuffix(".weight"), piece.block, piece.cut)
        target.copy_(value.view(target.shape) if value.numel() == 1 else value)
        done += size(piece)
        if progress is not None:
            progress(done, total)


def _as(value: torch.Tensor, dtype: torch.dtype, name: str) -> torch.Tensor:
    if keeps_value(value.dtype, dtype):
        return value.view(dtype) if (value.dtype, dtype) in SAME_BYTES else value.to(dtype)
    raise CheckpointError(
        f"tensor {name} is {value.dtype} in the file and would have to become {dtype}; that would lose bits"
    )
