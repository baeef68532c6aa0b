"""A checkpoint with random weights at published widths, here made narrow: it loads, and its model says something."""

import torch

from dsv4.model.load import load_model
from scripts import write_dummy

NARROW = {
    "hidden_size": 256,
    "num_attention_heads": 8,
    "head_dim": 64,
    "qk_rope_head_dim": 32,
    "q_lora_rank": 128,
    "o_groups": 4,
    "o_lora_rank": 64,
    "moe_intermediate_size": 128,
    "index_n_heads": 8,
    "index_head_dim": 64,
}


def test_a_checkpoint_loads_and_runs(tmp_path, monkeypatch, capsys):
    published = write_dummy.preset
    monkeypatch.setattr(write_dummy, "preset", lambda name: published(name) | NARROW)
    assert write_dummy.main([str(tmp_path / "a"), "--experts", "8", "--words", "512"]) == 0
    assert capsys.readouterr().err.startswith("wrote ")
    model = load_model(tmp_path / "a", numerics="native", backend="reference")
    assert [spec.ratio for spec in model.config.layers] == [0, 0, 4, 128, 4]
    logits = model.forward(torch.arange(40)[None] % 512)
    assert logits.isfinite().all() and float(logits.float().std()) > 0.1


def test_what_is_there_is_not_written_over(tmp_path, capsys):
    assert write_dummy.main([str(tmp_path), "--experts", "8", "--words", "16", "--layers", "1"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and said.count("\n") == 1
    assert write_dummy.main([str(tmp_path / "b"), "--experts", "2"]) == 2
    assert "num_experts_per_tok" in capsys.readouterr().err
