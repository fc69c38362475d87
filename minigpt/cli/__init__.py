"""The command line: one file a command, and here what holds for all of them.

Only this package and ``console.py`` know typer, rich and tqdm. A command imports torch inside its body, so that
``--help`` answers at once.
"""

from __future__ import annotations

import io
import os
import sys
import time
from typing import Any

import typer

from minigpt import __version__
from minigpt.cli.bench import bench
from minigpt.cli.eval import evaluate
from minigpt.cli.explain import explain
from minigpt.cli.generate import generate
from minigpt.cli.info import info
from minigpt.cli.options import Commands
from minigpt.cli.race import race
from minigpt.cli.train import train
from minigpt.errors import MinigptError, printable
from minigpt.parallel import World

# Base of all that typer finds wrong with a command line, which it does not export.
_UsageError: Any = typer.BadParameter.__base__
# How long a process that leaves the telling of an error to another one waits to be ended by torchrun, which ends all
# others when the first one goes: the one that tells must not be ended before it has.
SILENT_S = 5.0


class _Minigpt(Commands):
    """Turns what a user can mend into one line on stderr and exit code 1, in one place; bugs keep their traceback."""

    def invoke(self, ctx: Any) -> Any:
        world = ctx.obj = World.from_environment()
        try:
            return super().invoke(ctx)
        except (MinigptError, _UsageError) as error:
            if not world.first_to_fail():
                world.leave()
                time.sleep(SILENT_S)
                raise typer.Exit(1 if isinstance(error, MinigptError) else 2) from None
            if not isinstance(error, MinigptError):
                raise
            # Names of files may hold anything: escaped, so that one error is one line and colours nothing.
            sys.stderr.write(f"minigpt: {printable(str(error))}\n")
            raise typer.Exit(1) from None
        finally:
            world.leave()


app = typer.Typer(
    cls=_Minigpt,
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
app.add_typer(explain, name="explain")
app.command()(race)


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
    """Reads the command line of this process and does what it says."""
    for name in ("stdout", "stderr"):
        # A stream that was closed by the shell takes everything and keeps nothing.
        stream = getattr(sys, name) or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115, PTH123
        setattr(sys, name, stream)
        # A terminal that cannot show a character gets an escape for it instead of a traceback.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    app(prog_name="minigpt")
