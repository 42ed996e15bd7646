"""Root causes that most runs cannot have: of games, experts, batch statistics, and of the machine."""

from __future__ import annotations

from collections.abc import Mapping

from ..records import TrainingHistory
from . import needs
from .causes import cause
from .finding import Finding

Found = Mapping[str, Finding]


def _is_of_data_or_precision(history: TrainingHistory, found: Found) -> bool:
    """A batch that is not finite itself, inputs far out, or half precision, which overflows."""
    return "batch-not-finite" in found or "input-outliers" in found or needs.half_precision(history) is True


cause(
    "dead-experts",
    "Some experts are never chosen, and learn nothing.",
    "Balance the load of the router: an auxiliary loss, noise on its logits, or a capacity for each expert.",
    {"idle-experts": 0.98, "unused-experts": 0.9, "router-collapse": 0.6},
    "untrained-parameters zero-gradients layer-norm-imbalance standstill",
)
cause(
    "normalisation-statistics",
    "Evaluation normalises with statistics that are not those of the batches.",
    "Give BatchNorm a momentum of about 0.1 and batches of 16 or more; keep it in training mode until the last step; "
    "or use a normalisation without running statistics.",
    {"running-statistics-apart": 0.97},
    "overfitting label-noise validation-inputs-differ",
    needs=[needs.batch_statistics],
)
cause(
    "adversary-wins",
    "One side of the game has won, and the other learns no more.",
    "Weaken the side that wins, or take a loss that does not saturate (non-saturating, hinge, Wasserstein with a "
    "gradient penalty).",
    {"one-side-wins": 0.96},
    "vanishing-gradients zero-gradients growing-norm clip-rate-high",
    needs=[needs.game],
)
cause(
    "second-moment-collapse",
    "Adam's second moment has shrunk so far that gradients of usual size make steps that are too large.",
    "Lower beta2 (0.95), clip updates (AdaGC, StableAdamW), warm up again after a pause; keep the state in float32.",
    {"second-moment-collapse": 0.9},
    "norm-spike loss-spike growing-norm update-ratio-high loss-divergence loss-oscillation",
)
cause(
    "hardware-fault",
    "A gradient or the optimizer's state was far out of range, as a flipped bit in memory or arithmetic leaves it.",
    "Go back to a checkpoint from before that step and take it again: if all is well then, test memory and device.",
    {"lone-element": 0.97, "moment-out-of-bounds": 0.85},
    "norm-spike loss-spike growing-norm non-finite-gradients non-finite-loss skip-run non-finite-activations "
    "non-finite-weights saturated-units loss-divergence clip-rate-high layer-norm-imbalance update-ratio-high "
    "dead-units zero-gradients vanishing-gradients standstill",
    contradicted=_is_of_data_or_precision,
)
