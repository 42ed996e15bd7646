"""The rule on outputs that become alike while the loss falls: what is learnt is to tell inputs apart no longer."""

from __future__ import annotations

import math
from itertools import pairwise

from ...records import TrainingHistory
from ..finding import Finding
from ..needs import is_squared_error
from ..registry import rule
from ..signals import signals_of
from .output import last_layer, training_batches

TITLE = "Output"


@rule(
    "outputs-become-alike",
    of="same-output-for-all",
    source="collapse in self-supervised learning (Chen and He 2021), watched while it comes",
    remedy="The loss is met by giving much the same to all inputs: give it something that pushes apart (negatives, a "
    "stop-gradient, a term on the variance), and look at the sign of what does.",
    needs_descent=True,
    needs_targets=True,
)
def outputs_become_alike(
    history: TrainingHistory, *, left: float = 1.0 / 3.0, share: float = 1.0 / 3.0, fall: float = 0.5, samples: int = 6
) -> Finding | None:
    """The spread of the output over a batch came down to a share `left`, and to a `share` of the output's size.

    In the newest two of at least `samples` looks, against the largest of the first three; over the newest four it never
    rose, and the loss fell by `fall` or more. Silent of a loss over classes, and of a squared error that its first
    targets can explain: of these it is at least the square of how far their spread lies from the output's.
    """
    s, notes = signals_of(history), history.model
    known = [x for x in training_batches(history) if x.num_samples > 1 and math.isfinite(x.output_spread)]
    spreads = [x.output_spread for x in known]
    if len(known) < samples or not s.fall >= fall or "entropy" in notes.loss_kind or "log" in notes.loss_kind:
        return None
    first, newest = max(spreads[:3]), known[-2:]
    if first <= 0.0 or any(a < b for a, b in pairwise(spreads[-4:])):
        return None
    if any(x.output_spread > min(left * first, share * math.hypot(x.output_mean, x.output_std)) for x in newest):
        return None
    apart = (notes.target_std or 0.0) - newest[-1].output_std
    if is_squared_error(history) and (apart < 0.0 or apart**2 < 2.0 * s.loss_level):
        return None
    return Finding(
        f"The spread of the output over a batch fell from {first:.3g} to {newest[-1].output_spread:.3g}, "
        f"{newest[-1].output_spread / math.hypot(newest[-1].output_mean, newest[-1].output_std):.0%} of the output's "
        f"size, while the loss came down by {s.fall:.0%}.",
        layers=last_layer(history),
        evidence={"spread": newest[-1].output_spread, "at_first": first, "fall": s.fall, "threshold": left},
        confidence=0.85,
    )
