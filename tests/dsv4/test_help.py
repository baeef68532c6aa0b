"""Help, versions, completion and errors of the command line, before any command runs."""

import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import dsv4
from dsv4.commands import cli
from dsv4.commands.help import EXAMPLES, GROUPS, ORDER
from dsv4.runtime.threads import SMALL, limited_threads, thread_count

ROOT = Path(__file__).resolve().parents[2]


def commands(command=None, path: str = ""):
    """(path, command) of every command, groups among them."""
    command = command or cli.command()
    for name, each in getattr(command, "commands", {}).items():
        below = f"{path} {name}".strip()
        yield below, each
        yield from commands(each, below)


NAMES = [path for path, _ in commands()]


def test_help_and_version_import_no_torch():
    """In new processes: what this one has imported says nothing."""
    code = (
        "import sys; from dsv4 import cli\n"
        "for sys.argv in (['dsv4', '--help'], ['dsv4', 'audit', 'run', '--help'], ['dsv4', '--version']):\n"
        "    try: cli.main()\n"
        "    except SystemExit as stop: assert not stop.code\n"
        "print([name for name in ('torch', 'numpy', 'triton', 'accelerate') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-2:] == [f"dsv4 {dsv4.__version__}", "[]"]
    assert done.stdout.startswith("Usage: dsv4 [OPTIONS] COMMAND")


@pytest.mark.parametrize("out, message", [("/dev/full", "No space left on device"), (None, "is closed")])
def test_output_that_cannot_be_written_is_one_line(out, message):
    """In a process of its own: the interpreter writes at its end too."""
    close = "" if out else "import os; os.close(1); os.execv(sys.executable, [sys.executable, '-m', 'dsv4', '--help'])"
    with open(out or "/dev/null", "w") as stdout:
        command = [sys.executable, *(("-c", "import sys; " + close) if close else ("-m", "dsv4", "--help"))]
        done = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    assert done.returncode == 2 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    assert message in done.stderr


def test_a_report_s_version_is_the_package_s():
    from dsv4.probes.report import provenance

    assert provenance.versions()["dsv4"] == dsv4.__version__


@pytest.mark.parametrize("args", [(), ("audit",), ("regime",)], ids=lambda args: " ".join(args) or "bare")
def test_a_bare_group_prints_its_help(command_line, args):
    code, out, err = command_line(*args)
    assert code == 2 and err == "" and out == command_line(*args, "--help")[1]
    assert out.startswith("Usage: dsv4") and "\nCommands:\n" in out and "\nExamples:\n  dsv4" in out


def test_commands_are_in_the_order_of_use(command_line):
    shown = command_line("--help")[1].split("\nCommands:\n")[1].split("\n\n")[0].splitlines()
    assert [line.split()[0] for line in shown if not line.startswith("   ")] == list(ORDER)


@pytest.mark.parametrize("path", NAMES)
def test_every_option_stands_in_a_group_and_every_example_parses(command_line, monkeypatch, path):
    found = dict(commands())[path]
    loose = [
        p.name
        for p in found.params
        if p.param_type_name == "option" and not p.hidden and p.name != "help" and not p.required
        if p.rich_help_panel not in GROUPS
    ]
    assert loose == []
    shown = command_line(*path.split(), "--help")[1]
    assert len(EXAMPLES[path]) == 2 and all(f"\n  {line}\n" in shown for line in EXAMPLES[path])
    called = []
    for below, each in commands():
        if not hasattr(each, "commands"):
            monkeypatch.setattr(each, "callback", lambda below=below, **given: called.append(below))
    for line in EXAMPLES[path]:
        code, _, err = command_line(*shlex.split(line)[1:])
        assert code == 0 and called.pop().startswith(path) and len(line) < 105, err


def test_no_group_or_example_is_of_what_is_gone():
    names = {p.name for _, each in commands() for p in each.params}
    assert [n for group in GROUPS.values() for n in group.split() if n.rpartition(".")[2] not in names] == []
    assert set(EXAMPLES) == {"", *NAMES}


@pytest.mark.parametrize(
    "args, message",
    [
        (("generate", "demo", "--speculate", "eagle"), "--speculate takes off, mtp or lookup; got 'eagle'"),
        (("plan", "demo", "--kv-memory", "disk"), "--kv-memory takes device or host; got 'disk'"),
        (("convert", "a", "b", "--to", "int3"), "--to takes official, nvfp4, transformers or bf16; got 'int3'"),
        (("audit", "demo", "--numerics", "fp7"), "--numerics takes fp32, native, qat or qat:fp32; got 'fp7'"),
        (("recall", "demo", "--index-cache", "int2"), "--index-cache takes auto, bf16, fp8, fp4 or mxfp8; got 'int2'"),
        (("fidelity", "demo", "--effort", "none"), "--effort takes quick, standard or thorough; got 'none'"),
        (("termination", "demo", "--backend", "x"), "--backend takes auto, reference, cpu or triton; got 'x'"),
        (("regime", "measure", "--model", "mla"), "--model takes gqa or csa; got 'mla'"),
        (("audit", "demo", "--fail-on", "pass"), "--fail-on takes fail, vacuous or warn; got 'pass'"),
        (("genrate",), "No such command 'genrate'. Did you mean 'generate'?"),
        (("generate", "demo", "--max-tokens", "3"), "No such option: --max-tokens"),
        (("convert", "demo"), "Missing argument 'dst'"),
        (("generate", "nowhere", "--prompt", "a"), "nowhere"),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_an_error_names_the_choices(command_line, args, message):
    code, out, err = command_line(*args)
    assert code == 2 and out == "" and err.startswith("error: ") and err.count("\n") == 1
    assert message.lower() in err.lower()


def test_the_shell_completes_commands_and_choices(monkeypatch, command_line):
    assert all(option in command_line("--help")[1] for option in ("--install-completion", "--show-completion"))
    monkeypatch.setenv("_DSV4_COMPLETE", "complete_bash")
    for words, expected in (("dsv4 ge", ["generate"]), ("dsv4 generate --speculate l", ["lookup"])):
        monkeypatch.setenv("COMP_WORDS", words)
        monkeypatch.setenv("COMP_CWORD", str(len(words.split()) - 1))
        assert command_line()[1].split() == expected


def test_threads_are_the_user_s_else_one_for_small_models(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "6")
    assert thread_count(64, None, 6) == 6 and thread_count(64, 3, 6) == 3
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr("dsv4.runtime.threads.usable_processors", lambda: 4)
    assert thread_count(SMALL - 1, None, 64) == 1 and thread_count(SMALL, None, 64) == 4
    assert thread_count(None, None, 2) == 2 and thread_count(SMALL, 5, 64) == 5


@pytest.mark.parametrize("asked, threads", [((), 1), (("--threads", "3"), 3)], ids=("by default", "as asked"))
@pytest.mark.parametrize("command", ["generate", "batch"])
def test_a_command_computes_with_so_many_threads(
    command_line, monkeypatch, official, tmp_path, command, asked, threads
):
    """Of a model of hidden size below 1024, whatever torch itself would take."""
    import torch

    from dsv4.model.causal import CausalLM

    seen, append = set(), CausalLM.append
    monkeypatch.setattr(
        CausalLM, "append", lambda self, *a, **k: seen.add(torch.get_num_threads()) or append(self, *a, **k)
    )
    monkeypatch.delenv("OMP_NUM_THREADS")
    (tmp_path / "asked").write_text('{"token_ids": [5, 6], "max_tokens": 2}\n')
    given = {
        "generate": ("generate", official, "--token-ids", "5,6", "--max-new-tokens", "2"),
        "batch": ("batch", tmp_path / "asked", "--checkpoint", official),
    }
    with limited_threads(None, 2):
        code, _, err = command_line(*given[command], *asked)
        assert code == 0 and seen == {threads} and torch.get_num_threads() == 2, err
