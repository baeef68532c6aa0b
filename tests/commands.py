"""`dsv4 …` in this process. A new one takes 3 s to import torch."""

import sys

import pytest

from dsv4.commands import cli


def exit_code(*words) -> int:
    """Run `dsv4` with these words; what it prints goes wherever sys.stdout and sys.stderr lead."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as stop:
        patch.setattr(sys, "argv", ["dsv4", *map(str, words)])
        cli.main()
    return stop.value.code or 0
