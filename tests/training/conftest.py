"""A small corpus of this repository's own sources."""

from pathlib import Path

import pytest

from scripts.training.corpus import Source, build, collect

ROOT = Path(__file__).resolve().parents[2]
HELD_OUT = 0.3


def tiny_sources() -> list[Source]:
    files = sorted(f for folder in ("dsv4", "loaders") for f in (ROOT / folder).glob("*.py"))[:30]
    return [Source("own", str(f.relative_to(ROOT)), str(f)) for f in (*files, ROOT / "README.md")]


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("corpus")
    build(collect(tiny_sources(), 2**22, HELD_OUT, workers=1), out, vocab_size=1024, held_out=HELD_OUT)
    return out
