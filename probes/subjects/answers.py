"""What another implementation's `run` returned, as a Capture: in which forms it may come, and what is wrong with it."""

import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from dsv4.model.config import ModelConfig
from dsv4.probes.subject import POINTS, Capture
from dsv4.probes.subjects.dump import in_order, shape_of
from dsv4.probes.subjects.engine_dumps.fit import layers_of
from dsv4.probes.subjects.files import plain
from dsv4.probes.subjects.hooks import parts_of

Key = tuple[int, str]
NAMED = re.compile(r"(?:layers\.)?(\d+)\.(\w+)")
FORMS = "{(layer, point): tensor}, {'layers.3.attn_in': tensor}, {'attn_in': [tensor of each layer]}, or a Capture"


@dataclass(frozen=True)
class Problem:
    """key: (layer, point), ('logits',) as (−1, 'logits'), None of what is no point; said: found, and expected."""

    key: Key | None
    said: str


@dataclass
class Answer:
    """capture: all that is usable; problems: what is wrong; notes: what was put right, by key."""

    capture: Capture
    problems: list[Problem]
    notes: dict[Key, str]


def answer_of(result, config: ModelConfig, batch: int, tokens: int) -> Answer:
    """Points of [batch, tokens] in any of FORMS, alone or in a tuple with the logits."""
    problems, notes = [], {}
    logits, points = _parts(result, problems)
    found: dict[Key, torch.Tensor] = {}
    for key, value in _flat(points, problems):
        parts = list(parts_of(value).values())
        if not parts:
            problems.append(Problem(key, f"a {type(value).__name__} without a tensor; expected {POINTS[key[1]]}"))
            continue
        if wrong := _fitted(key, parts[0], config, batch, tokens, found, notes):
            problems.append(Problem(key, wrong))
    if logits is not None:
        logits = _logits(logits, config, batch, tokens, problems)
    ordered = {key: found[key] for key in sorted(found, key=in_order)}
    return Answer(Capture(logits, ordered), problems, notes)


def _parts(result, problems: list[Problem]) -> tuple[object, object]:
    """(logits or None, points) of what `run` returned."""
    if isinstance(result, Capture):
        return result.logits, result.points
    if isinstance(result, Mapping):
        return result.get("logits"), result.get("points", {k: v for k, v in result.items() if k != "logits"})
    if isinstance(result, tuple | list) and len(result) == 2:
        points = next((part for part in result if isinstance(part, Mapping)), None)
        if points is not None:
            return next((part for part in result if part is not points), None), points
    if isinstance(result, torch.Tensor):
        return result, {}
    if hasattr(result, "points"):
        return getattr(result, "logits", None), result.points
    problems.append(Problem(None, f"run returns a {type(result).__name__}; expected {FORMS}"))
    return None, {}


def _flat(points, problems: list[Problem]) -> Iterator[tuple[Key, object]]:
    """((layer, point), value) of points in any form."""
    for key, value in points.items() if isinstance(points, Mapping) else ():
        if isinstance(key, str) and key in POINTS and isinstance(value, Mapping | list | tuple):
            pairs = value.items() if isinstance(value, Mapping) else enumerate(value)
            yield from (((int(layer), key), part) for layer, part in pairs if part is not None)
            continue
        match = NAMED.fullmatch(key) if isinstance(key, str) else None
        layer, point = (
            (int(match[1]), match[2]) if match else key if isinstance(key, tuple) and len(key) == 2 else (None, key)
        )
        if isinstance(point, int) and isinstance(layer, str):
            layer, point = point, layer
        if layer is None or point not in POINTS:
            near = difflib.get_close_matches(str(point), POINTS, 1)
            meant = f", such as {near[0]!r}" if near else ""
            problems.append(Problem(None, f"{key!r} is no (layer, point); expected a point of the README{meant}"))
        elif value is not None:
            yield (layer, point), value


def _fitted(
    key: Key, value: torch.Tensor, config: ModelConfig, batch: int, tokens: int, found: dict, notes: dict[Key, str]
) -> str:
    """Puts a point into `found` and returns '', or returns what is wrong with it."""
    layer, point = key
    if not 0 <= layer < config.num_hidden_layers:
        return f"of layer {layer}; the model has {config.num_hidden_layers} layers"
    if not layers_of(point, config.compress_ratios[layer]):
        return f"of layer {layer}, which has none (its ratio is {config.compress_ratios[layer]}); leave it out"
    wanted = shape_of(config, layer, point, batch, tokens)
    said = [f"[{', '.join('any' if n is None else str(n) for n in wanted)}], {POINTS[point]}"]
    if batch == 1 and _fits(value.shape, wanted[1:]) and not _fits(value.shape, wanted):
        value, notes[key] = value.unsqueeze(0), "without its batch"
    if not _fits(value.shape, wanted):
        return f"of shape {list(value.shape)}; expected {said[0]}"
    if value.is_floating_point() == (point == "selection") or value.dtype is torch.bool:
        return f"{value.dtype}; expected {'int64' if point == 'selection' else 'float32'}".replace("torch.", "")
    kind = torch.int64 if point == "selection" else torch.float32
    if value.dtype is not kind or value.device.type != "cpu":
        notes[key] = f"{value.dtype} on {value.device.type}".replace("torch.", "")
    found[key] = value if value.dtype is kind and value.device.type == "cpu" else plain(value)
    return ""


def _fits(shape, wanted: tuple) -> bool:
    return len(shape) == len(wanted) and all(want in (None, size) for want, size in zip(wanted, shape))


def _logits(logits, config: ModelConfig, batch: int, tokens: int, problems: list[Problem]) -> torch.Tensor | None:
    parts = list(parts_of(logits).values())
    value, wanted = parts[0] if parts else None, (batch, tokens, config.vocab_size)
    if value is not None and batch == 1 and value.shape == wanted[1:]:
        value = value.unsqueeze(0)
    if value is None or value.shape != wanted or not value.is_floating_point():
        shape = type(logits).__name__ if value is None else list(value.shape)
        problems.append(Problem((-1, "logits"), f"{shape}; expected fp32 {list(wanted)}, of every position"))
        return None
    return plain(value) if value.dtype is not torch.float32 or value.device.type != "cpu" else value
