"""What is seen: in a real pseudo-terminal, in a file, through a pipe whose reader leaves, and after Ctrl-C."""

import json

import pytest

from dsv4.probes.selftest import detection
from tests.dsv4.test_cli import demo  # noqa: F401  (fixture: a checkpoint with a tokenizer)
from tests.fidelity.conftest import gqa, gqa_path  # noqa: F401  (fixtures: a GQA checkpoint with a tokenizer)
from tests.terminal import in_terminal, screen

WORDS = ("--prompt", "the checkpoint holds what the model reads", "--max-new-tokens", "12")
MEASURES = {
    "recall": ("recall", "CSA", "--context", "192", "--queries", "4", "--rows", "1", "--needles", "0"),
    "fidelity": (
        *("fidelity", "CSA", "--effort", "quick", "--rows", "1", "--tail", "4", "--new-tokens", "0"),
        *("--queries", "2", "--context", "160", "--topk", "2", "--needles", "0"),
    ),
    "termination": ("termination", "GQA", "--context", "600", "--queries", "1", "--budget", "512", "--tile", "64"),
    "sparse-prefill": (
        *("sparse-prefill", "GQA", "--context", "96", "--cuts", "32,4,8", "--tail", "8", "--every", "16"),
        *("--needles", "0", "--in-prompt", "0"),
    ),
    "audit": ("audit", "CSA", "--subject", "files", "--probe", "load_ledger"),
    "inspect": ("inspect", "CSA", "--verify"),
}


@pytest.fixture
def terminal(tmp_path):
    """Function: run `dsv4 …` in a pseudo-terminal (`tests.terminal.in_terminal`)."""
    return lambda *args, **more: in_terminal(*args, folder=tmp_path, **more)


@pytest.fixture(scope="module")
def text(demo):
    """What the model says after WORDS."""
    from dsv4.commands import generate as run

    request = run.Request(prompt=WORDS[1], max_new_tokens=12)
    session = run.Session(demo, run.Choices())
    return session.generate(session.encode(request), request, lambda text: None)[1]


def test_text_stands_in_a_terminal_as_it_was_generated(terminal, demo, text):
    done = terminal("generate", demo, *WORDS)
    assert done.code == 0 and done.shown.count("\x1b[?25l") == done.shown.count("\x1b[?25h") >= 2  # the cursor is back
    assert "prefill" in done.shown and "loading" in done.shown  # bars were drawn
    left = screen(done.shown)
    assert left.startswith(text.replace("\r", "") + "\n") and "━" not in left
    last = left.rstrip().splitlines()[-3:]
    assert [line.split(":")[0] for line in last] == ["generated", "memory", "path"]


def test_text_goes_whole_to_a_file_while_bars_are_drawn(terminal, demo, text):
    done = terminal("generate", demo, *WORDS, out=False)
    assert done.code == 0 and done.out == text + "\n"
    assert "prefill" in done.shown and "generated: 12 tokens" in done.shown and "━" not in screen(done.shown)


def test_stderr_that_is_no_terminal_gets_no_bar(terminal, demo, text):
    done = terminal("generate", demo, *WORDS, err=False)
    assert done.shown.replace("\r\n", "\n") == text + "\n" and "\x1b" not in done.err and done.err.count("\n") == 3


def test_quiet_is_the_text_alone(terminal, demo, text):
    done = terminal("generate", demo, *WORDS, "--quiet")
    assert done.code == 0 and done.shown.replace("\r\n", "\n") == text + "\n"


def test_a_batch_shows_results_then_a_table(terminal, demo, tmp_path):
    asked = tmp_path / "asked.jsonl"
    asked.write_text("".join(json.dumps({"id": name, "token_ids": [5, 6], "max_tokens": 3}) + "\n" for name in "ab"))
    done = terminal("batch", asked, "--checkpoint", demo, out=False)
    assert done.code == 0 and [json.loads(line).get("id") for line in done.out.splitlines()] == ["a", "b", None]
    left = screen(done.shown)
    assert "loading" in done.shown and "━" not in left and "first token, s" in left and "2 requests, 0 failed" in left


def test_a_conversion_shows_what_it_wrote(terminal, demo, tmp_path):
    done = terminal("convert", demo, tmp_path / "bf16", "--to", "bf16")
    assert done.code == 0 and "converting" in done.shown
    assert "━" not in screen(done.shown) and "matrices" in screen(done.shown)


# Over 5 s: six whole commands, each in a process of its own.
@pytest.mark.parametrize("name", MEASURES)
def test_what_is_measured_goes_whole_to_a_file(terminal, demo, gqa_path, name):
    given = [{"CSA": demo, "GQA": gqa_path}.get(word, word) for word in MEASURES[name]]
    done = terminal(*given, out=False)
    assert done.code == 0, done.shown
    assert done.out.count("\n") > 3 or name == "audit" and "11 PASS; exit code 0" in done.shown  # it says all on stderr
    assert "\x1b" not in done.out and "━" not in screen(done.shown)
    assert done.shown.count("\x1b[?25l") == done.shown.count("\x1b[?25h")


def test_the_self_test_prints_above_its_bar(terminal, monkeypatch):
    def run(out, section, name, fast, jobs, backend, device, say, done, journal, probe):
        done(None, 2)
        say("hc head dropped: caught")
        print("| matrix |")
        done(None, 2)
        return 0

    monkeypatch.setattr(detection, "run", run)
    done = terminal("audit", "selftest", out=False)
    assert done.code == 0 and done.out == "| matrix |\n" and "planting" in done.shown
    assert screen(done.shown).strip() == "hc head dropped: caught"


@pytest.mark.parametrize(
    "args",
    [("generate", *WORDS[:3], "64"), ("inspect", "--json"), ("inspect",)],
    ids=" ".join,
)
def test_a_reader_that_leaves_is_no_error(terminal, demo, args):
    """As `| head`: the exit code is a shell's for SIGPIPE, and nothing is said of it."""
    done = terminal(args[0], demo, *args[1:], head=1)
    assert done.code == 141 and "Traceback" not in done.shown and "error" not in done.shown


def test_ctrl_c_is_no_traceback(terminal, demo):
    done = terminal("generate", demo, "--token-ids", "5,6", "--max-new-tokens", "4000", interrupt="prefill")
    assert done.code == 130 and "Traceback" not in done.shown and "error" not in done.shown
    assert done.shown.count("\x1b[?25l") == done.shown.count("\x1b[?25h")


def test_no_prompt_in_a_terminal_is_one_line(terminal, demo):
    done = terminal("generate", demo)
    assert done.code == 2 and screen(done.shown).strip().splitlines() == [
        "error: there is no prompt; pass --prompt TEXT, --prompt-file FILE, or text on standard input"
    ]
