"""`dsv4 audit record`: one run of a subject as a file that bisect and `--subject FILE` read.

The file is plain safetensors: 'ids' int64 [1, T], 'logits' fp32 [1, T, vocab] and 'layers.{i}.{point}' with the points
and shapes of `dsv4.probes.subject.POINTS`. Any implementation can write such a file; points that it does not have are
left out.
"""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from dsv4.errors import InputError
from dsv4.loaders.errors import WriteError
from dsv4.probes import families
from dsv4.probes.audit import open_subject
from dsv4.probes.report.provenance import checkpoint_path, commit, without_paths
from dsv4.probes.subject import POINTS, Capture, Subject
from dsv4.probes.subjects.dump import write_dump


def run(
    checkpoint: Path,
    kind: str,
    device: str,
    ids_of: Callable,
    points: list[str],
    out: Path,
    say: Callable[[str], None],
    cache: str = "auto",
    index_cache: str = "auto",
) -> int:
    """Record `points` (all if empty). ids_of(subject) → int64 [1, T]."""
    if out.suffix != ".safetensors":
        raise InputError(f"--out is {out.name!r}; expected a name that ends in .safetensors")
    subject = open_subject(checkpoint, kind, device=device, cache=cache, index_cache=index_cache)
    families.of(subject).check_command("record", subject.name)
    if "run" not in subject.can:
        raise InputError(f"{subject.name} cannot run, so there is nothing to record; take ours or transformers")
    file, size = record(subject, ids_of(subject), points or list(POINTS), out)
    say(f"wrote {file} ({size:,} B)")
    return 0


def record(subject: Subject, ids, points: list[str], out: Path) -> tuple[Path, int]:
    """(file, bytes) of a dump of one run. The file appears whole or not at all. Raises WriteError."""
    capture = subject.run(ids, want=points)
    path = checkpoint_path(subject)
    about = {
        "name": f"recorded: {subject.name}",
        "numerics": subject.numerics,
        "checkpoint": path.name if path else None,
        "subject": without_paths(dict(subject.provenance)),
        **commit(),
    }
    return write_whole(capture, ids, out, about)


def write_whole(capture: Capture, ids, out: Path, about: dict) -> tuple[Path, int]:
    """(file, bytes) of `write_dump`. The file appears whole or not at all. Raises WriteError."""
    partial = None
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=".partial-", suffix=".safetensors", dir=out.parent)
        os.close(handle)
        partial = write_dump(capture, ids, name, about)
        os.chmod(partial, 0o666 & ~_umask())
        os.replace(partial, out)
    except OSError as error:
        raise WriteError(f"writing {out.name} failed ({error.strerror or error}); no file is half-written") from None
    finally:
        if partial is not None:
            Path(partial).unlink(missing_ok=True)
    return out, out.stat().st_size


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
