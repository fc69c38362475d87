"""``minigpt bench``: what the cache buys, on this machine, with this model."""

from __future__ import annotations

import html
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from minigpt.cli.options import CheckpointOption, DeviceOption, JsonOption, ThreadsOption
from minigpt.cli.save import Page, SaveOption, check_save, save
from minigpt.config import DEFAULT_PRESET, PRESETS, GPTConfig, find_preset

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.figure import Figure

    from minigpt.bench import Agreement, EngineSpeed, PositionTimes, TextTimes
    from minigpt.model import GPT
    from minigpt.peers import PeerSpeed

# Of the random model, that of tiny Shakespeare; it hardly matters for speed.
VOCAB_SIZE = 65
# Of the picture, in inches.
SIZE = (9.0, 4.0)


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
    against: Annotated[
        str | None,
        typer.Option(
            "--against",
            metavar="NAMES",
            help="Also time other programs with the same weights: transformers, ctranslate2, llama.cpp or several of"
            " them, with commas between (extra 'peers').",
            show_default=False,
        ),
    ] = None,
    device: DeviceOption = "auto",
    threads: ThreadsOption = None,
    save_as: SaveOption = None,
    json: JsonOption = False,
) -> None:
    """Time writing with the cache and by recompute, after checking that both write the same; then every engine."""
    if checkpoint is not None and preset is not None:
        raise typer.BadParameter("a checkpoint has a shape of its own: leave out --preset", param_hint="--preset")
    check_save(save_as, draws_pages=True)
    from minigpt import console
    from minigpt.bench import (
        REPEATS_OF_ENGINES,
        agreement,
        measure_engines,
        measure_positions,
        measure_text,
        positions,
        random_model,
    )
    from minigpt.checkpoint import load
    from minigpt.device import choose_device, set_threads
    from minigpt.engine import fused_reason
    from minigpt.errors import ConfigError
    from minigpt.peers import measure_peers
    from minigpt.runs import find_checkpoint, runs

    peers = _installed(against) if against is not None else []
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
    if peers and (reason := fused_reason(model)):
        raise ConfigError(f"--against compares with the fused engine, which cannot run here: {reason}")

    checked: Agreement | None = None
    rows: list[PositionTimes] = []
    text: TextTimes | None = None
    engines: list[EngineSpeed] = []
    speeds: list[PeerSpeed] = []
    at = positions(config)
    rounds = REPEATS_OF_ENGINES + 1
    try:
        # Every measurement moves the bar by one: the check, the positions, the text, rounds of engines and peers.
        with console.steps_bar(len(at) + 2 + rounds + (rounds if peers else 0)) as bar:
            checked = agreement(model, config.receptive_field + config.window)
            bar.update(1)
            for row in measure_positions(model, at):
                rows.append(row)
                bar.update(1)
            text = measure_text(model)
            bar.update(1)
            for engine in measure_engines(model, used_threads):
                if engine is None:
                    bar.update(1)
                else:
                    engines.append(engine)
            for found in measure_peers(model, peers, used_threads) if peers else ():
                if found is None:
                    bar.update(1)
                else:
                    speeds += found
    finally:
        # Also what an interrupted run has measured so far.
        data = _data(model, name, used_threads, checked, rows, text, engines, speeds)
        if json:
            console.write_json(data)
        else:
            _show(data, config, checked, rows, text, engines, speeds)
        # After one measurement there is no curve yet.
        if len(rows) > 1:
            save(
                save_as,
                "What the cache buys, by position",
                data,
                lambda figure: _draw(figure, rows),
                lambda: _page(data, rows),
                size=SIZE,
            )


def _installed(against: str) -> list[str]:
    """The peers that were asked for, less those that are not installed, which are named."""
    from minigpt import console
    from minigpt.peers import missing

    names = list(dict.fromkeys(name.strip() for name in against.split(",") if name.strip()))
    if not names:
        raise typer.BadParameter("name at least one program", param_hint="--against")
    lacking = {name: missing(name) for name in names}
    for name, packages in lacking.items():
        if packages:
            are = "is" if len(packages) == 1 else "are"
            console.note(
                f"{name} is left out, for {' and '.join(packages)} {are} not installed (pip install 'minigpt[peers]')"
            )
    return [name for name in names if not lacking[name]]


def _data(
    model: GPT,
    name: str,
    threads: int,
    checked: Agreement | None,
    rows: list[PositionTimes],
    text: TextTimes | None,
    engines: list[EngineSpeed],
    speeds: list[PeerSpeed],
) -> dict[str, Any]:
    return {
        **_setting(model, name, threads),
        "agreement": asdict(checked) if checked else None,
        "positions": [asdict(row) for row in rows],
        "text": asdict(text) if text else None,
        "engines": [asdict(engine) for engine in engines],
        "peers": [asdict(speed) for speed in speeds],
    }


