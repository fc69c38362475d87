"""``minigpt explain scale``: why scores are divided by sqrt(head size), in random numbers and in a model."""

from __future__ import annotations

import html
from typing import TYPE_CHECKING, Annotated, Any

import typer

from minigpt.cli.options import CheckpointOption, JsonOption, PromptOption
from minigpt.cli.save import Page, SaveOption, check_save, save

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from rich.console import Console

    from minigpt.checkpoint import Checkpoint
    from minigpt.explain.scale import Measured, Softmaxes

# Of the text that the model writes to look at its own queries and keys in it.
LENGTH = 128
# Longer texts would need much memory, for all scores of a layer at once.
MOST_CHARS = 1024
# Columns that the whole table of softmaxes needs.
WHOLE_TABLE = 60
PICTURE_SIZE = (11.0, 4.0)

# A table: its title, the two lines of each column's heading, and its rows; an empty row is a gap.
_Table = tuple[str, "Sequence[str]", "Sequence[Sequence[str]]"]


def scale(
    prompt: PromptOption = None,
    checkpoint: CheckpointOption = None,
    seed: Annotated[
        int, typer.Option("--seed", "-s", min=0, max=2**64 - 1, help="Of the random queries and keys.")
    ] = 0,
    json: JsonOption = False,
    save_as: SaveOption = None,
) -> None:
    """See why scores are divided by sqrt(head size): their variance, the softmax, and its gradient.

    Random queries and keys of variance 1, for head sizes from 4 to 256, and below them those of each layer of a model.
    Without a model the random ones are shown alone.

    Gradient is how much of a gradient gets through the softmax to the scores: the Frobenius norm of its Jacobian,
    diag(p) - p p^T, from 0 to 0.5, averaged over queries. Starved are queries with less than 0.01.
    """
    check_save(save_as, draws_pages=True)

    from minigpt import console
    from minigpt.cli.explain.screen import screen
    from minigpt.explain.recording import record
    from minigpt.explain.scale import experiment, measure_layers
    from minigpt.runs import CHECKPOINTS, runs

    loaded, text = None, ""
    layers: list[Measured] = []
    if checkpoint is None and prompt is None and not runs():
        console.note(
            f"there is no model to measure, for there are no runs in {CHECKPOINTS.resolve()}: train one with 'minigpt"
            " train', or give one with --checkpoint"
        )
    else:
        loaded, text = _given(checkpoint, prompt)
        layers = measure_layers(record(loaded.model, loaded.tokenizer.encode(text)))
    rows = experiment(seed)
    data = _data(seed, rows, loaded, text, layers)
    if json:
        console.write_json(data)
    else:
        _show(screen(), rows, layers)
    save(
        save_as,
        "Why scores are divided by sqrt(head size)",
        data,
        lambda figure: _draw(figure, rows, layers),
        lambda: _page(rows, layers),
        size=PICTURE_SIZE,
    )


def _given(checkpoint: str | None, prompt: str | None) -> tuple[Checkpoint, str]:
    from minigpt.cli.explain.given import given_model, given_text
    from minigpt.errors import PromptError

    loaded = given_model(checkpoint)
    text = given_text(loaded, prompt, LENGTH)
    if len(text) > MOST_CHARS:
        raise PromptError(f"the prompt has {len(text):,} characters, and at most {MOST_CHARS:,} are measured: cut it")
    if (keys := min(len(text), loaded.model.config.window)) < 2:
        raise PromptError(
            f"no position reads more than {keys} key, so that there is no softmax to measure: give"
            + (" a longer --prompt" if loaded.model.config.window > 1 else " a --checkpoint with a window above 1")
        )
    return loaded, text


def _data(seed: int, rows: list[Measured], loaded: Checkpoint | None, text: str, layers: list[Measured]) -> Any:
    from dataclasses import asdict

    from minigpt.explain.scale import KEYS, LOGITS, LOGITS_FACTOR, SETS, STARVED, sharpened

    def measured(row: Measured) -> dict[str, Any]:
        return asdict(row) | {"var_independent": row.var_independent}

    return {
        "seed": seed,
        "queries": SETS * KEYS,
        "keys": KEYS,
        "starved_below": STARVED,
        "logits": {
            "values": LOGITS,
            "softmax": sharpened(1),
            "factor": LOGITS_FACTOR,
            "softmax_times_factor": sharpened(LOGITS_FACTOR),
        },
        "experiment": [measured(row) for row in rows],
        "model": {
            "checkpoint": str(loaded.path),
            "prompt": text,
            "window": loaded.model.config.window,
            "layers": [{"layer": n} | measured(row) for n, row in enumerate(layers, 1)],
        }
        if loaded
        else None,
    }


