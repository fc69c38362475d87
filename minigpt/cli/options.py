"""Options that several commands share, and what groups of commands have in common."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

CheckpointOption = Annotated[
    str | None,
    typer.Option("--checkpoint", help="A run name, a run folder or a model file. Default: the newest run."),
]
DeviceOption = Annotated[str, typer.Option("--device", help="auto, cpu, cuda or mps.")]
ThreadsOption = Annotated[
    int | None,
    typer.Option("--threads", min=1, help="CPU threads. Default: one a core."),
]
EncodingOption = Annotated[str, typer.Option("--encoding", help="Encoding of the text.")]
PromptOption = Annotated[
    str | None,
    typer.Option("--prompt", "-p", help="Text to look at. Default: what the model itself writes with seed 0."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else on stdout.")]


class Commands(TyperGroup):
    """A group of commands whose help is quick."""

    def get_help_option(self, ctx: Any) -> Any:
        # Typer leaves its default unset, and imports all of pydantic to find out what that means.
        option = super().get_help_option(ctx)
        if option is not None:
            option.default = False
        return option
