"""A checkpoint of a published geometry with random weights and fewer layers, experts and words: to audit a whole model
at the widths for which kernels are made.

    python scripts/write_dummy.py DIRECTORY [--widths flash] [--layers 5] [--experts 16] [--words 4096] [--seed 0]
    dsv4 audit run DIRECTORY --device cuda --backend triton --numerics qat --cache fp8 --index-cache fp4

Names, dtypes and shapes are the official ones; every width of a layer is the published one. The first five layers of
Flash have a window, CSA and HCA, and route by hash and by score. There is no tokenizer, and there are no MTP blocks.
"""

import argparse
import sys
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from dsv4.errors import Dsv4Error
from dsv4.loaders.expected import Tensors, official_tensors, preset
from dsv4.loaders.files import DTYPES
from dsv4.loaders.write import tensor_bytes, write_checkpoint
from dsv4.model.config import ModelConfig
from dsv4.model.dummy import draw_e4m3, draw_expert_ids, first_layers, generator_of, scale_byte

GAINS, ZEROS = ("norm.weight",), (".bias", "_base", ".base", "attn_sink")


def config_of(widths: str, layers: int, experts: int, words: int) -> dict:
    return first_layers(widths, preset(widths), layers, False) | {"n_routed_experts": experts, "vocab_size": words}


def value(tensors: Tensors, experts: int, seed: int, name: str) -> torch.Tensor:
    """The tensor of that name. Maps have gains near 1."""
    dtype, shape = tensors[name]
    g = generator_of(f"{seed} {name}")
    if dtype == "F8_E8M0":
        codes, (*_, width) = tensors[name.removesuffix("scale") + "weight"]
        fp8 = codes == "F8_E4M3"
        byte = scale_byte(width if fp8 else 2 * width, fp8)
        return torch.full(shape, byte, dtype=torch.uint8).view(DTYPES[dtype])
    if dtype == "F8_E4M3":
        t = torch.empty(shape, dtype=torch.uint8)
        draw_e4m3(t, g)
        return t.view(DTYPES[dtype])
    if name.endswith("tid2eid"):
        t = torch.empty(shape, dtype=DTYPES[dtype])
        draw_expert_ids(experts, t, g)
        return t
    if not DTYPES[dtype].is_floating_point:
        return torch.randint(0, 256, shape, generator=g, dtype=torch.uint8).view(DTYPES[dtype])
    if name.endswith(GAINS):
        return torch.ones(shape, dtype=DTYPES[dtype])
    if name.endswith(ZEROS):
        return torch.zeros(shape, dtype=DTYPES[dtype])
    if name.endswith("scale"):  # of hyper-connections
        return torch.full(shape, 0.3, dtype=DTYPES[dtype])
    std = 1.0 if name.endswith("ape") or name == "embed.weight" else shape[-1] ** -0.5
    return (torch.randn(shape, generator=g) * std).to(DTYPES[dtype])


def main(given: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--widths", choices=("flash", "pro"), default="flash")
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--words", type=int, default=4096)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(given)
    shown = lambda done, total: print(f"\r{done / total:4.0%} of {total / 1e9:.1f} GB", end="", file=sys.stderr)
    shown = shown if sys.stderr.isatty() else None
    try:
        raw = config_of(args.widths, args.layers, args.experts, args.words)
        tensors = official_tensors(ModelConfig.from_official(raw), mtp=False)
        made = partial(value, tensors, args.experts, args.seed)
        write_checkpoint(args.directory, tensors, made, {"config.json": raw}, progress=shown)
    except Dsv4Error as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; nothing half-written is left", file=sys.stderr)
        return 130
    size = sum(tensor_bytes(*t) for t in tensors.values()) / 1e9
    print(f"{chr(10) * bool(shown)}wrote {args.directory}: {size:.1f} GB", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