# In words and tables


def _variances(rows: list[Measured], layers: list[Measured]) -> _Table:
    """The theory is what `Measured.var_independent` is with variances of exactly 1, for random queries and keys."""

    def cells(name: str, row: Measured, theory: float) -> list[str]:
        return [
            name,
            f"{row.var_q:.3f}",
            f"{row.var_k:.3f}",
            f"{row.var_scores:.2f}",
            f"{theory:.2f}",
            f"{row.var_scaled:.3f}",
        ]

    return (
        "Variance of scores",
        ("head\nsize", "\nq", "\nk", "\nq k^T", "in\ntheory", "\nscaled"),
        [
            *(cells(str(row.head_size), row, row.head_size) for row in rows),
            *([[]] if layers else []),
            *(cells(f"layer {n}", row, row.var_independent) for n, row in enumerate(layers, 1)),
        ],
    )


def _softmaxes(rows: list[Measured], layers: list[Measured], *, whole: bool) -> _Table:
    """What the softmax makes of them; not whole is without the last two columns."""

    def both(row: Measured, shown: Callable[[Softmaxes], str]) -> list[str]:
        return [shown(row.with_scale), shown(row.without_scale)]

    def cells(name: str, row: Measured) -> list[str]:
        return [
            name,
            *both(row, lambda each: f"{each.largest:.3f}"),
            *both(row, lambda each: f"{each.gradient:.3f}"),
            *(both(row, lambda each: f"{each.starved:.1%}") if whole else []),
        ]

    headings = ("largest\nscaled", "weight\nraw", "gradient\nscaled", "\nraw", "starved\nscaled", "\nraw")
    return (
        "The softmax, of scaled and of raw scores",
        ("head\nsize", *(headings if whole else headings[:4])),
        [
            *(cells(str(row.head_size), row) for row in rows),
            *([[]] if layers else []),
            *(cells(f"layer {n}", row) for n, row in enumerate(layers, 1)),
        ],
    )


def _five_logits() -> _Table:
    from minigpt.explain.scale import LOGITS, LOGITS_FACTOR, sharpened

    return (
        f"Five logits x, softmax(x), softmax({LOGITS_FACTOR} x)",
        ("\n", *["\n"] * len(LOGITS)),
        [
            ["x", *(f"{logit:g}" for logit in LOGITS)],
            ["1 x", *(f"{weight:.4f}" for weight in sharpened(1))],
            [f"{LOGITS_FACTOR} x", *(f"{weight:.4f}" for weight in sharpened(LOGITS_FACTOR))],
        ],
    )


def _about(rows: list[Measured], layers: list[Measured]) -> list[str]:
    """What the tables are of."""
    from minigpt.explain.scale import KEYS, STARVED

    sentences = [
        f"By head size, {rows[0].rows:,} random queries and keys of variance 1; each query reads {KEYS} keys.",
    ]
    if layers:
        sentences.append(
            f"By layer, the model's own (head size {layers[0].head_size}), of all heads and {layers[0].rows:,} queries"
            f" that read {layers[0].keys:.1f} keys on average; their theory is head size times the variances of q and"
            " k, as if all were independent."
        )
    sentences.append(
        "Gradient: how much gets through the softmax to the scores, the Frobenius norm of diag(p) - p p^T, at most 0.5;"
        f" starved: queries with less than {STARVED}."
    )
    return sentences


def _seen(rows: list[Measured], layers: list[Measured]) -> list[str]:
    """What the numbers say, whichever they are."""
    first, last = rows[0], rows[-1]
    growth = last.var_scores / first.var_scores
    sentences = [
        f"From head size {first.head_size} to {last.head_size} the variance of q k^T becomes {growth:.1f} times as"
        f" large (in theory {last.head_size / first.head_size:.0f}); scaled it is"
        f" {_span([row.var_scaled for row in rows], '.3f')} (in theory 1).",
        f"At head size {last.head_size} the largest weight is {last.with_scale.largest:.3f} with the scale and"
        f" {last.without_scale.largest:.3f} without, the gradient {last.with_scale.gradient:.3f} and"
        f" {last.without_scale.gradient:.3f}, and of the queries {last.with_scale.starved:.1%} and"
        f" {last.without_scale.starved:.1%} are starved.",
    ]
    if layers:
        less = sum(layer.without_scale.gradient < layer.with_scale.gradient for layer in layers)
        sentences += [
            "In the model a norm gives each q and k a mean square of 1, and learnt gains change it: the variance of q"
            f" is {_span([layer.var_q for layer in layers], '.3f')}, that of k"
            f" {_span([layer.var_k for layer in layers], '.3f')}.",
            "Without the scale, which it has learnt with, its largest weight would be"
            f" {_span([layer.without_scale.largest for layer in layers], '.3f')} instead of"
            f" {_span([layer.with_scale.largest for layer in layers], '.3f')}, and the gradient smaller in {less} of"
            f" {len(layers)} layers.",
        ]
    return sentences


