"""Trains on a few batches at several learning rates, to see what rate, optimizer and model can do."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from ..bench import Bench, set_rate

FACTORS = (1.0, 0.1, 10.0, 0.01, 100.0)
_HIGHER = (1e4, 1e6, 1e8, 1e10, 1e12)
_LOWER = (1e-3, 1e-4, 1e-6)
_RATES_OF_ADAM = (1e-3, 1e-2)
LEAST_STEPS = 10  # of an attempt, however slow: fewer are not conclusive


@dataclass(frozen=True, slots=True)
class Attempt:
    """Some steps at one learning rate."""

    factor: float  # multiple of the given learning rate
    lr: float  # the learning rate of the first group
    # start, end: mean loss over the batches before and after, with the same random numbers; NaN if it broke
    start: float
    end: float
    peak: float  # the highest loss on the way
    num_steps: int  # number of steps taken
    update_ratio: float  # median of |change| / |weight| over tensors and the first steps

    @property
    def gain(self) -> float:
        """By how much the loss fell; minus infinity if it is not finite."""
        return self.start - self.end if math.isfinite(self.end) else -math.inf

    @property
    def is_calm(self) -> bool:
        """Whether the loss fell without rising far on the way."""
        return self.gain > 0 and self.peak < 3.0 * abs(self.start) + 1e-9


@dataclass(frozen=True, slots=True)
class Fit:
    """All attempts: by factor with the given optimizer, and with a plain Adam if none of these learnt."""

    attempts: dict[float, Attempt]
    with_adam: tuple[Attempt, ...] = ()

    @property
    def given(self) -> Attempt:
        """The attempt at the given learning rate."""
        return self.attempts[1.0]

    @property
    def best(self) -> Attempt:
        """The attempt with the lowest final loss."""
        return max(self.attempts.values(), key=lambda one: one.gain)


class Fitting:
    """Makes the attempts within about `seconds`, of `LEAST_STEPS` to `max_steps` steps each."""

    def __init__(self, bench: Bench, batches: list[Any], max_steps: int, seconds: float) -> None:
        self._bench = bench
        self._batches = batches
        self._max_steps = max_steps
        self._deadline = time.perf_counter() + seconds
        self._seconds = seconds

    def run(self, baseline: float | None) -> Fit:
        """All attempts. `baseline` is the loss of the best constant answer, below which something was learnt."""
        started = time.perf_counter()
        first = self.attempt(1.0, min(4, self._max_steps))
        a_step = (time.perf_counter() - started) / (4 + 2 * len(self._batches))
        num_steps = min(self._max_steps, max(LEAST_STEPS, int(self._seconds / (8.0 * max(a_step, 1e-6)))))
        attempts: dict[float, Attempt] = {}
        for factor in FACTORS:
            attempts[factor] = self.attempt(factor, num_steps)
        start = first.start if baseline is None else min(baseline, first.start)
        if not any(self._moved(one, start) for one in attempts.values()):
            for factor in _HIGHER:  # a rate that is far too low
                if time.perf_counter() > self._deadline + 0.3 * self._seconds or math.isnan(attempts[100.0].end):
                    break
                attempts[factor] = self.attempt(factor, min(num_steps, 20))
                if self._moved(attempts[factor], start) or math.isnan(attempts[factor].end):
                    break
        with_adam: tuple[Attempt, ...] = ()
        if not any(attempts[factor].is_calm for factor in (1.0, 0.1, 0.01)):
            for factor in _LOWER:  # a rate that is far too high
                attempts[factor] = self.attempt(factor, num_steps)
                if attempts[factor].is_calm:
                    break
        for factor in sorted(attempts, key=lambda f: -attempts[f].gain)[:2]:  # slow ones get more time
            if not any(has_learnt(one, start) for one in attempts.values()) and not math.isnan(attempts[factor].end):
                attempts[factor] = self.attempt(factor, 3 * num_steps)
        if not any(has_learnt(one, start) for one in attempts.values()):
            with_adam = tuple(self._with_adam(lr, 3 * num_steps) for lr in _RATES_OF_ADAM)
        return Fit(attempts, with_adam)

    @staticmethod
    def _moved(one: Attempt, start: float) -> bool:
        return one.gain > 0.05 * abs(start)

    def attempt(self, factor: float, num_steps: int) -> Attempt:
        """`num_steps` steps at `factor` times the given learning rate; everything is restored."""
        with self._bench.put_back():
            lr = _scale_rates(self._bench.optimizer, factor)
            return self._go(self._bench, factor, lr, num_steps)

    def _with_adam(self, lr: float, num_steps: int) -> Attempt:
        params = [p for p in self._bench.model.parameters() if p.requires_grad]
        with self._bench.put_back():
            return self._go(self._bench.with_optimizer(torch.optim.Adam(params, lr)), math.nan, lr, num_steps)

    def _go(self, bench: Bench, factor: float, lr: float, num_steps: int) -> Attempt:
        watched = [p for p in bench.model.parameters() if p.requires_grad and p.dim() >= 2][:64]
        losses: list[float] = []
        ratios: list[float] = []
        try:
            start = self._mean_loss(bench)
            for step in range(num_steps):
                before = [p.detach().clone() for p in watched] if step < 3 else []
                losses.append(bench.step(self._batches[step % len(self._batches)]))
                if before:
                    ratios.append(_update_ratio(before, watched))
                is_late = time.perf_counter() > self._deadline + 0.2 * self._seconds
                if not math.isfinite(losses[-1]) or (is_late and len(losses) >= LEAST_STEPS):
                    break
            end = self._mean_loss(bench) if math.isfinite(losses[-1]) else math.nan
        except (RuntimeError, ArithmeticError, ValueError, IndexError):
            # with weights that are not finite, losses refuse their input: the same as a loss of NaN
            if not losses:
                raise
            return Attempt(factor, lr, start, math.nan, math.inf, len(losses), median(ratios or [math.nan]))
        peak = max((loss for loss in losses if math.isfinite(loss)), default=math.inf)
        if not math.isfinite(end):
            end, peak = math.nan, math.inf
        return Attempt(factor, lr, start, end, peak, len(losses), median(ratios or [math.nan]))

    def _mean_loss(self, bench: Bench) -> float:
        # With gradients, because a loss may take some itself (penalties, adversaries); with the same random numbers.
        with torch.enable_grad(), torch.random.fork_rng():
            torch.manual_seed(0)
            return sum(float(bench.run(batch)[1].detach()) for batch in self._batches) / len(self._batches)


def has_learnt(one: Attempt, start: float, share: float = 0.05) -> bool:
    """Whether an attempt ended clearly below `start`."""
    return math.isfinite(one.end) and start - one.end > share * abs(start)


def _scale_rates(optimizer: torch.optim.Optimizer, factor: float) -> float:
    """Multiplies each group's rate (or the one a warm-up rises to) by `factor`, and returns that of the first group."""
    rates = []
    for group in optimizer.param_groups:
        lr = max(float(group.get("lr", 0.0)), float(group.get("initial_lr", 0.0))) * factor
        if "lr" in group:
            set_rate(group, lr)
        rates.append(lr)
    return rates[0] if rates else math.nan


def _update_ratio(before: list[torch.Tensor], now: list[torch.nn.Parameter]) -> float:
    ratios = []
    for old, new in zip(before, now):
        norm = float(old.double().norm())
        if norm > 0:
            ratios.append(float((new.detach().double() - old.double()).norm()) / norm)
    return median(ratios) if ratios else math.nan
