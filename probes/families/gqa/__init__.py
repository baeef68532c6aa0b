"""GQA models, as the probes know them."""

from dsv4.errors import InputError
from dsv4.probes.families.base import ProbedFamily, made
from dsv4.probes.families.gqa import cases, rows, tiles
from dsv4.probes.subjects.answers import Answer
from dsv4.probes.subjects.gqa import OurGQASubject


class GQA(ProbedFamily):
    """The family of this package. Its methods look names up when they are called: faults replace them."""

    name, title = "gqa", "GQA models"
    lacks = {
        "edges": "its cases are the kernels of CSA, HCA and the indexer",
        "expert_memory": "they have no routed experts",
        "format_decode": "their weights are dense, without formats; load_ledger decodes every value",
        "index_oracle": "they have no indexer",
        "mhc": "they have one residual stream and no hyper-connections; decoder holds their sublayers against the "
        "definition",
        "moe_edges": "they have no experts and no router",
        "parallel": "it takes DeepSeek-V4 layers apart",
        "recorded": "their runs are not recorded",
        "speculation": "its rounds draft with an MTP block, which they lack; what a rejected draft leaves behind is "
        "held by rollback",
        "training": "their training backend is not audited",
    }
    refuses = {
        "bisect": "{} runs a GQA model, which bisect does not take; dsv4 audit run --probe decoder says which sublayer "
        "is off",
        "conform": "{} is no subject that runs a DeepSeek-V4 model; conform takes PACKAGE.MODULE:FACTORY, ours or "
        "transformers",
        "recall": "recall measures the indexer of CSA layers, and a GQA model has none; dsv4 fidelity compares "
        "policies that read its cache sparsely",
        "record": "{} runs a GQA model, whose runs are not recorded: dumps have the points of DeepSeek-V4 models; "
        "audit it as it runs",
    }

    def open_ours(self, path, *choices, kernels):
        return OurGQASubject(path, *choices, kernels=kernels)

    def open_training(self, path, *choices):
        raise InputError(
            "the training backend of GQA models cannot be audited: it keeps no cache, which their probes read; audit "
            "backend reference, cpu or triton"
        )

    def open_theirs(self, path):
        from dsv4.probes.subjects.transformers_gqa import TransformersGQASubject

        return TransformersGQASubject(path)

    def answer(self, result, config, batch, tokens):
        return Answer(result, [], {})  # points of another table, which nothing here holds against a config

    def tables(self):
        return OurGQASubject.tables

    def cases(self):
        return cases.CASES

    def tile_cases(self, seed):
        return made(tiles.MAKERS, seed)

    def windows(self, config):
        return set(config.windows) - {None}

    def made_of_input(self, config, layer):
        return {"keys", "values"}

    def buffers(self, subject, cache, mtp):
        return rows.buffers(cache)

    def visible(self, subject, cache, b, length, mtp_length):
        return rows.visible(subject, cache, b, length)

    def of_pages(self, subject, cache, pages, length, mtp_length):
        return rows.of_pages(subject, cache, pages, length)
