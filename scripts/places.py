"""Where measured files go: audits/<kind>/<subject>/<device>/.

    python -m scripts.places KIND SUBJECT [DEVICE]     # prints the folder; DEVICE: as found, if it is not given

kind: what was measured (kernels, decode, speculation, recall …). subject: of what: a checkpoint's name, the name of a
published geometry, or `all`; for audits of kernels two folders, <operation>/<kernel>. device: cpu, h100, h200 …. File
names stay whole, so that a file which was copied out of its folder still says what it is.
"""

import re
import sys
from pathlib import Path

AUDITS = Path("audits")


def device_slug(name: str) -> str:
    """'NVIDIA H100 80GB HBM3' → 'h100': what folders and files are called after."""
    found = re.search(r"\b([ABHLV]\d{2,3}S?|RTX \w+( \w+)?|T4)\b", name)
    return re.sub(r"\W+", "_", (found[0] if found else name).lower())


def folder(out: Path | None, kind: str, subject: str, device: str) -> Path:
    """`out` if it was given on the command line, else audits/<kind>/<subject>/<device>."""
    return AUDITS / kind / subject.lower() / device_slug(device) if out is None else out


def present_device() -> str:
    """The name of this machine's GPU, or 'cpu'."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


if __name__ == "__main__":
    kind, subject, *device = sys.argv[1:]
    print(folder(None, kind, subject, device[0] if device else present_device()))
