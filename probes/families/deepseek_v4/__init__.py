"""DeepSeek-V4 models, as the probes know them."""

from dsv4.probes.families.base import ProbedFamily, made
from dsv4.probes.families.deepseek_v4 import cases, rows, tiles
from dsv4.probes.oracle import kinds
from dsv4.probes.subjects.answers import answer_of
from dsv4.probes.subjects.ours import OurSubject


class DeepSeekV4(ProbedFamily):
    """The family of this package. Its methods look names up when they are called: faults replace them."""

    name, title, chosen = "deepseek_v4", "DeepSeek-V4 models", ("selection",)
    lacks = {
        "chunked_prefill": "its prompts are read by the choice that it has learnt",
        "decoder": "rope, index_oracle, influence, mhc and moe_edges hold their sublayers",
        "sparse_reading": "such a model has learnt what it reads (index_oracle)",
        "termination": "its attention reads what it has chosen, and has no rule to stop",
    }

    def open_ours(self, path, *choices, kernels):
        return OurSubject(path, *choices, kernels=kernels)

    def open_training(self, path, *choices):
        from dsv4.probes.subjects.training import TrainingSubject

        return TrainingSubject(path, *choices)

    def open_theirs(self, path):
        from dsv4.probes.subjects.transformers import TransformersSubject

        return TransformersSubject(path)

    def answer(self, result, config, batch, tokens):
        return answer_of(result, config, batch, tokens)

    def tables(self):
        return OurSubject.tables

    def cases(self):
        return cases.CASES

    def tile_cases(self, seed):
        return made(tiles.MAKERS, seed)

    def windows(self, config):
        return {config.sliding_window}

    def made_of_input(self, config, layer):
        ratio = config.compress_ratios[layer]
        raw = {kinds.WINDOW: (), kinds.CSA: ("main raw rows", "index raw rows"), kinds.HCA: ("main raw rows",)}[ratio]
        return {"window", *raw}

    def buffers(self, subject, cache, mtp):
        return rows.buffers(subject, cache, mtp)

    def visible(self, subject, cache, b, length, mtp_length):
        return rows.visible(subject, cache, b, length, mtp_length)

    def of_pages(self, subject, cache, pages, length, mtp_length):
        return rows.of_pages(subject, cache, pages, length, mtp_length)
