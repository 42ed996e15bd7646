"""The chance level of a loss, and its value for the best constant answer."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...experiments.loss import MAX_ELEMENTS, Answer, Problem, ask_loss
from ..bench import Bench, mapped, tensors_in
from .watcher import REGRESSION, LossCall, Watcher

CLASSES = ("cross_entropy", "nll_loss")
YES_OR_NO = ("binary_cross_entropy", "binary_cross_entropy_with_logits")


def has_indices(call: LossCall) -> bool:
    """Whether the targets are numbers of classes."""
    return call.kind in CLASSES and isinstance(call.target, Tensor) and not call.target.is_floating_point()


def num_classes(call: LossCall) -> int:
    """Number of classes in the input of a loss over classes."""
    return call.input.shape[1] if call.input.dim() > 1 else call.input.shape[0] if call.input.dim() else 1


def labels(call: LossCall) -> Tensor:
    """The classes of the targets, without those to be ignored: 1-d, int64."""
    given = call.target.detach().reshape(-1).long()
    return given[given != int(call.options.get("ignore_index", -100))]


def chance(call: LossCall) -> float | None:
    """The chance level: ln C for C classes, ln 2 for yes or no; None for other losses."""
    if call.kind in CLASSES:
        return math.log(max(num_classes(call), 1))
    return math.log(2.0) if call.kind in YES_OR_NO else None


def constant_baseline(call: LossCall) -> float | None:
    """The mean loss of the best constant answer; None if it is not known.

    Equivalent to: the entropy of the shares of classes; for regression, the loss of the targets' mean (l1: median).
    """
    if call.reduction != "mean" or call.options.get("weight") is not None or not isinstance(call.target, Tensor):
        return None
    target = call.target.detach()
    if not target.numel():
        return None
    if call.kind in CLASSES:
        smoothing = float(call.options.get("label_smoothing", 0.0))
        if has_indices(call):
            found = labels(call)
            if not found.numel() or int(found.min()) < 0 or int(found.max()) >= num_classes(call):
                return None
            shares = torch.bincount(found, minlength=num_classes(call)).double() / found.numel()
        else:
            shares = target.double().transpose(1, -1).reshape(-1, num_classes(call)).mean(0)
        return _entropy((1 - smoothing) * shares + smoothing / num_classes(call))
    if call.kind in YES_OR_NO:
        if call.options.get("pos_weight") is not None or bool(((target < 0) | (target > 1)).any()):
            return None
        p = target.double().reshape(target.shape[0], -1).mean(0) if target.dim() else target.double()
        return float(-(torch.xlogy(p, p) + torch.xlogy(1 - p, 1 - p)).mean())
    if call.kind in REGRESSION and target.dim() and target.is_floating_point():
        by_sample = target.double().reshape(target.shape[0], -1)
        center = by_sample.median(0).values if call.kind == "l1_loss" else by_sample.mean(0)
        options = {k: v for k, v in call.options.items() if k in ("beta", "delta")}
        return float(getattr(F, call.kind)(center.expand_as(by_sample), by_sample, **options))
    return None


def _entropy(shares: Tensor) -> float:
    return float(-torch.xlogy(shares, shares).sum())


LEAST_SURE = 0.6
_ENDINGS = {
    **dict.fromkeys(("sigmoid", "hardsigmoid"), torch.sigmoid),
    **dict.fromkeys(("tanh", "softsign", "hardtanh"), torch.tanh),
    **dict.fromkeys(("relu", "softplus", "exp"), F.softplus),
}


def ask(bench: Bench, batch: Any, made_by: tuple[str, int | None] | None, is_causal: bool) -> Answer:
    """Asks the loss about a batch, or as many samples of it as have outputs of `MAX_ELEMENTS`.

    Args:
        bench: model and loss.
        batch: the batch.
        made_by: the activation that made the model's output, and its dimension.
        is_causal: whether no output depends on later inputs.
    """
    with bench.put_back(), torch.enable_grad():
        asked = _Asked(bench, batch)
        size = sum(t.numel() for t in asked.outputs)
        if size > MAX_ELEMENTS:
            asked = _Asked(bench, _rows(batch, max(4, asked.num_samples * MAX_ELEMENTS // size)))
        num_threads = torch.get_num_threads()
        torch.set_num_threads(1)  # of small tensors, threads cost more than they bring
        try:
            answer = ask_loss(
                asked.judge,
                asked.outputs,
                asked.targets,
                inputs=asked.inputs,
                ending=None if made_by is None or bench.form != "pair" else _ending(*made_by),
                is_causal=is_causal,
                are_targets=bench.form == "pair",
            )
            return _unsure(asked, answer) if answer.optimum and not answer.problems else answer
        except Exception as error:  # what the loss raises of outputs that no model gave says nothing of it
            return Answer(abstained=f"{type(error).__name__}: {error}")
        finally:
            torch.set_num_threads(num_threads)


def _unsure(asked: _Asked, answer: Answer) -> Answer:
    """`answer`, with a problem more if a loss of torch's cannot be given probabilities that tell the targets."""
    with Watcher() as watcher:
        asked.judge(answer.optimum, asked.targets)
    known = [(sure, call) for call in watcher.seen.losses if (sure := _sureness(call)) is not None]
    if known:
        sure, call = max(known, key=lambda one: one[0])
        if sure < LEAST_SURE:
            problem = Problem(
                "target",
                f"Where the loss is lowest, {call.kind} still gives the targets a probability of only {sure:.2f}.",
                "Give it logits without softmax, sigmoid, tanh or normalisation, at their own scale; smooth labels by "
                "0.1 or less.",
                {"probability": sure, "threshold": LEAST_SURE},
                0.9,
            )
            return dataclasses.replace(answer, problems=(problem,))
    return answer


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
        self._given: list[Any] = []
        self._fake: list[Any] | None = None
        if bench.form == "pair":
            inputs, targets = bench.parts(batch)
            with torch.no_grad():
                self._calls = [bench.output(mapped(torch.clone, inputs))]
        else:
            inputs, targets = self._given, batch
            self._run(batch)
        self.inputs, self.targets = tensors_in(inputs), tensors_in(targets)
        self.outputs = [t for t in tensors_in(self._calls) if t.is_floating_point()]
        self.num_samples = self.outputs[0].shape[0] if self.outputs and self.outputs[0].dim() else 0

    def _run(self, batch: Any) -> Any:
        """The loss of a function that calls the model itself; its forward pass is noted, or not done."""
        model: nn.Module = self._bench.model
        forward, calls = model.forward, iter(self._fake or ())

        def instead(*args: Any, **kwargs: Any) -> Any:
            if self._fake is None:
                self._given += [*args, *kwargs.values()]
                self._calls.append(forward(*args, **kwargs))
                return self._calls[-1]
            return next(calls)

        was_own = "forward" in vars(model)
        model.forward = instead
        try:
            return self._bench.run(batch)[1]
        finally:
            if was_own:
                model.forward = forward
            else:
                del model.forward

    def judge(self, outputs: Sequence[Tensor], targets: Sequence[Tensor]) -> Tensor:
        """The loss of other outputs and targets, of the same shapes: what the optimizer minimises."""
        loss = self._judged(outputs, targets)
        return -loss if any(group.get("maximize") for group in self._bench.optimizer.param_groups) else loss

    def _judged(self, outputs: Sequence[Tensor], targets: Sequence[Tensor]) -> Tensor:
        others = iter(outputs)
        made = [mapped(lambda t: next(others) if t.is_floating_point() else t, call) for call in self._calls]
        new = iter(targets)
        if self._bench.form == "pair":
            return self._bench.judge(made[0], mapped(lambda _: next(new).clone(), self._bench.parts(self._batch)[1]))
        self._fake = made
        return self._run(mapped(lambda _: next(new), self._batch))


def _rows(batch: Any, most: int) -> Any:
    sizes = [t.shape[0] for t in tensors_in(batch) if t.dim()]
    return mapped(lambda t: t[:most] if t.dim() and t.shape[0] == sizes[0] else t, batch)


def _ending(kind: str, dim: int | None) -> Any:
    if kind in ("softmax", "log_softmax") and dim is not None:
        return lambda z: getattr(F, kind)(z, dim=dim)
    return _ENDINGS.get(kind)
