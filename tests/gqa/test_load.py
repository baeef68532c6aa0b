"""Loading: every tensor accounted for, both ways."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dsv4 import load_model
from dsv4.commands.inspection import inspect
from dsv4.errors import Dsv4Error, InputError
from dsv4.loaders.errors import CheckpointError
from dsv4.runtime.planning import plan
from tests.checkpoints import edit_config
from tests.conftest import TOLERANCE
from tests.gqa import oracle

NAME = "llama, llama3 rope and biases"


def weights(path: Path) -> dict[str, torch.Tensor]:
    return load_file(path / "model.safetensors")


@pytest.fixture
def llama(tmp_path):
    return oracle.save(oracle.randomised(oracle.CONFIGS[NAME]), oracle.CONFIGS[NAME], tmp_path / "llama")


def test_what_transformers_saves_loads(tmp_path):
    """save_pretrained, in shards: its own spelling of the config."""
    for name, config in oracle.CONFIGS.items():
        theirs = oracle.randomised(config)
        folder = tmp_path / name
        theirs.save_pretrained(folder, max_shard_size="20KB")
        assert len(list(folder.glob("*.safetensors"))) > 1
        ids = torch.arange(100).unsqueeze(0)
        model = load_model(folder, numerics="fp32")
        assert (model(ids) - oracle.logits(theirs, ids)).abs().max() < TOLERANCE
        assert model.ledger.problems() == [] and model.ledger.totals()["consumed"] == len(
            dict(theirs.named_parameters())
        )


def test_native_holds_weights_as_stored_and_is_near(tmp_path):
    config = oracle.CONFIGS["qwen2, bias and tied head"]
    theirs = oracle.randomised(config)
    folder = oracle.save(theirs, config, tmp_path / "bf16", torch.bfloat16)
    model, ids = load_model(folder), torch.arange(200).unsqueeze(0)
    assert (
        all(p.dtype is torch.bfloat16 for p in model.parameters())
        and model.new_cache().layers[0].keys.dtype is torch.bfloat16
    )
    wide = load_model(folder, numerics="fp32")
    assert all(p.dtype is torch.float32 for p in wide.parameters())
    a, b = model(ids), wide(ids)
    assert 0 < (a - b).norm() / b.norm() < 0.05


@pytest.mark.parametrize(
    "damage, said",
    [
        (lambda w: w.pop("model.layers.1.self_attn.k_proj.bias"), "k_proj.bias is not in the file"),
        (lambda w: w.update({"model.layers.9.mlp.up_proj.weight": torch.zeros(2, 2)}), "nothing takes it"),
        (lambda w: w.update({"model.layers.0.self_attn.q_norm.weight": torch.zeros(16)}), "nothing takes it"),
        (lambda w: w.update({"model.layers.0.self_attn.sinks": torch.zeros(6)}), "names that no layout knows"),
        (lambda w: w.update({"lm_head.weight": torch.zeros(3, 48)}), "has shape [3, 48]"),
        (lambda w: w["model.norm.weight"].fill_(float("nan")), "holds 48 NaN"),
        (lambda w: w.update({"model.norm.weight": torch.ones(48, dtype=torch.float64)}), "expected"),
    ],
)
def test_a_file_that_does_not_fit_is_refused(llama, damage, said):
    tensors = weights(llama)
    damage(tensors)
    save_file(tensors, llama / "model.safetensors")
    with pytest.raises(CheckpointError) as caught:
        load_model(llama, numerics="fp32")
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_a_tied_head_may_be_a_copy_and_nothing_else(tmp_path):
    config = oracle.CONFIGS["qwen2, bias and tied head"]
    folder = oracle.save(oracle.randomised(config), config, tmp_path / "tied")
    tensors = weights(folder)
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, folder / "model.safetensors")
    model = load_model(folder)
    assert list(model.ledger.listed) == ["lm_head.weight"] and "lm_head.weight" not in dict(model.named_parameters())
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"] + 1}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="tie_word_embeddings"):
        load_model(folder)
    assert any("tie_word_embeddings" in p for p in inspect(folder, verify=True)["ledger"]["problems"])


def test_old_files_carry_rotary_frequencies(llama):
    tensors = weights(llama) | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    save_file(tensors, llama / "model.safetensors")
    assert list(load_model(llama).ledger.listed.values()) == ["rotary frequencies, which follow from config.json"]


@pytest.mark.parametrize(
    "options, said",
    [
        (dict(numerics="qat"), "qat"),
        (dict(numerics="qat:fp32"), "qat"),
        (dict(mtp=True), "MTP"),
        (dict(cache="fp8"), "cache format 'fp8'"),
        (dict(index_cache="fp8"), "index"),
        (dict(max_context=100000), "max_context"),
        (dict(backend="nonsense"), "backend"),
    ],
)
def test_what_does_not_apply_is_refused(llama, options, said):
    with pytest.raises(Dsv4Error) as caught:
        load_model(llama, **options)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_another_family_s_tools_refuse(llama, command_line):
    for args in (
        ("convert", llama, llama.parent / "x", "--to", "bf16"),
        ("recall", llama),
        ("generate", llama, "--token-ids", "1,2", "--speculate", "mtp"),
    ):
        code, _, err = command_line(*args)
        assert code == 2 and err.startswith("error: ") and err.count("\n") == 1, (args, err)
    (llama / "r.jsonl").write_text('{"token_ids": [1, 2], "max_tokens": 2}\n')
    code, _, err = command_line("batch", llama / "r.jsonl", "--checkpoint", llama, "--cache", "fp8")
    assert code == 2 and err.startswith("error: ") and err.count("\n") == 1, err


def test_inspect_accounts_for_everything(llama):
    document = inspect(edit_config(llama, torch_dtype="float32"), verify=True)
    assert document["layout"] == "transformers" and document["ledger"]["problems"] == []
    assert all("crc32" in row and row["parameters"] == [row["tensor"]] for row in document["ledger"]["tensors"])
    rows = {row["key"]: row["status"] for row in document["config"]}
    assert rows["rope_scaling"] == "read" and set(rows.values()) == {"read", "never read"}


def test_plan_says_what_a_cache_takes(llama):
    document = plan(str(llama), "200", 3, 0, "native", "cpu")
    model = load_model(llama)
    assert document["cache_bytes"] == model.new_cache(3, 200).nbytes == 2 * 3 * 3 * 2 * 256 * 16 * 2
    assert document["cache_bytes_per_token"] == {
        "nbytes": 2 * 3 * 2 * 16 * 2,
        "formula": "2 × 3 layers × 2 heads × 16 × 2 B",
    }
    assert document["weights_bytes"] == model.nbytes
    wide = plan(str(llama), "200", 3, 0, "fp32", "cpu")
    assert (
        wide["weights_bytes"] == load_model(llama, numerics="fp32").nbytes
        and wide["cache_bytes"] == 2 * document["cache_bytes"]
    )
    with pytest.raises(InputError, match="max_position_embeddings"):
        plan(str(llama), "1M", 1, 0, "native", "cpu")


def test_generate_on_the_command_line(checkpoint, command_line):
    code, out, err = command_line("generate", checkpoint, "--prompt", "Hello", "--max-new-tokens", "5", "--verbose")
    assert code == 0 and "each written once" in err and "layer 1  full" in err and "grouped_attention" in err
    document = json.loads(
        command_line(
            "generate", checkpoint, "--prompt", "Hello", "--max-new-tokens", "8", "--numerics", "fp32", "--json"
        )[1]
    )
    # by the tokenizer's template
    assert document["prompt_token_ids"][0] == 0 and document["prompt_token_ids"].count(0) == 1
    ids, model = list(document["prompt_token_ids"]), load_model(checkpoint, numerics="fp32")
    for token in document["token_ids"]:
        assert token == int(model(torch.tensor([ids]))[0, -1].argmax())
        ids.append(token)
    drafted = json.loads(
        command_line(
            "generate",
            checkpoint,
            "--prompt",
            "Hello",
            "--max-new-tokens",
            "8",
            "--numerics",
            "fp32",
            "--json",
            "--speculate",
            "lookup",
        )[1]
    )
    assert drafted["token_ids"] == document["token_ids"] and drafted["speculation"]["method"] == "lookup"
    for args, said in ((("--numerics", "qat"), "native or fp32"), (("--cache", "fp8"), "use auto")):
        code, _, err = command_line("generate", checkpoint, "--prompt", "x", *args)
        assert code == 2 and said in err and err.count("\n") == 1


def test_tables_on_the_command_line(checkpoint, command_line):
    code, out, _ = command_line("plan", checkpoint, "--max-context", "512")
    assert code == 0 and "keys and values of one token of one row" in out
    code, out, _ = command_line("inspect", checkpoint)
    assert code == 0 and "every tensor and every parameter is accounted for" in out


def test_unknown_models_are_refused(llama, command_line):
    edit_config(llama, model_type="gemma2", architectures=["Gemma2ForCausalLM"])
    code, _, err = command_line("generate", llama, "--token-ids", "1")
    assert code == 2 and "gemma2" in err and "qwen2, llama, mistral" in err