def _span(values: list[float], form: str) -> str:
    low, high = (format(value, form) for value in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def _show(console: Console, rows: list[Measured], layers: list[Measured]) -> None:
    from minigpt.cli.explain.screen import print_lines, print_sentences, table_lines

    whole = console.width >= WHOLE_TABLE
    print_sentences(console, *_about(rows, layers))
    if not whole:
        print_sentences(console, f"(The two columns of starved queries need {WHOLE_TABLE} columns and are left out.)")
    for table in (_variances(rows, layers), _softmaxes(rows, layers, whole=whole), _five_logits()):
        print_lines(console, "", *table_lines(*table, between="  " if whole else " "))
    print_lines(console, "")
    print_sentences(console, *_seen(rows, layers))


# In pictures


def _draw(figure: Figure, rows: list[Measured], layers: list[Measured]) -> None:
    from minigpt.plot import COLOURS, FAINT

    def points(axes: Axes, values: Callable[[Measured], float], kind: str, label: str) -> None:
        """One curve over head sizes, and the layers of the model beside it."""
        colour, marker = {"with": (COLOURS[0], "o"), "without": (COLOURS[1], "s")}[kind]
        sizes = [row.head_size for row in rows]
        axes.plot(
            sizes,
            [values(row) for row in rows],
            color=colour,
            marker=marker,
            markersize=5,
            label=label,
            gid=f"{kind}-{axes.get_title(loc='left')}",
        )
        if layers:
            axes.plot(
                [layer.head_size for layer in layers],
                [values(layer) for layer in layers],
                color=colour,
                marker=marker,
                markersize=9,
                markerfacecolor="none",
                markeredgewidth=1.5,
                linestyle="none",
                label=f"the model's layers ({layers[0].keys:.1f} keys), {label}",
            )

    variance, largest, through = figure.subplots(1, 3)
    variance.set_title("variance of the scores", loc="left")
    largest.set_title("largest weight of a query", loc="left")
    through.set_title("gradient through the softmax", loc="left")
    sizes = [row.head_size for row in rows]
    # Broad, to be seen under what is measured.
    theory: dict[str, Any] = {"color": FAINT, "linewidth": 8, "solid_capstyle": "round"}
    variance.plot(sizes, sizes, label="theory: head size, and 1", gid="theory", **theory)
    variance.plot(sizes, [1] * len(sizes), **theory)
    points(variance, lambda row: row.var_scaled, "with", "scaled")
    points(variance, lambda row: row.var_scores, "without", "raw")
    for axes, values in (
        (largest, lambda each: each.largest),
        (through, lambda each: each.gradient),
    ):
        points(axes, lambda row, values=values: values(row.with_scale), "with", "scaled")  # type: ignore[misc]
        points(axes, lambda row, values=values: values(row.without_scale), "without", "raw")  # type: ignore[misc]
    variance.set_yscale("log")
    largest.set_ylim(0, 1)
    through.set_ylim(0, 0.5)
    for axes in (variance, largest, through):
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [str(size) for size in sizes])
        axes.minorticks_off()
        axes.set_xlabel("head size")
    figure.legend(*variance.get_legend_handles_labels(), loc="outside lower center", ncols=5)


def _page(rows: list[Measured], layers: list[Measured]) -> Page:
    from minigpt import plot
    from minigpt.cli.explain.screen import table_html

    tables = (_variances(rows, layers), _softmaxes(rows, layers, whole=True), _five_logits())
    paragraphs = [*_seen(rows, layers), *_about(rows, layers)]
    picture = plot.svg(lambda figure: _draw(figure, rows, layers), *PICTURE_SIZE)
    return Page(
        f"<figure>{picture}</figure>\n"
        + "\n".join(f"<p>{html.escape(paragraph)}</p>" for paragraph in paragraphs)
        + "\n".join(table_html(*table) for table in tables)
    )
