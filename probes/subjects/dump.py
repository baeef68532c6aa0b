"""Captures as tensors: put together from steps (`Timeline`), written to a file (`write_dump`), read back
(`DumpSubject`)."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from dsv4.errors import InputError
from dsv4.loaders.config_files import read_config, to_official
from dsv4.loaders.files import read_json
from dsv4.model.config import ModelConfig
from dsv4.probes.subject import GQA_POINTS, POINTS, Capture, Subject
from dsv4.probes.subjects.files import FilesSubject, plain

FORMAT = "dsv4 probe dump 1"
ORDER = list(POINTS | GQA_POINTS)  # as models compute them
PADS = {"index_scores": float("-inf"), "selection": -1}  # points whose last size grows with the tokens seen; their pad


class NotRecorded(InputError):
    """A dump was asked for a run that is not the recorded one."""


def steps_of(tokens: int, schedule: Sequence[int]) -> list[tuple[int, int]]:
    """(position before it, tokens of it) of each step; negative: tokens forgotten.

    Raises InputError for a step of no tokens or out of 0 … tokens, and for a schedule that does not end at `tokens`.
    """
    steps, at = [], 0
    for n in schedule or (tokens,):
        if not n or not 0 <= at + n <= tokens:
            raise InputError(
                f"a step of {n} at position {at} of {tokens} tokens cannot be run; the schedule is {list(schedule)}"
            )
        steps.append((at, int(n)))
        at += n
    if at != tokens:
        raise InputError(f"the schedule {list(schedule)} ends at position {at}; there are {tokens} tokens")
    return steps


def check_points(want: Sequence[str], among: Sequence[str] = tuple(POINTS)) -> frozenset[str]:
    """The wanted points as a set. Raises InputError for one that is not `among`."""
    for point in want:
        if point not in among:
            raise InputError(f"capture point {point!r} is unknown here; expected some of {', '.join(among)}")
    return frozenset(want)


def in_order(key: tuple[int, str]) -> tuple[int, int]:
    """Sorts (layer, point) as the model computes them."""
    return key[0], ORDER.index(key[1])


def shape_of(config: ModelConfig, layer: int, point: str, batch: int, tokens: int) -> tuple:
    """Shape that a point must have; None for the picks k, which an implementation may pad further with −1."""
    sizes = {
        "B": batch,
        "T": tokens,
        "n": tokens // max(1, config.compress_ratios[layer]),
        "k": None,
        "d": config.hidden_size,
        "H": config.num_attention_heads,
        "D": config.head_dim,
        "S": config.hc_mult,
        "Di": config.index_head_dim,
    }
    return tuple(sizes[name] for name in POINTS[point].partition("[")[2].partition("]")[0].split(", "))


class Timeline:
    """What was seen of each position of each row, in any order of steps: what was put last stands.

    Positions that nobody put hold NaN (−inf in index_scores, −1 in selection).
    """

    def __init__(self, batch: int, tokens: int):
        self.batch, self.tokens = batch, tokens
        self._held: dict[tuple[int, str], torch.Tensor] = {}

    def put(self, layer: int, point: str, values: torch.Tensor, starts: Sequence[int], first: int = 0) -> None:
        """values [b, t, ...]: rows first … first + b − 1 at positions starts[row] … starts[row] + t − 1; copied.

        Positions before 0 are left out: a ring has slots for them that hold nothing.
        """
        values = plain(values)
        out = self._room(layer, point, values)
        for b, start in enumerate(starts):
            skip = max(0, -start)
            place = out[first + b, start + skip : start + values.shape[1]]
            place.fill_(PADS.get(point, float("nan")))
            place[..., : values.shape[-1]] = values[b, skip:]

    def whole(self, layer: int, point: str, values: torch.Tensor) -> None:
        """values [B, ...] of all rows and all that the run has made, such as an entries buffer."""
        self._held[layer, point] = plain(values)

    def capture(self, logits: torch.Tensor | None = None) -> Capture:
        """The tensors of POINTS, fp32 or int64, on the CPU."""
        return Capture(logits, {key: self._held[key] for key in sorted(self._held, key=in_order)})

    def take(self, layer: int) -> dict[str, torch.Tensor]:
        """The points of a layer by name, which are forgotten here."""
        keys = sorted((key for key in self._held if key[0] == layer), key=in_order)
        return {key[1]: self._held.pop(key) for key in keys}

    def _room(self, layer: int, point: str, values: torch.Tensor) -> torch.Tensor:
        """The tensor [B, T, ...] of a point, as wide as `values` at least."""
        held = self._held.get((layer, point))
        if held is not None and held.shape[-1] >= values.shape[-1]:
            return held
        with torch.inference_mode(False):
            out = torch.full(
                (self.batch, self.tokens, *values.shape[2:]), PADS.get(point, float("nan")), dtype=values.dtype
            )
        if held is not None:
            out[..., : held.shape[-1]] = held
        self._held[layer, point] = out
        return out


def write_dump(capture: Capture, ids: torch.Tensor, file: str | Path, about: dict) -> Path:
    """Write a capture as one safetensors file: 'layers.{i}.{point}', 'ids' and, if there are any, 'logits'.

    about (JSON values) goes to the metadata; of it 'name', 'numerics' and 'schedule' (tokens a step; absent: one step)
    are read back into the subject, the rest into its provenance.
    """
    steps_of(ids.shape[1], about.get("schedule", ()))
    tensors = {f"layers.{layer}.{point}": value.contiguous() for (layer, point), value in capture.points.items()}
    tensors["ids"] = ids.to("cpu", torch.int64).contiguous()
    if capture.logits is not None:
        tensors["logits"] = capture.logits.contiguous()
    Path(file).parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, file, {"format": FORMAT, "about": json.dumps(about)})
    return Path(file)


class DumpSubject(Subject):
    """One recorded run, by this project or any other implementation. It answers for that run alone.

    config_path: the checkpoint directory, or a config.json in any form that loads. `ids` and `schedule` are the
    recorded ones. A point that was not recorded is absent from the capture. Raises InputError for a file that is no
    dump of that model.
    """

    can = frozenset({"recorded"})

    def __init__(self, file: str | Path, config_path: str | Path):
        self.file, self.config = Path(file), config_of(Path(config_path))
        if Path(config_path).is_dir():  # the weights that it ran with, for the oracle
            self.files, self.can = FilesSubject(config_path).files, frozenset({"recorded", "files"})
        about = self._read_headers()
        self.schedule = tuple(about.get("schedule", ()))
        self.name, self.numerics = str(about.get("name", self.file.name)), str(about.get("numerics", ""))
        self.provenance = {"file": str(self.file), "config": str(config_path), **about}
        steps_of(self.ids.shape[1], self.schedule)

    def run(self, ids: torch.Tensor, schedule: Sequence[int] = (), want: Sequence[str] = ()) -> Capture:
        """The recorded capture. Raises NotRecorded for other ids or another schedule than the recorded ones."""
        want = check_points(want)
        if ids.shape != self.ids.shape or not torch.equal(ids.cpu(), self.ids):
            raise NotRecorded(
                f"{self.file.name} holds a run of {list(self.ids.shape)} recorded ids; it was asked for others "
                f"({list(ids.shape)})"
            )
        tokens = ids.shape[1]
        if steps_of(tokens, schedule) != steps_of(tokens, self.schedule):
            raise NotRecorded(
                f"{self.file.name} was recorded in the schedule {list(self.schedule) or 'of one step'}; it was "
                f"asked for {list(schedule) or 'one step'}"
            )
        points = {key: self._read(name) for key, name in self._names.items() if key[1] in want}
        return Capture(self._read("logits") if self._has_logits else None, points)

    def stream(self, ids: torch.Tensor, want: Sequence[str], see: Callable[[int, dict], None]) -> torch.Tensor | None:
        """The recorded points layer by layer, however the run was cut into steps: points are those of all positions."""
        want = check_points(want)
        if ids.shape != self.ids.shape or not torch.equal(ids.cpu(), self.ids):
            raise NotRecorded(f"{self.file.name} holds a run of other ids than it was asked for")
        for layer in range(self.config.num_hidden_layers):
            see(layer, {p: self._read(name) for (i, p), name in self._names.items() if i == layer and p in want})
        return self._read("logits") if self._has_logits else None

    def layer(self, i: int) -> dict[str, torch.Tensor]:
        """Every recorded point of a layer, by name."""
        return {point: self._read(name) for (j, point), name in self._names.items() if j == i}

    def recorded(self) -> dict[str, tuple[int, ...]]:
        """Which layers each recorded point has."""
        return {
            p: tuple(sorted(i for i, q in self._names if q == p)) for p in POINTS if any(q == p for _, q in self._names)
        }

    def _read_headers(self) -> dict:
        try:
            with safe_open(self.file, "pt") as f:
                keys, metadata = list(f.keys()), f.metadata() or {}
        except (SafetensorError, OSError) as error:
            raise InputError(f"{self.file} is no dump that can be read ({str(error).splitlines()[0]})") from None
        if "ids" not in keys:
            raise InputError(f"{self.file} holds no tensor 'ids'; a dump names the tokens it was made with")
        self._has_logits = "logits" in keys
        self.ids = self._read("ids")
        named = {self._point(key): key for key in keys if key not in ("ids", "logits")}
        self._names = {key: named[key] for key in sorted(named, key=in_order)}
        try:
            return dict(json.loads(metadata.get("about", "{}")))
        except ValueError:
            raise InputError(f"{self.file} has metadata 'about' that is no JSON object") from None

    def _point(self, key: str) -> tuple[int, str]:
        head, _, rest = key.partition(".")
        layer, _, point = rest.partition(".")
        if (
            head != "layers"
            or not layer.isdigit()
            or point not in POINTS
            or int(layer) >= self.config.num_hidden_layers
        ):
            raise InputError(
                f"{self.file} holds {key!r}; expected layers.{{i}}.{{point}} of a point in POINTS and one of "
                f"{self.config.num_hidden_layers} layers"
            )
        found, wanted = self._shape(key), shape_of(self.config, int(layer), point, *self.ids.shape)
        if len(found) != len(wanted) or any(size not in (None, there) for size, there in zip(wanted, found)):
            raise InputError(
                f"{self.file} holds {key} of shape {list(found)}; expected {list(wanted)}, {POINTS[point]}"
            )
        return int(layer), point

    def _shape(self, key: str) -> list[int]:
        with safe_open(self.file, "pt") as f:
            return f.get_slice(key).get_shape()

    def _read(self, key: str) -> torch.Tensor:
        with safe_open(self.file, "pt") as f:
            value = f.get_tensor(key)
        return value.float() if value.is_floating_point() else value.long()


def config_of(path: Path) -> ModelConfig:
    """Of a checkpoint directory, or of a config.json in any form that loads."""
    return ModelConfig.from_official(read_config(path)[0] if path.is_dir() else to_official(read_json(path))[0])
