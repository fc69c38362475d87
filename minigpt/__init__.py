"""minigpt: a tiny character-level GPT that writes the same text with and without its KV cache.

from minigpt import generate, load

checkpoint = load("checkpoints/demo/best.safetensors")
prompt = checkpoint.tokenizer.encode("MARGIT:")
for (id_,) in generate(checkpoint.model, prompt, max_new_tokens=200, seed=1):
    print(checkpoint.tokenizer.decode([id_]), end="", flush=True)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minigpt.checkpoint import Checkpoint, load, save_checkpoint
    from minigpt.config import GPTConfig, TrainConfig
    from minigpt.corpus import Corpus, load_corpus
    from minigpt.engine import choose_engine
    from minigpt.errors import MinigptError
    from minigpt.evaluation import loss_by_position, stream_losses, window_loss
    from minigpt.generation import generate
    from minigpt.kv_cache import KVCache
    from minigpt.model import GPT, attention
    from minigpt.runs import find_checkpoint
    from minigpt.sampling import Sampling
    from minigpt.tokenizer import CharTokenizer
    from minigpt.trainer import EvalReport, StepReport, Trainer

__version__ = "0.1.0"

# Loaded when first used, so that the command line can print its help without importing torch.
_HOME = {
    "Checkpoint": "checkpoint",
    "load": "checkpoint",
    "save_checkpoint": "checkpoint",
    "GPTConfig": "config",
    "TrainConfig": "config",
    "Corpus": "corpus",
    "load_corpus": "corpus",
    "MinigptError": "errors",
    "loss_by_position": "evaluation",
    "stream_losses": "evaluation",
    "window_loss": "evaluation",
    "generate": "generation",
    "KVCache": "kv_cache",
    "GPT": "model",
    "attention": "model",
    "choose_engine": "engine",
    "find_checkpoint": "runs",
    "Sampling": "sampling",
    "CharTokenizer": "tokenizer",
    "EvalReport": "trainer",
    "StepReport": "trainer",
    "Trainer": "trainer",
}

__all__ = [
    "GPT",
    "CharTokenizer",
    "Checkpoint",
    "Corpus",
    "EvalReport",
    "GPTConfig",
    "KVCache",
    "MinigptError",
    "Sampling",
    "StepReport",
    "TrainConfig",
    "Trainer",
    "__version__",
    "attention",
    "choose_engine",
    "find_checkpoint",
    "generate",
    "load",
    "load_corpus",
    "loss_by_position",
    "save_checkpoint",
    "stream_losses",
    "window_loss",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'minigpt' has no attribute {name!r}")
    return getattr(import_module(f"minigpt.{_HOME[name]}"), name)
