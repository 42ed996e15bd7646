"""The learning-rate range test: with any function of a rate, or with a model, which gets everything back."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..records import values
from ..step.scalars import scalar
from ..step.wrappers import innermost
from .bench import Bench, is_pair, refuse_iterator, require_module, set_rate, without_guard

_DIVERGED = 10.0
MIN_POINTS = 10
_KEYS = ("suggested_lr", "lrs", "losses")


@dataclass(frozen=True)
class RangeTest:
    """Losses at rising learning rates, and what they suggest.

    The first three are attributes, keys (`result["suggested_lr"]`, `dict(result)`) and items in this order
    (`suggested_lr, lrs, losses = result`).

    Attributes:
        suggested_lr: where to start.
        lrs, losses: one point a step, without the one at which the test stopped.
        stopped: "nan" or "diverged" at the next learning rate; None if the test went through.
        reason: how the suggestion came about, in words.
    """

    suggested_lr: float
    lrs: list[float]
    losses: list[float]
    stopped: str | None = None
    reason: str = ""

    def keys(self) -> tuple[str, ...]:
        """Names of the three items."""
        return _KEYS

    def __getitem__(self, key: str | int) -> Any:
        if key not in self and not isinstance(key, int):
            raise KeyError(f"a range test has no {key!r}; it has: {', '.join(_KEYS)}, stopped, reason")
        return getattr(self, _KEYS[key] if isinstance(key, int) else key)

    def __contains__(self, key: object) -> bool:
        return key in (*_KEYS, "stopped", "reason")

    def __iter__(self) -> Iterator[Any]:
        return (getattr(self, key) for key in _KEYS)

    def __str__(self) -> str:
        return f"suggested learning rate: {self.suggested_lr:.3g} ({self.reason}); {len(self.lrs)} rates tried"


class LearningRateFinder:
    """Tries rising learning rates, one step each, and suggests one to train with.

    Args:
        min_lr, max_lr: the range, both ends included.
        num_steps: learning rates tried, evenly spaced in their logarithm.

    Raises:
        ValueError: not 0 < min_lr < max_lr, or fewer than 2 steps.

    Cost: of `find` and `range_test`, a training step or a call for each rate.

    Source: Smith 2017, "Cyclical learning rates for training neural networks", section 3.3. Deviation: a suggestion is
    read off the curve by rule instead of by eye: where the loss falls most steeply over log(lr), a tenth of the points
    further left; 10 × min_lr where there are fewer than 10 points or the loss never falls.

    >>> finder = LearningRateFinder(min_lr=1e-4, max_lr=1.0, num_steps=50)
    >>> result = finder.range_test(lambda lr: 1 / (1 + (lr / 0.1) ** 2))
    >>> len(result.lrs), round(result["suggested_lr"], 3), result.stopped
    (50, 0.041, None)
    """

    def __init__(self, min_lr: float = 1e-7, max_lr: float = 10.0, num_steps: int = 100) -> None:
        if not 0 < min_lr < max_lr < math.inf:
            raise ValueError(f"`min_lr` and `max_lr` must be 0 < min_lr < max_lr, got {min_lr!r} and {max_lr!r}")
        self.min_lr = float(min_lr)
        self.max_lr = float(max_lr)
        self.num_steps = values.at_least(2, "num_steps", num_steps)

    def schedule(self) -> list[float]:
        """The learning rates that are tried: min_lr · (max_lr / min_lr)^(i / (num_steps - 1))."""
        span, last = self.max_lr / self.min_lr, self.num_steps - 1
        return [self.min_lr * span ** (i / last) for i in range(last)] + [self.max_lr]

    def range_test(self, train_fn: Callable[[float], Any]) -> RangeTest:
        """Calls `train_fn` with each learning rate and reads a suggestion off the losses.

        Stops at a loss that is not finite or more than 10 times the best one; if that is not positive, 10 times the
        progress above it.

        Args:
            train_fn: takes a learning rate, trains one step with it, returns the loss: a float, or a tensor of one
                element. What it changes stays changed; `find` restores everything.

        Raises:
            ValueError: `train_fn` did not return a number.

        Cost: `num_steps` calls at most; a loss on an accelerator is waited for.
        """
        lrs: list[float] = []
        losses: list[float] = []
        stopped = None
        for lr in self.schedule():
            loss = scalar("loss", train_fn(lr))
            if not math.isfinite(loss):
                stopped = "nan"
                break
            best = min(losses, default=math.inf)
            gained = best if best > 0.0 else losses[0] - best
            if gained > 0.0 and loss - min(best, 0.0) > _DIVERGED * gained:
                stopped = "diverged"
                break
            lrs.append(lr)
            losses.append(loss)
        suggested, reason = suggest(lrs, losses, self.min_lr)
        return RangeTest(suggested, lrs, losses, stopped, reason)

    def find(
        self,
        model: torch.nn.Module,
        optimizer: Any,
        loader: Iterable[Any],
        loss_fn: Callable[..., Any] | None = None,
        *,
        compute_loss: Callable[[Any], Any] | None = None,
    ) -> RangeTest:
        """Runs the test on a model, and restores everything bit for bit, also after an error.

        That is parameters, buffers, gradients, optimizer state and settings, and random generators of torch, Python,
        NumPy and the loader. Each step clips to the guard's fixed limit, if it has one; the guard sees none of them.
        Groups keep the ratios of their learning rates. Schedulers are not stepped.

        Args:
            model: the model, in training or evaluation mode, on any device.
            optimizer: its optimizer, guarded or not, also inside a wrapper such as accelerate's.
            loader: batches, started again when they run out; not an iterator.
            loss_fn: the loss of `loss_fn(model(inputs), targets)`, for batches that are pairs.
            compute_loss: instead of that, batch -> loss, for anything else (autocast, dicts, moving to a device).

        Raises:
            ValueError: neither or both of `loss_fn` and `compute_loss`; an iterator or an empty `loader`; the first
                group's learning rate is 0.

        Cost: `num_steps` training steps, and a copy of parameters, buffers and optimizer state meanwhile.
        """
        if (loss_fn is None) == (compute_loss is None):
            raise ValueError("exactly one of `loss_fn` and `compute_loss` must be given")
        refuse_iterator("loader", loader)
        require_module(model)
        inner = innermost(optimizer)
        whole = None if compute_loss is None else lambda _, batch: compute_loss(batch)
        bench = Bench(model, inner, whole or loss_fn, "whole" if whole else "pair")
        first = float(inner.param_groups[0]["lr"])
        if not first > 0:
            raise ValueError(f"`optimizer` must have a learning rate > 0 in its first group, got {first}")
        ratios = [float(group["lr"]) / first for group in inner.param_groups]
        with bench.put_back(loader), without_guard(inner) as clip:
            batches = _again_and_again(loader, bench.form == "pair")

            def train(lr: float) -> float:
                for group, ratio in zip(inner.param_groups, ratios, strict=True):
                    set_rate(group, lr * ratio)
                return bench.step(next(batches), clip)

            with contextlib.closing(batches):
                return self.range_test(train)


def _again_and_again(loader: Iterable[Any], are_pairs: bool) -> Generator[Any, None, None]:
    is_empty = False
    while not is_empty:
        is_empty = True
        for batch in loader:
            if are_pairs and not is_pair(batch):
                what = f"{type(batch).__name__}. Pass compute_loss=lambda batch: ... for others"
                raise ValueError(f"`loader` must give pairs (inputs, targets) for `loss_fn`, got {what}.")
            is_empty = False
            yield batch
    raise ValueError("`loader` must give at least one batch, got none")


def suggest(lrs: Sequence[float], losses: Sequence[float], min_lr: float) -> tuple[float, str]:
    """A learning rate, and why: where the loss falls most steeply over log(lr), a tenth of the points further left.

    >>> suggest([10.0**k for k in range(-6, 6)], [9, 9, 9, 9, 9, 5, 1, 1, 1, 1, 2, 5], 1e-6)[0]
    0.01
    """
    fallback = 10 * min_lr
    if len(lrs) < MIN_POINTS:
        return fallback, f"10 x the smallest: only {len(lrs)} points, and a slope needs {MIN_POINTS}"
    last, logs = len(lrs) - 1, [math.log(lr) for lr in lrs]
    beside = [(max(i - 1, 0), min(i + 1, last)) for i in range(len(lrs))]  # at the ends the point itself
    slopes = [(losses[b] - losses[a]) / (logs[b] - logs[a]) for a, b in beside]
    steepest = min(range(len(slopes)), key=slopes.__getitem__)
    if slopes[steepest] >= 0:
        return fallback, "10 x the smallest: the loss fell at no learning rate"
    chosen = max(0, steepest - len(lrs) // 10)
    return lrs[chosen], f"the loss falls most steeply at {lrs[steepest]:.3g}; a tenth of the points before that"
