"""Which windows of a text a batch is made of."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from minigpt.examples import Examples


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32])
def test_a_batch_is_windows_of_the_text_and_what_follows_each_character(dtype: type[np.unsignedinteger[Any]]) -> None:
    ids = np.arange(50).astype(dtype)
    drawn = Examples(ids, 8, seed=1).batch(0, 16)
    x, y = drawn.x, drawn.y
    assert x.shape == y.shape == (16, 8)
    assert x.dtype == y.dtype == torch.int64
    assert x.is_contiguous()
    assert y.is_contiguous()
    assert torch.equal(y, x + 1)
    assert torch.equal(x, x[:, :1] + torch.arange(8))
    assert np.array_equal(ids[drawn.positions], y.numpy())


@pytest.mark.parametrize(
    ("length", "windows"), [(11, 1), (19, 1), (20, 1), (29, 1), (30, 2), (39, 2), (40, 3), (104, 9), (1009, 99)]
)
def test_a_pass_reads_windows_side_by_side_once_in_an_order_of_its_own(length: int, windows: int) -> None:
    examples = Examples(np.arange(length, dtype=np.uint16), 10, seed=1)
    orders, offsets = [], []
    for number in range(40):
        starts = examples.batch(windows * number, windows).x[:, 0].numpy()
        offsets.append(int(starts.min()))
        orders.append(((starts - offsets[-1]) // 10).tolist())
        assert np.array_equal(np.sort(starts), offsets[-1] + 10 * np.arange(windows))
        # With the character after it.
        assert offsets[-1] + 10 * windows + 1 <= length
    # Wherever a pass may begin, one does in the end, and there are as many orders as there can be.
    assert set(offsets) <= set(range(length - 10 * windows))
    assert len(set(offsets)) >= min(10, (length - 10 * windows) // 2 + 1)
    assert len({tuple(order) for order in orders}) == {1: 1, 2: 2, 3: 6}.get(windows, 40)


def test_every_place_in_a_pass_gets_every_window_equally_often() -> None:
    # Of ten windows.
    examples = Examples(np.arange(110, dtype=np.uint8), 10, seed=2)
    counts = np.zeros((10, 10))
    for number in range(2_000):
        starts = examples.batch(10 * number, 10).x[:, 0].numpy()
        counts[np.arange(10), (starts - starts.min()) // 10] += 1
    # Of 2,000 a tenth, with a standard deviation of 13.4; seeded, and a hundred of them are looked at.
    assert np.abs(counts - 200).max() < 4.5 * 13.4


def test_neighbours_are_no_likelier_to_follow_each_other_than_chance_has_it() -> None:
    # A shuffle with a pattern would let one window follow its neighbour often.
    examples = Examples(np.zeros(1_000_011, dtype=np.uint8), 10, seed=3)
    starts = examples.batch(0, 99_999).positions[:, 0]
    differences, counts = np.unique(np.diff(starts), return_counts=True)
    assert counts.max() <= 12
    assert len(differences) > 40_000


def test_every_start_from_the_first_to_the_last_is_equally_likely() -> None:
    # One window fits, at any of five places.
    drawn = Examples(np.arange(12, dtype=np.uint8), 7, seed=1).batch(0, 20_000)
    counts = torch.bincount(drawn.x[:, 0])
    assert len(counts) == 5
    assert drawn.y.max() == 11
    # Five standard deviations (57 each) of 4,000; seeded, and with another seed a false alarm once in 300,000 runs.
    assert (counts - 4000).abs().max() < 5 * 57


def test_starts_are_equally_likely_in_a_text_of_three_thousand_million_characters() -> None:
    """32 random bits modulo 3 * 10^9 would put 60 % into the first 1.3 * 10^9 instead of 43 %."""
    length = 3_000_000_000
    # Takes no memory: all characters are the same one.
    ids: np.ndarray = np.lib.stride_tricks.as_strided(np.zeros(1, np.uint8), shape=(length,), strides=(0,))
    starts = Examples(ids, 4, seed=1).batch(0, 10_000).positions[:, 0] - 1
    share = float((starts < 2**32 - length).mean())
    # Five standard deviations of 0.005; seeded, and with another seed a false alarm once in 1,700,000 runs.
    assert abs(share - (2**32 - length) / length) < 5 * 0.005


def test_a_batch_is_the_same_however_the_sequence_is_cut_into_batches() -> None:
    ids = np.arange(64, dtype=np.uint8)
    # Seven windows a pass: batches of 16 reach over the ends of two or three.
    whole = Examples(ids, 8, seed=5).batch(0, 112).x
    cut = [Examples(ids, 8, seed=5).batch(16 * step, 16).x for step in range(7)]
    assert torch.equal(torch.cat(cut), whole)
    backwards = Examples(ids, 8, seed=5)
    assert torch.equal(torch.cat([backwards.batch(16 * step, 16).x for step in reversed(range(7))][::-1]), whole)


def test_the_seed_alone_decides_the_order() -> None:
    ids = np.arange(100, dtype=np.uint8)
    one = Examples(ids, 8, seed=5).batch(3, 8)
    np.random.seed(2)
    torch.manual_seed(2)
    assert torch.equal(Examples(ids, 8, seed=5).batch(3, 8).x, one.x)
    assert not torch.equal(Examples(ids, 8, seed=6).batch(3, 8).x, one.x)


def test_the_only_window_of_a_short_text_is_found_and_a_shorter_text_is_a_mistake_in_code() -> None:
    drawn = Examples(np.arange(5, dtype=np.uint8), 4, seed=0).batch(0, 3)
    assert drawn.x.tolist() == [[0, 1, 2, 3]] * 3
    assert drawn.y.tolist() == [[1, 2, 3, 4]] * 3
    with pytest.raises(ValueError, match="block_size=4"):
        Examples(np.arange(4, dtype=np.uint8), 4, seed=0)
