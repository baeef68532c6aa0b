"""P3: every code under every scale, and every quantised tensor of the file, decoded by two decoders. See
format_decode.md."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from dsv4.kernels import quantize
from dsv4.kernels.errors import Dsv4Error
from dsv4.kernels.quantize import PackedWeight, WeightFormat
from dsv4.probes.catalogue.load_ledger import NAMED, headers, part_of
from dsv4.probes.oracle import formats
from dsv4.probes.oracle.weights import decode, stored
from dsv4.probes.probe import Probe
from dsv4.probes.result import Check, Status, compare, vacuous
from dsv4.probes.subject import Subject

BITS = "each product of a code and a scale is exact in fp32, or rounded once (specification 2.2): equal bit for bit"
SPECIAL = {0: "2^−127, an fp32 subnormal", 127: "1", 254: "2^127", 255: "NaN"}
GLOBAL = (1.0, 2.0**-9, 0.0123)  # global scales of NVFP4: neutral, an exact one, and one that rounds
BYTES = np.arange(256, dtype=np.uint8)


@dataclass(frozen=True)
class FormatDecode(Probe):
    """The loader's decoders (`dsv4.kernels.quantize`) against those of `dsv4.probes.oracle.formats`, which share
    nothing with them."""

    name: ClassVar[str] = "format_decode"
    title: ClassVar[str] = "number formats decode bit for bit"
    needs: ClassVar[frozenset[str]] = frozenset({"files"})

    def run(self, subject: Subject) -> list[Check]:
        return [
            *self._codes(),
            *self._scales_of_one(),
            *self._file(subject),
            *self._ranges(subject),
            *self._simulation(subject),
        ]

    def _codes(self) -> Iterator[Check]:
        """Rows are scale bytes, columns codes."""
        for label, found, wanted in grids():
            yield equal(f"{label}: every code under every scale", found, wanted, where=label)
            if found.shape[0] == 256 and not label.startswith("NVFP4"):
                for byte, meaning in SPECIAL.items():
                    yield equal(
                        f"{label}: scale byte {byte} is {meaning}",
                        found[byte : byte + 1],
                        wanted[byte : byte + 1],
                        where=label,
                        part="scales",
                    )
        packed = torch.from_numpy(BYTES).view(1, 256)
        yield equal(
            "byte → two codes, the low nibble first",
            quantize.unpack_e2m1(packed),
            formats.unpack_nibbles(BYTES[None]),
            where="E2M1",
            part="nibbles",
        )

    def _scales_of_one(self) -> Iterator[Check]:
        """E8M0 alone, given as its own dtype and as bytes."""
        raw = torch.from_numpy(BYTES.copy())
        for label, given in (("float8_e8m0fnu", raw.view(torch.float8_e8m0fnu)), ("uint8", raw)):
            yield equal(
                f"E8M0 byte as {label} → fp32", quantize.decode_e8m0(given), formats.E8M0, where="E8M0", part="scales"
            )

    def _simulation(self, subject: Subject) -> Iterator[Check]:
        """The operations that the subject's backend runs to quantise activations, KV and index keys, on awkward
        blocks."""
        if "kernels" not in subject.can:
            return
        run, c, rotated = subject.operations, subject.config, subject.config.qk_rope_head_dim
        cases = (
            ("FP8", "activations", 128, max(c.hidden_size, 200), 0),
            ("FP8", "main KV", 64, c.head_dim, rotated),
            ("FP4", "index queries and keys", 32, c.index_head_dim, 0),
        )
        for kind, what, block, width, keep in cases:
            x = awkward(width, self.seed)
            found = run[f"simulate_{kind.lower()}_blocks"](x.clone(), block, *([keep] if keep else []))
            wanted = (
                formats.simulate_fp8(x.double(), block, keep)
                if kind == "FP8"
                else formats.simulate_fp4(x.double(), block)
            )
            yield equal(
                f"simulated {kind} of {what}", found, wanted.numpy(), f"blocks of {block}", f"{kind} simulation"
            )
        x = awkward(c.index_head_dim, self.seed)[:24]
        found, wanted = run["hadamard"](x.clone()).double(), formats.hadamard(x.double())
        error = ((found - wanted).norm(dim=-1) / wanted.norm(dim=-1).clamp(min=1e-30)).max().item()
        yield compare(
            "Hadamard transform",
            error,
            "<=",
            1e-5,
            f"fp32 sums of {c.index_head_dim} terms",
            found.numel(),
            where=f"{c.index_head_dim} dims",
            part="Hadamard",
            unit="relative",
        )

    def _file(self, subject: Subject) -> Iterator[Check]:
        tensors, block = headers(subject.files), tuple(subject.config.weight_block_size)
        counts: dict[str, list] = {}
        for base, form in subject.files.formats.items():
            if form is WeightFormat.DENSE:
                continue
            wanted, count = decode(tensors, f"{base}.weight", block), counts.setdefault(form.value, [[], 0])
            count[1] += wanted.size
            try:
                wrong = differing(subject.files.read_matrix(base, block), wanted)
            except Dsv4Error:  # the loader refuses it
                wrong = wanted.size
            if wrong:
                count[0].append((f"{base}.weight", wrong, wanted.size))
        if not counts:
            yield vacuous(
                "quantised tensors of the file decode the same way",
                "the file holds no quantised tensor",
                part="formats",
            )
        for form, (bad, total) in counts.items():
            yield compare(
                f"quantised tensors of the file decode the same way, {form}: exceptions",
                len(bad),
                "==",
                0,
                BITS,
                total,
                unit="tensors",
                found=bad[0][0] if bad else "",
                part=part_of(bad[0][0]) if bad else "formats",
            )
            for name, wrong, n in bad[:NAMED]:
                yield compare(
                    "values that decode differently",
                    wrong,
                    "==",
                    0,
                    BITS,
                    n,
                    where=name,
                    part=part_of(name),
                    unit="values",
                )

    def _ranges(self, subject: Subject) -> Iterator[Check]:
        """Exponents of the block scales by format: reported; NaN and ends of the range are judged."""
        tensors, found = headers(subject.files), {}
        for name, (dtype, *_) in tensors.items():
            if not name.endswith((".scale", ".weight_scale")) or dtype not in ("F8_E8M0", "F8_E4M3"):
                continue
            codes = stored(tensors, name)
            row = found.setdefault(dtype, {"nan": [], "least": (256, ""), "most": (-1, ""), "n": 0})
            magnitude = codes if dtype == "F8_E8M0" else codes & 0x7F
            broken = magnitude == (255 if dtype == "F8_E8M0" else 127)
            row["n"] += codes.size
            if broken.any():
                row["nan"].append(name)
            row["least"] = min(row["least"], (int(magnitude.min(initial=255)), name))
            row["most"] = max(row["most"], (int(magnitude[~broken].max(initial=0)), name))
        for dtype, row in found.items():
            yield from self._range(dtype, row)

    def _range(self, dtype: str, row: dict) -> Iterator[Check]:
        value = formats.E8M0 if dtype == "F8_E8M0" else formats.E4M3
        (low, least), (high, most) = row["least"], row["most"]
        nan = row["nan"]
        yield compare(
            f"{dtype} scale tensors with NaN",
            len(nan),
            "==",
            0,
            "NaN is byte 255 of E8M0, 0x7F of E4M3: no weight is NaN",
            row["n"],
            found=nan[0] if nan else "",
            part=part_of(nan[0]) if nan else "scales",
            unit="tensors",
        )
        note = f"least {value[low]:.3g} in {least}, most {value[high]:.3g} in {most}"
        ends = dtype == "F8_E8M0" and (low <= 1 or high == 254)
        yield Check(
            f"range of {dtype} scales",
            Status.WARN if ends else Status.PASS,
            most,
            "scales",
            f"{value[low]:.3g} … {value[high]:.3g}",
            source="reported; a scale at an end of E8M0 makes every weight of its block 0 or infinite",
            samples=row["n"],
            note=note,
        )


def awkward(width: int, seed: int) -> torch.Tensor:
    """fp32 [48, width]: rows of all sizes, one of zeros, halves between codes, and largest values at and beside the
    limits."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(48, width, generator=g) * 2.0 ** torch.randint(-30, 30, (48, 1), generator=g)
    x[1], x[2] = 0, torch.randint(-24, 25, (width,), generator=g) / 4
    for row, top in enumerate((448.0, 6.0, 3.0, 224.0, 7.0, 480.0), 3):
        x[row] = x[row] / x[row].abs().max() * top
        x[row, 0] = top
        x[row + 6] = x[row]
        x[row + 6, 0] = torch.nextafter(torch.tensor(top), torch.tensor(float("inf")))
    return x


