"""The running statistics of BatchNorm modules beside those of a batch, at a few training passes."""

from __future__ import annotations

import math
import weakref
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..names import strip_wrappers
from ..records.failures import Failures
from .observer import ModuleHook, Observer
from .thinning import thinned

MAX_MODULES = 8
_MAX_ELEMENTS = 65536
_MAX_CHANNELS = 4096
_LEAST_ROWS = 16  # elements of a channel, whose own mean is off by a quarter of a deviation then


class NormStatistics(Observer):
    """Hooks on at most eight BatchNorm modules, for one pass; `arm` sets them.

    Attributes:
        found: by module, how many standard deviations of the batch's the means lie apart (root mean square over the
            channels), and the running variance over the batch's (geometric mean). Both are Inf where the running
            statistics are not finite, whatever the batch.

    Cost: 40 us a module, at the passes after `arm`.
    """

    def __init__(self, model: nn.Module, failures: Failures) -> None:
        named = [(name, m) for name, m in model.named_modules() if isinstance(m, _BatchNorm) and m.track_running_stats]
        step = -(-len(named) // MAX_MODULES) if named else 1
        self._modules = [(strip_wrappers(name), weakref.ref(m)) for name, m in named[::step]]
        self._failures = failures
        self._awaited: set[str] = set()
        self.found: dict[str, tuple[float, float]] = {}

    def arm(self) -> None:
        """Has the next pass looked at, if there is anything to look at."""
        self.close()
        for name, ref in self._modules:
            module = ref()
            if module is not None:
                self._awaited.add(name)
                self.hold(module.register_forward_pre_hook(ModuleHook(self._meet, name)))

    def _meet(self, name: str, module: nn.Module, args: tuple[Any, ...]) -> None:
        """A module is called, and looked at once. Removes the hooks when all modules were called."""
        if name in self._awaited and args and torch.is_grad_enabled():
            self._awaited.remove(name)
            if not self._awaited:
                self.close()
            self.compare(name, module, args[0])

    def compare(self, name: str, module: nn.Module, x: Any) -> None:
        """Takes what a module is given, ahead of what it makes of it."""
        with self._failures.kept("batch sampler", "Running statistics are not compared."), torch.no_grad():
            mean, variance = getattr(module, "running_mean", None), getattr(module, "running_var", None)
            if not isinstance(x, torch.Tensor) or mean is None or variance is None or not _can_be_read(x, mean):
                return
            if not bool(mean.isfinite().all() and variance.isfinite().all()):
                self.found[name] = math.inf, math.inf
                return
            if x.shape[1] != mean.numel():
                return
            step = -(-x.shape[1] // _MAX_CHANNELS)
            channels = x.detach()[:, ::step]
            most = max(_MAX_ELEMENTS, _LEAST_ROWS * channels.shape[1])
            channels = thinned(channels, most, (*range(x.dim() - 1, 1, -1), 0)).transpose(0, 1).flatten(1).float()
            if channels.shape[1] < _LEAST_ROWS:
                return
            mean, variance = mean[::step].float(), variance[::step].float()
            of_batch, means = torch.var_mean(channels, 1)
            eps = float(getattr(module, "eps", 1e-5))
            away = ((mean - means).square() / (of_batch + eps)).mean().sqrt()
            times = ((variance + eps).log() - (of_batch + eps).log()).mean()
            gap, ratio = float(away), math.exp(max(-700.0, min(700.0, float(times))))
            if math.isfinite(gap) and ratio > 0.0:
                self.found[name] = gap, ratio


def _can_be_read(x: torch.Tensor, mean: torch.Tensor) -> bool:
    if not (x.is_cpu and mean.is_cpu) or x.dim() < 2 or x.layout is not torch.strided:
        return False
    return not torch._C._functorch.is_functorch_wrapped_tensor(x) and type(x) in (torch.Tensor, nn.Parameter)
