"""What is measured of a loss: chance and the best constant answer, its optimum, and what trial steps reach."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...experiments.loss import MAX_ELEMENTS, Answer, Problem, ask_loss
from ..bench import Bench, mapped, output_of, set_rate, tensors_in
from .watcher import REGRESSION, LossCall, Watcher

CLASSES = ("cross_entropy", "nll_loss")
YES_OR_NO = ("binary_cross_entropy", "binary_cross_entropy_with_logits")
LEAST_SURE = 0.6
_ENDINGS = {
    **dict.fromkeys(("sigmoid", "hardsigmoid"), torch.sigmoid),
    **dict.fromkeys(("tanh", "softsign", "hardtanh"), torch.tanh),
    **dict.fromkeys(("relu", "softplus", "exp"), F.softplus),
}
FACTORS = (1.0, 0.1, 10.0, 0.01, 100.0)
_HIGHER = (1e4, 1e6, 1e8, 1e10, 1e12)
_LOWER = (1e-3, 1e-4, 1e-6)
_RATES_OF_ADAM = (1e-3, 1e-2)
LEAST_STEPS = 10  # of an attempt, however slow: fewer are not conclusive


def has_indices(call: LossCall) -> bool:
    """Whether the targets are numbers of classes."""
    return call.kind in CLASSES and isinstance(call.target, Tensor) and not call.target.is_floating_point()


def num_classes(call: LossCall) -> int:
    return call.input.shape[1] if call.input.dim() > 1 else call.input.shape[0] if call.input.dim() else 1


def chance(call: LossCall) -> float | None:
    """The chance level: ln C for C classes, ln 2 for yes or no; None for other losses."""
    if call.kind in CLASSES:
        return math.log(max(num_classes(call), 1))
    return math.log(2.0) if call.kind in YES_OR_NO else None


def constant_baseline(call: LossCall) -> float | None:
    """The mean loss of the best constant answer; None if it is not known.

    Equivalent to: the entropy of the shares of classes; for regression, the loss of the targets' mean (l1: median).
    """
    target, options, num = call.target, call.options, num_classes(call)
    is_weighted = options.get("weight") is not None or options.get("pos_weight") is not None
    is_mean = options.get("reduction", "mean") == "mean" and not is_weighted
    if not is_mean or not isinstance(target, Tensor) or not target.numel():
        return None
    target = target.detach()
    if call.kind in CLASSES:
        if has_indices(call):
            found = target[target != int(options.get("ignore_index", -100))].long()
            if not found.numel() or int(found.min()) < 0 or int(found.max()) >= num:
                return None
            shares = torch.bincount(found, minlength=num).double() / found.numel()
        else:
            shares = target.double().transpose(1, -1).reshape(-1, num).mean(0)
        smoothing = float(options.get("label_smoothing", 0.0))
        return float(torch.special.entr((1 - smoothing) * shares + smoothing / num).sum())
    if call.kind in YES_OR_NO and not bool(((target < 0) | (target > 1)).any()):
        p = torch.atleast_1d(target).double().mean(0)
        return float((torch.special.entr(p) + torch.special.entr(1 - p)).mean())
    if call.kind in REGRESSION and target.dim() and target.is_floating_point():
        target = target.double()
        center = target.median(0).values if call.kind == "l1_loss" else target.mean(0)
        own = {k: v for k, v in options.items() if k in ("beta", "delta")}
        return float(getattr(F, call.kind)(center.expand_as(target), target, **own))
    return None


def ask(bench: Bench, batch: Any, made_by: tuple[str, int | None] | None, is_causal: bool) -> Answer:
    """Asks the loss about a batch, or as many samples of it as have outputs of `MAX_ELEMENTS`."""
    with bench.put_back(), torch.enable_grad():
        asked = _Asked(bench, batch)
        size = sum(t.numel() for t in asked.outputs)
        if size > MAX_ELEMENTS:
            most = max(4, asked.outputs[0].shape[:1].numel() * MAX_ELEMENTS // size)
            num_samples = next((t.shape[0] for t in tensors_in(batch) if t.dim()), 0)
            asked = _Asked(bench, mapped(lambda t: t[:most] if t.dim() and len(t) == num_samples else t, batch))
        kind, dim = made_by if made_by is not None and bench.form == "pair" else ("", None)
        ending: Any = _ENDINGS.get(kind)
        if kind in ("softmax", "log_softmax") and dim is not None:
            ending = partial(getattr(F, kind), dim=dim)
        num_threads = torch.get_num_threads()
        torch.set_num_threads(1)  # of small tensors, threads cost more than they bring
        try:
            known: dict[str, Any] = {"inputs": asked.inputs, "ending": ending, "is_causal": is_causal}
            are_targets = bench.form == "pair"
            answer = ask_loss(asked.judge, asked.outputs, asked.targets, are_targets=are_targets, **known)
            return _unsure(asked, answer) if answer.optimum and not answer.problems else answer
        except Exception as error:  # what the loss raises of outputs that no model gave says nothing of it
            return Answer(abstained=f"{type(error).__name__}: {error}")
        finally:
            torch.set_num_threads(num_threads)


def _unsure(asked: _Asked, answer: Answer) -> Answer:
    """`answer`, with a problem more if a loss of torch's cannot be given probabilities that tell the targets."""
    with Watcher() as watcher:
        asked.judge(answer.optimum, asked.targets)
    known = [(sure, call.kind) for call in watcher.losses if (sure := _sureness(call)) is not None]
    sure, kind = max(known, key=lambda one: one[0], default=(1.0, ""))
    if not sure < LEAST_SURE:
        return answer
    problem = Problem(
        "target",
        f"Where the loss is lowest, {kind} still gives the targets a probability of only {sure:.2f}.",
        "Give it logits without softmax, sigmoid, tanh or normalisation, at their own scale; smooth labels by 0.1 or "
        "less.",
        {"probability": sure},
        0.9,
    )
    return replace(answer, problems=(problem,))


