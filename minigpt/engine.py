"""Which engine writes: torch, the reference, which runs everywhere, or the fused one, on a CPU where there is numba.

Both go on from the same cache with the same random numbers, one or more characters at a call, and leave the cache where
the other could go on.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from threading import Thread, Timer
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from minigpt.captured import StaticStep
from minigpt.errors import ConfigError
from minigpt.kv_cache import KVCache
from minigpt.model import GPT, NORM_EPS, rotary_angles
from minigpt.sampling import Sampling, ratio_slack, sample_and_doubt
from minigpt.weights import packed

ENGINES = ("auto", "torch", "fused")
# The ids of one or more steps, (n, B), and whether those of the last step are in doubt, (B,).
Drawn = tuple[NDArray[np.int64], NDArray[np.bool_]]
# Characters of a call: some milliseconds, so that streaming and Ctrl-C stay prompt.
RUN = 64
# Compiling that takes no longer is not worth a word.
SILENT_S = 1.0
# Weights from which a second thread helps more than waiting for it costs.
THREADED = 1_500_000
# Weights of up to so many bytes stay in a processor's cache, where four rows at a time are read faster than one after
# the other; from memory it is the other way round.
NEAR_BYTES = 16_000_000


def draw(logits: Tensor, uniforms: NDArray[np.float64], sampling: Sampling, tolerance: float) -> Drawn:
    """What one step draws from logits, (B, V), with one number a text, (B,); see `sampling.sample_and_doubt`."""
    # What little there is to do with so few numbers is done where a call is cheap.
    exact = logits.dtype == torch.float64
    rows = logits.detach().to("cpu", torch.float64 if exact else torch.float32).numpy()
    ids, doubts = sample_and_doubt(rows, uniforms, sampling, tolerance)
    return ids[None], doubts


class Engine(Protocol):
    """Writes characters that follow what is in a cache."""

    @property
    def name(self) -> str: ...

    @property
    def loading_s(self) -> float:
        """Seconds that loading it took, and compiling it if it was, within the calls so far."""

    def decode(
        self,
        kv_cache: KVCache,
        last: Sequence[int],
        uniforms: NDArray[np.float64],
        sampling: Sampling,
        tolerance: float,
    ) -> Drawn:
        """Takes one or more steps: each puts the newest ids into the cache and draws those that follow.

        Args:
            kv_cache: of all positions but the newest, of B texts.
            last: newest ids, (B,).
            uniforms: what draws the ids, (N, B); N steps at most are taken.
            sampling, tolerance: see `sampling.sample_and_doubt`.

        Returns:
            ids, (n, B), 1 <= n <= N, and whether those of the last step are in doubt, (B,); it stops at a doubt.
        """


class TorchEngine:
    """One step a call; on a CUDA device captured as a graph, once the ring is full."""

    name = "torch"
    loading_s = 0.0

    def __init__(self, model: GPT) -> None:
        self._model = model
        self._step: StaticStep | None = None

    def decode(
        self,
        kv_cache: KVCache,
        last: Sequence[int],
        uniforms: NDArray[np.float64],
        sampling: Sampling,
        tolerance: float,
    ) -> Drawn:
        return draw(self._logits(kv_cache, last), uniforms[0], sampling, tolerance)

    def _logits(self, kv_cache: KVCache, last: Sequence[int]) -> Tensor:
        """Takes a step, and gives the logits of the ids that follow, (B, V)."""
        device = self._model.lm_head.weight.device
        if device.type == "cuda" and kv_cache.length >= kv_cache.window - 1:
            if self._step is None or self._step.kv_cache is not kv_cache:
                self._step = StaticStep(self._model, kv_cache)
                self._step.capture()
            return self._step(last)
        ids = torch.tensor([[id_] for id_ in last], device=device)
        logits: Tensor = self._model(ids, kv_cache)[:, -1]
        return logits


class FusedEngine:
    """Many steps a call, in the compiled function of `fused`.

    It is loaded, and compiled if that was never done on this machine, by the first call: the first character, which
    torch writes while it reads the prompt, does not wait for it.

    Args:
        model: on the CPU, float32, its weights rounded to the format.
        format: what its matrices are read in.
        threads: that compute together.
        note: told that compiling takes a while, if it does.

    Raises:
        ConfigError: from `decode`, when it cannot be loaded.
    """

    name = "fused"

    def __init__(self, model: GPT, format: str, threads: int, note: Callable[[str], None]) -> None:
        self.threads = threads
        self._model = model
        self._config = model.config
        self._format = format
        self._note = note
        self._pool = ThreadPoolExecutor(threads - 1) if threads > 1 else None
        # What addresses point at.
        self._kept: list[NDArray[Any]] = []
        self._fused: Any = None
        self.loading_s = 0.0

    def decode(
        self,
        kv_cache: KVCache,
        last: Sequence[int],
        uniforms: NDArray[np.float64],
        sampling: Sampling,
        tolerance: float,
    ) -> Drawn:
        if self._fused is None:
            self._load()
        fused, config = self._fused, self._config
        N, B = uniforms.shape
        # Without a step there is nothing to share.
        threads = self.threads if N else 1
        C, F, V, W = config.n_embd, config.n_inner, config.vocab_size, config.window
        # The compiled code checks nothing: a wrong size or id would read or write what is not its own.
        if kv_cache.keys.shape != (config.n_layer, B, config.n_head, W, config.head_dim) or len(last) != B:
            raise ValueError(f"{B} texts need a cache and newest ids of {B} texts, of this model")
        if not all(0 <= id_ < V for id_ in last):
            raise ValueError(f"ids must be from 0 to {V - 1}, not {last}")
        cos, sin = rotary_angles(kv_cache.length, N, config.head_dim, torch.float32)
        uniforms = np.ascontiguousarray(uniforms)
        ids, drawn, doubts = np.array(last, np.int64), np.empty((N, B), np.int64), np.zeros(B, np.int64)
        floats = [np.zeros(B * n, np.float32) for n in (C, 3 * C, C, F, V)]
        probs, order = np.empty(V), np.empty((2, V), np.int64)
        marks, aborted = np.zeros((threads, fused.MARK_WORDS), np.int64), np.zeros(1, np.int64)
        shared = (ids, drawn, doubts, *floats, probs, order, marks, aborted)
        owns = [(*(np.empty(n, np.float32) for n in (B * C, W, B * F)), np.zeros(1, np.int64)) for _ in range(threads)]

        def run(rank: int) -> int:
            try:
                return step_all(rank)
            except BaseException:
                # The others would wait for it for ever.
                aborted[0] = 1
                raise

        def step_all(rank: int) -> int:
            steps: int = fused.decode(
                fused.Shape(B, config.n_layer, C, config.n_head, config.head_dim, F, V, W),
                self._weights,
                fused.Cache(
                    kv_cache.keys.data_ptr(),
                    kv_cache.values.data_ptr(),
                    cos.data_ptr(),
                    sin.data_ptr(),
                    kv_cache.length,
                ),
                fused.Drawing(
                    uniforms.ctypes.data,
                    N,
                    float(sampling.temperature),
                    sampling.top_k,
                    float(sampling.top_p),
                    float(sampling.min_p),
                    tolerance,
                    ratio_slack(sampling.temperature, tolerance),
                ),
                fused.Shared(*(array.ctypes.data for array in shared), threads),
                fused.Private(rank, *(array.ctypes.data for array in owns[rank])),
                self._like,
            )
            return steps

        others: list[Future[int]] = []
        try:
            for rank in range(1, threads):
                assert self._pool is not None
                others.append(self._pool.submit(run, rank))
            steps = run(0)
        except BaseException:
            aborted[0] = 1
            raise
        finally:
            # Their memory is in use until then.
            wait(others)
        for other in others:
            other.result()
        kv_cache.advance(steps)
        return drawn[:steps], doubts.astype(np.bool_)

    def _load(self) -> None:
        started = time.perf_counter()
        late = Timer(SILENT_S, self._note, ["compiling the fused engine, which takes a while, but only once"])
        loading = _InBackground(lambda: self._compile(late.start))
        try:
            loading.wait()
        except Exception as error:
            # Whatever may be wrong with an installation of numba or with what it keeps on disk.
            self._fused = None
            said = str(error).strip().partition("\n")[0]
            raise ConfigError(
                f"the fused engine cannot run here: numba fails ({type(error).__name__}{': ' * bool(said)}{said})"
            ) from error
        finally:
            late.cancel()
            self.loading_s = time.perf_counter() - started

    def _compile(self, compiling: Callable[[], object]) -> None:
        from minigpt import fused

        layers = np.zeros((len(self._model.blocks), fused.COLUMNS), np.int64)
        for row, block in zip(layers, self._model.blocks, strict=True):
            for column, vector in (
                (fused.NORM_1, block.norm_1.weight),
                (fused.Q_NORM, block.attn.q_norm.weight),
                (fused.K_NORM, block.attn.k_norm.weight),
                (fused.NORM_2, block.norm_2.weight),
            ):
                row[column] = self._address(vector.detach().numpy())
            for column, unit_column, matrix in (
                (fused.QKV, fused.QKV_UNIT, block.attn.qkv.weight),
                (fused.PROJ, fused.PROJ_UNIT, block.attn.proj.weight),
                (fused.GATE_UP, fused.GATE_UP_UNIT, block.mlp.gate_up.weight),
                (fused.DOWN, fused.DOWN_UNIT, block.mlp.down.weight),
            ):
                row[column], row[unit_column] = map(self._address, packed(matrix, self._format))
        wte, wte_unit = packed(self._model.wte.weight, self._format)
        head, head_unit = packed(self._model.lm_head.weight, self._format)
        self._like = wte.dtype.type(0)
        self._weights = fused.Weights(
            layers=self._address(layers),
            wte=self._address(wte),
            wte_unit=self._address(wte_unit),
            norm_f=self._address(self._model.norm_f.weight.detach().numpy()),
            lm_head=self._address(head),
            lm_head_unit=self._address(head_unit),
            width=wte.itemsize,
            near=self._model.n_params * wte.itemsize <= NEAR_BYTES,
            norm_eps=NORM_EPS,
        )
        self._fused = fused
        with fused.first_compiling(compiling):
            self.decode(self._model.new_cache(), [0], np.empty((0, 1)), Sampling(), 0.0)

    def _address(self, array: NDArray[Any]) -> int:
        self._kept.append(array)
        return array.ctypes.data


class AutoEngine:
    """The fused engine, or torch from the moment on that it turns out not to run here, which is said."""

    def __init__(self, model: GPT, fused: FusedEngine, note: Callable[[str], None]) -> None:
        self._model = model
        self._fused = fused
        self._engine: Engine = fused
        self._note = note

    @property
    def name(self) -> str:
        return self._engine.name

    @property
    def loading_s(self) -> float:
        return self._fused.loading_s

    def decode(
        self,
        kv_cache: KVCache,
        last: Sequence[int],
        uniforms: NDArray[np.float64],
        sampling: Sampling,
        tolerance: float,
    ) -> Drawn:
        try:
            return self._engine.decode(kv_cache, last, uniforms, sampling, tolerance)
        except ConfigError as error:
            self._note(f"writing with torch, which is slower: {error}")
            self._engine = TorchEngine(self._model)
            return self._engine.decode(kv_cache, last, uniforms, sampling, tolerance)


class _InBackground:
    """A call in a thread of its own, so that Ctrl-C is heard meanwhile: compiled code that calls Python back would
    lose it. The program can end before the call has."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._call = call
        self._error: Exception | None = None
        self._thread = Thread(target=self._run, daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Waits for its end.

        Raises:
            Exception: what the call raised.
        """
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            self._call()
        except Exception as error:
            self._error = error


def choose_engine(
    name: str,
    model: GPT,
    format: str = "float32",
    *,
    threads: int | None = None,
    note: Callable[[str], None] = lambda _: None,
) -> Engine:
    """The engine of that name; ``auto`` is the faster one of those that can run: fused, if it can.

    Args:
        model: its weights rounded to the format.
        threads: of the fused engine; None takes as many as help.
        note: told why ``auto`` is not the fused engine, and that compiling takes a while.

    Raises:
        ConfigError: there is no such engine, or it cannot run here.
    """
    if name not in ENGINES:
        raise ConfigError(f"there is no engine {name!r}: choose one of {', '.join(ENGINES)}")
    if name == "torch":
        return TorchEngine(model)
    if reason := fused_reason(model):
        sentence = f"the fused engine cannot run here: {reason}"
        if name == "fused":
            raise ConfigError(sentence)
        if model.lm_head.weight.device.type == "cpu":
            note(f"writing with torch, which is slower: {sentence}")
        return TorchEngine(model)
    helping = torch.get_num_threads() if model.n_params >= THREADED else 1
    fused = FusedEngine(model, format, threads or helping, note)
    return fused if name == "fused" else AutoEngine(model, fused, note)


def fused_reason(model: GPT) -> str | None:
    """Why the fused engine cannot run that model here; None if it can."""
    weight = model.lm_head.weight
    if weight.device.type != "cpu":
        return f"it computes on the CPU, and the model is on {weight.device.type}"
    if weight.dtype != torch.float32:
        return f"it computes in float32, and the model in {str(weight.dtype).removeprefix('torch.')}"
    if importlib.util.find_spec("numba") is None:
        return "numba is not installed (pip install 'minigpt[fast]')"
    return None


if TYPE_CHECKING:

    def _is_an_engine(engine: TorchEngine | FusedEngine | AutoEngine) -> Engine:
        return engine
