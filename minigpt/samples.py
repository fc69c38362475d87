"""What the model writes at each evaluation, kept in the run folder, so that one can read how it learnt to write.

The file is a function of the weights that were saved at the evaluations, so a run that was killed and resumed ends with
the one of a run that never stopped. It tells no times for that reason; the log does.
"""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

from minigpt.errors import ReportError
from minigpt.generation import generate
from minigpt.model import GPT
from minigpt.runs import SAMPLES
from minigpt.sampling import Sampling
from minigpt.tokenizer import CharTokenizer

# The lines of a sample are indented, so nothing that a model writes is taken for a heading.
_INDENT = "    "
_HEADING = re.compile(rb"step (\d+): .*\n")


def sample(model: GPT, tokenizer: CharTokenizer, start: str, n_chars: int) -> str:
    """Some characters in the model's own words, always the same ones; uses no random numbers of the training.

    Args:
        start: what they follow, one known character; a line break is used instead where the vocabulary has one.

    Returns:
        n_chars characters; those that would move a cursor are spaces, line breaks stay.
    """
    prompt = tokenizer.encode(tokenizer.start(start))
    ids = generate(model, prompt, n_chars, sampling=Sampling(temperature=0.8))
    text = tokenizer.decode(id_ for (id_,) in ids)
    return "".join(char if char.isprintable() or char == "\n" else " " for char in text)


def keep_sample(folder: Path, step: int, val_loss: float, best: bool, text: str) -> None:
    """Adds a sample to the file of a run.

    Args:
        step, val_loss, best: of the evaluation that it belongs to.
        text: as `sample` returns it.

    Raises:
        ReportError: it cannot be written; the samples before it are intact.
    """
    heading = f"step {step}: held-out loss {val_loss:.4f}{', the best so far' if best else ''}\n"
    lines = "".join(f"{_INDENT}{line}".rstrip() + "\n" for line in text.split("\n"))
    path = folder / SAMPLES
    try:
        with path.open("ab") as file:
            end = file.tell()
            try:
                file.write(f"{heading}\n{lines}\n".encode())
                file.flush()
            except OSError:
                # Half a sample is none.
                with suppress(OSError):
                    file.truncate(end)
                raise
    except OSError as error:
        raise ReportError(f"cannot write {path}: {error.strerror or error}") from None


def forget_samples(folder: Path, step: int) -> None:
    """Removes the samples of that step and of later ones, and one whose heading was cut short.

    Raises:
        ReportError: the file cannot be read or written.
    """
    path = folder / SAMPLES
    try:
        if not path.exists():
            return
        end = 0
        with path.open("r+b") as file:
            for line in file:
                if not line.startswith((_INDENT.encode(), b"\n")):
                    heading = _HEADING.fullmatch(line)
                    if heading is None or int(heading[1]) >= step:
                        break
                end += len(line)
            file.truncate(end)
        if end == 0:
            path.unlink()
    except OSError as error:
        raise ReportError(f"cannot tidy {path}: {error.strerror or error}") from None
