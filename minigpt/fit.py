"""Whether a model has learnt too much or too little of its text, judged by its losses. The rules, and nothing else."""

from __future__ import annotations

from enum import Enum

# A last held-out loss that is higher than the best by more than this share has clearly risen. The loss of a short text
# moves by about a hundredth by chance alone.
RISEN = 0.02
# Held-out and training loss that differ by more than this share of the held-out loss are far apart; the model knows
# by heart what it was shown.
FAR_APART = 0.2
# Those that differ by less than this share are about equal: what is learnt holds for new text as well.
ABOUT_EQUAL = 0.1
# A held-out loss that is lower than that of a blind guess by less than this share is no better than one.
BLIND = 0.01
# A held-out loss below this share of a blind guess's leaves next to nothing to learn.
DONE = 0.01


class Fit(Enum):
    """How a model stands to its text."""

    IGNORANT = "ignorant"
    OVERFITTING = "overfitting"
    UNDERFITTING = "underfitting"
    FITTING = "fitting"


def judge(train_loss: float, val_loss: float, best_loss: float, blind_loss: float) -> Fit:
    """Ignorant if neither the best nor the training loss was better than a blind guess; fitting if next to nothing is
    left to learn; overfitting if the held-out loss has clearly risen again or the training loss is far below it;
    underfitting if the two are about equal and the held-out loss was never lower than at the end.

    Args:
        train_loss, val_loss: at the end, measured in the same way; nats a character.
        best_loss: the lowest held-out loss of the run.
        blind_loss: that of equal probabilities for all characters, the logarithm of their number.
    """
    if best_loss > blind_loss * (1 - BLIND) and train_loss > blind_loss * (1 - BLIND):
        return Fit.IGNORANT
    if val_loss <= blind_loss * DONE:
        return Fit.FITTING
    apart = val_loss - train_loss
    if val_loss > best_loss * (1 + RISEN) or apart > val_loss * FAR_APART:
        return Fit.OVERFITTING
    if val_loss <= best_loss and apart <= val_loss * ABOUT_EQUAL:
        return Fit.UNDERFITTING
    return Fit.FITTING
