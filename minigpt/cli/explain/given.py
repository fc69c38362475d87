"""The model and the text that an explanation is about."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from minigpt.checkpoint import Checkpoint


def given_model(checkpoint: str | None) -> Checkpoint:
    """The checkpoint of --checkpoint, or that of the newest run, which is said; on the CPU, in float32.

    Raises:
        CheckpointError: there is none, or it cannot be read.
    """
    from minigpt import console
    from minigpt.checkpoint import load
    from minigpt.runs import find_checkpoint

    path = find_checkpoint(checkpoint)
    if checkpoint is None:
        console.note(f"with {path.parent.name}, the newest run ({path})")
    return load(path)


def given_text(loaded: Checkpoint, prompt: str | None, length: int) -> str:
    """The prompt, or so many characters that the model writes, always the same ones.

    Raises:
        PromptError: the prompt is empty, or has characters that the model has never seen.
    """
    from minigpt.cli.texts import check_known
    from minigpt.errors import PromptError
    from minigpt.generation import generate
    from minigpt.sampling import Sampling

    if prompt is None:
        ids = generate(loaded.model, loaded.tokenizer.encode(loaded.start), length, sampling=Sampling(0.8))
        return loaded.tokenizer.decode([id_ for (id_,) in ids])
    if not prompt:
        raise PromptError("the prompt is empty: give at least one character")
    check_known(prompt, loaded.tokenizer)
    return prompt
