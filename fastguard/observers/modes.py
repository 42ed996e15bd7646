"""Passes that do not train and follow each other, as of a test: in which mode, and of which inputs."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from .batch_sample import data_of, figures_of
from .likeness import InputLikeness

_MAX_SERIES, _MAX_COMPARED, _MAX_PASSES = 8, 8, 64  # of a run; of each, passes that are compared, and all
_MAX_INPUTS = 2  # of a pass that are compared


class EvaluationWatch:
    """Follows passes that do not train from one that `BatchWatch` samples up to the next step: a series.

    Of a model in training mode with dropout or batch statistics, it compares the inputs of the first passes without
    autograd with each other and with those of earlier series: a test repeats them. Then it waits for a pass in eval
    mode, which says that the script knows of the modes. Of inputs in any mode, it adds those of the passes 1, 2, 4, 8,
    16, 32 and 64 to `likeness`.

    Cost: 8 us for each of the first 64 passes of a series, up to 0.1 ms where it reads the inputs, in eight series.
    """

    def __init__(self) -> None:
        self.likeness = InputLikeness()
        self.step = self.next_from = -1  # of the open series; the step from which on the next one may begin
        self._num_series = self._num = 0  # passes of the open series
        self._found: list[list[int]] = []
        self._met: list[Any] = []  # the inputs of the open series
        self._before: set[Any] = set()  # and those of earlier ones
        self._is_compared = self._was_in_eval = False

    def awaits(self, is_training_mode: bool) -> bool:
        """Whether to look at a further pass of the open series."""
        if not is_training_mode and not self._was_in_eval:
            return True
        is_compared = self._is_compared and self._num < _MAX_COMPARED
        return is_compared or (self.likeness.awaits_validation and self._num < _MAX_PASSES)

    def meet(self, model: nn.Module, args: Any, kwargs: dict[str, Any], with_grad: bool, step: int) -> bool:
        """Takes a pass of step `step`. Returns whether it is one of an open series."""
        self._was_in_eval |= not model.training
        if self.step != step:
            self._num, self._met = 0, []
            is_open = self._num_series < _MAX_SERIES
            self._is_compared = is_open and not with_grad and not self._was_in_eval and _is_random(model)
            if self._is_compared:
                self._found.append([step, 0, 0, 0])
            if not is_open or not (self._is_compared or self.likeness.awaits_validation):
                return False
            self._num_series, self.step = self._num_series + 1, step
        self._num += 1
        if self.likeness.awaits_validation and self._num & (self._num - 1) == 0:
            self.likeness.add(data_of(args, kwargs), is_training=False)
        if self._is_compared and self._num <= _MAX_COMPARED:
            self._compare(args, kwargs)
        return True

    def _compare(self, args: Any, kwargs: dict[str, Any]) -> None:
        data = data_of(args, kwargs)
        figures = [x.figures or figures_of(x.tensor) for x in data[:_MAX_INPUTS]]
        inputs = tuple(x.digest for x in figures if x is not None)
        is_batch = any(x.tensor.dim() and x.tensor.shape[0] > 1 for x in data)
        is_new = bool(inputs) and is_batch and inputs not in self._met
        self._found[-1][1] += is_new
        self._found[-1][2] += is_new and inputs in self._before
        if inputs in self._met:  # drawn again and again, as for Monte Carlo dropout
            self._found[-1][2] = 0
        self._met.append(inputs)

    def end(self, step: int) -> None:
        """The open series is over: the next pass that does not train is one of step `step`."""
        if self._is_compared:
            self._found[-1][3] = step - self.step
        self._before.update(self._met)
        self.step = -1

    def facts(self) -> dict[str, Any]:
        found = [] if self._was_in_eval else [tuple(series) for series in self._found]
        modes = {"passes_in_training_mode": found} if self._was_in_eval or len(found) > 1 else {}
        return {**modes, **self.likeness.facts()}


def _is_random(model: nn.Module) -> bool:
    """Whether a part of the model acts otherwise in eval mode, and is not. `update_bn` sets the momentum to None."""
    norms = [m for m in model.modules() if m.training and isinstance(m, _BatchNorm) and m.track_running_stats]
    if any(m.momentum is None for m in norms):
        return False
    kinds = _DropoutNd, nn.MultiheadAttention, nn.RNNBase
    dropping = (m for m in model.modules() if m.training and isinstance(m, kinds))
    return bool(norms) or any(float(getattr(m, "p", getattr(m, "dropout", 0.0))) > 0.0 for m in dropping)
