"""`dsv4 demo`: text from the bundled checkpoint."""

from pathlib import Path
from typing import Annotated

import typer

from dsv4.errors import InputError

INSIDE = Path(__file__).resolve().parents[1] / "demo_checkpoint"  # the directory in a wheel (setup.py)
BESIDE = Path(__file__).resolve().parents[2] / "demo"  # the directory in a checkout


def checkpoint() -> Path:
    """The directory of the demo checkpoint. Raises InputError where neither a wheel nor a checkout has it."""
    for folder in (INSIDE, BESIDE):
        if (folder / "config.json").is_file():
            return folder
    raise InputError(
        f"the demo checkpoint is in neither {INSIDE} nor {BESIDE}; install dsv4 anew, or run `dsv4 generate CHECKPOINT`"
    )


def demo(
    prompt: Annotated[str, typer.Option(help="Text to go on from.")] = "The capital of France is",
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate, at most.")] = 64,
    where: Annotated[
        bool, typer.Option("--where", help="Print the checkpoint's directory and do nothing else.")
    ] = False,
):
    """Generate text from the demo checkpoint that comes with dsv4. Other commands take its directory (--where)."""
    folder = checkpoint()
    if where:
        print(folder)
        return
    from dsv4.commands.decode import generate

    generate(folder, prompt=prompt, max_new_tokens=max_new_tokens)
