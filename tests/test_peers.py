"""Other programs beside ours: they compute our network, and the one that suits best is compared."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from minigpt import peers as module
from minigpt.bench import Way, random_model
from minigpt.config import GPTConfig
from minigpt.errors import ConfigError
from minigpt.model import GPT
from minigpt.peers import Peer, measure_peers, missing, qwen3, save_ctranslate2, save_gguf

# Widths that llama.cpp's blocks of 32 numbers fit.
SHAPE = GPTConfig(vocab_size=11, n_layer=2, n_head=2, n_embd=64, block_size=16, window=12)
IDS = [i * 7 % 11 for i in range(12)]


@pytest.fixture
def model() -> GPT:
    model = random_model(SHAPE).requires_grad_(False)
    for name, weight in model.named_parameters():
        # Gains that differ, so that none can be taken for another.
        if "norm" in name:
            weight.mul_(torch.linspace(0.5, 1.5, len(weight)))
    return model


def ours(model: GPT, ids: list[int]) -> Any:
    return model(torch.tensor([ids]))[0].numpy()


# Each of them is optional.


def test_transformers_computes_our_network_far_past_the_window(model: GPT) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed; it is optional")
    ids = [i * 5 % 11 for i in range(60)]
    with torch.inference_mode():
        theirs = qwen3(model)(torch.tensor([ids]), use_cache=False).logits[0].numpy()
    np.testing.assert_allclose(theirs, ours(model, ids), rtol=0, atol=2e-5)


def test_ctranslate2_computes_our_network(model: GPT, tmp_path: Path) -> None:
    ctranslate2: Any = pytest.importorskip("ctranslate2", reason="ctranslate2 is not installed; it is optional")
    save_ctranslate2(model, tmp_path / "saved")
    generator = ctranslate2.Generator(str(tmp_path / "saved"), device="cpu", compute_type="float32")
    theirs = np.array(generator.forward_batch([IDS]))[0]
    np.testing.assert_allclose(theirs, ours(model, IDS), rtol=0, atol=2e-5)


# Its cache holds half-precision numbers.
@pytest.mark.parametrize(("format", "tolerance"), [("f32", 1e-3), ("f16", 0.01), ("q8_0", 0.1)])
def test_llama_cpp_computes_our_network(format: str, tolerance: float, model: GPT, tmp_path: Path) -> None:
    llama_cpp: Any = pytest.importorskip("llama_cpp", reason="llama.cpp is not installed; it is optional")
    pytest.importorskip("gguf", reason="gguf is not installed; it is optional")
    save_gguf(model, format, tmp_path / "saved.gguf")
    llama = llama_cpp.Llama(str(tmp_path / "saved.gguf"), n_ctx=12, n_threads=1, logits_all=True, verbose=False)
    llama.eval(IDS)
    np.testing.assert_allclose(llama.scores[: len(IDS)], ours(model, IDS), rtol=0, atol=tolerance)


def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "gguf" else object())
    assert missing("llama.cpp") == ["gguf"]
    assert missing("transformers") == []


def test_an_unknown_peer_is_told_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"nothing called 'gpt4all'.*: choose among transformers, ctranslate2, llama"):
        missing("gpt4all")


def test_the_thread_count_that_suits_each_is_compared(model: GPT, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba", reason="compares the fused engine")
    now = 0.0
    written: list[tuple[str, int, int]] = []
    # Seconds a character.
    theirs = {("f32", 1): 3.0, ("f32", 2): 5.0, ("8-bit", 1): 4.0, ("8-bit", 2): 2.0}
    us = {("float32", 1): 1.0, ("float32", 2): 0.5, ("int8", 1): 0.25, ("int8", 2): 1.0}

    def makers(_: GPT, threads: list[int], folder: Path) -> Iterator[Peer]:
        assert folder.is_dir()
        for weights, width in (("f32", "float32"), ("8-bit", "int8")):
            for used in threads:

                def write(n: int, weights: str = weights, used: int = used) -> None:
                    nonlocal now
                    now += n * theirs[weights, used]
                    written.append((weights, used, n))

                yield Peer("fake", weights, width, used, write)

    monkeypatch.setattr(module, "_MAKERS", {"fake": makers})
    monkeypatch.setattr("minigpt.peers.time.perf_counter", lambda: now)
    monkeypatch.setattr(Way, "character_s", lambda way, prompt, n: us[way.weights, way.threads])
    *rounds, found = measure_peers(model, ["fake"], 2, repeats=2)
    assert rounds == [None, None, None]
    assert found is not None
    assert [(speed.weights, speed.threads, 1 / speed.chars_per_s) for speed in found] == [
        ("f32", 1, 3.0),
        ("8-bit", 2, 2.0),
    ]
    assert [(speed.our_threads, 1 / speed.our_chars_per_s) for speed in found] == [(2, 0.5), (1, 0.25)]
    # A window at a time, in turn.
    texts = module.CHARACTERS // 12
    assert written[: 2 * texts] == [("f32", 1, 12)] * texts + [("f32", 2, 12)] * texts
    assert len(written) == 3 * 4 * texts
