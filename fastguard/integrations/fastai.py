"""Fastai: a callback for its `Learner`."""

from __future__ import annotations

from typing import Any

import torch

from ..errors import missing_package

try:
    from fastai.callback.core import Callback
except ImportError as error:
    raise missing_package("fastguard.integrations.fastai", "fastai", error) from error

from ..step import Guard
from .common import StepLoss, begin, checked, end, guard_of, observe_validation


class FastguardCallback(Callback):
    """Guards the torch optimizer that a Learner steps: `Learner(..., opt_func=..., cbs=[FastguardCallback()])`.

    The Learner needs a torch optimizer: `opt_func=partial(OptimWrapper, opt=torch.optim.AdamW)`. It is wrapped when
    `fit` begins; a later `fit` keeps the guard, unless fastai makes a new optimizer, as for `freeze`. The guard gets
    the loss of each step, the mean over accumulated batches, and the validation loss.

    Args:
        **settings: arguments of `fastguard.wrap`.

    Attributes:
        guard: the guard; None until training begins. `learn.fastguard.guard` is the same.

    Raises:
        TypeError: as `fit` begins, for an optimizer of fastai's own.

    Cost: about 20 us a batch on top of the guard's. No sync.
    """

    order = 55  # after the Recorder
    _stateattrs = ("guard", "step_loss")
    _has_stepped = False  # since `before_fit`, which comes with Learner.validate too

    def __init__(self, **settings: Any) -> None:
        self.settings = checked(settings)
        self.guard: Guard | None = None
        self.step_loss = StepLoss()

    def before_fit(self) -> None:
        """Guards the optimizer."""
        optimizer = getattr(self.learn.opt, "opt", None)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(
                "`opt_func` must make an OptimWrapper of a torch.optim.Optimizer, got "
                f"{type(self.learn.opt).__name__}. Give opt_func=partial(OptimWrapper, opt=torch.optim.AdamW)."
            )
        self.step_loss = StepLoss()
        self.guard = guard_of(optimizer, self.learn.model, self.settings)
        begin(self.guard, None, None)
        self._has_stepped = False

    def after_loss(self) -> None:
        """Takes the loss of a batch."""
        if self.learn.training:
            self.step_loss.add(self.learn.loss)

    def after_step(self) -> None:
        """Tells the guard the loss."""
        self._has_stepped = True
        self.step_loss.give(self.guard, mean=True)

    def after_validate(self) -> None:
        """Tells the guard the validation loss."""
        recorder = getattr(self.learn, "recorder", None)
        if recorder is not None and self._has_stepped and recorder.valid_metrics and recorder.loss.count:
            observe_validation(self.guard, recorder.loss.value)

    def after_fit(self) -> None:
        """Delivers the newest record, and notes the end of the run."""
        if self.guard is not None:
            end(self.guard)
