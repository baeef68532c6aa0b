"""What each layer of a model is, read from the config once. Everything that differs between layers asks its spec."""

import enum
from dataclasses import dataclass


class LayerKind(enum.Enum):
    """What a layer attends to beside its sliding window."""

    WINDOW = "window"  # nothing
    CSA = "csa"  # top-k of entries of `ratio` tokens, overlapping (paper §2.3.1)
    HCA = "hca"  # every visible entry of `ratio` tokens (paper §2.3.2)


@dataclass(frozen=True)
class LayerSpec:
    """One layer. Ownership is by source: a layer may read entries, or use a selection, that another layer made.

    label: 'layer 3' or 'mtp 0', for people; prefix: of its tensors' names in the file, 'layers.3' or 'mtp.0'.
    kind: what it attends to, a member of its family's enumeration.
    ratio: tokens an entry, 0 without compression; overlap: windows of `ratio` tokens that one entry pools.
    rope: the base of its rotations, 'main' or 'compress'; hashed: experts by token id instead of by score.
    entries_of, selection_of: the label of the layer whose compressed entries it reads, and of the one whose selection
    it uses; None where it has none. In DeepSeek-V4 that is always the layer itself.
    """

    label: str
    prefix: str
    kind: enum.Enum
    ratio: int = 0
    overlap: int = 0
    rope: str = "main"
    hashed: bool = False
    entries_of: str | None = None
    selection_of: str | None = None

    @property
    def compresses(self) -> bool:
        """Whether it makes entries of its own."""
        return self.entries_of == self.label

    @property
    def selects(self) -> bool:
        """Whether it has an indexer, and so index keys, of its own."""
        return self.selection_of == self.label

    @property
    def drafts(self) -> bool:
        """Whether it is an MTP block."""
        return self.prefix.startswith("mtp.")
