"""A rule on games, of which no other rule says anything: one side wins, and the other learns no more."""

from __future__ import annotations

from ...records import TrainingHistory
from .. import needs
from ..finding import Finding
from ..needs import game
from ..registry import rule
from ..signals import ends, signals_of

TITLE = "Loss"

_LOGISTIC = ("BinaryCrossEntropy", "Softplus", "LogSigmoid")
_PASSED = ("Mean", "Neg", "Add", "Sum", "Div", "Mul")


@rule(
    "one-side-wins",
    reads="the loss of a game, against where it began and what a logistic loss of chance is",
    source="Goodfellow et al. 2014, section 3, on the generator that a discriminator which is always right teaches "
    "nothing; Arjovsky and Bottou 2017",
    remedy="Weaken the side that wins: fewer steps or a lower learning rate for the discriminator, noise on its "
    "inputs, smoothed labels, a gradient penalty; or a loss that does not saturate.",
    cause=("adversary-wins", "One side of the game has won, and the other no longer learns."),
    weight=0.96,
    explains="vanishing-gradients zero-gradients growing-norm clip-rate-high",
    cause_needs=(needs.game,),
)
def one_side_wins(
    history: TrainingHistory, *, lost: float = 4.6, won: float = 0.02, steps: int = 100, min_steps: int = 200
) -> Finding | None:
    """A logistic loss of one side of a game has stood above `lost` or below `won` nats for the newest `steps` steps.

    Above `lost` the other side is right in 99 of 100 cases; below `won` this side is. From `min_steps` losses on;
    above, only where it has risen to twice its first.
    """
    s = signals_of(history)
    if game(history) is not True or len(s.losses) < min(min_steps, history.window) or history.losses.min < 0.0:
        return None
    ops = [op for op in history.model.loss_ops if not op.startswith(_PASSED)]
    if not ops or not ops[0].startswith(_LOGISTIC):
        return None
    newest = sorted(s.losses[-steps:])
    low, high = newest[len(newest) // 10], newest[-1 - len(newest) // 10]
    if low > max(lost, 2.0 * s.initial_loss):
        said, wins = f"has stood above {low:.3g} nats: the other side tells nearly all of what it is shown", False
    elif high < won:
        said, wins = f"has stood below {high:.2g} nats: there is nothing left to learn from the other side", True
    else:
        return None
    return Finding(
        f"For the last {len(newest)} steps the loss of this side of the game {said}.",
        *ends(s.loss_entries[-len(newest) :]),
        evidence={"level": newest[len(newest) // 2], "first": s.initial_loss, "is_the_winner": wins},
        confidence=0.85,
    )
