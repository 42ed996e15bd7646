"""Clip rules of others, from their definitions, and ours, all asked the same: the norms of a step in, factors out.

A rule knows nothing of tensors, so it is replayed on recorded norms as it is asked in a training. Each stands here as
its authors define it, also where that differs from `fastguard`'s policy of the same name.
"""

from __future__ import annotations

import functools
import math
import statistics
from bisect import insort
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any


def mean_and_std(values: Collection[float]) -> tuple[float, float]:
    """Mean and sample deviation. The module `statistics` does it exactly, and takes forty times as long."""
    mean = sum(values) / len(values)
    return mean, math.sqrt(sum((x - mean) ** 2 for x in values) / (len(values) - 1))


class Rule:
    """Decides over one step after the other. The base lets every step through."""

    def factors(self, norms: Sequence[float], loss: float | None = None) -> list[float]:
        """What to multiply each gradient by; all 0 is a skipped step.

        Args:
            norms: of each gradient, finite.
            loss: of the same step, finite.
        """
        return [self.factor(math.hypot(*norms), loss)] * len(norms)

    def factor(self, norm: float, loss: float | None) -> float:
        """The same for a rule on the norm of all gradients together."""
        return 1.0


class FixedNorm(Rule):
    """`torch.nn.utils.clip_grad_norm_`: min(1, max_norm / (norm + 1e-6))."""

    def __init__(self, max_norm: float = 1.0) -> None:
        self.max_norm = max_norm

    def factor(self, norm: float, loss: float | None) -> float:
        return min(1.0, self.max_norm / (norm + 1e-6))


class ZClip(Rule):
    """ZClip (Kumar et al. 2025), section 3, its "zscore" mode with adaptive scaling.

    s = (norm - mean) / std; where s > z the norm becomes mean + z^2 / s * std. Mean and variance are exponential
    averages (0.97) of the clipped norm, begun from the first 25 norms. The authors' code clips to 1.0 besides, which
    `max_norm` is for.
    """

    def __init__(self, z: float = 2.5, alpha: float = 0.97, warm_up: int = 25, max_norm: float | None = None) -> None:
        self.z, self.alpha, self.warm_up = z, alpha, warm_up
        self.max_norm = math.inf if max_norm is None else max_norm
        self.first: list[float] = []
        self.mean, self.var = 0.0, 0.0

    def factor(self, norm: float, loss: float | None) -> float:
        target = norm
        if len(self.first) < self.warm_up:
            self.first.append(norm)
            if len(self.first) == self.warm_up:
                self.mean, self.var = statistics.fmean(self.first), statistics.pvariance(self.first)
        else:
            std = math.sqrt(self.var)
            score = (norm - self.mean) / (std + 1e-6)
            if score > self.z:
                target = self.mean + self.z * self.z / score * std
            self.mean = self.alpha * self.mean + (1 - self.alpha) * target
            self.var = self.alpha * self.var + (1 - self.alpha) * (target - self.mean) ** 2
        target = min(target, self.max_norm)
        return min(1.0, target / (norm + 1e-6)) if target < norm else 1.0


class AutoClip(Rule):
    """AutoClip (Seetharaman et al. 2020), equation 2: clips to the p-th percentile of all norms so far, this one among
    them; p = 10."""

    def __init__(self, p: float = 10.0) -> None:
        self.p = p
        self.ordered: list[float] = []

    def factor(self, norm: float, loss: float | None) -> float:
        insort(self.ordered, norm)
        place = self.p / 100.0 * (len(self.ordered) - 1)
        low = int(place)
        high = min(low + 1, len(self.ordered) - 1)
        limit = self.ordered[low] + (place - low) * (self.ordered[high] - self.ordered[low])
        return min(1.0, limit / norm) if norm > 0.0 else 1.0


