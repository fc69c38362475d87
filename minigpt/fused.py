"""The fused engine's compiled code: many characters in one function that does not return to Python in between.

It is the network of `model` and the drawing of `sampling` once more, written for one new position a text, in loops that
numba compiles. It works on the same weights and the same cache, so that torch can go on from what it leaves, and it
from what torch leaves. `engine` calls it.

All threads run the same function, each on its share of heads and of rows of the matrices; where one reads what another
has written, they meet.

Everything is passed by address and read through plain pointers: arrays and tuples of them would be as fast, but numba
takes ten times longer to compile what passes them on.

Shape letters are those of `model`; W is the window, N the characters of a call, B texts are written side by side.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar, cast

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import event
from numba.extending import intrinsic

# Sums may be taken in any order, as torch takes them; infinities and NaN stay what they are.
ANY_ORDER = {"reassoc", "contract", "nsz", "arcp", "afn"}
# Words between the marks of two threads, so that no two share a cache line.
MARK_WORDS = 16
# How often a waiting thread looks before it lets others run in between: longer than any meeting takes when every thread
# has a core of its own.
SPINS = 5_000
# Rows of a matrix that stay in the nearest memory cache, with four texts, while all texts meet them.
ROWS = 16

Function = TypeVar("Function", bound=Callable[..., Any])

# Kinds of numbers that addresses point at.
FLOAT = np.float32(0)
DOUBLE = np.float64(0)
INT = np.int64(0)

# Columns of the table of a layer's addresses: its vectors, its matrices, and what one unit of their rows is worth.
NORM_1, Q_NORM, K_NORM, NORM_2, QKV, PROJ, GATE_UP, DOWN, QKV_UNIT, PROJ_UNIT, GATE_UP_UNIT, DOWN_UNIT = range(12)
COLUMNS = 12


class Shape(NamedTuple):
    """Sizes."""

    B: int
    L: int
    C: int
    H: int
    D: int
    F: int
    V: int
    W: int


class Weights(NamedTuple):
    """Addresses of a model's weights; each matrix has its numbers, and the worth of one unit of each of its rows."""

    # Of a table (L, COLUMNS) of addresses.
    layers: int
    wte: int
    wte_unit: int
    norm_f: int
    lm_head: int
    lm_head_unit: int
    # Bytes of a number in a matrix.
    width: int
    # Whether all of them fit into a processor's memory cache.
    near: bool
    # What norms add to a mean square.
    norm_eps: float


class Cache(NamedTuple):
    """Addresses of keys and values, (L, B, H, W, D), of the angles of N positions, (N, D), and the first position."""

    keys: int
    values: int
    cos: int
    sin: int
    position: int


class Drawing(NamedTuple):
    """How ids are drawn; see `sampling`."""

    # Address of (N, B) float64.
    uniforms: int
    N: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    tolerance: float
    # Of `sampling.ratio_slack`.
    slack: float


class Shared(NamedTuple):
    """Addresses of what the threads of a call write for each other."""

    # Newest ids, (B,); all that were drawn, (N, B); whether the newest are in doubt, (B,): int64.
    ids: int
    drawn: int
    doubts: int
    # (B, C), (B, 3 C), (B, C), (B, F), (B, V): float32.
    stream: int
    qkv: int
    attended: int
    inner: int
    logits: int
    # (V,) float64; (2, V) int64.
    probs: int
    order: int
    # How often each thread has been at a meeting, (threads, MARK_WORDS) int64; (1,) int64, not 0 once a thread will
    # come no more.
    marks: int
    aborted: int
    threads: int


class Private(NamedTuple):
    """Addresses of what a thread keeps to itself."""

    rank: int
    # (B, C), (W,), (B, F): float32.
    normed: int
    scores: int
    up: int
    # Meetings it has been at, (1,) int64.
    met: int


def _compile(function: Function, *, any_order: bool) -> Function:
    """Compiled when it is called first, without holding Python's lock; kept on disk where there is room for it."""
    settings: dict[str, Any] = {"nogil": True, "fastmath": ANY_ORDER if any_order else False}
    compiled: Any
    try:
        compiled = numba.njit(cache=True, **settings)(function)
    except RuntimeError:
        # No folder that numba knows can be written.
        compiled = numba.njit(**settings)(function)
    return cast(Function, compiled)


