"""Scripts that choose tiles by time say what they need."""

import pytest
import torch

from dsv4.kernels.chunked_prefill import Chunking
from scripts import tune_attention, tune_experts, tune_fp8, tune_index, tune_merging, tune_prefill, tune_termination

SCRIPTS = tune_attention, tune_experts, tune_fp8, tune_index, tune_merging, tune_prefill, tune_termination


def test_both_forms_of_attention_to_a_small_memory_are_tried():
    small, large = (tune_prefill.kinds(Chunking(512, 64, heavy)) for heavy in (192, 193))
    assert {t.columns for t in small["memory at once"][2]} == {256} and max(
        t.columns for t in small["memory in a loop"][2]
    ) < 256
    assert "memory at once" not in large and all(t.rows % t.columns == 0 for t in small["sums"][2])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda s: s.__name__)
def test_without_a_gpu_it_is_one_line(script, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["script"])
    assert script.main() == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and "CUDA" in err
