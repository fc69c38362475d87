"""The pace of a run: steps and evaluations that fill a time, and what fits a run of so many steps.

The clock is the trainer's.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import replace

from minigpt.config import DROPOUTS, FEWEST_EPOCHS, WARMUP_STEPS, TrainConfig
from minigpt.optim import decay_factor

# A run by the clock first measures its speed on the side, for this share of its time but no longer than this.
TRIAL_SHARE = 0.02
TRIAL_MAX_S = 20.0
# It evaluates about so often, unless told otherwise: fewer times where that would take more than this share of it.
EVALUATIONS = 5
EVALUATIONS_SHARE = 0.15


def steps_for(
    left_s: float, step: int, evaluated_step: int | None, update_s: float, evaluation_s: float, config: TrainConfig
) -> int:
    """The number of steps of a run that is to end when the time left is over, after its last evaluation.

    Args:
        left_s: seconds left, of which none or fewer may be.
        step: updates done, at rates that had not begun to fall.
        evaluated_step: that of the last evaluation; None before the first.
        update_s, evaluation_s: what one of each takes.
        config: for ``eval_every`` and ``decay_fraction``.

    Returns:
        At least 1, at least ``step``, and enough that the rates of no update done would have fallen.
    """
    done = -(-(evaluated_step or 0) // config.eval_every)

    def takes_s(steps: int) -> float:
        evaluations = -(-steps // config.eval_every) - done
        return (steps - step) * update_s + evaluations * evaluation_s

    # To the nearest step; more than these do not fit even without an evaluation.
    most = max(0, int(left_s / update_s)) + 2
    more = bisect_right(range(most), left_s + update_s / 2, key=lambda more: takes_s(step + more)) - 1
    steps = max(1, step + more, step)
    if step and config.decay_fraction < 1:
        steps = max(steps, int((step - 1) / (1 - config.decay_fraction)))
    # What is left to rounding.
    while step and rates_fall(step - 1, replace(config, steps=steps)):
        steps += 1
    return steps


def warmup_for(steps: int) -> int:
    """Steps over which the learning rates rise: `WARMUP_STEPS`, but in a short run no more than a tenth of it."""
    return min(WARMUP_STEPS, max(1, steps // 10))


def dropout_for(epochs: float, params_per_char: float) -> float:
    """The dropout of a run that reads the training part so often, with so many parameters for each character of it (see
    `DROPOUTS`)."""
    if epochs < FEWEST_EPOCHS:
        return 0.0
    return next((share for least, share in DROPOUTS if epochs * params_per_char >= least), 0.0)


def eval_every_for(seconds: float, update_s: float, evaluation_s: float) -> int:
    """Steps between two evaluations, for about `EVALUATIONS` of them in so many seconds, or fewer if they are slow."""
    evaluations = max(1, min(EVALUATIONS, int(EVALUATIONS_SHARE * seconds / evaluation_s)))
    return max(1, math.ceil((seconds / evaluations - evaluation_s) / update_s))


def rates_fall(step: int, config: TrainConfig) -> bool:
    """Whether the rates at a step (from 0) are below the constant ones because the end is near."""
    return decay_factor(step, config) < 1
