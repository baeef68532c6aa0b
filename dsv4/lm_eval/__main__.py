"""lm_eval's command line with `--model dsv4`. Errors are one line on stderr and exit code 2, as of `dsv4`."""

import importlib.util
import sys
import traceback

from dsv4.commands.cli import guarded
from dsv4.errors import InputError

NEEDED = "lm-eval>=0.4.12"  # as in pyproject.toml
OTHERS = ("ls", "validate", "-h", "--help")  # lm_eval's, which run no model


def run() -> None:
    """Run lm_eval with the words of the command line. Raises InputError without lm_eval, for another model, and for
    what lm_eval refuses before it evaluates."""
    if importlib.util.find_spec("lm_eval") is None:
        raise InputError(f'lm_eval is not installed; run: pip install "{NEEDED}"')
    sys.argv = ["python -m dsv4.lm_eval", *words(sys.argv[1:])]
    try:
        from lm_eval.__main__ import cli_evaluate

        import dsv4.lm_eval.model  # noqa: F401  registers the model
    except ImportError as error:
        raise InputError(f'lm_eval cannot be used ({error}); run: pip install "{NEEDED}"') from None
    try:
        cli_evaluate()
    except (ValueError, TypeError, OSError) as error:
        if any(frame.name == "simple_evaluate" for frame in traceback.extract_tb(error.__traceback__)):
            raise
        raise InputError(f"lm_eval: {error}") from None


def words(given: list[str]) -> list[str]:
    """The command line that lm_eval gets; its own default device would be a GPU. Raises InputError for another
    model."""
    if given[:1] and given[0] in OTHERS:
        return given
    rest = given[given[:1] == ["run"] :]
    named = [word.partition("=")[0] for word in rest]
    for word, name, following in zip(rest, named, [*rest[1:], ""]):
        model = word.partition("=")[2] or following
        if name in ("--model", "-M") and model != "dsv4":
            raise InputError(f"--model {model} was given; python -m dsv4.lm_eval runs dsv4: leave it out")
    device = [] if {"--device", "--config", "-C"} & set(named) else ["--device", "cpu"]
    return ["run", "--model", "dsv4", *device, *rest] if rest else ["run", "--help"]


if __name__ == "__main__":
    guarded(run)
