"""Hugging Face Transformers: a callback for its `Trainer`, and for those derived from it, as TRL's are."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
from collections.abc import Callable
from typing import Any

import torch

from ..errors import missing_package

try:
    from transformers import Trainer, TrainerCallback
except ImportError as error:
    raise missing_package("fastguard.integrations.transformers", "transformers", error) from error

from ..clip import GlobalNorm
from ..step import Guard
from .common import StepLoss, begin, checked, end, figures, guard_of, observe_validation, replace_method

_log = logging.getLogger("fastguard")
STATE = "fastguard.pt"  # in a checkpoint's folder


class FastguardCallback(TrainerCallback):
    """Guards what a `transformers.Trainer` trains: `Trainer(..., callbacks=[FastguardCallback()])`.

    When training begins, the Trainer's optimizer is wrapped, unless it has a guard. The guard then clips instead of the
    Trainer: `max_grad_norm` of the arguments is 0 until training ends. It gets the loss of each optimizer step, and
    `eval_loss`. Its figures go into each training log, and so to every reporter, as `fastguard/grad/norm` and others;
    `grad_norm` is its norm. Checkpoints include its state, and a resumed training continues from it.

    Args:
        max_norm: as of `fastguard.wrap`. None, and no `clip`: the Trainer's `max_grad_norm`.
        **settings: other arguments of `fastguard.wrap`.

    Attributes:
        guard: the guard; None until training begins.

    Raises:
        TypeError: from `train`: the optimizer cannot be guarded, such as a sharded one.

    Cost: about 60 us a step, to add up and observe losses; 80 us a log. No sync. It saves the pass over the gradients
    that the Trainer makes at each step for `grad_norm`.
    """

    def __init__(self, max_norm: float | None = None, **settings: Any) -> None:
        self._settings = checked({"max_norm": max_norm, **settings})
        self._loss = StepLoss()
        self._changes = contextlib.ExitStack()
        self._is_training = self._has_told = False
        self.guard: Guard | None = None

    def on_train_begin(
        self, args: Any, state: Any, control: Any, *, model: Any = None, optimizer: Any = None, **others: Any
    ) -> None:
        """Guards the optimizer."""
        self._changes.close()  # of a training that raised
        trainer, checkpoint = _training()
        self.guard = guard = guard_of(optimizer, model, self._settings)
        self._take_over(args, state, guard)
        saved = os.path.join(checkpoint or "", STATE)
        has_state = checkpoint is not None and os.path.isfile(saved)
        begin(guard, torch.load(saved, weights_only=True) if has_state else None, checkpoint)
        self._loss.take(mean=False)
        for name, call in (
            ("training_step", self._training_step),
            ("log", self._logged),
            ("_get_grad_norm", lambda method, *args, **kwargs: None),
            ("_save_optimizer_and_scheduler", functools.partial(self._saved, args)),
        ):
            if hasattr(trainer, name):
                self._changes.callback(replace_method(trainer, name, call))
        self._is_training = True

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Gives the guard the loss of the step just taken."""
        self._loss.give(self.guard, mean=False)  # each is divided by their number already

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **others: Any) -> None:
        """Gives the guard `eval_loss`."""
        if self._is_training:
            observe_validation(self.guard, (metrics or {}).get("eval_loss"))

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Leaves the Trainer as it was. The optimizer stays guarded."""
        self._is_training = False
        self._changes.close()
        if self.guard is not None:
            end(self.guard)

    def _take_over(self, args: Any, state: Any, guard: Guard) -> None:
        limit = args.max_grad_norm
        if not limit:
            return
        if guard.clip is None:
            guard.clip = GlobalNorm(limit)
        if not self._has_told and state.is_world_process_zero:
            self._has_told = True
            _log.info("max_grad_norm=%g: the guard clips, by %r, instead of the Trainer", limit, guard.clip)
        args.max_grad_norm = 0.0
        self._changes.callback(setattr, args, "max_grad_norm", limit)

    def _training_step(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        loss = method(*args, **kwargs)
        self._loss.add(loss)
        return loss

    def _logged(self, method: Callable[..., Any], logs: dict[str, float], *args: Any, **kwargs: Any) -> Any:
        if "loss" in logs and self.guard is not None and self.guard.last is not None:
            logs.setdefault("grad_norm", self.guard.last.norm)
            logs.update(figures([self.guard]))
        return method(logs, *args, **kwargs)

    def _saved(self, settings: Any, method: Callable[..., Any], output_dir: str) -> None:
        method(output_dir)
        if settings.should_save and self.guard is not None:
            torch.save(self.guard.state_dict(), os.path.join(output_dir, STATE))


def _training() -> tuple[Trainer, str | None]:
    """The Trainer that calls (events do not include it), and the checkpoint that it resumes from."""
    frame = sys._getframe(1)
    while frame is not None:
        known = frame.f_locals
        if isinstance(known.get("self"), Trainer):
            return known["self"], known.get("resume_from_checkpoint")
        frame = frame.f_back  # type: ignore[assignment]
    raise RuntimeError("`FastguardCallback` must be called by a transformers.Trainer. Elsewhere use fastguard.wrap.")
