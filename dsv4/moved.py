"""Modules that were moved stay importable by their old names until version 0.4.

The old name gives the module of the new one, the same object, with a DeprecationWarning. Names of packages that were
modules (`dsv4.model`, `dsv4.cache`, `dsv4.probes.report`) give their old attributes, see `former`.
"""

import importlib
import importlib.abc
import importlib.util
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

ROOMS = {  # room → the modules that lay in dsv4/ itself
    "cache": "paging prefixes rows sequence streams page_tables paged_view",
    "commands": "demo help inspection options tables terminal cli",
    "engine": "generate",
    "model": "arguments attention block causal chat config config_keys dummy linear load module moe mtp numerics "
    "offload rope step tokenizer gqa",
    "runtime": "capture gpus graph memory planning threads timing user_kernels",
}
MOVED = {f"dsv4.{name}": f"dsv4.{room}.{name}" for room, names in ROOMS.items() for name in names.split()} | {
    "dsv4.checkpoint_commands": "dsv4.commands.checkpoint",
    "dsv4.cost_model.cli": "dsv4.commands.regime",
    "dsv4.compressor": "dsv4.model.attention",
    "dsv4.indexer": "dsv4.model.attention",
    "dsv4.norms": "dsv4.model.linear",
    "dsv4.hyper_connections": "dsv4.model.block",
    "dsv4.engine.command": "dsv4.commands.batch",
    "dsv4.engine.work": "dsv4.engine.state",
    "dsv4.host_tier": "dsv4.cache.host_tier",
    "dsv4.paged_cache": "dsv4.cache.paged",
    "dsv4.run": "dsv4.commands.generate",
    "dsv4.speculation.host_half": "dsv4.speculation.host_loop",
    "dsv4.speculation.resident_drafters": "dsv4.speculation.device_drafters",
    "dsv4.speculation.resident": "dsv4.engine.generate",
    "dsv4.speculation.device_loop": "dsv4.engine.generate",
    "dsv4.speculation.loop": "dsv4.engine.generate",
    "dsv4.probes.cli": "dsv4.commands.audit",
    "dsv4.probes.fidelity": "dsv4.probes.measure.fidelity",
    "dsv4.probes.formats": "dsv4.probes.report",
    "dsv4.probes.measure.fidelity.attending": "dsv4.probes.measure.base.attending",
    "dsv4.probes.measure.fidelity.measures": "dsv4.probes.measure.base.logits",
    "dsv4.probes.measure.fidelity.needles": "dsv4.probes.measure.base.needles",
    "dsv4.probes.measure.fidelity.variants": "dsv4.probes.measure.base.variants",
    "dsv4.probes.measure.recall.haystack": "dsv4.probes.measure.base.haystack",
    "dsv4.probes.measure.recall.mass": "dsv4.probes.measure.base.mass",
    "dsv4.probes.measure.recall.text": "dsv4.probes.measure.base.text",
    "dsv4.probes.mutations": "dsv4.probes.faults",
    "dsv4.probes.provenance": "dsv4.probes.report.provenance",
    "dsv4.probes.recall": "dsv4.probes.measure.recall",
    "dsv4.probes.sparse_prefill": "dsv4.probes.measure.sparse_prefill",
    "dsv4.probes.terminating": "dsv4.probes.measure.termination",
}
PROBES = "dsv4.probes."  # a probe's own module, as in `python -m dsv4.probes.rope`, is in the catalogue now
CATALOGUE = "dsv4.probes.catalogue."


def new_name(name: str) -> str | None:
    """The name that a module has now, or None where the name is no old one. A module may have moved twice."""
    parts = name.split(".")
    for end in range(len(parts), 1, -1):
        new = MOVED.get(".".join(parts[:end]))
        if new is not None:
            once = ".".join([new, *parts[end:]])
            return new_name(once) or once
    probe = name.removeprefix(PROBES)
    if name.startswith(PROBES) and "." not in probe and any((f / f"{probe}.py").is_file() for f in _catalogues()):
        return CATALOGUE + probe
    return None


def _catalogues() -> list[Path]:
    """Where the catalogue may lie: inside dsv4 in a wheel, beside it in a checkout."""
    return [Path(folder) / "probes" / "catalogue" for folder in sys.modules["dsv4"].__path__]


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Stands first: a module of a moved package would else be found in its folder, and be there twice."""

    def __init__(self):
        self._specs = {}  # old name → the spec that its module had under the new one

    def find_spec(self, name: str, path=None, target=None):
        if not name.startswith("dsv4.") or name.startswith(CATALOGUE):
            return None
        new = new_name(name)
        if new is None or importlib.util.find_spec(new) is None:
            return None
        return importlib.util.spec_from_loader(name, self, origin=new)

    def create_module(self, spec) -> ModuleType:
        warnings.warn(f"{spec.name} is {spec.origin} now; the old name goes with 0.4", DeprecationWarning, stacklevel=2)
        module = importlib.import_module(spec.origin)
        self._specs[spec.name] = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """It ran under its own name: gives it back the spec that the import system wrote over."""
        module.__spec__ = self._specs.pop(module.__spec__.name)

    def get_code(self, name: str):
        """For `python -m` with an old name."""
        spec = importlib.util.find_spec(new_name(name))
        return spec.loader.get_code(spec.name)


def install() -> None:
    if not any(isinstance(finder, Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, Finder())


def former(package: str, *modules: str) -> Callable[[str], object]:
    """A package's `__getattr__`, for a package that has the name of a module whose content lies in `modules` inside it
    now."""

    def __getattr__(name: str) -> object:
        if not name.startswith("__") and importlib.util.find_spec(f"{package}.{name}") is None:  # not a module inside
            for module in modules:
                found = importlib.import_module(module)
                if hasattr(found, name):
                    return getattr(found, name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return __getattr__
