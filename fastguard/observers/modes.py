"""Follows series of passes without training, such as a test: the model's mode, and whether inputs repeat."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from .batch_sample import data_of, figures_of

_MAX_SERIES, _MAX_COMPARED = 8, 8  # of a run; passes of each that are compared
_DROPPING = _DropoutNd, nn.MultiheadAttention, nn.RNNBase


class EvaluationWatch:
    """Follows passes that do not train from one that `BatchWatch` samples up to the next step: a series.

    Of a model in training mode with dropout or batch statistics, it compares the inputs of the first passes without
    autograd with each other and with those of earlier series: a test repeats them. Then it waits for a pass in eval
    mode, which says that the script knows of the modes.

    Cost: up to 0.1 ms for each of the first eight passes of eight series.
    """

    def __init__(self) -> None:
        self.step = self.next_from = -1  # of the open series; the step from which on the next one may begin
        self._num_series = self._num = 0  # passes of the open series
        self._found: list[list[int]] = []
        self._last: dict[Any, int] = {}  # the newest series in which inputs were met, by their digests
        self._is_compared = self._was_in_eval = False

    def awaits(self, is_training_mode: bool) -> bool:
        """Whether to look at a further pass of the open series."""
        return self._num < _MAX_COMPARED or not (is_training_mode or self._was_in_eval)

    def meet(self, model: nn.Module, args: Any, kwargs: dict[str, Any], with_grad: bool, step: int) -> bool:
        """Takes a pass of step `step`. Returns whether it is one of an open series."""
        self._was_in_eval |= not model.training
        if self.step != step:
            self._is_compared = not with_grad and not self._was_in_eval and _is_random(model)
            if self._num_series == _MAX_SERIES or not self._is_compared:
                return False
            self._num_series, self.step, self._num = self._num_series + 1, step, 0
            self._found.append([step, 0, 0, 0])
        self._num += 1
        if self._is_compared and self._num <= _MAX_COMPARED:
            data = data_of(args, kwargs)
            digests = tuple(x.digest for one in data if (x := one.figures or figures_of(one.tensor)) is not None)
            last = self._last.get(digests, 0)
            self._last[digests] = self._num_series
            if last == self._num_series:  # drawn again and again, as for Monte Carlo dropout
                self._found[-1][2] = 0
            elif any(x.tensor.dim() and x.tensor.shape[0] > 1 for x in data):
                self._found[-1][1] += 1
                self._found[-1][2] += last > 0
        return True

    def end(self, step: int) -> None:
        """The open series is over: the next pass that does not train is one of step `step`."""
        if self._is_compared:
            self._found[-1][3] = step - self.step
        self.step = -1

    def facts(self) -> dict[str, Any]:
        found = [] if self._was_in_eval else [tuple(series) for series in self._found]
        return {"passes_in_training_mode": found} if self._was_in_eval or len(found) > 1 else {}


def _is_random(model: nn.Module) -> bool:
    """Whether a part of the model acts otherwise in eval mode, and is not. `update_bn` sets the momentum to None."""
    parts = [m for m in model.modules() if m.training]
    norms = [m for m in parts if isinstance(m, _BatchNorm) and m.track_running_stats]
    shares = [getattr(m, "p", getattr(m, "dropout", 0.0)) for m in parts if isinstance(m, _DROPPING)]
    return all(m.momentum is not None for m in norms) and (bool(norms) or any(shares))
