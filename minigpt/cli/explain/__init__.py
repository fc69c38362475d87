"""``minigpt explain``: the chapter on self-attention, shown in a model of one's own; one file a command."""

from __future__ import annotations

import typer

from minigpt.cli.explain.attention import attention
from minigpt.cli.explain.cache import cache
from minigpt.cli.explain.scale import scale
from minigpt.cli.explain.text import text
from minigpt.cli.options import Commands

explain = typer.Typer(
    cls=Commands,
    help="See attention, the scale and the cache at work in a model.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
explain.command()(attention)
explain.command()(scale)
explain.command()(cache)
explain.command()(text)
