"""A group of commands whose list has a whole sentence for each command."""

from __future__ import annotations

import inspect

import click


class Commands(click.Group):
    """A group that lists whole sentences, which click itself would truncate to a line."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands, each with its first sentence, in as many lines as it takes."""
        commands = [(name, self.get_command(ctx, name)) for name in self.list_commands(ctx)]
        rows = [
            (name, summary(command))
            for name, command in commands
            if command is not None and not command.hidden
        ]
        if rows:
            with formatter.section("Commands"):
                formatter.write_dl(rows)


def summary(command: click.Command) -> str:
    """Return the first sentence of a command's help."""
    first = inspect.cleandoc(command.help or "").partition("\n\n")[0]
    sentence, dot, _ = " ".join(first.split()).partition(". ")
    return f"{sentence}{dot.rstrip()}"