@contextmanager
def first_compiling(act: Callable[[], object]) -> Iterator[None]:
    """Calls ``act`` when a function begins to be compiled meanwhile, not if all are found on disk."""

    class FirstStart(event.Listener):  # type: ignore[misc, no-untyped-call, unused-ignore]
        acted = False

        def on_start(self, _: Any) -> None:
            if not self.acted:
                self.acted = True
                act()

        def on_end(self, _: Any) -> None:
            pass

    with event.install_listener("numba:compile", FirstStart()):
        yield


def _compiled(function: Function) -> Function:
    return _compile(function, any_order=True)


def _compiled_exactly(function: Function) -> Function:
    return _compile(function, any_order=False)


def _inlined(function: Function) -> Function:
    """Becomes part of those that call it: what it calls need not be optimised once more for its own sake."""
    inlined: Any = numba.njit(nogil=True, fastmath=ANY_ORDER, inline="always")(function)
    return cast(Function, inlined)


# What numba has no words for


def _generated(code: Callable[..., Any]) -> Any:
    """A function that is called as ``code`` is, less its first argument, and compiled to what that generates."""
    return intrinsic(code)


@_generated
def _pointer(context: Any, address: Any, like: Any) -> Any:
    """A pointer to numbers of the type of another."""
    pointer: Any = types.CPointer(like)  # type: ignore[no-untyped-call]

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(pointer))

    return pointer(types.int64, like), generate


@_generated
def _widened(context: Any, weight: Any) -> Any:
    """A weight as float32: float32 itself, 16 bits as the half-precision number they are, int8 by its value."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if weight == types.uint16:
            return builder.fpext(builder.bitcast(arguments[0], ir.HalfType()), ir.FloatType())
        if weight == types.int8:
            return builder.sitofp(arguments[0], ir.FloatType())
        return arguments[0]

    return types.float32(weight), generate


@_generated
def _float_of(context: Any, bits: Any) -> Any:
    """The float32 of 32 bits."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.int32), generate


@_generated
def _publish(context: Any, address: Any, value: Any) -> Any:
    """Stores a number; a thread that sees it sees all that this one has stored before."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        word = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        builder.store_atomic(arguments[1], word, "release", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@_generated
def _published(context: Any, address: Any) -> Any:
    """The number that another thread has stored last."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        word = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        return builder.load_atomic(word, "acquire", 8)

    return types.int64(types.int64), generate


# Of the system's own library.
_let_others_run = types.ExternalFunction("SwitchToThread" if sys.platform == "win32" else "sched_yield", types.int32())


@_compiled
def _meet(shared: Shared, private: Private) -> None:
    """Waits until all threads are here."""
    if shared.threads == 1:
        return
    met = _pointer(private.met, INT)
    met[0] += 1
    _publish(shared.marks + 8 * MARK_WORDS * private.rank, met[0])
    for other in range(shared.threads):
        spins = 0
        while _published(shared.marks + 8 * MARK_WORDS * other) < met[0]:
            if _published(shared.aborted):
                # What is computed from here on is not used.
                return
            spins += 1
            if spins > SPINS:
                _let_others_run()


@_inlined
def _share(n: int, shared: Shared, private: Private) -> tuple[int, int]:
    """The first of n rows that this thread computes, and the first that it does not."""
    return n * private.rank // shared.threads, n * (private.rank + 1) // shared.threads


# The network


@_compiled_exactly
def _exp(x: np.float32) -> np.float32:
    """e^x to a few units in the last place of float32, as if x were from -87.3 to 88.

    2^n e^f, with n the whole number nearest to x / ln 2 and e^f by its Taylor series to f^7, whose rest is below 2^-27.
    The library's exponential is a call for every number; this one is compiled into loops over eight at a time.

    Source:
        Cody and Waite 1980, "Software Manual for the Elementary Functions", chapter 6: n ln 2 is taken off in two
        parts, of which the first, n * 355 / 512, is exact.
    """
    x = min(max(x, np.float32(-87.3)), np.float32(88.0))
    n = np.floor(x * np.float32(1 / math.log(2)) + np.float32(0.5))
    f = (x - n * np.float32(355 / 512)) - n * np.float32(math.log(2) - 355 / 512)
    series = np.float32(1 / 5040)
    for factorial in (720, 120, 24, 6, 2, 1, 1):
        series = series * f + np.float32(1 / factorial)
    power: np.float32 = _float_of((np.int32(n) + np.int32(127)) << np.int32(23))
    return np.float32(series * power)


