"""The same network in other programs, timed beside ours: transformers, ctranslate2 and llama.cpp.

Each is given the weights of one of our models as the Qwen3 that it is, so that all do the same work. They are imported
when they are asked for; what is not installed is named.
"""

from __future__ import annotations

import importlib.util
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from minigpt.bench import REPEATS_OF_ENGINES, Way, limited_threads
from minigpt.errors import ConfigError
from minigpt.model import GPT, NORM_EPS, ROPE_BASE

# Packages that each needs, as Python imports them.
PEERS = {
    "transformers": ("transformers",),
    "ctranslate2": ("ctranslate2",),
    "llama.cpp": ("llama_cpp", "gguf"),
}
# Numbers of a row that share a scale in llama.cpp's q8_0; a row has to be some of them.
Q8_BLOCK = 32
# Characters of a measurement, at least: texts of a window are written until there are as many.
CHARACTERS = 512


@dataclass(frozen=True)
class Peer:
    """A program with the model's weights in a number format, which writes on some threads."""

    name: str
    # The format's name there, and that of ours which has as many bits.
    weights: str
    ours: str
    threads: int
    # Writes that many characters from an empty cache.
    write: Callable[[int], object]


@dataclass(frozen=True)
class PeerSpeed:
    """A peer beside our fused engine with weights of as many bits, each with the number of threads that suits it."""

    peer: str
    weights: str
    threads: int
    chars_per_s: float
    our_threads: int
    our_chars_per_s: float


def missing(name: str) -> list[str]:
    """Packages that a peer needs and that are not installed.

    Raises:
        ConfigError: there is no such peer.
    """
    if name not in PEERS:
        raise ConfigError(f"there is nothing called {name!r} to measure against: choose among {', '.join(PEERS)}")
    return [package for package in PEERS[name] if importlib.util.find_spec(package) is None]


