"""README, docs and recipes: their commands parse, their links lead somewhere, the files that they name are there."""

import json
import re
import shlex
from pathlib import Path

import pytest
import typer

from dsv4.commands.cli import app
from dsv4.lm_eval.__main__ import words as lm_eval_words
from dsv4.lm_eval.arguments import arguments_named

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", *sorted(map(str, ROOT.glob("docs/*.md"))))
]
BESIDE_CODE = [f for folder in ("dsv4", "kernels", "probes", "demo", "demo_gqa") for f in (ROOT / folder).rglob("*.md")]
STANDS_FOR = {"CHECKPOINT": "demo", "REQUESTS.jsonl": "audits/batch/demo/cpu/demo_pressure.jsonl"}
SOURCES = ("dsv4/", "kernels/", "loaders/", "probes/", "scripts/", "tests/", "audits/", "docs/", "demo/", "demo_gqa/")


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def commands(path: Path) -> list[str]:
    """Lines of fenced blocks, and code within lines, that call something; without comments."""
    text = path.read_text()
    fenced = re.findall(r"^```(?:bash|)\n(.*?)^```", text, re.M | re.S)
    lines = [line for block in fenced for line in block.split("\n")]
    lines += re.findall(r"`((?:dsv4|python|make) [^`]+)`", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S))
    lines = [re.sub(r"\s+#.*", "", " ".join(line.split("\n"))).strip() for line in lines]
    return [line for line in lines if line.split(" ")[0] in ("dsv4", "python", "make")]


EVERY = [(path, line) for path in PAGES for line in commands(path)]
CALLS = [pytest.param(path, line, id=f"{name(path)}: {line}") for path, line in EVERY]


def of(tool: str) -> list:
    return [call for call in CALLS if call.values[1].startswith(f"{tool} ")]


def test_pages_have_commands():
    assert len(of("dsv4")) > 40 and len(of("python")) > 8 and len(of("make")) >= 2


def parsed(arguments: list[str]):
    """The context of the command that they name, as the command line reads it; nothing runs. By names, since typer may
    bring a click of its own."""
    command, context, rest = typer.main.get_command(app), None, arguments
    while True:
        if hasattr(command, "commands") and not rest:
            return context
        context = command.make_context(command.name, list(rest), parent=context)
        if not hasattr(command, "commands"):
            return context
        _, command, rest = command.resolve_command(context, [*context._protected_args, *context.args])


@pytest.mark.parametrize("path, line", of("dsv4"))
def test_every_dsv4_command_parses(path, line, monkeypatch):
    monkeypatch.chdir(ROOT)
    words = [STANDS_FOR.get(word, word) for word in shlex.split(line)][1:]
    if words[0].startswith("--"):  # such options of `dsv4` itself act as soon as they are read
        assert words[0] in {option for parameter in typer.main.get_command(app).params for option in parameter.opts}
        return
    alone = all(re.fullmatch(r"[a-z-]+", word) for word in words)  # a name in a sentence: `dsv4 audit selftest`
    try:
        assert parsed(words) is not None
    except Exception as error:
        assert alone and type(error).__name__ == "MissingParameter", f"{line}: {error}"


def test_a_command_that_is_none_does_not_parse():
    for words in (["generate", "demo", "--no-such-option"], ["no-such-command"], ["plan", "flash", "--max-context"]):
        with pytest.raises(Exception) as error:
            parsed(words)
        assert hasattr(error.value, "exit_code")  # a usage error


@pytest.mark.parametrize("path, line", of("python"))
def test_every_python_command_calls_what_is_there(path, line):
    words = shlex.split(line)
    if words[1] == "-m":
        first = words[2].removeprefix("dsv4.").replace(".", "/")
        if words[2] in ("pytest", "dsv4", "pip", "dsv4.lm_eval"):
            return
        source = next(f for f in (ROOT / f"{first}.py", ROOT / first / "__main__.py") if f.is_file())
    else:
        source = ROOT / words[1]
    text = source.read_text() + (ROOT / "probes" / "main.py").read_text() * words[
        -1 if len(words) < 3 else 2
    ].startswith("dsv4.probes")
    text += (ROOT / "scripts" / "training" / "stretch.py").read_text() * ("train" in source.name)
    for option in (word.split("=")[0] for word in words if word.startswith("--")):
        assert f'"{option}"' in text, f"{name(source)} has no {option}"


@pytest.mark.parametrize("path, line", [call for call in of("python -m dsv4.lm_eval") if "--" in call.values[1]])
def test_every_lm_eval_command_parses(path, line):
    """By lm_eval's own command line, and its model arguments by dsv4."""
    parser = pytest.importorskip("lm_eval._cli.harness").HarnessCLI()._parser
    found = parser.parse_args(lm_eval_words(shlex.split(line)[3:]))
    assert arguments_named(found.model_args).checkpoint == "CHECKPOINT"


@pytest.mark.parametrize("path, line", of("make"))
def test_every_make_command_has_its_target(path, line):
    makefile = (ROOT / "Makefile").read_text()
    for target in (word for word in line.split()[1:] if "=" not in word):
        assert re.search(rf"^{re.escape(target)}:", makefile, re.M), target


def anchors(path: Path) -> set[str]:
    """Anchors of its headings, as GitHub makes them."""
    heads = re.findall(r"^#+ (.*)", path.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("path", [*PAGES, *BESIDE_CODE], ids=name)
def test_every_link_leads_somewhere(path):
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text()):
        if re.match(r"https?:|mailto:", target):
            continue
        file, _, anchor = target.partition("#")
        there = (path.parent / file).resolve() if file else path
        assert there.exists(), f"{name(path)}: {target}"
        assert not anchor or anchor in anchors(there), f"{name(path)}: {target}"


@pytest.mark.parametrize("path", [*PAGES, *(f for f in BESIDE_CODE if f.name == "MODEL_CARD.md")], ids=name)
def test_every_file_that_is_named_is_there(path):
    for code in re.findall(r"`([^`\n]+)`", path.read_text()):
        if (
            code.startswith(SOURCES)
            and re.fullmatch(r"[\w./-]+", code)
            and not re.search(r"\b(OP|[A-Z]{4,})\b|_NAME|NAME", code)
        ):
            assert (ROOT / code).exists(), f"{name(path)}: {code}"


# ---- what really runs ------------------------------------------------------------------------------------------


def test_sizes_of_the_published_configurations(command_line):
    """3 s and more: three plans list every tensor of models with 284B and 1.6T parameters."""
    page = (ROOT / "docs" / "run.md").read_text()
    rows = re.findall(r"^\| `dsv4 (plan [^`]+)` \| ([\d,]+) B [^|]*\| ([\d,]+) B [^|]*\|", page, re.M)
    assert len(rows) == 3
    for words, *figures in rows:
        _, out, _ = command_line(*words.split(), "--json")  # exit code 1 may mean that it does not fit here
        found = json.loads(out)
        assert [f"{found[key]:,}" for key in ("weights_bytes", "cache_bytes")] == figures, words


def test_the_library_page_runs(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    (code,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / "library.md").read_text(), re.M | re.S)
    exec(compile(code, "docs/library.md", "exec"), {})
    assert "linear" in capsys.readouterr().out


def test_the_kernel_of_the_run_page_runs(command_line, tmp_path):
    (code,) = re.findall(r"^```python\n(# kernels\.py\n.*?)^```", (ROOT / "docs" / "run.md").read_text(), re.M | re.S)
    (tmp_path / "kernels.py").write_text(code)
    asked = ("generate", ROOT / "demo", "--token-ids", "5,6,7", "--max-new-tokens", "3", "--numerics", "fp32", "--json")
    code, out, err = command_line(*asked, "--kernel", f"rms_norm={tmp_path / 'kernels.py'}:rms_norm")
    assert code == 0 and err.endswith("through kernels.py:rms_norm, and through nothing else\n")
    assert json.loads(out)["token_ids"] == json.loads(command_line(*asked)[1])["token_ids"]


def test_the_regime_page_runs(command_line, tmp_path):
    for start, file, goal in (("map", "regime_h200", 0), ("steps", "regime_steps_qwen2_5_7b_h100", 1)):
        (line,) = [line for path, line in EVERY if line.startswith(f"dsv4 regime {start} audits/")]
        words = shlex.split(line, comments=True)[1:]
        words = [str(ROOT / word) if word.startswith("audits/") else word for word in words]
        code, out, _ = command_line(*words, "--out", tmp_path)
        assert code == goal and (tmp_path / f"{file}.json").is_file() and ("FAILED" in out) is bool(goal)