def _sureness(call: LossCall) -> float | None:
    """The mean probability that a loss was given for what is true; None if there are no hard targets."""
    target = call.target
    if has_indices(call) and call.input.dim() == target.dim() + 1:
        logits = call.input.detach().float()
        p = (logits.log_softmax(1) if call.kind == "cross_entropy" else logits).exp()
        told = p.gather(1, target.clamp(min=0).unsqueeze(1)).squeeze(1)[target >= 0]
        return float(told.mean()) if told.numel() else None
    if call.kind in YES_OR_NO and isinstance(target, Tensor) and target.shape == call.input.shape:
        p = call.input.detach().float()
        p = p.sigmoid() if call.kind.endswith("logits") else p
        return float(torch.where(target > 0.5, p, 1 - p).mean())
    return None


class _Asked:
    """The outputs of one batch, its targets and a function that judges others in their place."""

    def __init__(self, bench: Bench, batch: Any) -> None:
        self._bench, self._batch = bench, batch
        self._calls: list[Any] = []
        forward, inputs = bench.model.forward, []

        def noted(*args: Any, **kwargs: Any) -> Any:
            inputs.extend([*args, *kwargs.values()])
            self._calls.append(forward(*args, **kwargs))
            return self._calls[-1]

        targets = batch
        if bench.form == "pair":
            inputs, targets = bench.parts(batch)
            with torch.no_grad():
                self._calls = [output_of(bench.model, mapped(torch.clone, inputs))]
        else:
            self._run(batch, noted)
        self.inputs, self.targets = tensors_in(inputs), tensors_in(targets)
        self.outputs = [t for t in tensors_in(self._calls) if t.is_floating_point()]

    def _run(self, batch: Any, forward: Callable[..., Any]) -> Any:
        """The loss of a function that calls the model itself, with `forward` in place of the model's."""
        attributes: dict[str, Any] = vars(self._bench.model)
        own = {key: attributes[key] for key in ("forward",) if key in attributes}
        attributes["forward"] = forward
        try:
            return self._bench.run(batch)[1]
        finally:
            del attributes["forward"]
            attributes |= own

    def judge(self, outputs: Sequence[Tensor], targets: Sequence[Tensor]) -> Tensor:
        """The loss of other outputs and targets, of the same shapes: what the optimizer minimises."""
        others, new = iter(outputs), iter(targets)
        made = [mapped(lambda t: next(others) if t.is_floating_point() else t, call) for call in self._calls]
        if self._bench.form == "pair":
            given = mapped(lambda _: next(new).clone(), self._bench.parts(self._batch)[1])
            loss = self._bench.judge(made[0], given)
        else:
            calls = iter(made)
            loss = self._run(mapped(lambda _: next(new), self._batch), lambda *args, **kwargs: next(calls))
        return -loss if any(group.get("maximize") for group in self._bench.optimizer.param_groups) else loss


@dataclass(frozen=True, slots=True)
class Attempt:
    """Some steps at one learning rate."""

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
        return self.attempts[1.0]


