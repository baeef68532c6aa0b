"""Writes docs/kernel_faults.md from the catalogue of faults and the plants.

python -m scripts.kernel_faults            # the page
python -m scripts.kernel_faults --check    # exit code 1 where the page is not what this script would write
"""

import argparse
import sys
from pathlib import Path

from dsv4.probes.kernel_audit.faults import FAULTS, NOT_PLANTED
from dsv4.probes.kernel_audit.plant import CLAUSES
from dsv4.probes.kernel_audit.plants import plants

PAGE = Path(__file__).resolve().parents[1] / "docs" / "kernel_faults.md"
INTRO = """# Faults of kernels

`python -m scripts.kernel_faults` writes this page from `probes/kernel_audit/faults.py` and the plants. A plant is a
faulty kernel that `dsv4 kernel selftest` must find, by the clause that is named here. The faults were seen in public
kernels and in contests of kernels. [Audit a kernel](kernel.md) says what each clause asks.
"""


def page() -> str:
    """The page as markdown."""
    found = {number: [p for p in plants() if p.entry == number] for number in FAULTS}
    lines = [INTRO, f"{sum(map(len, found.values()))} plants are of {len(FAULTS) - len(NOT_PLANTED)} faults.", ""]
    lines += ["| number | fault | clause | planted in |", "|---:|---|---|---|"]
    for number, mine in found.items():
        if mine:
            clauses = [c for c in CLAUSES if any(p.clause == c for p in mine)]
            hosts = sorted({p.operation for p in mine})
            only_cuda = " (on CUDA)" if all(p.device != "any" for p in mine) else ""
            lines.append(f"| {number} | {FAULTS[number]} | {', '.join(clauses)} | {', '.join(hosts)}{only_cuda} |")
    lines += ["", "## Not planted", "", "| number | fault | why it is not planted |", "|---:|---|---|"]
    lines += [f"| {n} | {FAULTS[n]} | {NOT_PLANTED[n]} |" for n, mine in found.items() if not mine]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Exit code: 1 where --check finds another page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare, and write nothing")
    if not parser.parse_args().check:
        PAGE.write_text(page())
    elif not PAGE.is_file() or PAGE.read_text() != page():
        print("docs/kernel_faults.md is not what the code says; run: python -m scripts.kernel_faults")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
