"""`captured` on GQA models: a step has positions and rotations alone."""

import torch

from dsv4.model.gqa.config import GQAConfig
from dsv4.model.step import CapturedStep
from dsv4.probes.catalogue.captured import Captured
from dsv4.probes.compare import window_of
from dsv4.probes.scenes.captured_step import Pairs, places
from dsv4.probes.subject import Subject


class GQACaptured(Captured):
    """Rows are an empty one, one shortly before 128 tokens, and one beyond the longest window."""

    @staticmethod
    def _starts(config: GQAConfig) -> list[int]:
        return [0, 126, -(-(window_of(config) + 2) // 128) * 128 + 21]

    @staticmethod
    def _pairs(subject: Subject, step: CapturedStep, starts: list[int], T: int, cache) -> Pairs:
        yield from places(subject, step, starts, T, cache)
        yield "positions", step.start, torch.tensor(starts)