def measure_peers(
    model: GPT, names: Sequence[str], max_threads: int, repeats: int = REPEATS_OF_ENGINES
) -> Iterator[list[PeerSpeed] | None]:
    """Times peers and our fused engine in turn.

    Each writes a window of characters from an empty cache, again and again, so that nobody has anything to forget: not
    every peer knows a sliding window. Of ours the first character of each text, which reads the prompt, is left out;
    theirs draw as they like best.

    Args:
        names: of `PEERS`, all installed.
        max_threads: everything is timed on one thread and on that many.

    Yields:
        None after each of ``repeats + 1`` rounds, of which the first warms up; then what was found.
    """
    counts = sorted({1, max_threads})
    n = model.config.window
    texts = max(1, CHARACTERS // n)
    with tempfile.TemporaryDirectory(prefix="minigpt-") as folder:
        found = [peer for name in names for peer in _MAKERS[name](model, counts, Path(folder))]
        formats = sorted({peer.ours for peer in found})
        ours = [Way(model, "fused", weights, threads) for weights in formats for threads in counts]
        times: dict[Any, list[float]] = {each: [] for each in (*found, *ours)}
        for _ in range(repeats + 1):
            for peer in found:
                started = time.perf_counter()
                for _ in range(texts):
                    peer.write(n)
                times[peer].append((time.perf_counter() - started) / (texts * n))
            for way in ours:
                times[way].append(statistics.fmean(way.character_s([0], n) for _ in range(texts)))
            yield None
    medians = {each: statistics.median(seconds[1:]) for each, seconds in times.items()}
    speeds = []
    for name, weights in dict.fromkeys((peer.name, peer.weights) for peer in found):
        peer = min((p for p in found if (p.name, p.weights) == (name, weights)), key=medians.__getitem__)
        way = min((w for w in ours if w.weights == peer.ours), key=medians.__getitem__)
        speeds.append(PeerSpeed(name, weights, peer.threads, 1 / medians[peer], way.threads, 1 / medians[way]))
    yield speeds


def _matrices(model: GPT) -> dict[str, NDArray[np.float32]]:
    """All weights by our names, in float32."""
    return {name: weight.detach().float().cpu().numpy() for name, weight in model.state_dict().items()}


def qwen3(model: GPT) -> Any:
    """The model as transformers' ``Qwen3ForCausalLM``, float32."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = model.config
    shape = Qwen3Config(
        vocab_size=config.vocab_size,
        hidden_size=config.n_embd,
        intermediate_size=config.n_inner,
        num_hidden_layers=config.n_layer,
        num_attention_heads=config.n_head,
        num_key_value_heads=config.n_head,
        head_dim=config.head_dim,
        rms_norm_eps=NORM_EPS,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_BASE},
        use_sliding_window=True,
        sliding_window=config.window,
        max_window_layers=0,
        layer_types=["sliding_attention"] * config.n_layer,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    qwen: Any = Qwen3ForCausalLM(shape)
    qwen.eval()
    names = {"model.embed_tokens.weight": model.wte.weight, "model.norm.weight": model.norm_f.weight}
    names["lm_head.weight"] = model.lm_head.weight
    for i, block in enumerate(model.blocks):
        at = f"model.layers.{i}."
        for part, rows in zip("qkv", block.attn.qkv.weight.chunk(3), strict=True):
            names[f"{at}self_attn.{part}_proj.weight"] = rows
        for part, rows in zip(("gate", "up"), block.mlp.gate_up.weight.chunk(2), strict=True):
            names[f"{at}mlp.{part}_proj.weight"] = rows
        names[at + "self_attn.o_proj.weight"] = block.attn.proj.weight
        names[at + "mlp.down_proj.weight"] = block.mlp.down.weight
        names[at + "self_attn.q_norm.weight"] = block.attn.q_norm.weight
        names[at + "self_attn.k_norm.weight"] = block.attn.k_norm.weight
        names[at + "input_layernorm.weight"] = block.norm_1.weight
        names[at + "post_attention_layernorm.weight"] = block.norm_2.weight
    qwen.load_state_dict(names)
    return qwen


def _transformers(model: GPT, threads: list[int], _: Path) -> Iterator[Peer]:
    qwen = qwen3(model)
    start = torch.zeros(1, 1, dtype=torch.long)

    def write(n: int, used: int) -> Any:
        with limited_threads(used), torch.inference_mode():
            return qwen.generate(
                start,
                attention_mask=torch.ones_like(start),
                do_sample=True,
                top_k=0,
                max_new_tokens=n,
                min_new_tokens=n,
            )

    for used in threads:
        yield Peer("transformers", "float32", "float32", used, lambda n, used=used: write(n, used))  # type: ignore[misc]


def save_ctranslate2(model: GPT, folder: Path) -> None:
    """Writes the model as one of ctranslate2's into a new folder; the token of an id is ``t`` and its number."""
    from ctranslate2.specs import TransformerDecoderModelSpec
    from ctranslate2.specs.common_spec import Activation

    config, weights = model.config, _matrices(model)
    spec = TransformerDecoderModelSpec.from_config(
        config.n_layer,
        config.n_head,
        activation=Activation.SWISH,
        ffn_glu=True,
        rms_norm=True,
        qk_norm=True,
        head_dim=config.head_dim,
        num_heads_kv=config.n_head,
        rotary_dim=config.head_dim,
        rotary_interleave=False,
        rotary_base=ROPE_BASE,
        sliding_window=config.window,
    )
    decoder = spec.decoder
    decoder.scale_embeddings = False
    decoder.embeddings.weight = weights["wte.weight"]
    decoder.layer_norm.gamma = weights["norm_f.weight"]
    decoder.projection.weight = weights["lm_head.weight"]
    for i, layer in enumerate(decoder.layer):
        at = f"blocks.{i}."
        attention, ffn = layer.self_attention, layer.ffn
        attention.layer_norm.gamma = weights[at + "norm_1.weight"]
        attention.q_norm.gamma = weights[at + "attn.q_norm.weight"]
        attention.k_norm.gamma = weights[at + "attn.k_norm.weight"]
        attention.linear[0].weight = weights[at + "attn.qkv.weight"]
        attention.linear[1].weight = weights[at + "attn.proj.weight"]
        ffn.layer_norm.gamma = weights[at + "norm_2.weight"]
        gate_up = weights[at + "mlp.gate_up.weight"]
        ffn.linear_0.weight, ffn.linear_0_noact.weight = gate_up[: config.n_inner], gate_up[config.n_inner :]
        ffn.linear_1.weight = weights[at + "mlp.down.weight"]
    tokens = [_token(id_) for id_ in range(config.vocab_size)]
    spec.register_vocabulary(tokens)
    spec.config.bos_token = spec.config.eos_token = spec.config.unk_token = tokens[0]
    spec.config.layer_norm_epsilon = NORM_EPS
    spec.validate()
    spec.optimize(quantization=None)
    folder.mkdir()
    spec.save(str(folder))


def _token(id_: int) -> str:
    return f"t{id_}"


def _ctranslate2(model: GPT, threads: list[int], folder: Path) -> Iterator[Peer]:
    import ctranslate2

    saved = folder / "ctranslate2"
    save_ctranslate2(model, saved)
    for format in ("float32", "int8"):
        for used in threads:
            generator = ctranslate2.Generator(
                str(saved), device="cpu", compute_type=format, inter_threads=1, intra_threads=used
            )

            def write(n: int, generator: Any = generator) -> Any:
                return generator.generate_batch(
                    [[_token(0)]],
                    max_length=n,
                    min_length=n,
                    sampling_topk=0,
                    include_prompt_in_result=False,
                )

            yield Peer("ctranslate2", format, format, used, write)


def _llama_cpp(model: GPT, threads: list[int], folder: Path) -> Iterator[Peer]:
    import llama_cpp

    formats = {"f32": "float32", "f16": "float16", "q8_0": "int8"}
    if model.config.n_embd % Q8_BLOCK:
        del formats["q8_0"]
    for format, ours in formats.items():
        path = folder / f"{format}.gguf"
        save_gguf(model, format, path)
        for used in threads:
            llama = llama_cpp.Llama(
                str(path), n_ctx=model.config.window, n_threads=used, n_threads_batch=used, verbose=False
            )

            def write(n: int, llama: Any = llama) -> None:
                # Its drawing is left out, to its advantage.
                ids = (llama_cpp.llama_token * 1)()
                batch = llama_cpp.llama_batch_get_one(ids, 1)
                llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(llama.ctx), True)
                for position in range(n):
                    ids[0] = position % model.config.vocab_size
                    if llama_cpp.llama_decode(llama.ctx, batch):
                        raise RuntimeError("llama.cpp cannot decode")

            yield Peer("llama.cpp", format, ours, used, write)


