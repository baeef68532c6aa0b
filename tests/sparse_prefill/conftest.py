"""A GQA model with a tokenizer, as fidelity is tested on, and the command line."""

from tests.fidelity.conftest import gqa, gqa_path, run  # noqa: F401
