"""``minigpt explain attention``: which characters each head reads, and how one position comes to read them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from minigpt.cli.explain.given import given_model, given_text
from minigpt.cli.options import CheckpointOption, JsonOption, PromptOption
from minigpt.cli.save import SaveOption, check_save, is_page, save

if TYPE_CHECKING:
    from torch import Tensor

    from minigpt.explain.attention import Attention, Head, Step, Toy

# Characters of the text that the model writes where none is given: so many heat maps of it stand side by side, and so
# many numbers, on 80 columns.
DEFAULT_CHARS = 16
DEFAULT_CHARS_OF_NUMBERS = 8
# Decimals of weights in JSON: as exact as float32 has them.
DECIMALS = 7


def attention(
    prompt: PromptOption = None,
    layer: Annotated[int | None, typer.Option("--layer", help="Only this layer, from 1. Default: all.")] = None,
    head: Annotated[int | None, typer.Option("--head", help="Only this head, from 1. Default: all.")] = None,
    numbers: Annotated[bool, typer.Option("--numbers", help="The weights as numbers of four decimals.")] = False,
    step: Annotated[
        bool, typer.Option("--step", help="Walk through one position: query, scores, scale, mask, softmax, sum.")
    ] = False,
    position: Annotated[
        int | None, typer.Option("--position", help="The position of --step, from 0. Default: the last.")
    ] = None,
    toy: Annotated[
        bool, typer.Option("--toy", help="The chapter's example instead of a model: random vectors, every number.")
    ] = False,
    seed: Annotated[
        int | None, typer.Option("--seed", "-s", min=0, max=2**64 - 1, help="Of --toy. Default: 0.")
    ] = None,
    checkpoint: CheckpointOption = None,
    json: JsonOption = False,
    save_as: SaveOption = None,
) -> None:
    """See what each head reads: the weights of attention, beside the uniform average."""
    if step and numbers:
        raise typer.BadParameter("it shows numbers by itself: leave out --numbers", param_hint="--step")
    if position is not None and not step:
        raise typer.BadParameter("it chooses the position of --step: add that", param_hint="--position")
    # The page of weights draws itself.
    check_save(save_as, draws_pages=step or toy)
    if toy:
        not_for_toy = {
            "--prompt": prompt,
            "--layer": layer,
            "--head": head,
            "--step": step or None,
            "--checkpoint": checkpoint,
        }
        for name, value in not_for_toy.items():
            if value is not None:
                raise typer.BadParameter(f"it has no model and no text: leave out {name}", param_hint="--toy")
        _toy(seed or 0, json, save_as)
        return
    if seed is not None:
        raise typer.BadParameter("only --toy draws numbers: add that", param_hint="--seed")

    from minigpt.explain.attention import explain_attention, explain_step, furthest

    loaded = given_model(checkpoint)
    text = given_text(loaded, prompt, DEFAULT_CHARS_OF_NUMBERS if numbers else DEFAULT_CHARS)
    seen = explain_attention(loaded.model, loaded.tokenizer.encode(text), layer, head)
    if step:
        place = len(text) - 1 if position is None else position
        _step(text, seen, explain_step(seen, furthest(seen, place), place), json, save_as)
    else:
        _weights(text, seen, numbers, json, save_as)


def _weights(text: str, seen: Attention, numbers: bool, json: bool, save_as: str | None) -> None:
    from minigpt import console
    from minigpt.cli.explain import attention_page, attention_picture, attention_text

    if is_page(save_as):
        attention_page.check_length(text)
    # Of a long text they are millions of numbers.
    told = weights_json(text, seen) if json or save_as is not None else None
    if json:
        console.write_json(told)
    else:
        attention_text.show_weights(text, seen, numbers)
    save(
        save_as,
        "What attention reads",
        told,
        lambda figure: attention_picture.draw_weights(figure, text, seen),
        lambda: attention_page.PAGE,
        size=attention_picture.size_of_weights(seen),
    )


def _step(text: str, seen: Attention, taken: Step, json: bool, save_as: str | None) -> None:
    from minigpt import console
    from minigpt.cli.explain import attention_picture, attention_text

    told = step_json(text, seen, taken)
    if json:
        console.write_json(told)
    else:
        attention_text.show_step(text, seen, taken)
    save(
        save_as,
        f"How position {taken.position} reads: layer {taken.layer}, head {taken.head}",
        told,
        lambda figure: attention_picture.draw_step(figure, text, seen, taken),
        size=attention_picture.size_of_step(taken),
    )


def _toy(seed: int, json: bool, save_as: str | None) -> None:
    from minigpt import console
    from minigpt.cli.explain import attention_picture, attention_text
    from minigpt.explain.attention import explain_toy

    toy = explain_toy(seed)
    told = toy_json(seed, toy)
    if json:
        console.write_json(told)
    else:
        attention_text.show_toy(seed, toy)
    save(
        save_as,
        f"Self-attention of random vectors, seed {seed}",
        told,
        lambda figure: attention_picture.draw_toy(figure, toy),
        size=attention_picture.size_of_toy(toy),
    )


def weights_json(text: str, seen: Attention) -> dict[str, Any]:
    """What --json prints and the page holds: all numbers of the heads asked for, as JSON can hold them.

    ``weights[i][j]`` is how much position i reads of position j, and the ``weight`` of the uniform average what
    it gives each of the ``readable`` positions of a row; entropies and departures are in bits, distances in characters.
    """
    return {
        "prompt": text,
        "window": seen.window,
        "head_dim": seen.head_dim,
        "readable": seen.readable.tolist(),
        "uniform": {
            **_summary(seen, seen.uniform),
            "entropy": _rounded(seen.uniform.entropy),
            "weight": _rounded(seen.uniform.weights.diagonal()),
        },
        "heads": [
            {
                "layer": head.layer,
                "head": head.head,
                **_summary(seen, head),
                "entropy": _rounded(head.entropy),
                "weights": _triangle(head.weights, seen.mask),
            }
            for head in seen.heads
        ],
    }


def _summary(seen: Attention, head: Head) -> dict[str, float]:
    return {
        "mean_entropy": float(head.entropy.mean()),
        "mean_departure": float(seen.departure(head).mean()),
        "mean_distance": float(head.distance.mean()),
    }


def step_json(text: str, seen: Attention, taken: Step) -> dict[str, Any]:
    """What --json prints of one position, as JSON can hold it: null stands for minus infinity."""
    masked: list[float] = taken.stages.masked.tolist()
    return {
        "prompt": text,
        "window": seen.window,
        "head_dim": seen.head_dim,
        "layer": taken.layer,
        "head": taken.head,
        "position": taken.position,
        "char": text[taken.position],
        "query": taken.query.tolist(),
        "keys": taken.keys.tolist(),
        "values": taken.values.tolist(),
        "scores": taken.stages.scores.tolist(),
        "scaled": taken.stages.scaled.tolist(),
        "masked": [
            score if readable else None for score, readable in zip(masked, taken.readable.tolist(), strict=True)
        ],
        "weights": taken.stages.weights.tolist(),
        "uniform": seen.uniform.weights[taken.position].tolist(),
        "output": taken.output.tolist(),
        "model_output": taken.model_output.tolist(),
        "gap": taken.gap,
    }


def toy_json(seed: int, toy: Toy) -> dict[str, Any]:
    """What --json prints of the chapter's example: null stands for minus infinity."""
    lower: list[list[bool]] = toy.mask.tolist()
    return {
        "seed": seed,
        "shape": list(toy.x.shape),
        "head_size": toy.q.shape[-1],
        "x": toy.x.tolist(),
        "q": toy.q.tolist(),
        "k": toy.k.tolist(),
        "v": toy.v.tolist(),
        "scores": toy.stages.scores.tolist(),
        "scaled": toy.stages.scaled.tolist(),
        "masked": [
            [
                [score if may else None for score, may in zip(row, may_row, strict=True)]
                for row, may_row in zip(rows, lower, strict=True)
            ]
            for rows in toy.stages.masked.tolist()
        ],
        "weights": toy.stages.weights.tolist(),
        "uniform": toy.uniform.tolist(),
        "entropy": toy.entropy.tolist(),
        "uniform_entropy": toy.uniform_entropy.tolist(),
        "out": toy.out.tolist(),
        "gap": toy.gap,
    }


def _rounded(numbers: Tensor) -> list[Any]:
    rounded: list[Any] = numbers.double().round(decimals=DECIMALS).tolist()
    return rounded


def _triangle(weights: Tensor, mask: Tensor) -> list[list[float]]:
    """Weights as rows; what may not be read is a plain 0, which takes a third of the place."""
    return [
        [weight if readable else 0 for weight, readable in zip(row, may, strict=True)]
        for row, may in zip(_rounded(weights), mask.tolist(), strict=True)
    ]
