"""The judgement of a finished run, over example numbers: training, last held-out and best held-out loss."""

from __future__ import annotations

import pytest

from minigpt.fit import Fit, judge


@pytest.mark.parametrize(
    ("train_loss", "val_loss", "best_loss", "fit"),
    [
        # Both about equal, at their lowest in the end.
        (1.38, 1.41, 1.41, Fit.UNDERFITTING),
        (1.30, 1.44, 1.44, Fit.UNDERFITTING),
        # What is held out may be the easier part.
        (2.61, 2.47, 2.47, Fit.UNDERFITTING),
        # Far apart, though the held-out loss still falls.
        (1.05, 1.47, 1.47, Fit.OVERFITTING),
        # Clearly risen, though the two are not far apart.
        (1.90, 2.00, 1.95, Fit.OVERFITTING),
        (0.10, 4.00, 2.10, Fit.OVERFITTING),
        # Neither apart nor about equal.
        (1.20, 1.41, 1.41, Fit.FITTING),
        # Next to nothing is left to learn, whatever the two are to each other.
        (0.0, 0.0, 0.0, Fit.FITTING),
        (0.01, 0.04, 0.04, Fit.FITTING),
        # About equal, but no longer falling, and risen by no more than chance.
        (1.38, 1.42, 1.41, Fit.FITTING),
    ],
)
def test_losses_apart_or_risen_are_overfitting_and_equal_ones_that_still_fall_underfitting(
    train_loss: float, val_loss: float, best_loss: float, fit: Fit
) -> None:
    assert judge(train_loss, val_loss, best_loss, blind_loss=4.17) is fit


def test_losses_of_a_blind_guess_are_those_of_a_model_that_has_learnt_nothing() -> None:
    assert judge(4.17, 4.17, 4.17, blind_loss=4.17) is Fit.IGNORANT
    # Worse than a guess, for being sure of it.
    assert judge(4.5, 4.6, 4.4, blind_loss=4.17) is Fit.IGNORANT
    assert judge(4.0, 4.17, 4.17, blind_loss=4.17) is not Fit.IGNORANT
    assert judge(4.1, 4.1, 4.1, blind_loss=4.17) is not Fit.IGNORANT
    # Of a single character there is nothing to guess.
    assert judge(0.0, 0.0, 0.0, blind_loss=0.0) is Fit.FITTING
