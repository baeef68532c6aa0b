"""safetensors headers are believed only where every byte is accounted for."""

import json
import re
import struct

import pytest
import torch
from safetensors.torch import save_file

from dsv4.loaders.errors import CheckpointError
from dsv4.loaders.files import DTYPE_NAMES, DTYPES, INDEX, open_checkpoint, parse_json, read_header


def entry(shape, offsets, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def write_raw(file, header, data=b""):
    """A file with any header at all: a dict, or its bytes."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return file


def refused(match, action):
    with pytest.raises(CheckpointError, match=match) as caught:
        action()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_bytes_of_every_dtype_are_those_the_safetensors_library_wrote(tmp_path, dtype):
    bits = torch.arange(48, dtype=torch.uint8)
    save_file({"before": torch.ones(3), "it": bits.view(dtype).view(2, -1)}, tmp_path / "model.safetensors")
    files = open_checkpoint(tmp_path)
    tensor = files.tensors["it"]
    assert (tensor.dtype, tensor.shape) == (DTYPE_NAMES[dtype], (2, 24 // dtype.itemsize))
    assert torch.equal(files.read(tensor), bits)
    assert torch.equal(files.read(tensor, 5, 11), bits[5:16])


@pytest.mark.parametrize("shape", [(), (0, 7), (2, 3)], ids=["a scalar", "nothing", "a matrix"])
def test_extreme_shapes_are_read(tmp_path, shape):
    save_file({"a": torch.ones(shape), "b": torch.ones(5), "c": torch.ones(shape)}, tmp_path / "model.safetensors")
    files = open_checkpoint(tmp_path)
    assert {k: files.read(t).view(torch.float32).view(t.shape).sum().item() for k, t in files.tensors.items()} == {
        "a": torch.ones(shape).sum().item(),
        "b": 5,
        "c": torch.ones(shape).sum().item(),
    }


@pytest.mark.parametrize(
    "header,data,match",
    [
        ({"a": entry([2], [0, 8]), "b": entry([1], [4, 8])}, 8, "tensors a and b overlap"),
        ({"a": entry([2], [0, 8]), "b": entry([1], [12, 16])}, 16, "4 bytes between a and b belong to no tensor"),
        ({"a": entry([1], [4, 8])}, 8, "4 bytes between the header and a"),
        ({"a": entry([1], [0, 4])}, 7, "3 bytes after a belong to no tensor"),
        ({"a": entry([3], [0, 12])}, 11, "ends before tensor a does .* truncated"),
        ({"a": entry([3], [0, 8])}, 8, r"a F32 \[3\] spans 8 bytes; expected 12"),
        ({"a": entry([1], [0, 4], "F4")}, 4, "a has dtype F4; expected one of"),
        ({"a": entry([1], [0, 4], ["F32"])}, 4, "entry of a is malformed"),
        ({"a": entry([-1, -1], [0, 4])}, 4, "entry of a is malformed"),
        ({"a": entry([1.0], [0, 4])}, 4, "entry of a is malformed"),
        ({"a": entry([True], [0, 4])}, 4, "entry of a is malformed"),
        ({"a": entry([1], ["0", "4"])}, 4, "entry of a is malformed"),
        ({"a": entry([1], [0, 4, 8])}, 4, "entry of a is malformed"),
        ({"a": 3}, 4, "entry of a is malformed"),
        ({"a": {"dtype": "F32"}}, 4, "entry of a is malformed"),
        (b'{"a":1,"a":1}', 0, "has a twice"),
        (b'{"a":', 0, "not valid JSON"),
        (b"\xff\xfe", 0, "not valid JSON"),
        (b"[" * 100_000, 0, "not valid JSON"),
        (b'{"a":' + b"9" * 5000 + b"}", 0, "not valid JSON"),
        (b"[]", 0, "holds a list; expected an object"),
        (b"", 0, "not valid JSON"),
    ],
    ids=[
        "two tensors overlap",
        "a hole between tensors",
        "a hole at the start",
        "bytes after the last tensor",
        "data cut short",
        "offsets contradict the shape",
        "an unknown dtype",
        "a dtype that is a list",
        "negative sizes",
        "a size that is a float",
        "a size that is a bool",
        "offsets that are text",
        "three offsets",
        "an entry that is a number",
        "an entry without offsets",
        "a name twice",
        "JSON cut short",
        "bytes that are no text",
        "nesting without end",
        "a number without end",
        "a list for a header",
        "an empty header",
    ],
)
def test_a_damaged_header_is_one_line(tmp_path, header, data, match):
    file = write_raw(tmp_path / "x.safetensors", header, bytes(data))
    refused(match, lambda: read_header(file))


@pytest.mark.parametrize(
    "content",
    [b"", b"\x01\x02", struct.pack("<Q", 1000) + b"{}", struct.pack("<Q", 2**63) + b"{}"],
    ids=["an empty file", "half a length", "a header longer than the file", "a length beyond reason"],
)
def test_a_file_that_is_too_short_for_its_header(tmp_path, content):
    (tmp_path / "x.safetensors").write_bytes(content)
    refused("truncated or damaged", lambda: read_header(tmp_path / "x.safetensors"))


def test_a_file_cut_short_after_it_was_opened(tmp_path):
    save_file({"a": torch.ones(9)}, tmp_path / "model.safetensors")
    files = open_checkpoint(tmp_path)
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:-4])
    refused("ends inside tensor a", lambda: files.read(files.tensors["a"]))


@pytest.fixture
def sharded(tmp_path):
    """Two shards of one tensor each, and their index."""
    for name in ("a", "b"):
        save_file({name: torch.ones(3)}, tmp_path / f"{name}.safetensors")

    def index(weight_map):
        (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map} if weight_map is not None else {}))
        return tmp_path

    return index


def test_shards_are_read_through_their_index(sharded):
    files = open_checkpoint(sharded({"a": "a.safetensors", "b": "b.safetensors"}))
    assert {k: t.file.name for k, t in files.tensors.items()} == {"a": "a.safetensors", "b": "b.safetensors"}
    assert [f.name for f in files.shards] == ["a.safetensors", "b.safetensors"]


@pytest.mark.parametrize(
    "weight_map,match",
    [
        ({"a": "a.safetensors", "b": "c.safetensors"}, "1 of 2 shards are missing: c.safetensors"),
        ({"a": "a.safetensors", "b": "b.safetensors", "c": "b.safetensors"}, "1 tensors are not in the shard .*: c$"),
        ({"a": "b.safetensors", "b": "a.safetensors"}, "2 tensors are not in the shard"),
        ({"z": "a.safetensors", "b": "b.safetensors"}, "not in the shard.*: z"),
        (None, "no weight_map"),
        (["a"], "no weight_map"),
        ({"a": 3}, "no weight_map from tensor names to file names"),
        ({"a": ["a.safetensors"]}, "no weight_map from tensor names to file names"),
    ],
    ids=[
        "a shard is missing",
        "a tensor is in no shard",
        "tensors are in each other's shard",
        "another name",
        "no map",
        "a list for a map",
        "a number for a file",
        "a list for a file",
    ],
)
def test_an_index_that_disagrees_with_its_shards(sharded, weight_map, match):
    refused(match, lambda: open_checkpoint(sharded(weight_map)))


def test_a_tensor_of_a_shard_that_the_index_does_not_list(sharded, tmp_path):
    save_file({"a": torch.ones(3), "extra": torch.ones(3)}, tmp_path / "a.safetensors")
    refused(
        "1 tensors of the shards are not in .*: extra",
        lambda: open_checkpoint(sharded({"a": "a.safetensors", "b": "b.safetensors"})),
    )


def test_a_tensor_in_two_shards(sharded, tmp_path):
    save_file({"a": torch.ones(3), "b": torch.ones(3)}, tmp_path / "b.safetensors")
    refused(
        "tensor a is in two shards: a.safetensors and b.safetensors",
        lambda: open_checkpoint(sharded({"a": "a.safetensors", "b": "b.safetensors"})),
    )


def test_several_files_without_an_index_are_not_guessed_among(sharded, tmp_path):
    refused("2 safetensors files, but neither", lambda: open_checkpoint(tmp_path))


def test_a_folder_without_weights(tmp_path):
    refused("0 safetensors files", lambda: open_checkpoint(tmp_path))


def test_one_duplicate_among_many_names_is_found_at_once():
    names = [f'"layers.{i}":0' for i in range(100_000)]
    refused("has layers.77 twice$", lambda: parse_json(("{" + ",".join([*names, names[77]]) + "}").encode(), "header"))


@pytest.mark.parametrize("name", ["../x.safetensors", "/etc/hostname", "a/b.safetensors", ".."])
def test_an_index_names_files_beside_it_only(official, copy_of, name):
    path = copy_of(official)
    index = json.loads((path / INDEX).read_text())
    index["weight_map"][next(iter(index["weight_map"]))] = name
    (path / INDEX).write_text(json.dumps(index))
    refused(f"names '{name}'; expected names of files beside it, without a path", lambda: open_checkpoint(path))


@pytest.mark.parametrize("command", ["inspect", "convert"])
def test_a_config_that_is_a_loop_of_links_is_one_line(official, copy_of, command_line, command):
    path = copy_of(official)
    (path / "config.json").unlink()
    (path / "config.json").symlink_to("config.json")
    more = [path.parent / "out", "--to", "bf16"] if command == "convert" else []
    code, _, err = command_line(command, path, *more)
    assert code == 2 and err.count("\n") == 1 and "config.json cannot be read: Too many levels" in err


@pytest.mark.parametrize(
    "change,message",
    [
        ({"n_routed_experts": 10**8}, "asks for n_routed_experts 100000000 .* the file holds 436, of 6 experts in 5 l"),
        ({"num_nextn_predict_layers": 64}, "the file holds 436"),
        ({"vocab_size": 10**12}, r"vocab_size = 1000000000000; expected a number below 1e\+12"),
        ({"hc_mult": 10**6}, "asks for a tensor that no machine holds"),
    ],
)
def test_sizes_far_beyond_the_file_are_refused_before_they_cost_anything(
    official, copy_of, command_line, change, message
):
    from tests import checkpoints

    code, _, err = command_line("inspect", checkpoints.edit_config(copy_of(official), **change))
    assert code == 2 and err.count("\n") == 1 and re.search(message, err)
