"""Early stopping, when a validation value no longer improves or is no longer finite."""

from __future__ import annotations

import math
from typing import Any

import torch

from .._text import count
from ..records import values
from ..step import Guard
from ..step.scalars import scalar


class EarlyStopping:
    """Stops training after `patience` checks in a row without an improvement, or at once at NaN or Inf.

    Args:
        patience: number of checks (not steps) without an improvement, >= 1.
        min_delta: smallest improvement that counts, >= 0: value < best - min_delta, or > best + min_delta ("max").
        mode: "min" for losses, "max" for accuracies.
        restore_best: copy the model's parameters and buffers at the best value, and restore them in place at the stop.

    Attributes:
        best, best_check: the best value and the number of its check; NaN and 0 before the first finite value.
        num_checks, num_bad, last: number of values so far; number since the best value or a rollback; newest value.

    Raises:
        ValueError: an argument is out of range.

    Cost: a comparison; synchronises if the value is on an accelerator. `restore_best` copies the model at each
    improvement.

    >>> import fastguard, torch
    >>> model, stop = torch.nn.Linear(2, 1), fastguard.EarlyStopping(patience=2, min_delta=0.01)
    >>> [stop(model, value) for value in (1.0, 0.5, 0.495, 0.6)]
    [False, False, False, True]
    >>> stop.best, stop.reason
    (0.5, '2 checks without a value below 0.5 by more than 0.01, that of check 2')
    """

    def __init__(
        self,
        patience: int,
        min_delta: float = 0.0,
        mode: str = "min",
        restore_best: bool = False,
    ) -> None:
        if mode not in ("min", "max"):
            raise ValueError(f"`mode` must be 'min' or 'max', got {mode!r}")
        self.patience = values.at_least(1, "patience", patience)
        self.min_delta = scalar("min_delta", min_delta)
        if not 0.0 <= self.min_delta < math.inf:
            raise ValueError(f"`min_delta` must be a finite number >= 0, got {min_delta!r}")
        self.mode, self.restore_best = mode, restore_best
        self.best = self.last = math.nan
        self.best_check = self.num_checks = self.num_bad = self._num_rollbacks = 0
        self._kept: dict[str, torch.Tensor] = {}

    @property
    def reason(self) -> str:
        """Why to stop, in words; "" while training should continue."""
        if self.num_checks and not math.isfinite(self.last):
            return f"the value of check {self.num_checks} is {self.last}"
        if self.num_bad < self.patience:
            return ""
        side = "below" if self.mode == "min" else "above"
        by = f" by more than {self.min_delta:g}" if self.min_delta else ""
        than = f"{side} {self.best:g}{by}, that of check {self.best_check}"
        return f"{count(self.num_bad, 'check')} without a value {than}"

    def __call__(self, guard_or_model: Any, value: Any) -> bool:
        """Takes the value of one check and returns whether to stop. Once it returns True, it always does.

        A rollback by the guard resets `num_bad` to 0.

        Args:
            guard_or_model: `optimizer.guard`, a guarded optimizer, or the model.
            value: a number, or a tensor of one element. With several processes, pass the same value on each.

        Raises:
            ValueError: `value` is not a number, or `restore_best` is set and the guard has no model.
        """
        if self.reason:
            return True
        guard, model = None, guard_or_model
        if not isinstance(model, torch.nn.Module):
            guard = model if isinstance(model, Guard) else Guard.of(model)
            model = guard.model
        if self.restore_best and model is None:
            raise ValueError("`guard_or_model` must have a model for restore_best. Give it to fastguard.wrap, or here.")
        events = () if guard is None else guard.history.model.recoveries
        num_rollbacks = sum(event["kind"] == "rollback" for event in events)
        if num_rollbacks != self._num_rollbacks:
            self._num_rollbacks, self.num_bad = num_rollbacks, 0
        self.last = number = scalar("value", value)
        self.num_checks += 1
        gain = self.best - number if self.mode == "min" else number - self.best
        is_better = math.isfinite(number) and (math.isnan(self.best) or gain > self.min_delta)
        if is_better:
            self.best, self.best_check, self.num_bad = number, self.num_checks, 0
        else:
            self.num_bad += 1
        if not self.restore_best:
            return bool(self.reason)
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        if is_better:
            self._kept.clear()  # first, so that there is only one copy at a time
            self._kept.update((name, tensor.detach().clone()) for name, tensor in tensors.items())
        elif self.reason and self._kept:
            if tensors.keys() != self._kept.keys():
                raise ValueError("`guard_or_model` must have the tensors that it had at the best value, got others")
            with torch.no_grad():
                for name, tensor in tensors.items():
                    tensor.copy_(self._kept[name])
        return bool(self.reason)

    def state_dict(self) -> dict[str, Any]:
        """The state as plain data, including the tensors of the best model if they are kept."""
        numbers = {"best": self.best, "last": self.last, "best_check": self.best_check, "num_checks": self.num_checks}
        return {**numbers, "num_bad": self.num_bad, "num_rollbacks": self._num_rollbacks, "kept": dict(self._kept)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resumes from `state_dict` with this object's settings: a larger `patience` continues a stopped run.

        Raises:
            ValueError: an entry is missing or invalid; the message names it, and nothing is changed.
        """
        best, last = (values.entry(state, name, values.number) for name in ("best", "last"))
        names = ("best_check", "num_checks", "num_bad", "num_rollbacks")
        counts = [values.entry(state, name, values.count) for name in names]
        kept = values.entry(state, "kept", lambda plain: values.by_name(_copied, plain))
        self.best, self.last, self._kept = best, last, kept
        self.best_check, self.num_checks, self.num_bad, self._num_rollbacks = counts


def _copied(tensor: Any) -> torch.Tensor:
    if not isinstance(tensor, torch.Tensor):
        raise values.refused("a tensor", tensor)
    return tensor.clone()
