"""`draft_depth` on GQA models: their drafts are made of the text, by no MTP block."""

from typing import ClassVar

from dsv4.probes.catalogue.draft_depth import DraftDepth


class GQADraftDepth(DraftDepth):
    """Asks for no drafts of an MTP block."""

    needs: ClassVar[frozenset[str]] = frozenset({"run", "cache", "rewind", "batch", "kernels"})
