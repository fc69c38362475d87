"""How many steps and evaluations fill a given time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from minigpt.config import TrainConfig
from minigpt.optim import learning_rate_factor
from minigpt.pacing import dropout_for, eval_every_for, steps_for, warmup_for


@pytest.mark.parametrize(
    ("left_s", "step", "evaluated_step", "update_s", "evaluation_s", "steps"),
    [
        (60.0, 0, None, 1.0, 0.0, 60),
        # To the nearest step.
        (3.4, 0, None, 1.0, 0.0, 3),
        (3.6, 0, None, 1.0, 0.0, 4),
        # Ten updates and an evaluation take 7 s: 8 times, and in what is left 4 updates and the last evaluation.
        (60.0, 0, None, 0.5, 2.0, 84),
        # 4 times, and then no update together with an evaluation.
        (29.0, 40, 40, 0.5, 2.0, 80),
        # The evaluation of step 40 is still to come.
        (29.0, 40, 30, 0.5, 2.0, 78),
        # No time at all, but at least a step, and what was done at full rate stays that: step 6 is among 70 % of 9.
        (0.0, 0, None, 1.0, 9.0, 1),
        (-5.0, 7, None, 1.0, 0.0, 9),
    ],
)
def test_the_number_of_steps_fills_the_time_that_is_left(
    left_s: float, step: int, evaluated_step: int | None, update_s: float, evaluation_s: float, steps: int
) -> None:
    config = TrainConfig(eval_every=10, decay_fraction=0.3)
    assert steps_for(left_s, step, evaluated_step, update_s, evaluation_s, config) == steps


@pytest.mark.parametrize("decay_fraction", [0.0, 0.1, 1 / 3, 0.6, 0.9, 0.99])
@pytest.mark.parametrize("step", [1, 2, 3, 10, 49, 1000])
def test_no_number_of_steps_changes_the_rate_of_an_update_that_was_done(step: int, decay_fraction: float) -> None:
    config = TrainConfig(decay_fraction=decay_fraction, warmup_steps=0, eval_every=10)
    steps = steps_for(0.0, step, None, 1.0, 1.0, config)
    assert all(learning_rate_factor(i, replace(config, steps=steps)) == 1 for i in range(step))
    # And it is the smallest of them.
    assert steps == step or learning_rate_factor(step - 1, replace(config, steps=steps - 1)) < 1


@pytest.mark.parametrize(
    ("epochs", "params_per_char", "share"),
    [
        # Nothing is read often enough to be learnt by heart, however many parameters there are.
        (0.1, 1e6, 0.0),
        (3.99, 1e6, 0.0),
        (4.0, 4.99, 0.0),
        (4.0, 5.0, 0.1),
        (10.0, 3.99, 0.1),
        (10.0, 4.0, 0.2),
        (1000.0, 1.0, 0.2),
        (1000.0, 0.01, 0.0),
    ],
)
def test_more_is_dropped_the_more_parameters_read_a_character_the_more_often(
    epochs: float, params_per_char: float, share: float
) -> None:
    assert dropout_for(epochs, params_per_char) == share


@pytest.mark.parametrize(
    ("seconds", "update_s", "evaluation_s", "eval_every"),
    [
        # 5 times 12 s, of which half a second is the evaluation's.
        (60.0, 0.5, 0.5, 23),
        # An evaluation of 3 s, and 15 % of the time are 9 s.
        (60.0, 0.5, 3.0, 34),
        # One that takes longer than the whole run comes at its end.
        (1.0, 0.5, 3.0, 1),
        (0.01, 5.0, 0.1, 1),
    ],
)
def test_evaluations_come_a_few_times_a_run_and_take_little_of_it(
    seconds: float, update_s: float, evaluation_s: float, eval_every: int
) -> None:
    assert eval_every_for(seconds, update_s, evaluation_s) == eval_every


@pytest.mark.parametrize(("steps", "warmup_steps"), [(1, 1), (19, 1), (150, 15), (499, 49), (500, 50), (9000, 50)])
def test_rates_rise_over_a_tenth_of_a_short_run_and_over_fifty_steps_of_a_longer_one(
    steps: int, warmup_steps: int
) -> None:
    assert warmup_for(steps) == warmup_steps