@_compiled
def _dot(row_at: int, x_at: int, n: int, like: Any) -> np.float32:
    row, x = _pointer(row_at, like), _pointer(x_at, FLOAT)
    total = np.float32(0)
    for i in range(n):
        total += _widened(row[i]) * x[i]
    return total


@_compiled
def _four_dots(row_at: int, pitch: int, x_at: int, n: int, like: Any) -> tuple[Any, Any, Any, Any]:
    """Four neighbouring rows, so many bytes apart, each times x: x is loaded once, and four sums run side by side."""
    x = _pointer(x_at, FLOAT)
    row_0, row_1 = _pointer(row_at, like), _pointer(row_at + pitch, like)
    row_2, row_3 = _pointer(row_at + 2 * pitch, like), _pointer(row_at + 3 * pitch, like)
    total_0 = total_1 = total_2 = total_3 = np.float32(0)
    for i in range(n):
        total_0 += _widened(row_0[i]) * x[i]
        total_1 += _widened(row_1[i]) * x[i]
        total_2 += _widened(row_2[i]) * x[i]
        total_3 += _widened(row_3[i]) * x[i]
    return total_0, total_1, total_2, total_3


@_compiled
def _two_by_four(row_at: int, pitch: int, x_at: int, n: int, like: Any) -> tuple[Any, ...]:
    """Two neighbouring rows, so many bytes apart, times four neighbouring vectors: as many sums as registers hold.

    Returns:
        The sums of the first row, then those of the second.
    """
    row_0, row_1 = _pointer(row_at, like), _pointer(row_at + pitch, like)
    x_0, x_1 = _pointer(x_at, FLOAT), _pointer(x_at + 4 * n, FLOAT)
    x_2, x_3 = _pointer(x_at + 8 * n, FLOAT), _pointer(x_at + 12 * n, FLOAT)
    a_0 = a_1 = a_2 = a_3 = b_0 = b_1 = b_2 = b_3 = np.float32(0)
    for i in range(n):
        a, b = _widened(row_0[i]), _widened(row_1[i])
        a_0 += a * x_0[i]
        a_1 += a * x_1[i]
        a_2 += a * x_2[i]
        a_3 += a * x_3[i]
        b_0 += b * x_0[i]
        b_1 += b * x_1[i]
        b_2 += b * x_2[i]
        b_3 += b * x_3[i]
    return a_0, a_1, a_2, a_3, b_0, b_1, b_2, b_3


@_compiled
def _multiply(
    matrix: int, unit_at: int, first: int, last: int, n: int, x: int, out_at: int, stride: int, adds: bool,
    weights: Weights, texts: int, like: Any,
) -> None:  # fmt: skip
    """Rows first ... last - 1 of a matrix of n columns times x, (B, n), into or added to out, (B, stride).

    Some rows meet all texts before the next ones are read.
    """
    pitch = weights.width * n
    if not adds:
        for b in range(texts):
            _fill(out_at + 4 * (b * stride + first), last - first)
    unit, out = _pointer(unit_at, FLOAT), _pointer(out_at, FLOAT)
    for start in range(first, last, ROWS):
        stop = min(start + ROWS, last)
        in_twos, in_fours = stop - (stop - start) % 2, stop - (stop - start) % 4
        b = 0
        while b + 4 <= texts and in_twos == stop:
            for r in range(start, stop, 2):
                sums = _two_by_four(matrix + pitch * r, pitch, x + 4 * n * b, n, like)
                at = b * stride + r
                out[at] += sums[0] * unit[r]
                out[at + stride] += sums[1] * unit[r]
                out[at + 2 * stride] += sums[2] * unit[r]
                out[at + 3 * stride] += sums[3] * unit[r]
                out[at + 1] += sums[4] * unit[r + 1]
                out[at + stride + 1] += sums[5] * unit[r + 1]
                out[at + 2 * stride + 1] += sums[6] * unit[r + 1]
                out[at + 3 * stride + 1] += sums[7] * unit[r + 1]
            b += 4
        while b < texts:
            r = start
            while weights.near and r < in_fours:
                sums = _four_dots(matrix + pitch * r, pitch, x + 4 * n * b, n, like)
                at = b * stride + r
                out[at] += sums[0] * unit[r]
                out[at + 1] += sums[1] * unit[r + 1]
                out[at + 2] += sums[2] * unit[r + 2]
                out[at + 3] += sums[3] * unit[r + 3]
                r += 4
            while r < stop:
                out[b * stride + r] += _dot(matrix + pitch * r, x + 4 * n * b, n, like) * unit[r]
                r += 1
            b += 1


