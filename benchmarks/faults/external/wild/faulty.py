"""Standard faults in tasks of this group; each counts where it costs a twentieth of the quality, over two seeds."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

from .. import optimizers as o
from ..case import Case, Make, Truth, changed
from ..harm import worse
from ..loop import Plan, Tensors
from . import architectures, densities, pairs, regimes, settings
from .case import GROUP, WildCase

_STEPS = ("lr", "explosion", "loss", "weights", "units", "nonfinite")
_ANY_DATA = ("data", "loss", "setup", "output", "lr")
HIGH = Truth(_STEPS, ("learning-rate-too-high",))
LOW = Truth(("lr", "loss", "weights"), ("learning-rate-too-low",))
KEPT = Truth(("setup", *_STEPS), ("missing-zero-grad",))
LABELS = Truth(("data", "loss", "setup"), ("wrong-targets",))
BATCH = Truth(("nonfinite", "data"), ("bad-batch", "recurring-bad-batch"))
DEAD = Truth(("units", "vanishing", "weights", "setup", "loss"), ("dead-units",))
OUTPUT = Truth(("output", "loss", "vanishing", "setup", "units"), ("wrong-output-layer",))
LOSS = Truth(("output", "loss", "data", "setup", "explosion"), ("wrong-loss",))
INPUTS = Truth((*_ANY_DATA, *_STEPS, "vanishing"), ("unnormalised-inputs",))
CLIPPED = Truth(("explosion", "lr", "loss", "weights"), ("clipped-away", "gradients-too-large-to-clip"))


def too_fast(plan: Plan) -> None:
    plan.lr *= 100.0


def too_slow(plan: Plan) -> None:
    plan.lr /= 1000.0


def not_cleared(plan: Plan) -> None:
    plan.zero_grad = False


def shuffled(plan: Plan) -> None:
    """Targets of other samples."""
    order = torch.randperm(len(plan.train[1]), generator=torch.Generator().manual_seed(5))
    plan.train = (plan.train[0], plan.train[1][order], *plan.train[2:])


def spoilt(plan: Plan) -> None:
    """NaN in one batch of each epoch."""

    def change(epoch: int, place: int, batch: Tensors) -> Tensors:
        return (torch.where(torch.rand(batch[0].shape) < 0.1, torch.nan, batch[0]), *batch[1:]) if place == 5 else batch

    plan.change = change


def dead(plan: Plan) -> None:
    """The first hidden layer answers nothing."""
    first = next(m for m in plan.model.modules() if isinstance(m, nn.Linear))
    nn.init.constant_(first.bias, -30.0)


def unnormalised(plan: Plan) -> None:
    """Inputs in other units."""
    plan.train = (300.0 * plan.train[0] + 900.0, *plan.train[1:])
    plan.held_out = (300.0 * plan.held_out[0] + 900.0, *plan.held_out[1:])


def softmax_at_end(plan: Plan) -> None:
    """Probabilities where the loss makes its own."""
    plan.model = nn.Sequential(plan.model, nn.Softmax(-1))


def relu_at_end(plan: Plan) -> None:
    """Nothing below zero can be said."""
    plan.model = nn.Sequential(plan.model, nn.ReLU())


def turned_over(plan: Plan) -> None:
    """The loss with the wrong sign."""
    right = plan.loss
    plan.loss = lambda model, batch: -right(model, batch)


def broadcast(plan: Plan) -> None:
    """Each output against the targets of all."""
    plan.loss = lambda model, batch: ((model(batch[0]) - batch[1][:, 0]) ** 2).mean()


def as_numbers(plan: Plan) -> None:
    """Classes as one-hot numbers under an absolute error."""
    plan.loss = lambda model, batch: F.l1_loss(
        model(batch[0]), F.one_hot(batch[1], int(plan.train[1].max()) + 1).float()
    )


def clipped_away(plan: Plan) -> None:
    """A limit far below the norms, under an optimizer whose steps are of the gradient's size."""
    plan.max_norm = 1e-5


