"""A subject of the family that a checkpoint's config.json is of."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from dsv4.errors import InputError
from dsv4.kernels.replacing import Replacement
from dsv4.loaders.config_files import family_of, read_json
from dsv4.model.ranks import here
from dsv4.probes.families import FAMILIES, ProbedFamily
from dsv4.probes.subject import Subject
from dsv4.probes.subjects.ours import OurSubject


def open_ours(path: str | Path, *choices: str, kernels: Mapping[str, Replacement] = MappingProxyType({})) -> OurSubject:
    """The subject of the family that config.json is of; choices and kernels as `OurSubject` takes them."""
    family = _family_at(path)
    if "training" in choices:
        if kernels:
            raise InputError("--kernel was given for the training backend, whose operations are differentiable")
        if here().size > 1:
            raise InputError(
                f"the training backend was asked of {here().size} ranks; it runs in one process: leave one out"
            )
        return family.open_training(path, *choices)
    return family.open_ours(path, *choices, kernels=kernels)


def open_theirs(path: str | Path) -> Subject:
    """transformers' model of the family that config.json is of, in fp32."""
    return _family_at(path).open_theirs(path)


def _family_at(path: str | Path) -> ProbedFamily:
    return FAMILIES[family_of(read_json(Path(path) / "config.json"))]
