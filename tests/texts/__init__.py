"""Frozen texts for tests: what trains their tokenizers and fills their prompts, so that no edit of a document or a
source changes what a test runs on. prose.txt is a README and code.txt two modules of this project as they once were."""

from pathlib import Path

PROSE_FILE, CODE_FILE = (Path(__file__).parent / name for name in ("prose.txt", "code.txt"))
PROSE, CODE = (file.read_text(encoding="utf-8") for file in (PROSE_FILE, CODE_FILE))


def modules() -> list[str]:
    """The definitions of the code, each as a module of its own."""
    return CODE.split("\n\n\n")
