"""A subject of the family that a checkpoint's config.json is of."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from dsv4.errors import InputError
from dsv4.kernels.replacing import Replacement
from dsv4.loaders.config_files import family_of, read_json
from dsv4.probes.subject import Subject
from dsv4.probes.subjects.ours import OurSubject


def open_ours(path: str | Path, *choices: str, kernels: Mapping[str, Replacement] = MappingProxyType({})) -> OurSubject:
    """The subject of the family that config.json is of; choices and kernels as `OurSubject` takes them."""
    from dsv4.probes.subjects.gqa import OurGQASubject

    raw = read_json(Path(path) / "config.json")
    if "training" in choices:
        if kernels:
            raise InputError("--kernel was given for the training backend, whose operations are differentiable")
        return _open_training(path, family_of(raw), *choices)
    return (OurGQASubject if family_of(raw) == "gqa" else OurSubject)(path, *choices, kernels=kernels)


def _open_training(path: str | Path, family: str, *choices: str) -> OurSubject:
    """Raises InputError for a GQA model, whose training backend no probe runs."""
    from dsv4.probes.subjects.training import TrainingSubject

    if family == "gqa":
        raise InputError(
            "the training backend of GQA models cannot be audited: it keeps no cache, which their probes read; audit "
            "backend reference, cpu or triton"
        )
    return TrainingSubject(path, *choices)


def open_theirs(path: str | Path) -> Subject:
    """transformers' model of the family that config.json is of, in fp32."""
    from dsv4.probes.subjects.transformers import TransformersSubject
    from dsv4.probes.subjects.transformers_gqa import TransformersGQASubject

    raw = read_json(Path(path) / "config.json")
    return (TransformersGQASubject if family_of(raw) == "gqa" else TransformersSubject)(path)
