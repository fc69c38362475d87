"""The command line: one file a command, and here what holds for all of them.

Only this package and ``console.py`` know typer, rich and tqdm. A command imports torch inside its body, so that
``--help`` answers at once.
"""

from __future__ import annotations

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
from minigpt.errors import MinigptError


class _Commands(TyperGroup):
    """Turns what a user can mend into one line on stderr and exit code 1, in one place; bugs keep their traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except MinigptError as error:
            typer.echo(f"minigpt: {error}", err=True)
            raise typer.Exit(1) from None


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
    # A terminal that cannot show a character gets an escape for it instead of a traceback.
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    app(prog_name="minigpt")
