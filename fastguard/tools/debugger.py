"""TrainingDebugger: the kernels, history and rules of the guard, for loops that you feed in step by step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from .. import kernels
from ..diagnosis import unexplained
from ..records import GradientStats, StepStats, TrainingHistory
from ..records.failures import Failures
from ..records.series import NUM_NEWEST
from ..report import Report, build_report
from ..step.scalars import scalar

MIN_STEPS = 5
MAX_NORM = 1000.0
_ORDER = ("no-evidence", "healthy", "warning", "critical")


class TrainingDebugger:
    """Diagnoses a training loop that cannot be guarded, from torch, NumPy or other arrays, step by step.

    Args:
        window: number of steps that the history keeps in full.

    Attributes:
        history: the `TrainingHistory` of all steps.
        monitor: the `ActivationMonitor`; None until activations are passed.
        last_gradients: `GradientStats` of the newest step; None before the first.

    >>> import torch
    >>> debugger = TrainingDebugger()
    >>> for step in range(10):
    ...     debugger.step(step, loss=1 / (step + 1), gradients=[torch.ones(3)], learning_rate=1e-3)
    >>> debugger.quick_check(), debugger.report()["status"]
    (True, 'healthy')
    """

    def __init__(self, window: int = 512) -> None:
        self.history = TrainingHistory(window)
        self.monitor: Any = None
        self.last_gradients: GradientStats | None = None
        self._failures = Failures()

    def step(
        self,
        step: int,
        loss: Any,
        gradients: Sequence[Any] | Mapping[str, Any],
        learning_rate: float,
        activations: Mapping[str, Any] | None = None,
        val_loss: Any = None,
    ) -> None:
        """Takes one step.

        Args:
            step: its number.
            loss, val_loss: a float, or a tensor or array of one element.
            gradients: tensors or arrays of any floating dtype and shape; a dict gives them names. None entries, for
                parameters without a gradient, are skipped.
            learning_rate: the learning rate of the step.
            activations: tensors or arrays by layer name.

        Raises:
            UnsupportedTensorError: a gradient or activation is not floating point.
            TypeError: `gradients` is neither a sequence nor a dict.
            ValueError: `loss` or `val_loss` is not a number.

        Cost: one read of every gradient and activation; a sync if they are on an accelerator.
        """
        names, given = _named(gradients)
        tensors = kernels.tensor_stats([kernels.tensors.as_tensor(gradient) for gradient in given], names=names)
        self.last_gradients = tensors.total()
        loss, val_loss = scalar("loss", loss), None if val_loss is None else scalar("val_loss", val_loss)
        lr = float(learning_rate)
        self.history.add(StepStats(step=int(step), tensors=tensors, loss=loss, val_loss=val_loss, lr=lr))
        if activations and self.monitor is None:
            from ..observers.activations import ActivationMonitor

            self.monitor = ActivationMonitor()
        for name, activation in (activations or {}).items():
            self.monitor.record(name, activation)

    def report(self) -> dict[str, Any]:
        """The state of the run, as a dict.

        Returns:
            `status`: "healthy", "warning" or "critical"; "no-evidence" before anything was given.
            `issues`: sentences that begin with the name of the check (`LOSS_EXPLOSION`, …), rule or cause.
            `recommendations`: what to do, each once.
            `gradient_healthy`: whether the newest step's gradients are (`GradientStats.is_healthy`).
            `activation_issues`: problems by layer.

        Cost: about 1 ms.
        """
        checked = self.history.diagnose()
        healthy, messages = (True, []) if self.last_gradients is None else self.last_gradients.is_healthy()
        report = self.full_report()
        found = [one for one in report.findings if one.severity != "info" and one.rule != "failed-parts"]
        told = [*report.causes, *unexplained(found, list(report.causes))]
        activation_issues = {} if self.monitor is None else self.monitor.diagnose()
        statuses = [checked["status"], *(finding.severity for finding in found)]
        if self.last_gradients is not None and (self.last_gradients.num_nans or self.last_gradients.num_infs):
            statuses.append("critical")
        elif messages or activation_issues:
            statuses.append("warning")
        elif self.last_gradients is not None or self.monitor is not None:
            statuses.append("healthy")
        recommendations = [*checked["recommendations"], *(finding.recommendation for finding in told)]
        return {
            "status": max(statuses, key=_ORDER.index),
            "issues": [*checked["issues"], *messages, *(f"{one.rule}: {one.summary}" for one in told)],
            "recommendations": list(dict.fromkeys(recommendations)),
            "gradient_healthy": healthy,
            "activation_issues": activation_issues,
        }

    def full_report(self) -> Report:
        """The same `Report` as `Guard.report()` gives: findings with evidence, causes, numbers. Cost: about 1 ms."""
        return build_report(self.history, failures=self._failures)

    def quick_check(self) -> bool:
        """Whether to go on: no NaN or Inf among the last 5 losses, none in the gradients, and their norm at most 1000.

        True before 5 steps. Cost: 2 us.
        """
        if self.history.num_steps < MIN_STEPS or self.last_gradients is None:
            return True
        newest = [entry.loss for entry in list(self.history.recent)[-NUM_NEWEST:]]
        if any(loss is not None and not math.isfinite(loss) for loss in newest):
            return False
        return self.last_gradients.norm <= MAX_NORM  # which a norm of NaN or Inf is not


def _named(gradients: Sequence[Any] | Mapping[str, Any]) -> tuple[list[str], list[Any]]:
    if isinstance(gradients, Mapping):
        pairs = [(str(name), gradient) for name, gradient in gradients.items()]
    elif isinstance(gradients, (list, tuple)):
        pairs = [(f"tensor{i}", gradient) for i, gradient in enumerate(gradients)]
    else:
        raise TypeError(f"`gradients` must be a list of tensors or arrays, or a dict, got {type(gradients).__name__}")
    kept = [(name, gradient) for name, gradient in pairs if gradient is not None]
    return [name for name, _ in kept], [gradient for _, gradient in kept]
