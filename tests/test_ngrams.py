"""Counts of a text as distributions to learn from, against a slow second implementation with dictionaries."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch

from minigpt import ngrams
from minigpt.corpus import Ids
from minigpt.ngrams import DISCOUNT, MAX_ORDER, NGrams


def text(n: int, vocab_size: int = 3, seed: int = 0) -> Ids:
    """A text in which some contexts are frequent and some occur once."""
    draws = np.random.default_rng(seed).geometric(0.5, n) - 1
    return np.minimum(draws, vocab_size - 1).astype(np.uint8)


def expected(ids: Ids, vocab_size: int, position: int, counted: list[int], max_order: int) -> list[float]:
    """The distribution at a position, from the text without that position's own occurrence."""
    others = [i for i in counted if i != position]
    probabilities = [1 / vocab_size] * vocab_size
    for order in range(max_order + 1):
        context = [ids[max(position - back, 0)] for back in range(order, 0, -1)]
        followed = Counter(int(ids[i]) for i in others if ids[i - order : i].tolist() == context)
        total = sum(followed.values())
        if total:
            discounts = {id_: DISCOUNT * n**0.75 for id_, n in followed.items()}
            left = sum(discounts.values())
            probabilities = [
                (followed[id_] - discounts.get(id_, 0.0) + left * probability) / total
                for id_, probability in enumerate(probabilities)
            ]
    return probabilities


def test_the_distribution_at_every_place_is_that_of_all_the_other_places() -> None:
    ids = text(300)
    found = NGrams(ids, 3).distribution(np.arange(len(ids)))
    counted = list(range(MAX_ORDER, len(ids)))
    for position in range(len(ids)):
        assert found[position].tolist() == pytest.approx(expected(ids, 3, position, counted, MAX_ORDER), abs=1e-5)
    torch.testing.assert_close(found.sum(dim=1), torch.ones(len(ids)))
    assert found.min() > 0


@pytest.mark.parametrize("n_chars", [306, 307, 309])
def test_of_a_long_text_even_pieces_are_counted(n_chars: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngrams, "MOST_COUNTED", 100)
    monkeypatch.setattr(ngrams, "CHUNKS", 4)
    ids = text(n_chars)
    # 300 positions in 4 pieces, of whose 75 the first 25 are counted; and up to three at the end that are not.
    counted = [MAX_ORDER + 75 * piece + i for piece in range(4) for i in range(25)]
    found = NGrams(ids, 3).distribution(np.arange(len(ids)))
    for position in range(len(ids)):
        assert found[position].tolist() == pytest.approx(expected(ids, 3, position, counted, MAX_ORDER), abs=1e-5)
    torch.testing.assert_close(found.sum(dim=1), torch.ones(n_chars))


def test_contexts_whose_table_would_be_too_large_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = text(300)
    # 1, 3 and 9 contexts and a row more each, times 3: the third table is the first with more than 29 cells.
    monkeypatch.setattr(ngrams, "MOST_CELLS", 29)
    found = NGrams(ids, 3).distribution(np.arange(len(ids)))
    counted = list(range(MAX_ORDER, len(ids)))
    for position in range(len(ids)):
        assert found[position].tolist() == pytest.approx(expected(ids, 3, position, counted, 1), abs=1e-5)


def test_a_context_that_occurs_once_is_no_hint_of_what_follows_it_there() -> None:
    # "abcabcabc..." with one odd place: what follows it would be certain if it were counted itself.
    ids = np.array([0, 1, 2] * 40 + [2, 2, 1] + [0, 1, 2] * 40, np.uint8)
    place = 122
    assert ids[place - 2 : place + 1].tolist() == [2, 2, 1]
    found = NGrams(ids, 3).distribution(np.array([place, 50]))
    assert found[0, 1] < 0.1
    # In a place like all others the answer is near certain.
    assert found[1, ids[50]] > 0.8


def test_a_held_out_text_is_predicted_better_with_counts_than_without() -> None:
    # A chain in which each character depends on the two before it.
    generator = np.random.default_rng(3)
    choices = generator.dirichlet([0.2] * 5, (5, 5))
    ids = np.zeros(6000, np.uint8)
    for i in range(2, len(ids)):
        ids[i] = generator.choice(5, p=choices[ids[i - 2], ids[i - 1]])
    entropy = -np.mean([np.log(choices[ids[i - 2], ids[i - 1]][ids[i]]) for i in range(2, len(ids))])
    found = NGrams(ids, 5).distribution(np.arange(100, len(ids)))
    loss = -found[torch.arange(len(found)), torch.from_numpy(ids[100:].astype(np.int64))].log().mean().item()
    # Each place is judged by the others, so the loss cannot fall below the chain's own.
    assert entropy < loss < entropy + 0.1
