"""The judgement of a finished run, over example numbers: training, last held-out and best held-out loss."""

from __future__ import annotations

import pytest

from minigpt.fit import Fit, judge


@pytest.mark.parametrize(
    ("train_loss", "val_loss", "best_loss"),
    [
        # Both about equal, at their lowest in the end.
        (1.38, 1.41, 1.41),
        (1.30, 1.44, 1.44),
        # What is held out may be the easier part.
        (2.61, 2.47, 2.47),
        (0.0, 0.0, 0.0),
    ],
)
def test_losses_that_are_about_equal_and_still_fall_are_underfitting(
    train_loss: float, val_loss: float, best_loss: float
) -> None:
    assert judge(train_loss, val_loss, best_loss) is Fit.UNDERFITTING


@pytest.mark.parametrize(
    ("train_loss", "val_loss", "best_loss"),
    [
        # Far apart, though the held-out loss still falls.
        (1.05, 1.47, 1.47),
        # Clearly risen, though the two are not far apart.
        (1.90, 2.00, 1.95),
        (0.10, 4.00, 2.10),
    ],
)
def test_losses_that_part_or_a_held_out_loss_that_rose_are_overfitting(
    train_loss: float, val_loss: float, best_loss: float
) -> None:
    assert judge(train_loss, val_loss, best_loss) is Fit.OVERFITTING


@pytest.mark.parametrize(
    ("train_loss", "val_loss", "best_loss"),
    [
        # Neither apart nor about equal.
        (1.20, 1.41, 1.41),
        # About equal, but no longer falling, and risen by no more than chance.
        (1.38, 1.42, 1.41),
    ],
)
def test_other_losses_are_neither(train_loss: float, val_loss: float, best_loss: float) -> None:
    assert judge(train_loss, val_loss, best_loss) is Fit.FITTING
