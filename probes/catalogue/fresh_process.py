"""P32: the same run in a new process, and in memory full of garbage, gives the same bits. See fresh_process.md."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from safetensors.torch import load_file

import dsv4
from dsv4.kernels.errors import Dsv4Error
from dsv4.probes.catalogue.tiles import unwritten
from dsv4.probes.compare import tokens, window_of
from dsv4.probes.probe import Probe
from dsv4.probes.result import Check, compare, vacuous
from dsv4.probes.scenes.control import attempted_all
from dsv4.probes.scenes.fresh_child import answer
from dsv4.probes.subject import Subject
from dsv4.runtime.user_kernels import asked

LARGEST = 2 << 30  # bytes of parameters, at effort 1, that new processes load again
PERTURBED = {128: "0x7f", 192: "0x3f"}  # MALLOC_PERTURB_ → each byte of memory that the C library gives out
SECONDS = 600  # that a new process may take
EQUAL = "the same program on the same numbers, whatever ran before and whatever its memory held"
RUNS = "the run can be repeated"
# (module:function, arguments) that new processes call before they open the subject; what each returns is given the
# subject. A self-test plants its fault so in them too
PREPARATIONS: list[tuple[str, list[str]]] = []


@dataclass(frozen=True)
class FreshProcess(Probe):
    """One text after another text, in memory of NaN, and as the first run of two new processes."""

    name: ClassVar[str] = "fresh_process"
    title: ClassVar[str] = "a new process gives the same bits"
    needs: ClassVar[frozenset[str]] = frozenset({"run"})

    def run(self, subject: Subject) -> list[Check]:
        if "kernels" not in subject.can:
            why = "the subject is another implementation's, which a new process may open and compile otherwise"
            return [vacuous(self.title, why, part="new process")]
        T = 105 + max(8, window_of(subject.config) // 2)
        if T > subject.config.max_position_embeddings:
            why = f"{T} tokens are needed, the checkpoint allows {subject.config.max_position_embeddings}"
            return [vacuous(self.title, why, part="new process")]
        ids, schedule = tokens(subject, T, self.seed), [101, T - 105, 1, 1, 1, 1]
        subject.run(tokens(subject, 61, self.seed + 1))  # something else came before
        here = answer(subject, ids, schedule)
        checks = attempted_all(RUNS, "memory of NaN", "unwritten memory", lambda: dirty(subject, ids, schedule, here))
        size = sum(p.nbytes for p in subject.model.parameters())
        if size > LARGEST * self.effort:
            why = f"the model holds {size:,} bytes and would be loaded twice; {LARGEST * self.effort:,.0f} are allowed"
            return [*checks, vacuous("a new process gives the same bits", why, part="new process")]
        if subject.model.layer_devices is not None:
            why = "layers are spread over devices; new processes load a model whole"
            return [*checks, vacuous("a new process gives the same bits", why, part="new process")]
        make = lambda: fresh(subject, ids, schedule, here)
        return [*checks, *attempted_all(RUNS, "a new process", "new process", make)]


def dirty(subject: Subject, ids: torch.Tensor, schedule: list[int], here: dict) -> Iterator[Check]:
    with unwritten():
        found = answer(subject, ids, schedule)
    yield from equal(found, here, "memory of NaN", "unwritten memory")


def fresh(subject: Subject, ids: torch.Tensor, schedule: list[int], here: dict) -> Iterator[Check]:
    """Two new processes, started together, whose memory holds other bytes before it is written."""
    with tempfile.TemporaryDirectory(prefix="dsv4-fresh-") as folder:
        specification = Path(folder) / "run.json"
        specification.write_text(json.dumps(specified(subject, ids, schedule)))
        begun = {byte: started(specification, Path(folder) / f"{byte}.safetensors", byte) for byte in PERTURBED}
        try:
            said = {byte: process.communicate(timeout=SECONDS)[1] for byte, process in begun.items()}
        finally:
            for process in begun.values():
                if process.poll() is None:
                    process.kill()
                    process.wait()
        answers = {}
        for byte, process in begun.items():
            if process.returncode:
                last = (said[byte].strip().splitlines() or ["it said nothing"])[-1]
                raise Dsv4Error(f"a new process ended with code {process.returncode}: {last}")
            answers[byte] = load_file(Path(folder) / f"{byte}.safetensors")
    (one, first), (other, second) = answers.items()
    where = f"memory of {PERTURBED[one]} and of {PERTURBED[other]}"
    yield from equal(second, first, f"two new processes, {where}", "unwritten memory")
    yield from equal(here, first, "this process, after other runs, and a new one", "state kept between runs")


def specified(subject: Subject, ids: torch.Tensor, schedule: list[int]) -> dict:
    """What a new process must know."""
    model = subject.model
    path = str(Path(subject.files.path).resolve())
    return dict(
        subject=[path, "ours", subject.numerics, model.backend, str(model.device), *subject.caches],
        kernels=asked(model.replacements),
        ids=ids.tolist(),
        schedule=schedule,
        threads=torch.get_num_threads(),
        preparations=PREPARATIONS,
    )


def started(specification: Path, out: Path, byte: int) -> subprocess.Popen:
    """A new interpreter that imports this package, wherever it was started."""
    root = Path(dsv4.__file__).resolve().parent.parent
    paths = [str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"MALLOC_PERTURB_": str(byte), "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-m", "dsv4.probes.scenes.fresh_child", str(specification), str(out)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)


def equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], where: str, part: str) -> Iterator[Check]:
    """Logits, and the selections of all layers, in every bit."""
    picks = [name for name in wanted if name != "logits"]
    for what, names in (("logits", ["logits"]), ("selections", picks)):
        if not names:
            continue
        wrong = {name: differing(found[name], wanted[name]) for name in names}
        first = next((name for name, n in wrong.items() if n), "")
        yield compare(
            f"{what} of one run and of its repeat that differ",
            sum(wrong.values()),
            "==",
            0,
            EQUAL,
            sum(wanted[name].numel() for name in names),
            where=", ".join(filter(None, (where, first if what == "selections" else ""))),
            part=f"{part}, {what}",
        )


def differing(found: torch.Tensor, wanted: torch.Tensor) -> int:
    return int((found != wanted).sum()) if found.shape == wanted.shape else max(found.numel(), wanted.numel())


if __name__ == "__main__":
    from dsv4.probes.main import main

    main(FreshProcess)