def grids() -> Iterator[tuple[str, torch.Tensor, np.ndarray]]:
    """(label, by the loader, by the oracle) of 256 scale bytes × all codes of a format."""
    bytes_ = torch.from_numpy(BYTES.copy())
    fp8 = bytes_.expand(256, 256).contiguous()
    scale = bytes_.view(256, 1)
    packed = PackedWeight(
        WeightFormat.FP8, fp8.view(torch.float8_e4m3fn), scale.view(torch.float8_e8m0fnu), None, (1, 256)
    )
    wanted = formats.decode_fp8(fp8.numpy(), formats.E8M0[BYTES][:, None], (1, 256))
    yield "FP8 with E8M0 scales", quantize.to_float(packed), wanted
    values = torch.tensor([0.0, 1.0, 2.0**-7, 0.3, 120.0])
    packed = PackedWeight(
        WeightFormat.FP8, fp8[:5].contiguous().view(torch.float8_e4m3fn), values.view(5, 1), None, (1, 256)
    )
    wanted = formats.decode_fp8(fp8[:5].numpy(), values.double().numpy()[:, None], (1, 256))
    yield "FP8 with fp32 scales", quantize.to_float(packed), wanted
    codes = quantize.pack_e2m1(torch.arange(32, dtype=torch.uint8) % 16).expand(256, 16).contiguous()
    packed = PackedWeight(WeightFormat.MXFP4, codes, scale.view(torch.float8_e8m0fnu), None, (128, 128))
    yield "MXFP4", quantize.to_float(packed), formats.decode_mxfp4(codes.numpy(), BYTES[:, None])
    for top in GLOBAL:
        packed = PackedWeight(
            WeightFormat.NVFP4,
            codes[:, :8].contiguous(),
            scale.view(torch.float8_e4m3fn),
            torch.tensor([top]),
            (128, 128),
        )
        wanted = formats.decode_nvfp4(codes[:, :8].numpy(), BYTES[:, None], float(np.float32(top)))
        yield f"NVFP4 with global scale {top:g}", quantize.to_float(packed), wanted


def differing(found: torch.Tensor, wanted: np.ndarray) -> int:
    """Values that are not the same fp32 bits; any NaN equals any NaN. All of them if the shape or the dtype differs."""
    with np.errstate(over="ignore"):
        wanted = torch.from_numpy(np.ascontiguousarray(wanted).astype(np.float32))
    if found.dtype is not torch.float32 or found.shape != wanted.shape:
        return max(1, wanted.numel())
    same = (found.view(torch.int32) == wanted.view(torch.int32)) | (found.isnan() & wanted.isnan())
    return int((~same).sum())


def equal(what: str, found: torch.Tensor, wanted: np.ndarray, where: str, part: str = "formats") -> Check:
    return compare(
        what,
        differing(found.contiguous(), wanted),
        "==",
        0,
        BITS,
        int(wanted.size),
        unit="values",
        where=where,
        part=part,
    )


if __name__ == "__main__":
    from dsv4.probes.main import main

    main(FormatDecode)
