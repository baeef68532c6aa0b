"""Pieces of an engine put together: which capture point each is of, over ranks, then over steps."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from dsv4.model.config import ModelConfig
from dsv4.probes.subject import Capture
from dsv4.probes.subjects.dump import Timeline, in_order, shape_of
from dsv4.probes.subjects.engine_dumps import dims, fit
from dsv4.probes.subjects.engine_dumps.names import OF_STEPS, Rule, Table
from dsv4.probes.subjects.engine_dumps.pieces import (
    EngineDumpError,
    Loaded,
    MissingPieces,
    Piece,
    RanksDiffer,
    RenameError,
    WrongShape,
    dtype_name,
    tensor_of,
)
from dsv4.probes.subjects.engine_dumps.steps import Run, Step, agreed, steps_of_run

Key = tuple[int, str]  # (layer, point)


@dataclass
class Imported:
    """A run put together. dtypes: of each point as dumped; shared: how ranks held it; fates: what became of each
    piece, in their order."""

    capture: Capture
    run: Run
    dtypes: dict[str, str]
    shared: dict[str, str]
    fates: list[str]


@dataclass
class _Routed:
    """Numbers of pieces: of points by step, and of `ids` and `positions` by step."""

    points: dict[Key, dict[int, list[int]]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(list)))
    tokens: dict[int, dict[str, list[int]]] = field(default_factory=lambda: defaultdict(lambda: defaultdict(list)))
    rules: dict[int, Rule] = field(default_factory=dict)
    fates: list[str] = field(default_factory=list)


def assemble(pieces: Sequence[Piece], table: Table, config: ModelConfig, wanted: torch.Tensor | None) -> Imported:
    """The run of `wanted` int64 [1, T], or the last of the dump if it is None.

    Raises RenameError, MissingPieces, RanksDiffer, WrongShape and EngineDumpError, each in one line.
    """
    table.check(piece.name for piece in pieces)
    routed = _route(pieces, table, config)
    if not routed.points:
        names = sorted({piece.name for piece in pieces})
        raise EngineDumpError(
            f"none of the {len(names)} names of the dump is of a capture point ({', '.join(names[:3])} …); say which "
            "are in a renaming table: --rename FILE.toml"
        )
    run = steps_of_run(_steps(pieces, routed, wanted), wanted)
    strange = run.ids[(run.ids < 0) | (run.ids >= config.vocab_size)]
    if len(strange):
        raise EngineDumpError(
            f"the dump has token id {int(strange[0])}, and the config a vocabulary of {config.vocab_size}; is it of "
            "another checkpoint?"
        )
    maker = _Maker(pieces, routed, config, run)
    for key in sorted(routed.points, key=in_order):
        maker.point(*key)
    for i in routed.rules:
        if (number := pieces[i].step) in run.left_out:
            routed.fates[i] = f"step {number}: {run.left_out[number]}"
    routed.fates = [fate or f"step {piece.step} is not of the run" for piece, fate in zip(pieces, routed.fates)]
    if not maker.line.capture().points:
        raise EngineDumpError("nothing of the run is a capture point; see what was left out, and --rename FILE.toml")
    return Imported(maker.line.capture(), run, maker.dtypes, maker.shared, routed.fates)


def _route(pieces: Sequence[Piece], table: Table, config: ModelConfig) -> _Routed:
    routed = _Routed()
    for i, piece in enumerate(pieces):
        rule, layer = table.match(piece.name)
        layer = piece.layer if layer is None else layer
        fate = piece.skip or _why_not(piece, rule, layer, config)
        if not fate:
            routed.rules[i] = rule
            if rule.point in OF_STEPS:
                routed.tokens[piece.step][rule.point].append(i)
                fate = rule.point
            else:
                routed.points[layer, rule.point][piece.step].append(i)
        routed.fates.append(fate)
    for named in routed.tokens.values():
        for name, which in named.items():  # the step's own, if it was dumped beside what was handed to the layers
            named[name] = [i for i in which if pieces[i].layer is None] or which
            for i in set(which) - set(named[name]):
                routed.fates[i] = "a layer's copy of what the step has"
    return routed


def _why_not(piece: Piece, rule: Rule | None, layer: int | None, config: ModelConfig) -> str:
    """Why a piece is of no point; '' if it is. Raises RenameError where the user's own line says it is one."""
    if rule is None:
        return "no line of a renaming table means its name"
    if rule.point is None:
        return "left out by the renaming table"
    if rule.point in OF_STEPS:
        return ""
    if layer is None:
        why = "neither its name nor a tag says its layer"
    elif layer >= config.num_hidden_layers:
        return f"layer {layer} is not one of the {config.num_hidden_layers} of the main model"
    elif not fit.layers_of(rule.point, config.compress_ratios[layer]):
        why = f"layer {layer} has no {rule.point}"
    else:
        return ""
    if rule.own:
        raise RenameError(f"{piece.name!r} is to be {rule.point}, but {why}; {fit.TELL}")
    return why


def _steps(pieces: Sequence[Piece], routed: _Routed, wanted: torch.Tensor | None) -> list[Step]:
    """Every step of which something is wanted, by its tokens."""
    numbers = {pieces[i].step for i in routed.rules}
    found = []
    for number in sorted(numbers):
        seen = {
            name: agreed(f"{name} of step {number}", [tensor_of(pieces[i], pieces[i].load()) for i in which])
            for name, which in routed.tokens[number].items()
        }
        n = next((len(v) for v in (seen.get("positions"), seen.get("ids")) if v is not None), None)
        if n is None:
            n = _length(pieces, routed, number)
        if n:
            found.append(Step(number, n, seen.get("ids"), seen.get("positions")))
    return found


