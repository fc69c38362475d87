"""``minigpt generate``: continue a prompt, streaming."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from minigpt.cli.options import (
    CheckpointOption,
    DeviceOption,
    EncodingOption,
    JsonOption,
    ThreadsOption,
)
from minigpt.cli.texts import known_part, read_given
from minigpt.config import DEFAULT_FORMAT

if TYPE_CHECKING:
    from collections.abc import Iterator

    from minigpt.generation import StopFilter


def generate(
    stdin: Annotated[
        str | None,
        typer.Argument(metavar="-", help="A lone '-' reads the prompt from standard input.", show_default=False),
    ] = None,
    prompt: Annotated[
        str | None,
        typer.Option("--prompt", "-p", help="Text to continue; '-' reads standard input."),
    ] = None,
    prompt_file: Annotated[
        str | None,
        typer.Option("--prompt-file", help="File with the text to continue; '-' is standard input."),
    ] = None,
    encoding: EncodingOption = "utf-8",
    checkpoint: CheckpointOption = None,
    length: Annotated[int, typer.Option("--length", "-n", min=1, help="New characters to write.")] = 500,
    temperature: Annotated[
        float, typer.Option("--temperature", "-t", help="Below 1 safer, above 1 wilder, 0 always the likeliest.")
    ] = 0.8,
    top_k: Annotated[int, typer.Option("--top-k", help="Draw among the k likeliest characters; 0 is off.")] = 0,
    top_p: Annotated[
        float, typer.Option("--top-p", help="Draw among the fewest characters that sum to this share; 1 is off.")
    ] = 1.0,
    min_p: Annotated[
        float, typer.Option("--min-p", help="Drop characters below this share of the likeliest one; 0 is off.")
    ] = 0.0,
    seed: Annotated[
        int | None,
        typer.Option("--seed", "-s", min=0, help="Same seed, same text. Default: a new one each time."),
    ] = None,
    samples: Annotated[int, typer.Option("--samples", min=1, help="Texts to write side by side.")] = 1,
    stop: Annotated[
        list[str] | None,
        typer.Option("--stop", help="Stop before this text; may be given several times."),
    ] = None,
    skip_unknown: Annotated[
        bool, typer.Option("--skip-unknown", help="Drop characters of the prompt that the model has never seen.")
    ] = False,
    cache: Annotated[
        bool,
        typer.Option("--cache/--no-cache", help="Keep keys and values, or recompute the prefix: same text, more work."),
    ] = True,
    engine: Annotated[
        str,
        typer.Option("--engine", help="torch, fused (needs the extra 'fast'), or auto, the faster one: same text."),
    ] = "auto",
    weights: Annotated[
        str,
        typer.Option(
            "--weights",
            help="What the weights are rounded to: int8, the fastest, float16, or float32, as they are.",
        ),
    ] = DEFAULT_FORMAT,
    device: DeviceOption = "auto",
    threads: ThreadsOption = None,
    json: JsonOption = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Nothing on stderr but errors.")] = False,
) -> None:
    """Continue a text, character by character."""
    text = _prompt_text(stdin, prompt, prompt_file, encoding)
    if engine == "fused" and not cache:
        raise typer.BadParameter("it goes on from a cache: leave out --no-cache", param_hint="--engine fused")
    if stop and "" in stop:
        raise typer.BadParameter("an empty text is everywhere", param_hint="--stop")

    from minigpt import console
    from minigpt.checkpoint import load
    from minigpt.device import choose_device, set_threads
    from minigpt.engine import choose_engine
    from minigpt.generation import StopFilter
    from minigpt.generation import generate as generate_ids
    from minigpt.runs import find_checkpoint
    from minigpt.sampling import Sampling
    from minigpt.weights import round_weights

    note = console.notes(quiet)
    sampling = Sampling(temperature, top_k, top_p, min_p)
    set_threads(threads)
    path = find_checkpoint(checkpoint)
    if checkpoint is None:
        note(f"from {path.parent.name}, the newest run ({path})")
    loaded = load(path, choose_device(device))
    if loaded.facts.steps == 0:
        note(f"{path} has taken no step of training yet: what it writes is noise")
    text = known_part(text, loaded.tokenizer, skip_unknown, note, "prompt")
    round_weights(loaded.model, weights)
    if not cache and engine == "auto":
        engine = "torch"
    chosen = choose_engine(engine, loaded.model, weights, threads=threads, note=note)
    if (reach := loaded.model.config.receptive_field) < len(text):
        note(f"of the prompt's {len(text):,} characters the last {reach:,} are read: no others can reach what follows")
    if seed is None:
        seed = time.time_ns() % 2**32

    ids = generate_ids(
        loaded.model,
        loaded.tokenizer.encode(text or loaded.start),
        length,
        sampling=sampling,
        seed=seed,
        samples=range(samples),
        use_cache=cache,
        engine=chosen,
    )
    clock = _Clock()
    pieces = _until_stopped(clock.timed(ids), [StopFilter(stop or []) for _ in range(samples)], loaded.tokenizer.chars)
    streaming = samples == 1 and not json
    texts = [""] * samples
    characters = 0
    if not json:
        console.write(text)
    try:
        # Either text streams to the screen or a bar moves on it, never both.
        with console.steps_bar(length, hidden=streaming or quiet) as bar:
            for step in pieces:
                characters += sum(map(len, step))
                if streaming:
                    # Not kept: it may be very long.
                    console.write(step[0])
                else:
                    texts = [old + new for old, new in zip(texts, step, strict=True)]
                bar.update(1)
    except KeyboardInterrupt:
        if streaming:
            console.write("\n")
        raise

    # Of the time that the second character took.
    clock.decode_s -= chosen.loading_s
    cache_bytes = loaded.model.new_cache(samples).nbytes if cache else 0
    if json:
        console.write_json(
            {
                "prompt": text,
                "texts": texts,
                "characters": characters,
                "loading_s": round(chosen.loading_s, 6),
                "prefill_s": round(clock.prefill_s, 6),
                "decode_s": round(clock.decode_s, 6),
                "chars_per_s": round(clock.chars_per_s * samples, 1),
                "mode": _mode(cache),
                "engine": chosen.name,
                "weights": weights,
                "cache_bytes": cache_bytes,
                "seed": seed,
                "checkpoint": str(path),
            }
        )
    elif streaming:
        console.write("\n")
    else:
        console.write("".join(f"\n--- sample {s + 1} of {samples} ---\n{text}\n" for s, text in enumerate(texts)))
    note(
        f"{characters:,} characters in {clock.prefill_s + clock.decode_s:.2f} s"
        f" ({clock.chars_per_s * samples:,.0f} a second), {_mode(cache)}, {chosen.name} engine, {weights} weights,"
        f" {cache_bytes:,} bytes of cache, seed {seed}"
        + (f"; loading the engine took {chosen.loading_s:.1f} s" if chosen.loading_s else "")
    )


class _Clock:
    """Times the steps of an iterator, not what is done between them."""

    def __init__(self) -> None:
        # Reading the prompt and drawing the first character; all further characters.
        self.prefill_s = 0.0
        self.decode_s = 0.0
        self._steps = 0

    def timed(self, ids: Iterator[list[int]]) -> Iterator[list[int]]:
        while True:
            started = time.perf_counter()
            try:
                step = next(ids)
            except StopIteration:
                return
            elapsed_s = time.perf_counter() - started
            if self._steps:
                self.decode_s += elapsed_s
            else:
                self.prefill_s = elapsed_s
            self._steps += 1
            yield step

    @property
    def chars_per_s(self) -> float:
        """Of one sample, after the first character, which the prompt has to be read for."""
        return (self._steps - 1) / self.decode_s if self._steps > 1 else 1 / self.prefill_s


def _until_stopped(ids: Iterator[list[int]], filters: list[StopFilter], chars: str) -> Iterator[list[str]]:
    """The new text of every sample, step by step, until all have come to a stop text or there are no more steps."""
    for step in ids:
        yield [each.feed(chars[id_]) for each, id_ in zip(filters, step, strict=True)]
        if all(each.stopped for each in filters):
            return
    yield [each.flush() for each in filters]


def _mode(cache: bool) -> str:
    return "cache" if cache else "no-cache"


def _prompt_text(stdin: str | None, prompt: str | None, prompt_file: str | None, encoding: str) -> str:
    from minigpt.sources import STDIN

    if stdin not in (None, STDIN):
        raise typer.BadParameter(f"{stdin!r} is not '-': give the text with --prompt", param_hint="'[-]'")
    if sum(source is not None for source in (stdin, prompt, prompt_file)) > 1:
        raise typer.BadParameter("the prompt comes from one place: --prompt, --prompt-file or '-'")
    file = STDIN if stdin == STDIN or prompt == STDIN else prompt_file
    if file is None:
        return prompt or ""
    return read_given(file, encoding, "prompt")
