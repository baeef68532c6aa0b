"""Blank the device code of other GPU architectures in a CUDA library, so that it compresses to a fraction.

    python -m scripts.bench.fatbin LIBRARY.so OUT.so 90

Headers stay, so the driver still sees every entry; only what a GPU of the given architecture loads keeps its code. Used
by `scripts/peers.sh` to carry published kernels to a machine without a network.
"""

import struct
import sys
from collections import Counter
from pathlib import Path

MAGIC = struct.pack("<IH", 0xBA55ED50, 1)


def sections(data: bytes) -> dict[str, tuple[int, int]]:
    """Name → (offset, size) of the sections of a 64-bit little-endian ELF file."""
    (table,) = struct.unpack_from("<Q", data, 0x28)
    size, count, names = struct.unpack_from("<HHH", data, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", data, table + i * size) for i in range(count)]
    start = headers[names][4]
    name = lambda at: data[start + at : data.index(b"\0", start + at)].decode()
    return {name(h[0]): (h[4], h[5]) for h in headers if h[1] != 8}  # type 8 has no bytes in the file


def entries(data: bytes, at: int) -> tuple[int, list[tuple[int, int, int, int]]]:
    """The container at `at`: where it ends, and its entries (kind, architecture, start of the code, its size). Kind 1
    is PTX, 2 machine code."""
    header, length = struct.unpack_from("<HQ", data, at + 6)
    entry, stop, found = at + header, at + header + length, []
    while entry + 64 <= stop:
        kind, _, head, payload = struct.unpack_from("<HHIQ", data, entry)
        (arch,) = struct.unpack_from("<I", data, entry + 28)
        found.append((kind, arch, entry + head, payload))
        entry += head + payload
    return stop, found


def blank(data: bytearray, architecture: int) -> Counter:
    """Zero every entry that a GPU of `architecture` (90 for sm_90 and sm_90a) would not load: it takes machine code of
    its own architecture, else the newest PTX that is not newer. Returns bytes by (what happened, kind,
    architecture)."""
    seen: Counter = Counter()
    for name in (".nv_fatbin", "__nv_relfatbin"):
        at, size = sections(bytes(data)).get(name, (0, 0))
        end = at + size
        while (at := data.find(MAGIC, at, end)) >= 0:
            at, found = entries(data, at)
            native = any(kind == 2 and arch == architecture for kind, arch, _, _ in found)
            newest = max((arch for kind, arch, _, _ in found if kind == 1 and arch <= architecture), default=0)
            for kind, arch, start, length in found:
                kept = (kind == 2 and arch == architecture) if native else (kind == 1 and arch == newest)
                seen["kept" if kept else "blank", "PTX" if kind == 1 else "code", arch] += length
                if not kept:
                    data[start : start + length] = bytes(length)
    return seen


def main(source: str, out: str, architecture: str) -> None:
    data = bytearray(Path(source).read_bytes())
    for (fate, kind, arch), size in sorted(blank(data, int(architecture)).items()):
        print(f"{fate} {kind} sm_{arch}: {size / 1e6:.1f} MB")
    Path(out).write_bytes(data)


if __name__ == "__main__":
    main(*sys.argv[1:])
