"""``minigpt bench``: what the cache buys, on this machine, with this model."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from minigpt.cli.options import CheckpointOption, DeviceOption, JsonOption, ThreadsOption
from minigpt.config import DEFAULT_PRESET, PRESETS, GPTConfig, find_preset

if TYPE_CHECKING:
    from minigpt.bench import Agreement, PositionTimes, TextTimes
    from minigpt.model import GPT

# Of the random model, that of tiny Shakespeare; it hardly matters for speed.
VOCAB_SIZE = 65


def bench(
    checkpoint: CheckpointOption = None,
    preset: Annotated[
        str | None,
        typer.Option(
            "--preset",
            help=f"Measure random weights of this shape instead: {', '.join(PRESETS)}. Default without any run:"
            f" {DEFAULT_PRESET}.",
            show_default=False,
        ),
    ] = None,
    device: DeviceOption = "auto",
    threads: ThreadsOption = None,
    json: JsonOption = False,
) -> None:
    """Time writing with the cache and by recompute, after checking that both write the same."""
    if checkpoint is not None and preset is not None:
        raise typer.BadParameter("a checkpoint has a shape of its own: leave out --preset", param_hint="--preset")
    from minigpt import console
    from minigpt.bench import agreement, measure_positions, measure_text, positions, random_model
    from minigpt.checkpoint import load
    from minigpt.device import choose_device, set_threads
    from minigpt.runs import find_checkpoint, runs

    chosen_device = choose_device(device)
    used_threads = set_threads(threads)
    if preset is None and (checkpoint is not None or runs()):
        path = find_checkpoint(checkpoint)
        model, name = load(path, chosen_device).model, str(path)
    else:
        preset = preset or DEFAULT_PRESET
        config = GPTConfig(vocab_size=VOCAB_SIZE, **find_preset(preset).model)
        model, name = random_model(config).to(chosen_device), f"random weights of preset {preset}"
    config = model.config

    checked: Agreement | None = None
    rows: list[PositionTimes] = []
    text: TextTimes | None = None
    at = positions(config)
    try:
        # Every measurement moves the bar by one: the check, the positions, the text.
        with console.steps_bar(len(at) + 2) as bar:
            checked = agreement(model, config.receptive_field + config.window)
            bar.update(1)
            for row in measure_positions(model, at):
                rows.append(row)
                bar.update(1)
            text = measure_text(model)
            bar.update(1)
    finally:
        # Also what an interrupted run has measured so far.
        _show(model, name, used_threads, checked, rows, text, json)


def _show(
    model: GPT,
    name: str,
    threads: int,
    checked: Agreement | None,
    rows: list[PositionTimes],
    text: TextTimes | None,
    json: bool,
) -> None:
    from minigpt import console

    setting = _setting(model, name, threads)
    if json:
        console.write_json(
            {
                **setting,
                "agreement": asdict(checked) if checked else None,
                "positions": [asdict(row) for row in rows],
                "text": asdict(text) if text else None,
            }
        )
        return
    config = model.config
    console.write(
        f"model    {name}\n"
        f"         {setting['parameters']:,} parameters, {config.n_layer} layers, {config.n_head} heads,"
        f" {config.n_embd} channels, window {config.window}\n"
        f"machine  {setting['machine']}\n"
        f"         {setting['device']}, {threads} thread{'s' * (threads > 1)}, {setting['dtype']},"
        f" torch {setting['torch']}\n"
        f"cache    {setting['cache_bytes_per_layer']:,} bytes a layer, {setting['cache_bytes']:,} in all, always\n"
    )
    if checked:
        same = "the same characters" if checked.same_ids else "NOT the same characters"
        console.write(
            f"check    both write {same} ({checked.characters:,}); largest logit gap {checked.logit_gap:.1e}\n"
        )
    if rows:
        console.write("\n")
        console.write_table(
            ["position", "prefill", "cache", "no cache", "ratio", "cache", "no cache", "ratio"],
            [
                [
                    f"{row.position:,}",
                    f"{row.prefill_ms:.2f}",
                    f"{row.cached_ms:.2f}",
                    f"{row.recomputed_ms:.2f}",
                    f"{row.recomputed_ms / row.cached_ms:.1f}",
                    _millions(row.cached_work),
                    _millions(row.recomputed_work),
                    f"{row.recomputed_work / row.cached_work:.1f}",
                ]
                for row in rows
            ],
            title="One character at a position: milliseconds, and million multiply-adds",
        )
        console.write(
            f"\nThe cache computes one position and reads at most window = {config.window} keys a layer.\n"
            "Without it every position that can matter is computed: all of them up to the\n"
            f"receptive field of {config.receptive_field:,} characters, from there on just as many as that.\n"
        )
    if text:
        console.write(
            f"{text.characters:,} characters: {text.cached_s:.2f} s with the cache, {text.recomputed_s:.2f} s"
            f" by recompute, {text.recomputed_s / text.cached_s:.1f} times as long\n"
        )


def _setting(model: GPT, name: str, threads: int) -> dict[str, Any]:
    import torch

    cache_bytes = model.new_cache().nbytes
    weight = model.lm_head.weight
    return {
        "model": name,
        "parameters": model.n_params,
        "config": asdict(model.config),
        "receptive_field": model.config.receptive_field,
        "machine": _machine(),
        "device": str(weight.device),
        "threads": threads,
        "dtype": str(weight.dtype).removeprefix("torch."),
        "torch": torch.__version__,
        "cache_bytes": cache_bytes,
        "cache_bytes_per_layer": cache_bytes // model.config.n_layer,
    }


def _machine() -> str:
    """The processor's name and number of cores, as well as this system tells."""
    import os
    import platform
    from pathlib import Path

    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                name = line.partition(":")[2].strip()
                break
    return f"{name}, {os.cpu_count()} cores, {platform.system()}"


def _millions(number: int) -> str:
    return f"{number / 1e6:,.2f}"