def _length(pieces: Sequence[Piece], routed: _Routed, number: int) -> int:
    """Tokens of a step that says nothing of them, by a tensor that has a row a token; 0 if there is none."""
    for (_, point), steps in routed.points.items():
        if point not in fit.ENTRIES and steps.get(number):
            piece = pieces[steps[number][0]]
            shape = tensor_of(piece, piece.load()).shape
            return shape[1] if len(shape) > 2 and shape[0] == 1 else shape[0]
    return 0


class _Maker:
    """Puts points into a timeline, and says of each piece what became of it."""

    def __init__(self, pieces: Sequence[Piece], routed: _Routed, config: ModelConfig, run: Run):
        self.pieces, self.routed, self.config, self.run = pieces, routed, config, run
        self.line = Timeline(1, run.ids.shape[1])
        self.dtypes: dict[str, str] = {}
        self.shared: dict[str, str] = {}

    def point(self, layer: int, point: str) -> None:
        """One point of one layer, of all steps of the run; left out where a line of the default table does not fit."""
        steps = self.routed.points[layer, point]
        if not any(steps.get(number) for number, _, _ in self.run.parts):
            return
        which = [i for number, _, _ in self.run.parts for i in steps.get(number, [])]
        try:
            values = [self._step(layer, point, *part) for part in self.run.parts]
            self._put(layer, point, values)
        except WrongShape as error:
            if any(self.routed.rules[i].own for i in which):
                raise
            fate = str(error).partition(";")[0] + " …"
        else:
            fate = f"layers.{layer}.{point}"
        for i in which:
            self.routed.fates[i] = fate

    def _step(self, layer: int, point: str, number: int, start: int, n: int) -> tuple[torch.Tensor, dims.Dims]:
        """The value of one step over all ranks."""
        what = f"{point} of layer {layer} in step {number}"
        which = self.routed.points[layer, point].get(number)
        if not which:
            raise MissingPieces(f"{what} (positions {start} to {start + n - 1}) is in no file; dump every step")
        self._once(what, which)
        loaded = [self.pieces[i].load() for i in which]
        parts = [(one.axes, tensor_of(self.pieces[i], one)) for i, one in zip(which, loaded)]
        words = dims.parse(self._words(what, which, loaded))
        whole = dims.join(what, parts, words)
        kind = dtype_name(parts[0][1])
        if self.dtypes.setdefault(point, kind) != kind:
            raise RanksDiffer(f"{what} is {kind}, and {self.dtypes[point]} before; expected one dtype of a point")
        self.shared[point] = _how(parts, words)
        return whole, words

    def _once(self, what: str, which: list[int]) -> None:
        seen: dict[int, str] = {}
        for i in which:
            piece = self.pieces[i]
            if piece.rank in seen:
                both = " and ".join(sorted({seen[piece.rank], piece.name}))
                raise EngineDumpError(
                    f"{what} is dumped twice by rank {piece.rank}, as {both}; keep one: give the other name `false` in "
                    "the renaming table, or remove its files"
                )
            seen[piece.rank] = piece.name

    def _words(self, what: str, which: list[int], loaded: list[Loaded]) -> str:
        found = {
            self.routed.rules[i].dims if self.routed.rules[i].dims is not None else l.dims
            for i, l in zip(which, loaded)
        }
        if len(found) > 1:
            raise RanksDiffer(f"{what} has dims {' and '.join(map(repr, sorted(found)))} on different ranks")
        return found.pop()

    def _put(self, layer: int, point: str, values: list[tuple[torch.Tensor, dims.Dims]]) -> None:
        wanted = shape_of(self.config, layer, point, 1, self.line.tokens)
        made, entries = [], fit.Entries(max(1, self.config.compress_ratios[layer]))
        for (number, start, n), (value, words) in zip(self.run.parts, values):
            what = f"{point} of layer {layer} in step {number}"
            if point in fit.ENTRIES:
                entries.add(what, value, start, n)
                continue
            rest = (None,) if point in ("index_scores", "selection") else wanted[2:]
            found = fit.rows(what, point, value, n, rest, words.names)
            made.append((fit.scores(found, wanted[2]) if point == "index_scores" else found, start))
        if point in fit.ENTRIES:
            made = [(entries.held.unsqueeze(0), 0)]
        last = made[-1][0].shape
        if any(size not in (None, there) for size, there in zip(wanted[2:], last[2:])):
            raise WrongShape(
                f"{point} of layer {layer} ends with shape {list(last)}; expected {list(wanted)}; {fit.TELL}"
            )
        for value, start in made:
            if point in fit.ENTRIES:
                self.line.whole(layer, point, value)
            else:
                self.line.put(layer, point, value, [start])


def _how(parts: list, words: dims.Dims) -> str:
    axes = {name for held, _ in parts for name in held}
    cut = [
        f"{'summed' if s.partial else 'joined'} over {s.axis}"
        for s in words.shares
        if s.axis in axes or dims.ANY in axes and len(parts) > 1
    ]
    return ", ".join(cut) or (f"the same on {len(parts)} ranks" if len(parts) > 1 else "")
