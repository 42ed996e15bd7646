"""Passes without autograd that follow each other while dropout or batch statistics are at work."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from .batch_sample import Given, figures_of

_MAX_PLACES, _MAX_PASSES = 8, 8  # of a run, and of each place
_MAX_INPUTS = 2  # that are compared


class ModeWatch:
    """Series of passes without autograd, in training mode, between two steps: as of a test without `model.eval()`.

    A series begins with a pass that `BatchWatch` samples, and ends with the next step. Of its first passes it compares
    the inputs with each other and with those of earlier series. Then it waits for a pass in eval mode, which says that
    the script knows of the modes.

    Cost: 40 us for each of the first eight passes at eight places of a run; 2 us for others at these places.
    """

    def __init__(self) -> None:
        self.step = self.next_from = -1  # of the open series; the step from which on the next one may begin
        self._found: list[list[int]] = []
        self._met: list[Any] = []  # the inputs of the open series
        self._before: set[Any] = set()  # and those of earlier ones
        self._was_in_eval = False

    def awaits(self, is_training_mode: bool) -> bool:
        """Whether to look at a further pass of the open series."""
        return len(self._met) < _MAX_PASSES if is_training_mode else not self._was_in_eval

    def meet(self, model: nn.Module, data: Sequence[Given], with_grad: bool, step: int, waited: int) -> bool:
        """Takes a pass that does not train. Returns whether further ones of this step are of interest.

        The pass came `waited` steps after it was due.
        """
        self._was_in_eval |= not model.training
        if self.step != step:
            if with_grad or self._was_in_eval or len(self._found) == _MAX_PLACES or not _is_random(model):
                return False
            self._met, self.step = [], step
            self._found.append([step, 0, 0, waited])
        self._take(data)
        return not self._was_in_eval

    def _take(self, data: Sequence[Given]) -> None:
        figures = [x.figures or figures_of(x.tensor) for x in data[:_MAX_INPUTS]]
        inputs = tuple(x.digest for x in figures if x is not None)
        is_batch = any(x.tensor.dim() and x.tensor.shape[0] > 1 for x in data)
        is_new = bool(inputs) and is_batch and inputs not in self._met
        self._found[-1][1] += is_new
        self._found[-1][2] += is_new and inputs in self._before
        self._met.append(inputs)

    def end(self) -> None:
        """The open series is over."""
        self._before.update(self._met)
        self.step = -1

    def facts(self) -> dict[str, Any]:
        found = [] if self._was_in_eval else [tuple(series) for series in self._found]
        return {"passes_in_training_mode": found} if self._was_in_eval or len(found) > 1 else {}


def _is_random(model: nn.Module) -> bool:
    """Whether a part of the model acts otherwise in eval mode, and is not. `update_bn` sets the momentum to None."""
    norms = [m for m in model.modules() if m.training and isinstance(m, _BatchNorm) and m.track_running_stats]
    if any(m.momentum is None for m in norms):
        return False
    kinds = _DropoutNd, nn.MultiheadAttention, nn.RNNBase
    dropping = (m for m in model.modules() if m.training and isinstance(m, kinds))
    return bool(norms) or any(float(getattr(m, "p", getattr(m, "dropout", 0.0))) > 0.0 for m in dropping)
