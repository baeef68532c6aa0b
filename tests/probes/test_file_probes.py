"""The probes of files and memory: green on a sound checkpoint, red and by the right name on a planted fault."""

import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from dsv4.cache import layout, rows, streams
from dsv4.errors import ConfigError
from dsv4.kernels import quantize
from dsv4.kernels.quantize import weights as quantised
from dsv4.probes.catalogue.config_ledger import NO_EFFECT
from dsv4.probes.probe import execute, probe_named
from dsv4.probes.result import Status, worst
from dsv4.probes.subject import Subject
from dsv4.probes.subjects.files import FilesSubject
from dsv4.probes.subjects.ours import OurSubject
from tests import checkpoints

NAMES = ("load_ledger", "config_ledger", "format_decode", "dtype_ledger", "memory_map")
KEYS = "layers.1.attn.indexer.compressor.wkv.weight"


def run(name: str, subject: Subject) -> list:
    return execute(probe_named(name)(), subject)[0]


def failures(name: str, subject: Subject) -> list:
    return [c for c in run(name, subject) if c.status in (Status.FAIL, Status.ERROR)]


def rewrite(root, change) -> None:
    """Change the tensors of each shard: change(name, tensor) → tensor."""
    for file in root.glob("*.safetensors"):
        tensors = {n: change(n, t) for n, t in load_file(file).items()}
        save_file({n: t.contiguous() for n, t in tensors.items()}, file)


