"""`python -m dsv4.probes.catalogue.NAME CHECKPOINT --out FILE.md`: one probe from the shell.

Exit codes are those of `dsv4 audit`.
"""

import argparse
import sys
from pathlib import Path

from dsv4.kernels.errors import Dsv4Error
from dsv4.loaders.errors import WriteError
from dsv4.outputs import writable


def main(probe: type) -> None:
    """Run the probe of that name on the command line's checkpoint, and exit: 0 clean, 1 findings, 2 it could not run.

    `python -m` runs a file a second time under the name __main__; only the name of its class is taken from there, so
    that the probe that runs is the one that `probes.catalogue.NAME` defines.
    """
    parser = argparse.ArgumentParser(prog=f"python -m dsv4.probes.catalogue.{probe.name}", description=probe.title)
    parser.add_argument("checkpoint", type=Path, help="checkpoint directory")
    parser.add_argument(
        "--out", type=Path, help="write the summary to FILE.md, with FILE.json and the page FILE.html beside it"
    )
    parser.add_argument(
        "--subject", default="ours", help="ours[:NUMERICS[:BACKEND]], files, transformers, or FILE.safetensors"
    )
    parser.add_argument("--numerics", default="fp32", help="fp32, native, qat or qat:fp32")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--cache", default="auto", help="of ours: auto, bf16 or fp8, how window rows and entries are held"
    )
    parser.add_argument(
        "--index-cache", default="auto", help="of ours: auto, bf16, fp8 or fp4, how index keys are held"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--effort", type=float, default=1.0, help="1.0 is what dsv4 audit spends")
    given = parser.parse_args()
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")
    try:
        sys.exit(run(probe.name, given))
    except (Dsv4Error, WriteError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)


def run(name: str, given: argparse.Namespace) -> int:
    """The report of one probe, to the file or to stdout; the exit code. Raises Dsv4Error."""
    from dsv4.probes.audit import audit, open_subject
    from dsv4.probes.report import json_report, markdown, page
    from dsv4.probes.report.files import write_files

    writable(given.out, file=True)
    subject = open_subject(
        given.checkpoint, given.subject, given.numerics, given.backend, given.device, given.cache, given.index_cache
    )
    command = ["python", "-m", f"dsv4.probes.catalogue.{name}", *sys.argv[1:]]
    report = audit(subject, [name], given.seed, given.effort, command=command)
    if given.out is None:
        print(markdown.render(report, name))
        return report.exit_code
    stem = given.out.stem
    texts = {given.out.name: markdown.render(report, stem), f"{stem}.json": json_report.render(report, stem)}
    for file in write_files(given.out.parent, texts | {f"{stem}.html": page.render(report, stem)}):
        print(f"wrote {file}", file=sys.stderr)
    return report.exit_code
