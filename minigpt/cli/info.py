"""``minigpt info``: what a checkpoint is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minigpt.cli.options import CheckpointOption, JsonOption
from minigpt.config import DEFAULT_FORMAT

if TYPE_CHECKING:
    from minigpt.model import GPT


def info(checkpoint: CheckpointOption = None, json: JsonOption = False) -> None:
    """Show the shape, vocabulary and history of a model."""
    from dataclasses import asdict

    from minigpt import console
    from minigpt.checkpoint import load
    from minigpt.runs import find_checkpoint

    path = find_checkpoint(checkpoint)
    loaded = load(path)
    config, facts = loaded.model.config, loaded.facts
    parameters = _parameters_by_part(loaded.model)
    cache_bytes = loaded.model.new_cache().nbytes
    if json:
        console.write_json(
            {
                "checkpoint": str(path),
                "config": asdict(config),
                "head_dim": config.head_dim,
                "n_inner": config.n_inner,
                "receptive_field": config.receptive_field,
                "parameters": {**parameters, "total": sum(parameters.values())},
                "chars": loaded.tokenizer.chars,
                "training": asdict(facts),
                "cache_bytes_per_char": cache_bytes // config.window,
                "cache_bytes": cache_bytes,
                "default_weights": DEFAULT_FORMAT,
            }
        )
        return
    rows = [
        ("checkpoint", str(path)),
        *((name, str(value)) for name, value in asdict(config).items()),
        ("head_dim", f"{config.head_dim}  (n_embd / n_head)"),
        ("n_inner", f"{config.n_inner}  (width of the feed-forward layers)"),
        ("receptive field", f"{config.receptive_field:,} characters"),
        *((f"parameters: {part}", f"{count:,}") for part, count in parameters.items()),
        ("parameters", f"{sum(parameters.values()):,}"),
        ("vocabulary", repr(loaded.tokenizer.chars)[1:-1]),
        ("trained on", f"{facts.corpus}, {facts.corpus_chars:,} characters, sha256 {facts.corpus_sha256[:16]}..."),
        ("held out", f"the last {facts.val_fraction:.0%}"),
        ("training", f"{facts.steps:,} steps, preset {facts.preset}, {facts.elapsed_s:.0f} s"),
        ("loss", _loss(facts.train_loss, facts.val_loss)),
        ("written by", f"minigpt {facts.minigpt_version}, torch {facts.torch_version}"),
        ("weights", f"rounded to {DEFAULT_FORMAT} by generate, unless it is told otherwise"),
        ("cache", f"{cache_bytes // config.window:,} bytes a character, at most {cache_bytes:,}"),
    ]
    width = max(len(name) for name, _ in rows)
    console.write("".join(f"{name.ljust(width)}  {value}\n" for name, value in rows))


def _parameters_by_part(model: GPT) -> dict[str, int]:
    """Parameters by what they are for; the parts sum to the whole."""
    parts = {"wte": 0, "attn": 0, "mlp": 0, "norms": 0, "lm_head": 0}
    for name, param in model.named_parameters():
        part = "norms" if "norm" in name else next(part for part in parts if part in name)
        parts[part] += param.numel()
    return parts


def _loss(train_loss: float | None, val_loss: float | None) -> str:
    if val_loss is None:
        return "not evaluated yet"
    return f"{train_loss:.4f} in training, {val_loss:.4f} on the held-out text, nats a character"
