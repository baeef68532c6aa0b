"""The command line: one file a command or a group of commands, and what they print. The top layer: nothing imports
it."""