def save_gguf(model: GPT, format: str, path: Path) -> None:
    """Writes the model as a file of llama.cpp's.

    Args:
        format: of the matrices, "f32", "f16" or "q8_0", which is int8 in blocks of `Q8_BLOCK` of a row.
    """
    import gguf

    config, weights = model.config, _matrices(model)
    file = gguf.GGUFWriter(str(path), "qwen3")
    file.add_context_length(config.window)
    file.add_embedding_length(config.n_embd)
    file.add_block_count(config.n_layer)
    file.add_feed_forward_length(config.n_inner)
    file.add_head_count(config.n_head)
    file.add_head_count_kv(config.n_head)
    file.add_key_length(config.head_dim)
    file.add_value_length(config.head_dim)
    file.add_layer_norm_rms_eps(NORM_EPS)
    file.add_rope_freq_base(ROPE_BASE)
    file.add_vocab_size(config.vocab_size)
    # Ids alone: it needs no characters.
    file.add_tokenizer_model("no_vocab")

    def add(name: str, numbers: NDArray[np.float32]) -> None:
        if numbers.ndim == 2 and format == "q8_0":
            kind = gguf.GGMLQuantizationType.Q8_0
            file.add_tensor(name + ".weight", gguf.quants.quantize(numbers, kind), raw_dtype=kind)
        else:
            narrow = numbers.ndim == 2 and format == "f16"
            file.add_tensor(name + ".weight", np.ascontiguousarray(numbers, np.float16 if narrow else np.float32))

    add("token_embd", weights["wte.weight"])
    add("output_norm", weights["norm_f.weight"])
    add("output", weights["lm_head.weight"])
    for i in range(config.n_layer):
        ours, theirs = f"blocks.{i}.", f"blk.{i}."
        for part, rows in zip("qkv", np.split(weights[ours + "attn.qkv.weight"], 3), strict=True):
            add(f"{theirs}attn_{part}", rows)
        for part, rows in zip(("gate", "up"), np.split(weights[ours + "mlp.gate_up.weight"], 2), strict=True):
            add(f"{theirs}ffn_{part}", rows)
        for name, of_ours in (
            ("attn_norm", "norm_1"),
            ("attn_q_norm", "attn.q_norm"),
            ("attn_k_norm", "attn.k_norm"),
            ("attn_output", "attn.proj"),
            ("ffn_norm", "norm_2"),
            ("ffn_down", "mlp.down"),
        ):
            add(theirs + name, weights[f"{ours}{of_ours}.weight"])
    file.write_header_to_file()
    file.write_kv_data_to_file()
    file.write_tensors_to_file()
    file.close()


_MAKERS: dict[str, Callable[[GPT, list[int], Path], Iterator[Peer]]] = {
    "transformers": _transformers,
    "ctranslate2": _ctranslate2,
    "llama.cpp": _llama_cpp,
}