def _show(
    setting: dict[str, Any],
    config: GPTConfig,
    checked: Agreement | None,
    rows: list[PositionTimes],
    text: TextTimes | None,
    engines: list[EngineSpeed],
    speeds: list[PeerSpeed],
) -> None:
    from minigpt import console

    threads = setting["threads"]
    console.write(
        f"model    {setting['model']}\n"
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
            f" by recompute, {text.recomputed_s / text.cached_s:.1f} times as long (torch engine)\n"
        )
    if engines:
        console.write("\n")
        console.write_table(
            ["engine", "weights", "threads", "characters a second", "kB a character", "of the limit"],
            [
                [
                    ", ".join(
                        [engine.engine, *["no cache"] * (not engine.cached), *["NOT THE SAME"] * (not engine.same_ids)]
                    ),
                    engine.weights,
                    str(engine.threads),
                    f"{engine.chars_per_s:,.0f}",
                    f"{engine.bytes_per_char / 1e3:,.0f}" if engine.bytes_per_char else "",
                    f"{engine.share_of_limit:.0%}" if engine.share_of_limit else "",
                ]
                for engine in engines
            ],
            title="Every way of writing, from a full cache, in turn; each was checked to write the text of torch",
        )
        console.write(
            "\nA character reads all weights and the cache. The limit is the speed at which this machine\n"
            "sums so many bytes again and again, from whatever cache or memory they sit in.\n"
        )
    if speeds:
        console.write("\n")
        console.write_table(
            [
                "the same network in",
                "weights",
                "threads",
                "characters a second",
                "minigpt, threads",
                "minigpt",
                "ratio",
            ],
            [
                [
                    speed.peer,
                    speed.weights,
                    str(speed.threads),
                    f"{speed.chars_per_s:,.0f}",
                    str(speed.our_threads),
                    f"{speed.our_chars_per_s:,.0f}",
                    f"{speed.our_chars_per_s / speed.chars_per_s:.2f}",
                ]
                for speed in speeds
            ],
            title=f"Windows of {config.window} characters from an empty cache, in turn; weights of as many bits",
        )


def _draw(figure: Figure, rows: Sequence[PositionTimes]) -> None:
    """Milliseconds and multiply-adds of a character by its position, both ways."""
    from matplotlib.ticker import FuncFormatter, LogFormatter, NullLocator

    from minigpt.plot import COLOURS

    times, work = figure.subplots(1, 2)
    at = [row.position for row in rows]
    for way, label, colour, marker in (
        ("cached", "with the cache", COLOURS[0], "o"),
        ("recomputed", "by recompute", COLOURS[1], "s"),
    ):
        for axes, unit, scale in ((times, "ms", 1.0), (work, "work", 1e6)):
            values = [getattr(row, f"{way}_{unit}") / scale for row in rows]
            axes.plot(
                at, values, color=colour, linewidth=1.8, marker=marker, markersize=4, label=label, gid=f"{unit}-{way}"
            )
    times.set_ylabel("milliseconds a character")
    work.set_ylabel("million multiply-adds a character")
    plain = FuncFormatter(lambda value, _: f"{value:,g}")
    for axes in (times, work):
        axes.set_xlabel("position")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(plain)
        axes.yaxis.set_major_formatter(plain)
        # Where there is less than a power of ten, numbers between are named, too.
        axes.yaxis.set_minor_formatter(LogFormatter())
        axes.legend(loc="upper left")


def _page(data: dict[str, Any], rows: Sequence[PositionTimes]) -> Page:
    from minigpt import plot

    cells = "".join(
        f"<tr><td>{row.position:,}</td><td>{row.prefill_ms:.2f}</td><td>{row.cached_ms:.2f}</td>"
        f"<td>{row.recomputed_ms:.2f}</td><td>{row.recomputed_ms / row.cached_ms:.1f}</td>"
        f"<td>{_millions(row.cached_work)}</td><td>{_millions(row.recomputed_work)}</td>"
        f"<td>{row.recomputed_work / row.cached_work:.1f}</td></tr>\n"
        for row in rows
    )
    heads = "".join(
        f"<th>{head}</th>"
        for head in ("position", "prefill", "cache", "no cache", "ratio", "cache", "no cache", "ratio")
    )
    return Page(
        f"<p>{html.escape(data['model'])}: {data['parameters']:,} parameters, window {data['config']['window']},"
        f" receptive field {data['receptive_field']:,}. {html.escape(data['machine'])}; threads {data['threads']},"
        f" torch {html.escape(data['torch'])}.</p>\n"
        f"<figure>{plot.svg(lambda figure: _draw(figure, rows), *SIZE)}</figure>\n"
        '<table>\n<tr><th></th><th colspan="4">milliseconds</th><th colspan="3">million multiply-adds</th></tr>\n'
        f"<tr>{heads}</tr>\n{cells}</table>"
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
