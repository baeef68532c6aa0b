"""A small corpus of code and prose."""

from pathlib import Path

import pytest

from scripts.training.corpus import Source, build, collect
from tests import texts

HELD_OUT = 0.3


def tiny_sources() -> list[Source]:
    code = [Source("own", f"part_{i}.py", text=text) for i, text in enumerate(texts.modules())]
    return [*code, *(Source("own", f"part_{i}.md", text=text) for i, text in enumerate(texts.PROSE.split("\n## ")))]


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("corpus")
    build(collect(tiny_sources(), 2**22, HELD_OUT, workers=1), out, vocab_size=1024, held_out=HELD_OUT)
    return out