def _momentum(make: Make, lr: float) -> Make:
    return changed(make, optimizer=o.MOMENTUM, lr=lr)


Fault = tuple[Callable[[Plan], None], Truth]
FAST, SLOW, UNCLEARED, WRONG = (too_fast, HIGH), (too_slow, LOW), (not_cleared, KEPT), (shuffled, LABELS)
SPOILT, LIFELESS, UNSCALED = (spoilt, BATCH), (dead, DEAD), (unnormalised, INPUTS)
SOFT, CUT, SIGN = (softmax_at_end, OUTPUT), (relu_at_end, OUTPUT), (turned_over, LOSS)
MIXED, NUMBERS, STIFLED = (broadcast, LOSS), (as_numbers, LOSS), (clipped_away, CLIPPED)
PLANTED: dict[str, tuple[Make, tuple[Fault, ...]]] = {
    "digits-softened": (regimes.distilled, (FAST, UNCLEARED, SPOILT)),
    "gaussian-loss": (densities.gaussian_loss, (FAST, SLOW, WRONG, SPOILT)),
    "heavy-tails": (densities.heavy_tails, (SLOW, LIFELESS, UNSCALED)),
    "outliers-huber": (densities.outliers_huber, (FAST, WRONG, UNSCALED, CUT)),
    "events-poisson": (densities.events, (FAST, UNCLEARED, UNSCALED, CUT)),
    "spiral-flow": (densities.spiral, (FAST, SLOW, UNCLEARED, WRONG)),
    "survival": (densities.survival, (WRONG, SPOILT, SIGN)),
    "listwise": (pairs.listed, (SLOW, WRONG, SIGN)),
    "angular-margin": (pairs.angular, (FAST, SLOW, WRONG)),
    "rare-class": (regimes.rare, (FAST, WRONG, UNSCALED, LIFELESS)),
    "digits-routed": (architectures.routed, (FAST, SLOW, WRONG)),
    "digits-weight-norm": (architectures.weight_norm, (FAST, SOFT, NUMBERS, STIFLED)),
    "digits-few-normed": (architectures.few_normed, (SLOW, SOFT, WRONG, NUMBERS)),
    "chained-labels": (architectures.chained, (FAST, UNCLEARED, WRONG)),
    "triangles": (architectures.triangles, (FAST, SLOW, UNSCALED, MIXED)),
    "largest-of-set": (architectures.largest, (FAST, WRONG, CUT, MIXED)),
    "reversed-strings": (architectures.reversed_strings, (FAST, SLOW, UNCLEARED, SOFT)),
    "gaps": (architectures.gaps, (FAST, SLOW, WRONG, SOFT)),
    "short-memory": (settings.digits, (FAST, SLOW, SPOILT, LIFELESS, UNSCALED, SOFT, NUMBERS, SIGN)),
    "triangular-rate": (_momentum(settings.friedman, 5e-2), (FAST, SLOW, UNCLEARED, MIXED, STIFLED)),
    "deep-residual": (settings.deep, (FAST, WRONG, SPOILT, SOFT)),
}


def _with(make: Make, change: Callable[[Plan], None]) -> Make:
    def with_fault(seed: int) -> Plan:
        plan = make(seed)
        change(plan)
        return plan

    return with_fault


def _cases() -> list[Case]:
    found: list[Case] = []
    for task, (make, faults) in PLANTED.items():
        for change, truth in faults:
            fault = change.__name__.replace("_", "-")
            found.append(
                WildCase(
                    f"{GROUP}/{task}/{fault}",
                    GROUP,
                    f"{task}/{fault}",
                    f"{task}, {fault}",
                    _with(make, change),
                    __name__,
                    truth,
                    make,
                    worse(2),
                )
            )
    return found


CASES: tuple[Case, ...] = tuple(_cases())
