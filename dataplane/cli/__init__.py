"""The command line: bare options run the node, subcommands ask it, clean up after it, or show what it does.

Contract: exit codes are 0, all is well; 1, it could not be done, with one line on stderr that says why; 2, the command line
makes no sense. What only one command needs is imported when it runs.
"""

from dataplane.cli.commands import cli, main

__all__ = ["cli", "main"]
