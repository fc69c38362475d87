"""The command line: one file a command, and here what holds for all of them.

Only this package and ``console.py`` know typer, rich and tqdm. A command imports torch inside its body, so that
``--help`` answers at once.
"""

from __future__ import annotations

import io
import os
import sys
from typing import Any

import typer
from typer.core import TyperGroup

from minigpt import __version__
from minigpt.cli.bench import bench
from minigpt.cli.eval import evaluate
from minigpt.cli.generate import generate
from minigpt.cli.info import info
from minigpt.cli.train import train
from minigpt.errors import MinigptError, printable


class _Commands(TyperGroup):
    """Turns what a user can mend into one line on stderr and exit code 1, in one place; bugs keep their traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except MinigptError as error:
            # Names of files may hold anything: escaped, so that one error is one line and colours nothing.
            sys.stderr.write(f"minigpt: {printable(str(error))}\n")
            raise typer.Exit(1) from None

    def get_help_option(self, ctx: Any) -> Any:
        # Typer leaves its default unset, and imports all of pydantic to find out what that means.
        option = super().get_help_option(ctx)
        if option is not None:
            option.default = False
        return option


app = typer.Typer(
    cls=_Commands,
    help="Learn a text with a tiny character-level GPT and continue it, with a KV cache or without: the same text.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(train)
app.command()(generate)
app.command()(bench)
app.command("eval")(evaluate)
app.command()(info)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"minigpt {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(False, "--version", callback=_show_version, is_eager=True, help="Print the version."),
) -> None:
    pass


def main() -> None:
    """The entry point of ``minigpt`` and ``python -m minigpt``."""
    for name in ("stdout", "stderr"):
        # A stream that was closed by the shell takes everything and keeps nothing.
        stream = getattr(sys, name) or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115, PTH123
        setattr(sys, name, stream)
        # A terminal that cannot show a character gets an escape for it instead of a traceback.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    app(prog_name="minigpt")