@_compiled
def _fill(at: int, n: int) -> None:
    """Zeros."""
    x = _pointer(at, FLOAT)
    for i in range(n):
        x[i] = np.float32(0)


@_compiled
def _norm(x_at: int, weight_at: int, out_at: int, n: int, eps: float) -> None:
    x, weight, out = _pointer(x_at, FLOAT), _pointer(weight_at, FLOAT), _pointer(out_at, FLOAT)
    inverse = np.float32(1) / np.sqrt(_dot(x_at, x_at, n, FLOAT) / np.float32(n) + np.float32(eps))
    for i in range(n):
        out[i] = x[i] * inverse * weight[i]


@_compiled
def _norm_rotate(x_at: int, weight: int, cos_at: int, sin_at: int, out_at: int, D: int, eps: float) -> None:
    """Norms and turns a query or key, (D,), into another place."""
    _norm(x_at, weight, out_at, D, eps)
    half = D // 2
    out, cos, sin = _pointer(out_at, FLOAT), _pointer(cos_at, FLOAT), _pointer(sin_at + 4 * half, FLOAT)
    for i in range(half):
        first, second = out[i], out[half + i]
        out[i] = first * cos[i] - second * sin[i]
        out[half + i] = first * sin[i] + second * cos[i]


@_compiled
def _attend(q: int, keys: int, values_at: int, n: int, D: int, scores_at: int, y_at: int) -> None:
    """softmax(q k^T / sqrt(D)) v over the first n slots of a head's ring, whose order does not matter."""
    scores, y = _pointer(scores_at, FLOAT), _pointer(y_at, FLOAT)
    scale = np.float32(1) / np.sqrt(np.float32(D))
    pitch = 4 * D
    in_fours = n - n % 4
    for j in range(0, in_fours, 4):
        scores[j], scores[j + 1], scores[j + 2], scores[j + 3] = _four_dots(keys + pitch * j, pitch, q, D, FLOAT)
    for j in range(in_fours, n):
        scores[j] = _dot(keys + pitch * j, q, D, FLOAT)
    largest = np.float32(-np.inf)
    for j in range(n):
        scores[j] *= scale
        largest = max(largest, scores[j])
    total = np.float32(0)
    for j in range(n):
        scores[j] = _exp(scores[j] - largest)
        total += scores[j]
    _fill(y_at, D)
    for j in range(0, in_fours, 4):
        v = _pointer(values_at + pitch * j, FLOAT)
        share_0, share_1 = scores[j] / total, scores[j + 1] / total
        share_2, share_3 = scores[j + 2] / total, scores[j + 3] / total
        for i in range(D):
            y[i] += share_0 * v[i] + share_1 * v[D + i] + share_2 * v[2 * D + i] + share_3 * v[3 * D + i]
    for j in range(in_fours, n):
        v = _pointer(values_at + pitch * j, FLOAT)
        share = scores[j] / total
        for i in range(D):
            y[i] += share * v[i]