class AdaGC(Rule):
    """AdaGC (Wang et al. 2025), Algorithm 1, with the settings of its ports: ratio 1.05, beta 0.98, 100 warm-up steps.

    In the warm-up all gradients are clipped together to 1.0, and each tensor's average begins as the least norm left;
    then it is clipped to ratio x its average, which takes the clipped norm.
    """

    def __init__(self, ratio: float = 1.05, beta: float = 0.98, warm_up: int = 100, max_norm: float = 1.0) -> None:
        self.ratio, self.beta, self.warm_up, self.max_norm = ratio, beta, warm_up, max_norm
        self.averages: list[float] = []
        self.step = 0

    def factors(self, norms: Sequence[float], loss: float | None = None) -> list[float]:
        self.step += 1
        if self.step <= self.warm_up:
            factor = min(1.0, self.max_norm / (math.hypot(*norms) + 1e-6))
            left = [factor * norm for norm in norms]
            self.averages = left if self.step == 1 else list(map(min, self.averages, left))
            return [factor] * len(norms)
        found = [
            min(1.0, self.ratio * average / norm) if norm > 0.0 else 1.0
            for average, norm in zip(self.averages, norms, strict=True)
        ]
        self.averages = [
            self.beta * average + (1 - self.beta) * factor * norm
            for average, factor, norm in zip(self.averages, found, norms)
        ]
        return found


class SkipStep(Rule):
    """OLMo's skipped step: out where loss or norm lies more than 6 standard deviations above the mean of the last 128,
    once there are 64; what was skipped counts among them. What is left is clipped to `max_norm`."""

    def __init__(self, sigma: float = 6.0, window: int = 128, max_norm: float = math.inf) -> None:
        self.sigma, self.max_norm = sigma, max_norm
        self.norms: deque[float] = deque(maxlen=window)
        self.losses: deque[float] = deque(maxlen=window)

    def factor(self, norm: float, loss: float | None) -> float:
        is_out = self._is_out(self.norms, norm)
        if loss is not None:
            is_out |= self._is_out(self.losses, loss)
        return 0.0 if is_out else min(1.0, self.max_norm / (norm + 1e-6))

    def _is_out(self, past: deque[float], value: float) -> bool:
        assert past.maxlen is not None
        is_out = False
        if len(past) + 1 >= max(2, past.maxlen // 2):
            mean, std = mean_and_std(past)
            is_out = value - mean > self.sigma * std
        past.append(value)
        return is_out


class WindowClip(Rule):
    """Levanter's update clipping: to mean + 3 standard deviations of the last 128 norms before clipping, once there
    are 64. There the norms are of the updates, here of the gradients."""

    def __init__(self, sigma: float = 3.0, window: int = 128) -> None:
        self.sigma = sigma
        self.norms: deque[float] = deque(maxlen=window)

    def factor(self, norm: float, loss: float | None) -> float:
        assert self.norms.maxlen is not None
        limit = math.inf
        if len(self.norms) >= self.norms.maxlen // 2:
            mean, std = mean_and_std(self.norms)
            limit = mean + self.sigma * std
        self.norms.append(norm)
        return limit / norm if norm > limit else 1.0


class Limits(Rule):
    """A policy of fastguard's, of the whole model, replayed as the guard asks it: limits before the step, the norm
    afterwards. The loss that it is told is the one of the step before."""

    def __init__(self, policy: Any) -> None:
        self.policy = policy
        self._loss: float | None = None

    def factor(self, norm: float, loss: float | None) -> float:
        trigger, target = self.policy.limits()
        self.policy.observe(norm, self._loss)
        self._loss = loss
        return min(1.0, target / norm) if norm > trigger else 1.0


def _spikes(**settings: float) -> Rule:
    import fastguard

    return Limits(fastguard.Spikes(**settings))  # type: ignore[arg-type]


OURS = "Spikes"
RULES: dict[str, Callable[[], Rule]] = {
    OURS: _spikes,
    "Spikes(k=4.5)": functools.partial(_spikes, k=4.5),  # what is caught against what is acted on without need
    "Spikes(k=2.5)": functools.partial(_spikes, k=2.5),
    "Spikes(k=1.5)": functools.partial(_spikes, k=1.5),
    "ZClip": ZClip,
    "AdaGC": AdaGC,
    "AutoClip": AutoClip,
    "SkipStep": SkipStep,
    "update clip": WindowClip,
}