def bf16_cast(name: str, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.bfloat16() if name == "layers.2.attn.attn_sink" else tensor


@pytest.mark.parametrize("numerics", ["files", "fp32", "native", "qat"])
@pytest.mark.parametrize("name", NAMES)
def test_sound_subjects_pass(official, name, numerics):
    subject = FilesSubject(official) if numerics == "files" else OurSubject(official, numerics)
    checks = run(name, subject)
    if name == "memory_map" and numerics == "files":
        assert worst(checks) is Status.VACUOUS
        return
    assert worst(checks) is Status.PASS, [c for c in checks if c.status is not Status.PASS]
    for check in checks:
        assert check.source and check.samples > 0 and check.part, check


# ---- load_ledger -------------------------------------------------------------------------------


@pytest.mark.parametrize("numerics", ["fp32", "native"])
def test_overwritten_weight_is_named(official, numerics):
    subject = OurSubject(official, numerics)
    matrix = subject.model.layers[1].attn.indexer.compressor.wkv_gate.weight
    matrix.data[3, 5] += 1
    found = failures("load_ledger", subject)
    assert {c.at for c in found} == {KEYS} and {c.part for c in found} == {"indexer keys"}


def test_scale_lost_in_memory_is_named(official):
    subject = OurSubject(official, "native")
    subject.model.layers[0].ffn.experts.w2.scale.data.view(torch.uint8)[2] += 1
    wheres = {c.at for c in failures("load_ledger", subject)}
    assert "layers.0.ffn.experts.2.w2.scale" in wheres and "layers.0.ffn.experts.2.w2.weight" in wheres


def test_parameter_left_unfilled_is_named(official):
    subject = OurSubject(official)
    subject.model.layers[2].ffn.gate.bias.data[1] = float("nan")
    found = failures("load_ledger", subject)
    assert {c.part for c in found} == {"router"}
    assert "parameter is free of NaN and poison" in {c.name for c in found}


def test_copied_and_constant_tensors_show(official, copy_of):
    root = copy_of(official)
    tensors = {}
    for file in root.glob("*.safetensors"):
        tensors |= load_file(file)

    def change(name, tensor):
        if name == "layers.3.attn.compressor.ape":
            return tensors["layers.1.attn.compressor.ape"]
        return torch.zeros_like(tensor) if name == "layers.4.ffn.gate.bias" else tensor

    rewrite(root, change)
    checks = run("load_ledger", FilesSubject(root))
    alike = [c for c in checks if c.status is Status.FAIL]
    assert {c.part for c in alike} == {"compressor"} and "layers.3.attn.compressor.ape" in alike[0].note
    assert [c.at for c in checks if c.status is Status.WARN] == ["layers.4.ffn.gate.bias"]


def test_missing_tensor_is_named(official):
    subject = FilesSubject(official)
    sources = {n: s for n, s in subject.files.sources.items() if n != KEYS}
    subject.files = dataclasses.replace(subject.files, sources=sources)
    found = failures("load_ledger", subject)
    assert KEYS in {c.at for c in found} and "indexer keys" in {c.part for c in found}


def test_subject_without_weights_is_vacuous(official):
    class Silent(FilesSubject):
        weight = Subject.weight

    checks = run("load_ledger", Silent(official))
    assert worst(checks) is Status.VACUOUS


def test_another_implementation_is_held_against_the_file(official):
    from dsv4.probes.subjects.transformers import TransformersSubject

    subject = TransformersSubject(official, torch.bfloat16)
    found = [c for c in run("load_ledger", subject) if c.status is not Status.PASS]
    assert [(c.status, c.at) for c in found] == [(Status.WARN, "mtp.0")]  # it has no MTP block, and says so nowhere
    assert worst(run("dtype_ledger", subject)) is Status.PASS
    subject.model.model.layers[3].self_attn.sinks.data.zero_()
    assert {c.part for c in failures("load_ledger", subject)} == {"sink"}
    assert {c.part for c in failures("dtype_ledger", subject)} == {"sink"}


# ---- config_ledger -----------------------------------------------------------------------------


def test_an_unread_key_passes_where_its_reason_is_known_and_is_refused_else(official, copy_of):
    root = checkpoints.edit_config(copy_of(official), attention_dropout=0.0)
    assert "attention_dropout" in NO_EFFECT
    found = [c for c in run("config_ledger", FilesSubject(root)) if c.at == "attention_dropout"]
    assert found and worst(found) is Status.PASS
    with pytest.raises(ConfigError, match="'seq_aux_loss', which nothing here reads"):
        FilesSubject(checkpoints.edit_config(root, seq_aux_loss=True))


def test_kind_that_contradicts_the_tensors_is_red(official, copy_of):
    root = copy_of(official)
    raw = json.loads((root / "config.json").read_text())
    checkpoints.edit_config(root, compress_ratios=[0, 4, 128, 0, *raw["compress_ratios"][4:]])
    found = failures("config_ledger", FilesSubject(root))
    assert [(c.at, c.part) for c in found] == [("layer 3", "layer kind")]


def test_clamped_and_ignored_values_are_red(official):
    subject = OurSubject(official)
    subject.model.config = dataclasses.replace(subject.model.config, max_position_embeddings=64)
    subject.model.layers[1].attn.indexer.topk = 3
    subject.model.layers[2].attn.base = "main"
    subject.model.frequencies["compress"] = subject.model.frequencies["main"]
    wheres = {c.at for c in failures("config_ledger", subject)}
    assert {"max_position_embeddings", "layer 1", "layer 2", "base compress"} <= wheres


def test_effective_config_of_another_implementation_is_compared(official):
    subject = FilesSubject(official)
    subject.provenance = subject.provenance | {"effective": {"index_topk": 2048, "hidden_size": 128}}
    assert [c.at for c in failures("config_ledger", subject)] == ["index_topk"]


# ---- format_decode -----------------------------------------------------------------------------


def test_swapped_nibbles_are_red(official, monkeypatch):
    real = quantize.unpack_e2m1
    swapped = lambda packed: real((packed >> 4) | (packed << 4))
    monkeypatch.setattr(quantize, "unpack_e2m1", swapped)
    monkeypatch.setattr(quantised, "unpack_e2m1", swapped)
    found = failures("format_decode", FilesSubject(official))
    assert "nibbles" in {c.part for c in found} and "experts" in {c.part for c in found}


def test_scale_byte_as_a_number_is_red(official, monkeypatch):
    cast = lambda scale: scale.view(torch.uint8).float()
    monkeypatch.setattr(quantize, "decode_e8m0", cast)
    monkeypatch.setattr(quantised, "decode_e8m0", cast)
    found = failures("format_decode", FilesSubject(official))
    assert {"scales", "formats", "queries", "experts"} <= {c.part for c in found}


def test_nan_scale_in_the_file_is_red(official, copy_of):
    root, name = copy_of(official), "layers.0.attn.wkv.scale"

    def change(n, tensor):
        if n == name:
            tensor.view(torch.uint8)[0] = 255
        return tensor

    rewrite(root, change)
    found = failures("format_decode", FilesSubject(root))
    assert name in {c.at for c in found} and {c.part for c in found} == {"window KV"}


# ---- dtype_ledger ------------------------------------------------------------------------------


def test_narrow_island_on_disk_is_red(official, copy_of):
    root = copy_of(official)
    rewrite(root, bf16_cast)
    found = failures("dtype_ledger", FilesSubject(root))
    assert {c.at for c in found} == {"layers.2.attn.attn_sink"} and {c.part for c in found} == {"sink"}


def test_island_that_went_through_bf16_is_red(official):
    subject = OurSubject(official)
    sink = subject.model.layers[0].attn.attn_sink
    sink.data.copy_(sink.data.bfloat16().float())
    assert {c.part for c in failures("dtype_ledger", subject)} == {"sink"}
    gate = subject.model.layers[2].ffn.gate
    gate.bias.data = gate.bias.data.bfloat16()
    assert {c.part for c in failures("dtype_ledger", subject)} == {"sink", "router"}


def test_cache_of_another_dtype_is_red(official, monkeypatch):
    subject = OurSubject(official)
    real = layout.zeros
    narrow = lambda stream, device: (
        real(stream, device).bfloat16() if stream.name == "main raw rows" else real(stream, device)
    )
    monkeypatch.setattr(layout, "zeros", narrow)
    found = failures("dtype_ledger", subject)
    assert [(c.at, c.part) for c in found] == [("layer 1", "main raw rows")]


# ---- memory_map --------------------------------------------------------------------------------


def test_wrong_size_names_stream_and_layer(official, monkeypatch):
    subject = OurSubject(official)
    real = streams.layer_streams

    def padded(*args):
        layer = real(*args)
        grown = [
            dataclasses.replace(s, shape=(*s.shape[:1], s.shape[1] + 1, *s.shape[2:])) if s.name == "index keys" else s
            for s in layer.streams
        ]
        return dataclasses.replace(layer, streams=tuple(grown))

    monkeypatch.setattr(streams, "layer_streams", padded)
    found = failures("memory_map", subject)
    assert {c.part for c in found} == {"index keys", "cache"} and any(c.at.startswith("layer 1") for c in found)


def test_rows_that_share_memory_are_red(official, monkeypatch):
    subject = OurSubject(official)
    real = layout.zeros

    def shared(stream, device):
        buffer = real(stream, device)
        if stream.name == "entries" and len(buffer) == 2:
            buffer = buffer[:1].expand(2, -1, -1)
        return buffer

    monkeypatch.setattr(layout, "zeros", shared)
    assert "rows that share memory" in {c.name for c in failures("memory_map", subject)}


def test_write_to_another_row_is_red(official, monkeypatch):
    subject = OurSubject(official)
    real = rows.Entries.write

    def spilled(self, step, values):
        real(self, step, values)
        if len(self.buffer) > 1:
            self.buffer[1 - step.first, 0] = values[0].to(self.buffer.dtype)

    monkeypatch.setattr(rows.Entries, "write", spilled)
    found = failures("memory_map", subject)
    assert {c.name for c in found} == {"buffers of the other row that were written"} and {c.part for c in found} == {
        "entries"
    }


def test_offsets_of_32_bits_are_red(official, monkeypatch):
    subject = OurSubject(official)
    real = rows.Entries.write

    def wrapped(self, step, values):
        D, (B, n) = self.buffer.shape[-1], self.buffer.shape[:2]
        if B * n * D <= 1 << 31:
            return real(self, step, values)
        slots = (step.new_windows(self.ratio) * D % (1 << 31) // D).flatten()
        self.flat.index_copy_(0, slots, values.to(self.buffer.dtype))

    monkeypatch.setattr(rows.Entries, "write", wrapped)
    found = failures("memory_map", subject)
    assert [c.part for c in found] == ["entries"] and "2^31" in found[0].name