@_inlined
def _layer(
    layer: int, step: int, shape: Shape, weights: Weights, cache: Cache, shared: Shared, private: Private, like: Any
) -> None:
    """What `Block` adds to the stream."""
    B, C, H, D, F, W = shape.B, shape.C, shape.H, shape.D, shape.F, shape.W
    row = _pointer(weights.layers + 8 * COLUMNS * layer, INT)
    position = cache.position + step
    for b in range(B):
        _norm(shared.stream + 4 * C * b, row[NORM_1], private.normed + 4 * C * b, C, weights.norm_eps)
    # A head's query, key and value are made by the thread that attends with them, so nobody waits in between.
    first, last = _share(H, shared, private)
    for part in range(3):
        start, stop = part * C + first * D, part * C + last * D
        _multiply(row[QKV], row[QKV_UNIT], start, stop, C, private.normed, shared.qkv, 3 * C, False, weights, B, like)
    cos, sin = cache.cos + 4 * D * step, cache.sin + 4 * D * step
    for b in range(B):
        for h in range(first, last):
            q = shared.qkv + 4 * (b * 3 * C + h * D)
            ring = 4 * W * D * ((layer * B + b) * H + h)
            slot = ring + 4 * D * (position % W)
            _norm_rotate(q, row[Q_NORM], cos, sin, q, D, weights.norm_eps)
            _norm_rotate(q + 4 * C, row[K_NORM], cos, sin, cache.keys + slot, D, weights.norm_eps)
            v, kept = _pointer(q + 8 * C, FLOAT), _pointer(cache.values + slot, FLOAT)
            for i in range(D):
                kept[i] = v[i]
            y = shared.attended + 4 * (b * C + h * D)
            _attend(q, cache.keys + ring, cache.values + ring, min(position + 1, W), D, private.scores, y)
    _meet(shared, private)
    first, last = _share(C, shared, private)
    _multiply(row[PROJ], row[PROJ_UNIT], first, last, C, shared.attended, shared.stream, C, True, weights, B, like)
    _meet(shared, private)

    for b in range(B):
        _norm(shared.stream + 4 * C * b, row[NORM_2], private.normed + 4 * C * b, C, weights.norm_eps)
    first, last = _share(F, shared, private)
    gate_up, unit = row[GATE_UP], row[GATE_UP_UNIT]
    _multiply(gate_up, unit, first, last, C, private.normed, shared.inner, F, False, weights, B, like)
    up_rows = gate_up + weights.width * C * F
    _multiply(up_rows, unit + 4 * F, first, last, C, private.normed, private.up, F, False, weights, B, like)
    inner, up = _pointer(shared.inner, FLOAT), _pointer(private.up, FLOAT)
    for b in range(B):
        for r in range(b * F + first, b * F + last):
            inner[r] = inner[r] / (np.float32(1) + _exp(-inner[r])) * up[r]
    _meet(shared, private)
    first, last = _share(C, shared, private)
    _multiply(row[DOWN], row[DOWN_UNIT], first, last, F, shared.inner, shared.stream, C, True, weights, B, like)
    _meet(shared, private)


@_inlined
def _logits(
    step: int, shape: Shape, weights: Weights, cache: Cache, shared: Shared, private: Private, like: Any
) -> None:
    """Puts the newest ids into the cache and computes the logits of those that follow."""
    B, C, V = shape.B, shape.C, shape.V
    ids, stream, unit = _pointer(shared.ids, INT), _pointer(shared.stream, FLOAT), _pointer(weights.wte_unit, FLOAT)
    first, last = _share(C, shared, private)
    for b in range(B):
        embedding = _pointer(weights.wte + weights.width * C * ids[b], like)
        for i in range(first, last):
            stream[b * C + i] = _widened(embedding[i]) * unit[ids[b]]
    _meet(shared, private)
    for layer in range(shape.L):
        _layer(layer, step, shape, weights, cache, shared, private, like)
    for b in range(B):
        _norm(shared.stream + 4 * C * b, weights.norm_f, private.normed + 4 * C * b, C, weights.norm_eps)
    first, last = _share(V, shared, private)
    head, head_unit = weights.lm_head, weights.lm_head_unit
    _multiply(head, head_unit, first, last, C, private.normed, shared.logits, V, False, weights, B, like)
    _meet(shared, private)


# Drawing


@_compiled_exactly
def _rank(logits_at: int, V: int, order_at: int) -> int:
    """Sorts ids by their logits, the largest first, equal ones by id; returns the address of the order, (V,)."""
    logits = _pointer(logits_at, FLOAT)
    order, spare = order_at, order_at + 8 * V
    a = _pointer(order, INT)
    for i in range(V):
        a[i] = i
    width = 1
    while width < V:
        a, b = _pointer(order, INT), _pointer(spare, INT)
        for start in range(0, V, 2 * width):
            left, right = start, min(start + width, V)
            middle, stop = right, min(start + 2 * width, V)
            for i in range(start, stop):
                if right == stop or (left < middle and logits[a[left]] >= logits[a[right]]):
                    b[i] = a[left]
                    left += 1
                else:
                    b[i] = a[right]
                    right += 1
        order, spare = spare, order
        width *= 2
    return order


@_compiled_exactly
def _n_kept(probs_at: int, order_at: int, V: int, top_k: int, top_p: float, min_p: float) -> int:
    """How many of the ids, the likeliest first, pass the filters of `sampling.probabilities`."""
    probs, order = _pointer(probs_at, DOUBLE), _pointer(order_at, INT)
    n = top_k if 0 < top_k < V else V
    if top_p < 1:
        total = 0.0
        for i in range(n):
            total += probs[order[i]]
        before = probs[order[0]]
        for i in range(1, n):
            if before >= top_p * total:
                n = i
                break
            before += probs[order[i]]
    while n > 1 and (probs[order[n - 1]] == 0 or probs[order[n - 1]] < min_p * probs[order[0]]):
        n -= 1
    return n


