"""The command line: one file a command or a group of commands, and what they print. The top layer: nothing imports
it."""

from dsv4.moved import former

__getattr__ = former(__name__, "dsv4.commands.decode")  # the names that `dsv4.commands` had as a module