class Fitting:
    """Makes the attempts within about `seconds`, of `LEAST_STEPS` to `max_steps` steps each."""

    def __init__(self, bench: Bench, batches: list[Any], max_steps: int, seconds: float) -> None:
        self._bench, self._batches = bench, batches
        self._max_steps, self._seconds = max_steps, seconds
        self._deadline = time.perf_counter() + seconds

    def run(self, baseline: float | None) -> Fit:
        """All attempts. `baseline` is the loss of the best constant answer, below which something was learnt."""
        started = time.perf_counter()
        first = self.attempt(1.0, min(4, self._max_steps))
        a_step = (time.perf_counter() - started) / (4 + 2 * len(self._batches))
        num_steps = min(self._max_steps, max(LEAST_STEPS, int(self._seconds / (8.0 * max(a_step, 1e-6)))))
        attempts = {factor: self.attempt(factor, num_steps) for factor in FACTORS}
        start = first.start if baseline is None else min(baseline, first.start)
        moved = 0.05 * abs(start)
        if not any(one.gain > moved for one in attempts.values()):
            for factor in _HIGHER:  # a rate that is far too low
                if time.perf_counter() > self._deadline + 0.3 * self._seconds or math.isnan(attempts[100.0].end):
                    break
                attempts[factor] = self.attempt(factor, min(num_steps, 20))
                if attempts[factor].gain > moved or math.isnan(attempts[factor].end):
                    break
        if not any(attempts[factor].is_calm for factor in (1.0, 0.1, 0.01)):
            for factor in _LOWER:  # a rate that is far too high
                attempts[factor] = self.attempt(factor, num_steps)
                if attempts[factor].is_calm:
                    break
        for factor in sorted(attempts, key=lambda f: -attempts[f].gain)[:2]:  # slow ones get more time
            if not any(has_learnt(one, start) for one in attempts.values()) and not math.isnan(attempts[factor].end):
                attempts[factor] = self.attempt(factor, 3 * num_steps)
        has_failed = not any(has_learnt(one, start) for one in attempts.values())
        rates = _RATES_OF_ADAM if has_failed else ()
        return Fit(attempts, tuple(self.attempt(lr, 3 * num_steps, with_adam=True) for lr in rates))

    def attempt(self, factor: float, num_steps: int, *, with_adam: bool = False) -> Attempt:
        """Steps at `factor` times the given rate, or by Adam at the rate `factor`; everything is restored."""
        bench = copy.copy(self._bench)
        with self._bench.put_back():
            if with_adam:
                bench.optimizer = torch.optim.Adam([p for p in bench.model.parameters() if p.requires_grad], 1.0)
            rates = []
            for group in bench.optimizer.param_groups:  # the rate that a warm-up rises to, if there is one
                rates.append(max(float(group.get("lr", 0.0)), float(group.get("initial_lr", 0.0))) * factor)
                if "lr" in group:
                    set_rate(group, rates[-1])
            return self._go(bench, rates[0] if rates else math.nan, num_steps)

    def _go(self, bench: Bench, lr: float, num_steps: int) -> Attempt:
        watched = [p for p in bench.model.parameters() if p.requires_grad and p.dim() >= 2][:64]
        losses: list[float] = []
        ratios: list[float] = []
        try:
            start = self._mean_loss(bench)
            for step in range(num_steps):
                before = [p.detach().clone() for p in watched] if step < 3 else []
                losses.append(bench.step(self._batches[step % len(self._batches)]))
                pairs = [(old.double(), new.detach().double()) for old, new in zip(before, watched)]
                moved = [float((new - old).norm() / old.norm()) for old, new in pairs if bool(old.any())]
                ratios += [median(moved)] if moved else []
                is_late = time.perf_counter() > self._deadline + 0.2 * self._seconds
                if not math.isfinite(losses[-1]) or (is_late and len(losses) >= LEAST_STEPS):
                    break
            end = self._mean_loss(bench) if math.isfinite(losses[-1]) else math.nan
        except (RuntimeError, ArithmeticError, ValueError, IndexError):
            # with weights that are not finite, losses refuse their input: the same as a loss of NaN
            if not losses:
                raise
            end = math.nan
        peak = max((loss for loss in losses if math.isfinite(loss)), default=math.inf)
        if not math.isfinite(end):
            end, peak = math.nan, math.inf
        return Attempt(lr, start, end, peak, len(losses), median(ratios or [math.nan]))

    def _mean_loss(self, bench: Bench) -> float:
        # With gradients, because a loss may take some itself (penalties, adversaries); with the same random numbers.
        with torch.enable_grad(), torch.random.fork_rng():
            torch.manual_seed(0)
            return sum(float(bench.run(batch)[1].detach()) for batch in self._batches) / len(self._batches)


def has_learnt(one: Attempt, start: float, share: float = 0.05) -> bool:
    """Whether an attempt ended clearly below `start`."""
    return start - one.end > share * abs(start)