@_compiled_exactly
def _n_below(probs_at: int, V: int, target: float) -> int:
    """How many of the cumulative probabilities are at most a number."""
    probs = _pointer(probs_at, DOUBLE)
    cumulative = 0.0
    for i in range(V):
        cumulative += probs[i]
        # Written so that one that is not a number ends it, as `sampling` counts.
        if not cumulative <= target:
            return i
    return V - 1


@_compiled_exactly
def draw(logits_at: int, V: int, u: float, drawing: Drawing, probs_at: int, order_at: int) -> tuple[int, bool]:
    """`sampling.sample_and_doubt` for one row.

    Args:
        logits_at: address of (V,) float32.
        u: the uniform number.
        probs_at, order_at: of room for (V,) float64 and (2, V) int64.
    """
    logits, probs = _pointer(logits_at, FLOAT), _pointer(probs_at, DOUBLE)
    tolerance, temperature = drawing.tolerance, drawing.temperature
    best = 0
    for i in range(1, V):
        # The first one that is not a number counts as the largest, as it does there.
        if logits[i] > logits[best] or (logits[i] != logits[i] and logits[best] == logits[best]):
            best = i
    lead = np.inf
    for i in range(V):
        if i != best:
            lead = min(lead, np.float64(logits[best]) - np.float64(logits[i]))
    if temperature == 0:
        return best, lead <= 2 * tolerance
    doubt = temperature < tolerance and lead <= 2 * tolerance
    slack = drawing.slack
    total = 0.0
    for i in range(V):
        probs[i] = math.exp((np.float64(logits[i]) - np.float64(logits[best])) / temperature)
        total += probs[i]
    for i in range(V):
        probs[i] /= total
    if drawing.top_k or drawing.top_p < 1 or drawing.min_p:
        ranked_at = _rank(logits_at, V, order_at)
        ranked = _pointer(ranked_at, INT)
        n = _n_kept(probs_at, ranked_at, V, drawing.top_k, drawing.top_p, drawing.min_p)
        if tolerance > 0:
            # Two characters on either side of a cut might change places, or the cut itself might move.
            doubt |= n < V and probs[ranked[n - 1]] <= probs[ranked[n]] * (1 + slack)
            for sign in (-1, 1):
                top_p = drawing.top_p + sign * slack / 4 if drawing.top_p < 1 else 1.0
                min_p = drawing.min_p * (1 + sign * slack)
                doubt |= _n_kept(probs_at, ranked_at, V, drawing.top_k, top_p, min_p) != n
        for i in range(n, V):
            probs[ranked[i]] = 0.0
    total = 0.0
    for i in range(V):
        total += probs[i]
    most = np.nextafter(total, 0.0)
    drawn = _n_below(probs_at, V, min(u * total, most))
    for shift in (-slack, slack):
        moved = min(max(u + u * (1 - u) * shift, 0.0) * total, most)
        doubt |= _n_below(probs_at, V, moved) != drawn
    return drawn, doubt


@_compiled
def decode(
    shape: Shape, weights: Weights, cache: Cache, drawing: Drawing, shared: Shared, private: Private, like: Any
) -> int:
    """Takes steps: each puts the newest ids into the cache and draws those that follow.

    Args:
        like: a number of the type that matrices hold: float32, uint16 (the bits of float16), or int8.

    Returns:
        The number of steps; fewer than N if the last one's ids are in doubt.
    """
    ids, drawn, doubts = _pointer(shared.ids, INT), _pointer(shared.drawn, INT), _pointer(shared.doubts, INT)
    uniforms = _pointer(drawing.uniforms, DOUBLE)
    for step in range(drawing.N):
        _logits(step, shape, weights, cache, shared, private, like)
        if private.rank == 0:
            for b in range(shape.B):
                u = uniforms[step * shape.B + b]
                id_, doubt = draw(shared.logits + 4 * shape.V * b, shape.V, u, drawing, shared.probs, shared.order)
                ids[b], drawn[step * shape.B + b], doubts[b] = id_, id_, doubt
        _meet(shared, private)
        for b in range(shape.B):
            if doubts[b]:
                return step + 1
    return drawing.N
