"""The running statistics of BatchNorm modules beside those of a batch, at a few training passes."""

from __future__ import annotations

import math
import weakref
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..names import strip_wrappers
from ..stats.failures import Failures
from .transient import Transient

MAX_MODULES = 8
_MAX_ELEMENTS = 65536
_LEAST_ROWS = 16  # elements of a channel, whose own mean is off by a quarter of a deviation then


class NormStatistics:
    """Hooks on at most eight BatchNorm modules, each for one pass; `arm` sets them.

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
        self._handles: dict[str, Any] = {}
        self.found: dict[str, tuple[float, float]] = {}

    def arm(self) -> None:
        """Has the next pass looked at, if there is anything to look at."""
        self.close()
        for name, ref in self._modules:
            module = ref()
            if module is not None:
                self._handles[name] = module.register_forward_pre_hook(Compare(self, name))

    def compare(self, name: str, module: nn.Module, x: Any) -> None:
        """Takes what a module is given, ahead of what it makes of it, and takes its hook away."""
        handle = self._handles.pop(name, None)
        if handle is not None:
            handle.remove()
        with self._failures.kept("batch sampler", "Running statistics are not compared."), torch.no_grad():
            mean, variance = getattr(module, "running_mean", None), getattr(module, "running_var", None)
            if not isinstance(x, torch.Tensor) or mean is None or variance is None or not _can_be_read(x, mean):
                return
            if not math.isfinite(float(mean.sum(dtype=torch.float64) + variance.sum(dtype=torch.float64))):
                self.found[name] = math.inf, math.inf
                return
            x = x.detach().transpose(0, 1).flatten(1).float()
            x = x[:, :: -(-x.numel() // _MAX_ELEMENTS)]
            if x.shape[1] < _LEAST_ROWS or x.shape[0] != mean.numel():
                return
            of_batch, means = torch.var_mean(x, 1)
            eps = float(getattr(module, "eps", 1e-5))
            away = ((mean.float() - means).square() / (of_batch + eps)).mean().sqrt()
            times = ((variance.float() + eps).log() - (of_batch + eps).log()).mean()
            gap, ratio = float(away), math.exp(max(-700.0, min(700.0, float(times))))
            if math.isfinite(gap) and ratio > 0.0:
                self.found[name] = gap, ratio

    def close(self) -> None:
        """Takes the hooks away."""
        handles, self._handles = self._handles, {}
        for handle in handles.values():
            handle.remove()


def _can_be_read(x: torch.Tensor, mean: torch.Tensor) -> bool:
    if not (x.is_cpu and mean.is_cpu) or x.dim() < 2 or x.layout is not torch.strided:
        return False
    return not torch._C._functorch.is_functorch_wrapped_tensor(x) and type(x) in (torch.Tensor, nn.Parameter)


class Compare(Transient):
    """The hook, for one call; keeps nothing alive."""

    def __init__(self, owner: NormStatistics, name: str) -> None:
        self._owner = weakref.ref(owner)
        self._name = name

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if torch.compiler.is_compiling():
            return
        owner = self._owner()
        if owner is not None and torch.is_grad_enabled() and args and not torch._C._is_tracing():
            owner.compare(self._name, module, args[0])
