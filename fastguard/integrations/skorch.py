"""Skorch: a callback for its nets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import missing_package

try:
    from skorch.callbacks import Callback
except ImportError as error:
    raise missing_package("fastguard.integrations.skorch", "skorch", error) from error

from ..step import Guard
from .common import begin, checked, end, figures, guard_of, observe_validation


class FastguardCallback(Callback):
    """Guards what a skorch net trains: `NeuralNet(..., callbacks=[FastguardCallback(max_norm=1.0)])`.

    When `fit` or `partial_fit` begins, the optimizer is wrapped, unless it has a guard. The guard gets the loss of each
    step, and `valid_loss` at the end of an epoch. Its figures go into the batches of `net.history`, as
    `fastguard/grad/norm` and others, and two of them into its epochs. A pickled net includes the guard's state.

    Args:
        max_norm: as of `fastguard.wrap`.
        settings: other arguments of `fastguard.wrap`, as a dict, so that `get_params` and `clone` know of them.

    Attributes:
        guard_: the guard; None until training begins.

    Cost: about 80 us a batch on top of the guard's.
    """

    def __init__(self, max_norm: float | None = None, settings: Mapping[str, Any] | None = None) -> None:
        checked({"max_norm": max_norm, **(settings or {})})
        self.max_norm = max_norm
        self.settings = settings

    def initialize(self) -> FastguardCallback:
        """Forgets the guard: the net and its optimizer are new."""
        self.guard_: Guard | None = None
        self.state_: dict[str, Any] | None = None
        return self

    def on_train_begin(self, net: Any, X: Any = None, y: Any = None, **others: Any) -> None:
        """Guards the optimizer."""
        self.guard_ = guard_of(net.optimizer_, net.module_, {"max_norm": self.max_norm, **(self.settings or {})})
        state, self.state_ = self.state_, None
        begin(self.guard_, state, None)

    def on_batch_end(self, net: Any, batch: Any = None, training: Any = None, **others: Any) -> None:
        """Adds the guard's values to the history."""
        if training and self.guard_ is not None:
            for name, value in figures([self.guard_]).items():
                net.history.record_batch(name, value)

    def on_epoch_end(self, net: Any, dataset_train: Any = None, dataset_valid: Any = None, **others: Any) -> None:
        """Tells the guard the validation loss."""
        if self.guard_ is None or self.guard_.last is None:
            return
        observe_validation(self.guard_, net.history[-1].get("valid_loss"))
        seen = figures([self.guard_])
        for name in ("fastguard/grad/norm", "fastguard/num_skipped"):
            net.history.record(name, seen[name])

    def on_train_end(self, net: Any, X: Any = None, y: Any = None, **others: Any) -> None:
        """Delivers the newest record, and notes the end of the run."""
        if self.guard_ is not None:
            end(self.guard_)

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        guard = state.pop("guard_", None)
        return {**state, "guard_": None, "state_": state.get("state_") if guard is None else guard.state_dict()}
