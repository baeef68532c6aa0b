"""The command line: what it prints, one-line errors, exit codes. Run as a user would, in a process of its own where it
matters."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dsv4.loaders import load
from tests import checkpoints
from tests.checkpoints import edit_config
from tests.texts import PROSE

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """A small checkpoint with a tokenizer."""
    from scripts.training.tokenizer import train_tokenizer

    path = checkpoints.write_official(tmp_path_factory.mktemp("demo") / "c")
    train_tokenizer([PROSE], 320).save(str(path / "tokenizer.json"))
    return path


@pytest.fixture
def run(command_line):
    return command_line


def test_generate_prints_text_then_a_summary(run, demo):
    asked = ("generate", demo, "--prompt", "Hello", "--max-new-tokens", "5")
    code, out, err = run(*asked)
    assert code == 0 and out.endswith("\n") and len(out) > 1
    generated, memory, path = err.splitlines()
    for part in ("generated: 5 tokens", "tokens/s", "first token after 0.", "stopped: max_new_tokens"):
        assert part in generated, part
    assert "weights" in memory and "cache" in memory and "peak" in memory
    assert path.startswith("path: 2 window, 2 csa, 2 hca layers on cpu; numerics native, backend cpu; operations by ")
    code, out, err = run(*asked, "--verbose")
    for part in ("start: torch imported in 0.00 s", "layer 1  csa", "what ran", "each written once"):
        assert part in err, part
    assert [line.split(":")[0] for line in err.splitlines()[-3:]] == ["generated", "memory", "path"]
    assert run(*asked, "--quiet") == (0, out, "")


def test_headers_of_a_checkpoint_are_read_once(run, demo, monkeypatch):
    opened, found = [], load.open_checkpoint
    monkeypatch.setattr(load, "open_checkpoint", lambda path: opened.append(path) or found(path))
    assert run("generate", demo, "--prompt", "Hello", "--max-new-tokens", "1")[0] == 0
    assert opened == [demo]


def test_generate_json_is_one_document(run, demo):
    code, out, err = run("generate", demo, "--prompt", "Hello", "--max-new-tokens", "6", "--json")
    document = json.loads(out)
    assert code == 0 and err == ""
    assert (
        len(document["token_ids"]) == 6
        and document["stop_reason"] == "max_new_tokens"
        and isinstance(document["text"], str)
    )
    assert document["prompt_token_ids"][0] == 0 and document["numerics"] == "native" and document["backend"] == "cpu"
    assert document["timings"]["decode_tokens_per_second"] > 0 and document["bytes"]["cache"] > 0
    assert [row["kind"] for row in document["layers"]] == ["window", "csa", "hca", "csa", "hca", "window"]
    assert document["bytes"]["max_context"] == len(document["prompt_token_ids"]) + 5


def test_greedy_text_is_the_model_s_argmax(run, demo):
    from dsv4 import load_model

    document = json.loads(
        run("generate", demo, "--token-ids", "5,6,7", "--max-new-tokens", "5", "--numerics", "fp32", "--json")[1]
    )
    model, ids = load_model(demo, numerics="fp32"), [5, 6, 7]
    for token in document["token_ids"]:
        assert token == int(model(torch.tensor([ids]))[0, -1].argmax())
        ids.append(token)


def test_sampling_follows_the_seed(run, demo):
    ids = [
        json.loads(
            run(
                "generate",
                demo,
                "--prompt",
                "Hi",
                "--max-new-tokens",
                "8",
                "--temperature",
                "1.5",
                "--top-p",
                "0.9",
                "--seed",
                seed,
                "--json",
            )[1]
        )["token_ids"]
        for seed in (1, 1, 2)
    ]
    assert ids[0] == ids[1] != ids[2]


def test_chat_wraps_the_prompt_in_control_tokens(run, demo):
    from dsv4.model.chat import ASSISTANT, BOS, END_THINK, THINK, USER
    from dsv4.model.tokenizer import Tokenizer

    tokenizer = Tokenizer(demo, 320)
    c = tokenizer.control
    plain = tokenizer.encode("Hi <｜User｜>")
    assert c(USER) not in plain  # the user's text is never a control token
    for flags, last in ((["--chat"], END_THINK), (["--chat", "--think"], THINK)):
        document = json.loads(
            run(
                "generate",
                demo,
                "--prompt",
                "Hi <｜User｜>",
                *flags,
                "--system",
                "S",
                "--max-new-tokens",
                "1",
                "--json",
            )[1]
        )
        assert document["prompt_token_ids"] == [c(BOS), *tokenizer.encode("S"), c(USER), *plain, c(ASSISTANT), c(last)]


def test_prompt_from_a_file_and_from_stdin(run, demo, tmp_path, monkeypatch):
    import io

    (tmp_path / "p.txt").write_text("from a file")
    args = ("--max-new-tokens", "1", "--json")
    from_file = json.loads(run("generate", demo, "--prompt-file", tmp_path / "p.txt", *args)[1])
    monkeypatch.setattr(sys, "stdin", io.StringIO("from a file"))
    assert json.loads(run("generate", demo, *args)[1])["prompt_token_ids"] == from_file["prompt_token_ids"]


@pytest.mark.parametrize(
    "args,message",
    [
        (["--prompt", ""], "the prompt is empty"),
        (["--prompt", "  \n"], "the prompt is empty"),
        (["--prompt", "a", "--token-ids", "1"], "--prompt and --token-ids were given"),
        (["--token-ids", "1,2,320"], "token id 320 is outside the vocabulary of 320"),
        (["--token-ids", "1,x"], "expected numbers separated by commas"),
        (["--prompt", "a", "--numerics", "int3"], "--numerics takes fp32, native, qat or qat:fp32; got 'int3'"),
        (["--prompt", "a", "--device", "cuda:7"], "CUDA devices"),
        (["--prompt", "a", "--device", "tpu"], "device 'tpu'"),
        (["--token-ids", "1,2,3,4", "--max-context", "3"], "the prompt has 4 tokens, max_context is 3"),
        (["--prompt", "a", "--max-context", "1M"], "max_position_embeddings 4096"),
        (["--prompt", "a", "--max-context", "big"], "is not a size"),
        (["--prompt", "a", "--think"], "add --chat"),
        (["--prompt", "a", "--top-p", "0"], "top_p 0.0"),
        (["--prompt", "a", "--max-new-tokens", "0"], "--max-new-tokens"),
        (["--prompt-file", "/nowhere/p"], "cannot read the prompt"),
        (["--prompt", "a", "--device-map", "auto", "--max-memory", "lots"], "--max-memory has 'lots'"),
        (["--prompt", "a", "--device-map", "auto", "--max-memory", "cpu=1K"], "one block needs"),
        (["--prompt", "a", "--device-map", "round-robin"], "device map 'round-robin' is unknown"),
        (["--no-such-flag"], "No such option"),
        (["--prompt", "a", "--quiet", "--json"], "--json and --quiet were given"),
        (["--prompt", "a", "--verbose", "--json"], "--json and --verbose were given"),
        (["--prompt", "a", "--verbose", "--quiet"], "--quiet and --verbose were given"),
        (["--prompt", "a", "--dummy-weights", "huge"], "--dummy-weights takes flash, pro, llama-8b"),
        (["--prompt", "\udcff"], "is no Unicode; expected UTF-8"),
        (["--prompt", "a", "--temperature", "nan"], "temperature nan"),
        (["--prompt", "a", "--temperature", "inf"], "temperature inf"),
        (["--prompt", "a", "--top-p", "nan"], "top_p nan"),
        (["--prompt", "a", "--seed", str(2**63)], "expected a number of 64 bits"),
        (["--prompt", "a", "--seed", "-" + "9" * 4000], "seed -9999"),
        (["--prompt", "a", "--temperature", "1" + 400 * "0"], "temperature inf"),
        (["--prompt", "a", "--temperature", "1000001"], "or 1e-06 to 1000000"),
        (["--prompt", "a", "--temperature", "1e-300"], "temperature 1e-300"),
        (["--prompt", "a", "--temperature", "-1"], "temperature -1.0"),
        (["--token-ids", "1," + "9" * 23], "is outside the vocabulary of 320; expected 0 to 319"),
        (["--token-ids", "-1"], "token id -1 is outside"),
        (["--token-ids", "9" * 5000], "expected numbers separated by commas"),
        (
            ["--prompt", "a", "--max-new-tokens", "4096"],
            "4096 (max_position_embeddings) that the checkpoint takes; shorten it, or lower --max-new-tokens",
        ),
        (
            ["--prompt", "a", "--max-new-tokens", "4096", "--max-context", "4096"],
            "that the checkpoint takes; shorten it, or lower --max-new-tokens",
        ),
        (
            ["--prompt-tokens", "4097", "--max-context", "4096", "--max-new-tokens", "1"],
            "that the checkpoint takes; shorten it",
        ),
        (["--token-ids", "1,2,3,4", "--max-context", "3"], "shorten it or raise --max-context (at most 4096)"),
        (
            ["--token-ids", "1,2", "--speculate", "lookup", "--max-new-tokens", "9" * 30],
            "that the checkpoint takes; shorten it, or lower --max-new",
        ),
        (
            ["--prompt", "a", "--device-map", "auto", "--max-memory", "0=1G,cuda:0=2G"],
            "'cuda:0=2G'; expected cpu and numbers of GPUs, each at most once",
        ),
        (["--prompt", "a", "--device-map", "auto", "--max-memory", "²=1G"], "expected cpu and numbers of GPUs"),
    ],
    ids=lambda v: " ".join(v)[:40].replace("/", "|") if isinstance(v, list) else "",
)
def test_bad_requests_are_one_line_and_exit_2(run, demo, args, message):
    code, out, err = run("generate", demo, *args)
    assert code == 2 and out == ""
    assert err.startswith("error: ") and err.count("\n") == 1 and message in err


def test_closed_standard_input_is_one_line(run, demo, monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)  # what Python makes of it
    code, out, err = run("generate", demo)
    assert code == 2 and out == "" and err.count("\n") == 1 and "there is no prompt" in err


@pytest.mark.parametrize("held", ["not open for reading", "not UTF-8"])
def test_standard_input_that_cannot_be_read_is_one_line(run, demo, monkeypatch, tmp_path, held):
    import io

    write_only = open(tmp_path / "w", "wb")
    stream = (
        io.BytesIO(b"\xff") if held == "not UTF-8" else io.BufferedReader(io.FileIO(os.dup(write_only.fileno()), "r"))
    )
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(stream, encoding="utf-8"))
    code, out, err = run("generate", demo)
    assert (
        code == 2
        and out == ""
        and err.count("\n") == 1
        and "standard input: " + ("it is not UTF-8" if held == "not UTF-8" else "Bad file") in err
    )


def test_overrun_while_generating_keeps_the_text_and_exits_2(run, demo):
    code, out, err = run("generate", demo, "--token-ids", "1,2,3", "--max-new-tokens", "20", "--max-context", "6")
    assert code == 2 and out.strip() != ""
    assert err.count("\n") == 1 and "the context of 6 tokens is full after 4 new tokens" in err


def test_a_tokenizer_is_needed_for_text_only(run, official):
    code, _, err = run("generate", official, "--prompt", "a")
    assert code == 2 and "has no tokenizer.json" in err and "--token-ids" in err
    code, out, _ = run("generate", official, "--token-ids", "1,2", "--max-new-tokens", "3")
    assert code == 0 and len(out.split()) == 3


def test_a_broken_checkpoint_is_one_line(run, demo, copy_of):
    path = copy_of(demo)
    sorted(path.glob("*.safetensors"))[0].unlink()
    for command in (
        ["generate", path, "--prompt", "a"],
        ["inspect", path],
        ["convert", path, path.parent / "o", "--to", "bf16"],
        ["plan", str(path)],
    ):
        code, out, err = run(*command)
        assert code == 2 and err.count("\n") == 1 and "shards are missing" in err, command
    assert not (path.parent / "o").exists()


def test_inspect_accounts_for_every_tensor(run, demo):
    document = json.loads(run("inspect", demo, "--verify", "--json")[1])
    ledger = document["ledger"]
    assert ledger["problems"] == [] and len(ledger["tensors"]) == ledger["totals"]["file_tensors"] == 436
    assert all(row["parameters"] and len(row["crc32"]) == 8 for row in ledger["tensors"])
    status = {row["key"]: row["status"] for row in document["config"]}
    assert status["index_topk"] == "read" and status["architectures"] == "never read"
    code, out, _ = run("inspect", demo)
    assert code == 0 and "every tensor and every parameter is accounted for" in out.replace("\n", " ").replace(
        "  ", " "
    )


def test_inspect_finds_what_is_wrong_and_exits_2(run, demo, copy_of):
    path = edit_config(copy_of(demo), num_hash_layers=1)
    for options in ((), ("--json",)):
        code, out, err = run("inspect", path, *options)
        assert code == 2 and "tensor layers.1.ffn.gate.bias is not in the file" in out
        assert err.startswith("error: ") and err.count("\n") == 1 and " problems, first: tensor layers.1" in err


def test_a_table_in_a_pipe_has_whole_lines(run, demo):
    rows = [line for line in run("inspect", demo)[1].splitlines() if "layers.0.attn.wq_a.weight" in line]
    assert len(rows) == 1 and rows[0].split()[1:2] == ["F8_E4M3"] and rows[0] == rows[0].rstrip()


@pytest.mark.parametrize(
    "args, message",
    [
        (("--token-ids", "1,2,3,4", "--max-context", "3"), "the prompt has 4 tokens, max_context is 3"),
        (("--prompt", "word " * 5000, "--max-new-tokens", "1"), "(max_position_embeddings) that the checkpoint takes"),
        (("--token-ids", "1,999"), "token id 999 is outside the vocabulary"),
        (("--prompt", "a", "--max-context", "1M"), "--max-context 1048576 exceeds the checkpoint's max_position"),
    ],
    ids=("max_context", "checkpoint", "vocabulary", "beyond"),
)
def test_a_prompt_that_cannot_run_is_refused_before_the_weights_are_read(run, demo, monkeypatch, args, message):
    monkeypatch.setattr("dsv4.commands.generate.load_model", lambda *a, **k: pytest.fail("weights were read"))
    code, out, err = run("generate", demo, *args)
    assert code == 2 and out == "" and err.count("\n") == 1 and message in err


@pytest.mark.parametrize("held", ["", "\n  \n"])
def test_a_batch_without_requests_is_refused_before_the_weights_are_read(run, demo, monkeypatch, tmp_path, held):
    import io

    monkeypatch.setattr("dsv4.commands.generate.load_model", lambda *a, **k: pytest.fail("weights were read"))
    (tmp_path / "asked").write_text(held)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(held.encode())))
    for file in (tmp_path / "asked", "-"):
        code, out, err = run("batch", file, "--checkpoint", demo)
        assert code == 2 and out == "" and err.count("\n") == 1 and "holds no requests; expected one JSON" in err


def test_a_batch_ends_with_a_table(run, demo, tmp_path):
    (tmp_path / "asked").write_text('{"id": "a", "token_ids": [5, 6], "max_tokens": 3}\nnot JSON\n')
    code, out, err = run("batch", tmp_path / "asked", "--checkpoint", demo)
    assert code == 1 and len(out.splitlines()) == 3
    row = next(line for line in err.splitlines() if line.startswith("a "))
    assert row.split()[:4] == ["a", "max_tokens", "2", "3"] and "InputError: line 2 is not JSON" in err
    assert err.splitlines()[-1].startswith("2 requests, 1 failed; 3 tokens in ")
    assert run("batch", tmp_path / "asked", "--checkpoint", demo, "--quiet")[2] == ""


def test_convert_then_generate_gives_the_same_tokens(run, demo, tmp_path):
    tokens = []
    for to in ("official", "nvfp4", "transformers", "bf16"):
        code, out, _ = run("convert", demo, tmp_path / to, "--to", to)
        assert code == 0 and "matrices" in out
        tokens.append(
            json.loads(
                run(
                    "generate",
                    tmp_path / to,
                    "--prompt",
                    "Hello",
                    "--max-new-tokens",
                    "6",
                    "--numerics",
                    "fp32",
                    "--json",
                )[1]
            )["token_ids"]
        )
    assert tokens.count(tokens[0]) == 4
    code, _, err = run("convert", demo, tmp_path / "bf16", "--to", "official")
    assert code == 2 and "exists already" in err


def test_plan_of_a_preset_and_of_a_directory(run, demo):
    document = json.loads(run("plan", "flash", "--max-context", "1M", "--json")[1])
    assert document["weights_bytes"] == 159609485896 and document["cache_bytes"] == 7275963392
    assert document["fits"] == (document["total_bytes"] <= document["free_bytes"])
    code, out, _ = run("plan", "pro")
    assert code == (0 if out.startswith("fits: ") else 1) and "⌈1048576 / 4⌉" in out
    document = json.loads(run("plan", str(demo), "--max-context", "1000", "--batch", "2", "--json")[1])
    from dsv4 import load_model

    model = load_model(demo)
    assert (
        document["weights_bytes"] == model.nbytes
        and document["cache_bytes"] == model.new_cache(2, 1000).nbytes
        and document["fits"]
    )
    code, _, err = run("plan", str(demo), "--max-context", "1M")
    assert code == 2 and "never" not in err and "max_position_embeddings 4096" in err
    code, _, err = run("plan", "tiny")
    assert code == 2 and "tiny is not a directory" in err


def test_a_plan_is_for_what_the_model_takes_unless_told(run, demo):
    code, out, _ = run("plan", str(demo))
    assert (
        code == 0
        and "of 4096 tokens (the model's longest" in out
        and "the model's longest" not in run("plan", str(demo), "--max-context", "4K")[1]
    )
    document = json.loads(run("plan", str(demo), "--json")[1])
    assert document["max_context"] == 4096 and document["max_context_default"]
    assert json.loads(run("plan", "flash", "--json")[1])["max_context"] == 1 << 20


@pytest.mark.parametrize("name, room", [("demo", "1400K"), ("demo_gqa", "7M")])
def test_device_map_from_the_command_line(run, demo, name, room):
    ask = ("generate", demo if name == "demo" else name, "--prompt", "Hello", "--max-new-tokens", "3", "--json")
    plain = json.loads(run(*ask)[1])
    spread = json.loads(run(*ask, "--device-map", "auto", "--max-memory", f"cpu={room}")[1])
    places = list(spread["placement"].values())
    assert spread["token_ids"] == plain["token_ids"] and "disk" in places and "cpu" in places


# Over 5 s: two new processes import torch.
def test_a_real_process_streams_and_survives_a_closed_pipe(demo):
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-m", "dsv4", "generate", str(demo), "--prompt", "Hello", "--max-new-tokens", "12"]
    done = subprocess.run(command, capture_output=True, env=environment, timeout=120)
    assert done.returncode == 0 and b"Traceback" not in done.stderr
    piped = subprocess.run(" ".join(command) + " | head -c 1", shell=True, capture_output=True, timeout=120)
    assert b"Traceback" not in piped.stderr


def test_characters_of_several_bytes_stream_whole(demo):
    from dsv4.model.tokenizer import TextStream, Tokenizer

    tokenizer = Tokenizer(demo, 320)
    text = "naïve 北京 🦉!"
    stream, shown = TextStream(tokenizer), []
    for token in tokenizer.encode(text):
        shown.append(stream.push(token))
    assert "".join(shown) + stream.finish() == text and not any("\ufffd" in s for s in shown)
    assert any(s == "" for s in shown)
