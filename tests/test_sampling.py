"""From logits to ids: reference numbers, filters as documented, and nothing impossible is ever drawn."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import settings as examples
from hypothesis import strategies as st

from minigpt import sampling as module
from minigpt.errors import ConfigError
from minigpt.sampling import Logits, Sampling, probabilities, sample, sample_and_doubt, uniforms

LAST_BELOW_ONE = 1 - 2.0**-53
DROPPED = -math.inf


def row(*logits: float, dtype: type[np.floating[Any]] = np.float64) -> Logits:
    return np.array([logits], dtype)


def of_probabilities(*probs: float) -> Logits:
    with np.errstate(divide="ignore"):
        return np.log(row(*probs))


def draw(logits: Logits, u: float, settings: Sampling) -> int:
    return int(sample(logits, np.array([u]), settings)[0])


def kept(logits: Logits, settings: Sampling) -> list[int]:
    ids: list[int] = probabilities(logits, settings)[0].nonzero()[0].tolist()
    return ids


# The uniform number


def uniform(seed: int, number: int, position: int) -> float:
    """The number of one character."""
    return float(uniforms(seed, [number], position, 1)[0, 0])


def split_mix(*words: int) -> float:
    """SplitMix64 from its paper in 64-bit arithmetic, one step a word, each word mixed into the state before it."""
    state = np.uint64(0)
    with np.errstate(over="ignore"):
        for word in words:
            z = (state ^ np.uint64(word % 2**64)) + np.uint64(0x9E3779B97F4A7C15)
            z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            state = z ^ (z >> np.uint64(31))
    return float(state >> np.uint64(11)) / 2.0**53


def test_the_mixing_function_is_that_of_split_mix_64() -> None:
    # The first outputs of the public reference program (Vigna, splitmix64.c) from the state 0.
    states = np.array([n * 0x9E3779B97F4A7C15 % 2**64 for n in (1, 2, 3)], np.uint64)
    assert module._mix(states).tolist() == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]


@pytest.mark.parametrize(
    ("seed", "number", "position"),
    [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (42, 3, 1000), (2**64 - 1, 2**32, 10**9), (-1, 0, 7), (2**70, 1, 1)],
)
def test_the_number_of_a_character_is_a_fixed_function_of_seed_sample_and_position(
    seed: int, number: int, position: int
) -> None:
    assert uniform(seed, number, position) == split_mix(seed, number, position)


def test_texts_of_today_can_be_written_again_tomorrow() -> None:
    # As first released: another number here is another text for every seed that anybody has noted down.
    assert [uniform(0, 0, 0), uniform(1, 0, 1), uniform(1337, 2, 500)] == [
        0.13870941014555427,
        0.42321144819582723,
        0.7068724863380125,
    ]


@pytest.mark.parametrize("start", [0, 5, 2**40])
def test_numbers_of_many_characters_are_those_of_each(start: int) -> None:
    together = uniforms(7, [0, 3, 1], start, 4)
    assert together.tolist() == [[uniform(7, number, start + n) for number in (0, 3, 1)] for n in range(4)]


@given(st.integers(-(2**70), 2**70), st.integers(0, 2**20), st.integers(0, 2**40))
def test_the_number_is_from_zero_to_below_one(seed: int, number: int, position: int) -> None:
    assert 0 <= uniform(seed, number, position) < 1


@pytest.mark.parametrize(("bits", "number"), [(0, 0.0), (2**64 - 1, LAST_BELOW_ONE)])
def test_the_extreme_states_give_zero_and_the_last_number_below_one(
    bits: int, number: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_mix", lambda z: np.full_like(z, bits))
    assert uniform(1, 2, 3) == number


@pytest.mark.parametrize(
    "numbers",
    [
        pytest.param(lambda n: uniform(1, 0, n), id="positions"),
        pytest.param(lambda n: uniform(1, n, 100), id="samples"),
        pytest.param(lambda n: uniform(n, 0, 100), id="seeds"),
    ],
)
def test_numbers_are_uniform_and_neighbours_unrelated(numbers: Callable[[int], float]) -> None:
    drawn = np.array([numbers(n) for n in range(20_000)])
    assert len(set(drawn)) == len(drawn)
    # Fixed numbers, so a pass today is a pass for ever; a new function would fail either bound once in ten thousand.
    counts = np.histogram2d(drawn[:-1], drawn[1:], bins=10, range=[(0, 1), (0, 1)])[0]
    expected = counts.sum() / 100
    assert ((counts - expected) ** 2 / expected).sum() < 161.3  # chi-square, 99 degrees of freedom
    assert abs(np.corrcoef(drawn[:-1], drawn[1:])[0, 1]) < 3.9 / math.sqrt(len(drawn))


# Temperature


def test_probabilities_are_the_softmax_of_logits_over_temperature() -> None:
    logits = np.array([0.5, -1, 3, 3, 0])
    for temperature in (0.1, 1.0, 7.5):
        weights = np.exp((logits - 3) / temperature)
        expected = weights / weights.sum()
        probs = probabilities(row(*logits), Sampling(temperature))
        np.testing.assert_allclose(probs[0], expected, rtol=1e-12)


@given(
    st.lists(st.sampled_from([-2.0, 0.0, 0.5, 1.0, 1e30, -1e30]), min_size=1, max_size=9), st.floats(0, LAST_BELOW_ONE)
)
def test_temperature_zero_is_the_first_largest_logit_and_so_is_top_k_one(logits: list[float], u: float) -> None:
    greedy = logits.index(max(logits))
    assert draw(row(*logits), u, Sampling(temperature=0)) == greedy
    assert draw(row(*logits), u, Sampling(top_k=1)) == greedy
    assert draw(row(*logits), u, Sampling(temperature=0.5, top_k=1, top_p=0.5, min_p=0.5)) == greedy


def test_filters_do_nothing_at_temperature_zero() -> None:
    assert draw(row(0, 2, 1), 0.99, Sampling(temperature=0, top_k=3, top_p=0.1, min_p=0.1)) == 1


def test_a_low_temperature_concentrates_and_a_high_one_levels() -> None:
    cold, plain, hot = (probabilities(row(0, 1, 2), Sampling(t))[0, 2].item() for t in (0.1, 1.0, 1e9))
    assert (cold, plain, hot) == pytest.approx((0.99995, 0.66524, 1 / 3), abs=1e-5)


def test_a_temperature_near_zero_takes_the_most_probable() -> None:
    assert draw(row(1, 2), 0.5, Sampling(temperature=1e-310)) == 1


def test_top_k_one_takes_the_most_probable_even_when_temperature_levels_all() -> None:
    assert draw(row(1, 2), 0.5, Sampling(temperature=1e17, top_k=1)) == 1


# Filters


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (Sampling(top_k=2), [0, 6 / 13, 0, 0, 7 / 13]),
        (Sampling(top_k=4), [2 / 19, 6 / 19, 4 / 19, 0, 7 / 19]),
        (Sampling(top_k=99), [0.1, 0.3, 0.2, 0.05, 0.35]),
        # 0.35 and 0.3 are 0.65; the third is needed for 0.7 and enough for 0.8.
        (Sampling(top_p=0.6), [0, 6 / 13, 0, 0, 7 / 13]),
        (Sampling(top_p=0.7), [0, 6 / 17, 4 / 17, 0, 7 / 17]),
        (Sampling(top_p=0.8), [0, 6 / 17, 4 / 17, 0, 7 / 17]),
        (Sampling(top_p=0.001), [0, 0, 0, 0, 1]),
        (Sampling(top_p=0.999), [0.1, 0.3, 0.2, 0.05, 0.35]),
        # At least half of 0.35.
        (Sampling(min_p=0.5), [0, 6 / 17, 4 / 17, 0, 7 / 17]),
        (Sampling(min_p=0.6), [0, 6 / 13, 0, 0, 7 / 13]),
        (Sampling(min_p=1.0), [0, 0, 0, 0, 1]),
        # Of three that top-k leaves, the first two are 65 / 85 = 0.76 of what is left, not 0.65 of all.
        (Sampling(top_k=3, top_p=0.75), [0, 6 / 13, 0, 0, 7 / 13]),
        (Sampling(top_k=4, top_p=0.8, min_p=0.6), [0, 6 / 13, 0, 0, 7 / 13]),
    ],
)
def test_filters_keep_what_they_say_and_share_it_out(settings: Sampling, expected: list[float]) -> None:
    probs = probabilities(of_probabilities(0.1, 0.3, 0.2, 0.05, 0.35), settings)
    np.testing.assert_allclose(probs[0], expected, rtol=0, atol=1e-12)


def test_temperature_comes_before_the_filters() -> None:
    # At temperature 2 these are 4 : 2 : 1, of which the first two are 6 / 7 = 0.857; before, 20 / 21 = 0.952.
    logits = of_probabilities(16 / 21, 4 / 21, 1 / 21)
    assert kept(logits, Sampling(top_p=0.9)) == [0, 1]
    assert kept(logits, Sampling(temperature=2, top_p=0.9)) == [0, 1, 2]
    assert kept(logits, Sampling(min_p=0.4)) == [0]
    assert kept(logits, Sampling(temperature=2, min_p=0.4)) == [0, 1]


@pytest.mark.parametrize("k", range(1, 7))
def test_top_k_keeps_exactly_k_of_equal_characters_the_first_ones(k: int) -> None:
    assert kept(row(0, 0, 0, 0, 0, 0), Sampling(top_k=k)) == list(range(k))
    assert kept(row(0, 1, 0, 1, 0, 1), Sampling(top_k=k)) == sorted([1, 3, 5, 0, 2, 4][:k])


def test_top_p_takes_the_first_of_equal_characters() -> None:
    assert kept(row(0, 0, 0, 0), Sampling(top_p=0.5)) == [0, 1]
    assert kept(row(0, 0, 0, 0), Sampling(top_p=0.51)) == [0, 1, 2]


def test_min_p_keeps_all_equals_of_the_most_probable() -> None:
    assert kept(row(1, 0, 1, 1), Sampling(min_p=1)) == [0, 2, 3]


def reference(logits: list[float], settings: Sampling) -> list[float]:
    """The distribution as the documentation of `Sampling` words it, one character at a time."""
    weights = [math.exp((logit - max(logits)) / settings.temperature) for logit in logits]
    left = sorted(range(len(logits)), key=lambda i: (-weights[i], i))
    if settings.top_k:
        left = left[: settings.top_k]
    if settings.top_p < 1:
        total = sum(weights[i] for i in left)
        count = next(n for n in range(1, len(left) + 1) if sum(weights[i] for i in left[:n]) >= settings.top_p * total)
        left = left[:count]
    left = [i for i in left if weights[i] >= settings.min_p * weights[left[0]]]
    total = sum(weights[i] for i in left)
    return [weights[i] / total if i in left else 0.0 for i in range(len(logits))]


SETTINGS = st.builds(
    Sampling,
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    top_k=st.integers(0, 10),
    # Not on a boundary for equal logits, where rounding decides.
    top_p=st.sampled_from([0.0137, 0.3137, 0.5137, 0.9137, 1.0]),
    min_p=st.sampled_from([0.0, 0.0137, 0.3137, 0.9137, 1.0]),
)


@given(st.lists(st.sampled_from([-3.0, 0.0, 0.7, 1.0, 1.9]), min_size=1, max_size=9), SETTINGS)
def test_filters_combine_in_the_documented_order(logits: list[float], settings: Sampling) -> None:
    probs = probabilities(row(*logits), settings)[0]
    np.testing.assert_allclose(probs, reference(logits, settings), rtol=0, atol=1e-12)


def test_logits_are_left_as_they_were() -> None:
    # In float64 on the CPU, where a copy is not needed for the type.
    logits = row(1, 3, 2, 2)
    before = logits.copy()
    for settings in (Sampling(0), Sampling(0.5), Sampling(top_k=2), Sampling(top_p=0.5), Sampling(min_p=0.5)):
        draw(logits, 0.5, settings)
        assert np.array_equal(logits, before)


def test_rows_are_drawn_each_from_its_own_distribution_and_number() -> None:
    logits = np.concatenate(
        (of_probabilities(0.5, 0.5, 0), of_probabilities(0, 0.25, 0.75), of_probabilities(0.2, 0.3, 0.5))
    )
    uniforms = np.array([0.4, 0.3, 0.6])
    assert sample(logits, uniforms, Sampling()).tolist() == [0, 2, 2]
    settings = Sampling(top_k=2, top_p=0.9, min_p=0.1)
    alone = [draw(logits[i : i + 1], uniforms[i].item(), settings) for i in range(3)]
    assert sample(logits, uniforms, settings).tolist() == alone


# The draw


@pytest.mark.parametrize(("u", "id_"), [(0, 0), (0.249, 0), (0.25, 2), (0.749, 2), (0.75, 3), (LAST_BELOW_ONE, 3)])
def test_a_draw_inverts_the_cumulative_distribution(u: float, id_: int) -> None:
    # Of probabilities 1/4, 0, 1/2, 1/4, exact in binary; [low, high) belongs to each.
    logits = row(0, DROPPED, math.log(2), 0)
    probs = probabilities(logits, Sampling())
    assert probs[0].tolist() == pytest.approx([0.25, 0, 0.5, 0.25])
    assert draw(logits, u + 1e-12 if 0 < u < LAST_BELOW_ONE else u, Sampling()) == id_


def test_frequencies_over_evenly_spaced_numbers_are_the_probabilities() -> None:
    settings = Sampling(temperature=0.8, top_k=5, top_p=0.97, min_p=0.05)
    logits = row(0.3, -1, 2, 1.5, -0.2, 0.9, -4, 1.5)
    n = 10_000
    numbers = (np.arange(n) + 0.5) / n
    counts = np.bincount(sample(logits.repeat(n, axis=0), numbers, settings), minlength=8)
    # Each boundary between characters lies within one step: no chance involved.
    assert np.abs(counts - n * probabilities(logits, settings)[0]).max() <= 1
    assert np.count_nonzero(counts) == 5


def test_frequencies_over_the_numbers_of_a_text_are_the_probabilities() -> None:
    logits, n = row(0.3, -1, 2, 1.5), 20_000
    numbers = uniforms(7, [0], 0, n)[:, 0]
    counts = np.bincount(sample(logits.repeat(n, axis=0), numbers, Sampling()), minlength=4)
    expected = n * probabilities(logits, Sampling())[0]
    # Chi-square, 3 degrees of freedom. Fixed numbers; another seed would fail once in ten thousand.
    assert ((counts - expected) ** 2 / expected).sum() < 21.1


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("u", [0.0, LAST_BELOW_ONE])
def test_the_extreme_numbers_draw_no_impossible_character(u: float, dtype: type[np.floating[Any]]) -> None:
    assert draw(row(DROPPED, -1e30, 0, 0, 0, -1e30, DROPPED, dtype=dtype), u, Sampling()) == (2 if u == 0 else 4)


@given(
    st.lists(
        st.sampled_from([DROPPED, -1e30, -700.0, -40.0, -36.0, -1.0, 0.0, 0.1, 3.0, 700.0, 1e30]),
        min_size=1,
        max_size=70,
    ).filter(lambda logits: max(logits) > DROPPED),
    st.sampled_from([0.0, 5e-324, 2.0**-53, 0.1, 0.5, 1 - 2.0**-52, LAST_BELOW_ONE]) | st.floats(0, LAST_BELOW_ONE),
    SETTINGS,
)
def test_whatever_the_logits_only_a_character_that_was_kept_is_drawn(
    logits: list[float], u: float, settings: Sampling
) -> None:
    probs = probabilities(row(*logits), settings)[0]
    assert probs.sum().item() == pytest.approx(1)
    id_ = draw(row(*logits), u, settings)
    assert 0 <= id_ < len(logits) and probs[id_] > 0


@pytest.mark.parametrize("n", [3, 10, 49, 1000])
def test_a_sum_that_rounds_below_or_above_one_still_ends_at_the_last_character(n: int) -> None:
    logits = row(*[0.1 * i % 1 for i in range(n)], DROPPED)
    assert draw(logits, LAST_BELOW_ONE, Sampling()) == n - 1


# Doubt

TOLERANCE = 0.05  # far more than rounding, so that a bound that holds only for small changes is found out


@examples(max_examples=200)
@given(
    st.lists(st.tuples(st.floats(-2, 2), st.sampled_from([-1.0, -1.0, 0.0, 0.4, 1.0, 1.0])), min_size=1, max_size=7),
    st.tuples(st.integers(0, 6), st.sampled_from([0.01, 0.5, 0.99])),
    SETTINGS | st.just(Sampling(0)) | st.builds(Sampling, st.sampled_from([0.02, 0.3, 1.0, 3.0])),
)
@example([(0.0, -1.0), (1.0, -1.0), (1.0, 0.0)], (0, 0.5), Sampling(0.3, top_p=0.9, min_p=0.9))
def test_without_a_doubt_logits_a_tolerance_away_draw_the_same_id(
    moved: list[tuple[float, float]], place: tuple[int, float], settings: Sampling
) -> None:
    logits = row(*[logit for logit, _ in moved])
    # Strictly within the tolerance: at its very edge the rounding of this addition would decide.
    others = logits + 0.999 * TOLERANCE * row(*[way for _, way in moved])
    # A number between a boundary of the one distribution and the same boundary of the other: there they part.
    index, share = place
    ways = [probabilities(x, replace(settings, temperature=settings.temperature or 1.0)) for x in (logits, others)]
    here, there = (probs.cumsum(axis=-1)[0, index % len(moved)].item() for probs in ways)
    u = min(max(0.0, here + share * (there - here)), LAST_BELOW_ONE)
    ids, doubts = sample_and_doubt(logits, np.array([u]), settings, TOLERANCE)
    assert ids.item() == draw(logits, u, settings)
    assert doubts.item() or draw(others, u, settings) == ids.item()


@pytest.mark.parametrize(
    "settings", [Sampling(), Sampling(0.5), Sampling(top_k=3), Sampling(top_p=0.8), Sampling(min_p=0.2)], ids=str
)
def test_doubts_are_as_rare_as_the_tolerance_is_small(settings: Sampling) -> None:
    logits, n = row(0.3, -1, 2, 1.5, -0.2, 0.9, -4), 100_000
    uniforms = (np.arange(n) + 0.5) / n
    ids, doubts = sample_and_doubt(logits.repeat(n, axis=0), uniforms, settings, 2e-5)
    assert np.array_equal(ids, sample(logits.repeat(n, axis=0), uniforms, settings))
    # A boundary between two ids casts doubt on 2 u (1 - u) * 4e-5 / temperature of the numbers: at most 4 of them.
    assert 1 <= doubts.sum() <= 4 * 6


@pytest.mark.parametrize(
    ("logits", "settings"),
    [
        (row(0, 1, 1 - 1e-6), Sampling(0)),
        (row(0, 1, 1e-6), Sampling(top_k=2)),
        (of_probabilities(0.5, 0.3 + 1e-6, 0.2 - 1e-6), Sampling(top_p=0.8)),
        (of_probabilities(0.5, 0.3 - 1e-6, 0.2 + 1e-6), Sampling(top_p=0.8)),
        (row(1e-6, 0, -1), Sampling(min_p=1)),
        (of_probabilities(0.6, 0.3 + 1e-6, 0.1 - 1e-6), Sampling(min_p=0.5)),
        (of_probabilities(0.6, 0.3 - 1e-6, 0.1 + 1e-6), Sampling(min_p=0.5)),
    ],
)
def test_a_choice_of_characters_that_rounding_could_change_is_in_doubt(logits: Logits, settings: Sampling) -> None:
    # The number itself is far from every boundary.
    u = np.array([0.3])
    assert sample_and_doubt(logits, u, settings, 2e-5)[1].item()
    assert not sample_and_doubt(logits, u, settings, 1e-9)[1].item()


def test_each_row_has_its_own_doubt() -> None:
    logits, uniforms = row(0, 0).repeat(3, axis=0), np.array([0.4, 0.5, 0.6])
    assert sample_and_doubt(logits, uniforms, Sampling(), 1e-6)[1].tolist() == [False, True, False]


@pytest.mark.parametrize("settings", [Sampling(1e-8), Sampling(1e-310), Sampling(1e-5, min_p=0.1)], ids=str)
def test_a_temperature_near_zero_is_no_reason_to_fail(settings: Sampling) -> None:
    ids, doubts = sample_and_doubt(row(1, 2), np.array([0.5]), settings, 2e-5)
    assert (ids.item(), doubts.item()) == (1, False)


# Settings


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("temperature", value) for value in (math.nan, -0.1, math.inf, -math.inf)],
        ("top_k", -1),
        *[("top_p", value) for value in (math.nan, 0, -0.1, 1.1, math.inf)],
        *[("min_p", value) for value in (math.nan, -0.1, 1.1, math.inf)],
    ],
)
def test_a_setting_out_of_range_is_refused_by_name_and_value(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"^{field}={value} must be"):
        Sampling(**{field: value})


@pytest.mark.parametrize("value", [math.nan, *(v for v in (math.inf, 2.5))])
def test_a_top_k_that_is_no_count_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match="top_k"):
        Sampling(top_k=value)


def test_settings_that_filter_nothing_are_allowed() -> None:
    assert Sampling() == Sampling(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
    assert kept(row(1, 2, -30), Sampling()) == [0, 1, 2]


def test_a_temperature_that_is_all_but_zero_is_in_doubt_where_being_greedy_is() -> None:
    u = np.array([0.5])
    for first, doubt in ((1e-6, True), (1e-3, False)):
        logits = row(1.0, 1.0 - first)
        assert sample_and_doubt(logits, u, Sampling(1e-8), 2e-5)[1].item() is doubt
