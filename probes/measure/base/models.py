"""The model that is measured: how it is loaded, and what the measurements ask of its config."""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

import torch

from dsv4.cache.host_tier.choice import HostMemory
from dsv4.model import families
from dsv4.model.causal import CausalLM
from dsv4.model.load import load_model
from dsv4.probes.oracle import kinds
from dsv4.probes.subject import Subject

Say = Callable[[str], None]
Advance = Callable[[int], None]
NEAR = 512  # tokens between needle and question at least, where a model has no sliding windows: the reach of the demo's


class ModelSubject(Subject):
    """A model of either family, loaded from a checkpoint, as provenance takes it."""

    can = frozenset({"run", "kernels"})

    def __init__(
        self,
        checkpoint: Path,
        numerics: str,
        backend: str,
        device: str,
        kernels: Mapping = MappingProxyType({}),
        kv_memory: HostMemory | None = None,
    ):
        """kv_memory: caches in host memory; None: on the device."""
        self.model: CausalLM = load_model(
            checkpoint, numerics=numerics, backend=backend, device=device, kernels=kernels, kv_memory=kv_memory
        )
        self.files, self.config, self.numerics = self.model.inventory, self.model.config, numerics
        said = "".join(f", {operation} by {kernel.shown}" for operation, kernel in self.model.replacements.items())
        said += f", {words}" if (words := self.model.ranks.words) else ""
        said += "" if kv_memory is None else ", caches in host memory"
        self.name = f"ours, {numerics}{said}, backend {self.model.backend}, {device}"
        self.provenance = {
            "path": str(checkpoint),
            "backend": self.model.backend,
            "device": device,
            "torch": torch.__version__,
        }
        if kv_memory is not None:
            self.provenance["kv_memory"] = "host"


def reads_by_policy(known) -> bool:
    """Whether a policy may decide what the decoding steps of a model, or of a subject, read of the cache; otherwise
    indexers select among compressed entries."""
    return families.of(known.config).takes_attention


def family(known) -> str:
    """Its name in documents."""
    return "gqa" if reads_by_policy(known) else "csa"


def csa_layers(config) -> list[int]:
    return [i for i in range(config.num_hidden_layers) if config.compress_ratios[i] == kinds.CSA]


def reach(model: CausalLM) -> int:
    """Tokens that information cannot cross through sliding windows alone, over all layers; NEAR for a model without
    windows."""
    windows = getattr(model.config, "windows", None)  # of a GQA model, a layer each
    if windows is not None:
        return sum(w for w in windows if w is not None) or NEAR
    return model.config.num_hidden_layers * model.config.sliding_window
