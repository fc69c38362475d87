"""Options that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

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
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else on stdout.")]
