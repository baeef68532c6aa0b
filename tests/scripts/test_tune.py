"""Scripts that choose tiles by time say what they need."""

import pytest
import torch

from scripts import tune_prefill, tune_termination


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("script", [tune_prefill, tune_termination], ids=lambda s: s.__name__)
def test_without_a_gpu_it_is_one_line(script, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["script"])
    assert script.main() == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and "CUDA" in err
