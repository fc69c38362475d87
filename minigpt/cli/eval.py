"""``minigpt eval``: how well a model predicts a text."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Annotated, Any

import typer

from minigpt.cli.options import (
    CheckpointOption,
    DeviceOption,
    EncodingOption,
    JsonOption,
    ThreadsOption,
)

if TYPE_CHECKING:
    from minigpt.checkpoint import Checkpoint
    from minigpt.corpus import Corpus, Ids

# How far the table of positions reaches, in block sizes.
BLOCKS = 10

TRANSLATED_AT_ONCE = 1 << 20


def evaluate(
    corpus: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="CORPUS",
            help="Files, folders of *.txt, '-' for standard input, a URL, or 'shakespeare'. Default: the bundled text.",
            show_default=False,
        ),
    ] = None,
    encoding: EncodingOption = "utf-8",
    everything: Annotated[
        bool, typer.Option("--all", help="Also read the part of the text that the model was trained on.")
    ] = False,
    checkpoint: CheckpointOption = None,
    weights: Annotated[
        str,
        typer.Option("--weights", help="What the weights are rounded to: float32 (as they are), float16 or int8."),
    ] = "float32",
    device: DeviceOption = "auto",
    threads: ThreadsOption = None,
    json: JsonOption = False,
) -> None:
    """Measure how well a model predicts a text, in nats and bits a character, also far past its block size."""
    from minigpt import console
    from minigpt.checkpoint import load
    from minigpt.corpus import load_corpus
    from minigpt.device import choose_device, set_threads
    from minigpt.errors import CorpusError
    from minigpt.evaluation import stream_losses
    from minigpt.runs import find_checkpoint
    from minigpt.weights import round_weights

    set_threads(threads)
    path = find_checkpoint(checkpoint)
    if checkpoint is None:
        console.note(f"with {path.parent.name}, the newest run ({path})")
    loaded = load(path, choose_device(device))
    round_weights(loaded.model, weights)
    text = load_corpus(corpus or [], encoding=encoding, progress=console.bytes_bar("downloading"))
    for sentence in text.notes:
        console.note(sentence)
    raw = text.ids
    if text.sha256 == loaded.facts.corpus_sha256 and not everything:
        raw = text.split(loaded.facts.val_fraction, loaded.model.config.block_size)[1]
        console.note(f"it learnt from {text.name}: only the held-out {len(raw):,} characters are read")
        console.note("(--all reads everything)")
    ids, unknown = _translated(raw, text, loaded)
    if len(ids) < 2:
        raise CorpusError(f"{text.name} has {len(ids)} characters that the model knows, and at least 2 are needed")

    total, count = 0.0, 0
    with console.steps_bar(len(ids) - 1) as bar:
        for losses in stream_losses(loaded.model, ids):
            total += float(losses.sum(dtype="float64"))
            count += len(losses)
            bar.update(len(losses))
    nats = total / count
    result = {
        "characters": count,
        "nats_per_char": nats,
        "bits_per_char": nats / math.log(2),
        "perplexity": math.exp(nats),
        "weights": weights,
        "unknown": sum(unknown.values()),
        "by_position": _by_position(loaded, ids),
    }
    if json:
        console.write_json(result)
    else:
        _show(text.name, result, unknown)


def _translated(ids: Ids, text: Corpus, loaded: Checkpoint) -> tuple[Ids, dict[str, int]]:
    """The ids in the model's vocabulary, without the characters it lacks, and how often each of those occurs."""
    import numpy as np

    known = np.array([char in loaded.tokenizer for char in text.tokenizer.chars])
    target = np.zeros(len(known), dtype=np.min_scalar_type(len(loaded.tokenizer)))
    target[known] = loaded.tokenizer.encode("".join(char for char in text.tokenizer.chars if char in loaded.tokenizer))
    counts = np.zeros(len(known), dtype=np.int64)
    pieces = []
    # In pieces, since a count or a lookup of all of a long text at once would take many times its memory.
    for start in range(0, len(ids), TRANSLATED_AT_ONCE):
        piece = ids[start : start + TRANSLATED_AT_ONCE]
        counts += np.bincount(piece, minlength=len(known))
        pieces.append(target[piece[known[piece]]])
    unknown = {
        char: int(n) for char, n, is_known in zip(text.tokenizer.chars, counts, known, strict=True) if not is_known
    }
    return np.concatenate(pieces), {char: n for char, n in unknown.items() if n}


def _by_position(loaded: Checkpoint, ids: Ids) -> list[dict[str, Any]]:
    """Mean loss by the number of characters before, in bands that end at the window, the block size and beyond."""
    from minigpt.evaluation import loss_by_position

    config = loaded.model.config
    length = min(BLOCKS * config.block_size, len(ids) - 1)
    losses = loss_by_position(loaded.model, ids, length)
    edges = [0, config.window, *(blocks * config.block_size for blocks in (1, 2, 5, BLOCKS))]
    bands = [(start, min(stop, length)) for start, stop in itertools.pairwise(edges) if start < min(stop, length)]
    return [{"from": start, "to": stop, "nats_per_char": float(losses[start:stop].mean())} for start, stop in bands]


def _show(name: str, result: dict[str, Any], unknown: dict[str, int]) -> None:
    from minigpt import console

    console.write(
        f"{name}: {result['nats_per_char']:.4f} nats a character, {result['bits_per_char']:.4f} bits, perplexity"
        f" {result['perplexity']:.3f}\nover {result['characters']:,} characters, {result['weights']} weights\n"
    )
    if unknown:
        most = sorted(unknown.items(), key=lambda item: -item[1])[:8]
        listed = ", ".join(f"{char!r} {n:,}" for char, n in most)
        console.write(
            f"left out, since the model has never seen them: {sum(unknown.values()):,} characters of {len(unknown)}"
            f" kinds ({listed}{', ...' if len(unknown) > 8 else ''})\n"
        )
    console.write("\n")
    console.write_table(
        ["characters before", "nats a character"],
        [[f"{band['from'] + 1:,} to {band['to']:,}", f"{band['nats_per_char']:.4f}"] for band in result["by_position"]],
    )
