"""What is known of a run from its losses and its loss's graph."""

from __future__ import annotations

import pytest

from fastguard.diagnosis import needs

from made_runs import falling_losses, run
from records import make_batch


def chosen(*ops, num_samples=1, **facts):
    batch = make_batch(num_samples=num_samples)
    return run(
        falling_losses(9), change=lambda step: {"batches": (batch,)}, loss_ops=[f"{op}Backward0" for op in ops], **facts
    )


def episodes():
    """One batch a step, as long as an episode was."""
    ops = [f"{op}Backward0" for op in ("Sum", "Mul", "Neg", "Sum", "Mul", "Log")]
    lengths = lambda step: {"batches": (make_batch(num_samples=20 + 7 * step),)}  # noqa: E731
    return run(falling_losses(9), change=lengths, loss_ops=ops)


@pytest.mark.parametrize(
    ("need", "history", "answer"),
    [
        (needs.descent, run(falling_losses(20)), None),
        (needs.descent, run([1.0, -0.1, 0.5]), False),
        (needs.descent, run([1.0, -0.1, 0.5], objective="minimise"), True),
        (needs.descent, run(falling_losses(20), objective="game"), False),
        (needs.descent, run(falling_losses(20), objective="reward"), False),
        (needs.reinforces, chosen("Mul", "Neg", "Log", "Select"), True),
        (needs.reinforces, chosen("Sum", "Cat", "Mul", "Neg", "Squeeze", "Gather", "Sub"), True),
        (needs.reinforces, chosen("Mul", "Neg", "Gather", num_samples=32), False),  # a mask, perhaps
        (needs.reinforces, chosen("Neg", "Mean", "Gather"), False),
        (needs.reinforces, chosen("Mul", "NllLoss", "Select"), False),
        (needs.reinforces, chosen("Mul", "Neg", "Addmm", "Select"), False),
        (needs.reinforces, chosen("Mul", "Neg", "Gather", objective="minimise"), False),
        (needs.rewarded, chosen("Add", "Neg", "Sum", "Mul", "Log"), True),
        (needs.rewarded, chosen("Add", "Neg", "Sum", "Mul", "LogSigmoid"), False),  # a likelihood
        (needs.is_of_numbers, chosen("NllLoss", "LogSoftmax", loss_kind="squared error"), False),
        (needs.reinforces, episodes(), True),
        (needs.reinforces, chosen("Sum", "Mul", "Neg", "Sum", "Mul", "Log", num_samples=32), False),
        (needs.reinforces, run(falling_losses(9), loss_ops=["NegBackward0", "MinimumBackward0", "ExpBackward0"]), True),
        (needs.descent, chosen("Mul", "Neg", "Gather"), False),
    ],
)
def test_needs(need, history, answer):
    assert need(history) is answer
