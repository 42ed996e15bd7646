"""Lightning: a callback for its `Trainer`, whose figures go to the trainer's loggers."""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Callable
from typing import Any

from ..errors import missing_package

try:
    from lightning.pytorch import Callback
    from lightning.pytorch.utilities.model_helpers import is_overridden
except ImportError as error:  # the same under its older name
    try:
        from pytorch_lightning import Callback
        from pytorch_lightning.utilities.model_helpers import is_overridden
    except ImportError:
        raise missing_package("fastguard.integrations.lightning", "lightning", error) from error

from ..clip import GlobalNorm, Value
from ..step import Guard
from .common import StepLoss, begin, checked, end, figures, guard_of, observe_validation

_log = logging.getLogger("fastguard")


class FastguardCallback(Callback):
    """Guards the optimizers of a LightningModule: `Trainer(callbacks=[FastguardCallback()])`.

    When training begins, each optimizer without a guard is wrapped, under automatic and manual optimization. The guard
    clips instead of the trainer's `gradient_clip_val`, and gets the loss of each optimizer step: the mean over the
    accumulated batches, or under manual optimization the sum given to `manual_backward` since the last step. Every
    `log_every_n_steps`, figures go to the trainer's loggers and `callback_metrics`, as `fastguard/grad/norm`, or
    `fastguard/0/grad/norm` with several optimizers. Checkpoints include the guards' state, and `fit(ckpt_path=...)` or
    another `fit` of the same trainer resumes from it.

    Args:
        max_norm: as of `fastguard.wrap`. None, and no `clip`: the trainer's `gradient_clip_val`.
        monitor: the name under which the validation loss is logged.
        **settings: other arguments of `fastguard.wrap`; each optimizer gets a copy of `clip`. Call `fastguard.wrap` in
            `configure_optimizers` for settings that differ between optimizers, and for sinks of several.

    Attributes:
        guards: one per optimizer; empty until training begins.

    Raises:
        ValueError: from `fit`: a limit is given here and as `gradient_clip_val`; sinks for several optimizers.

    Cost: about 60 us a batch on top of the guards'; 80 us a guard and a `log_dict` when values are logged.
    """

    def __init__(self, max_norm: float | None = None, *, monitor: str = "val_loss", **settings: Any) -> None:
        self._settings = checked({"max_norm": max_norm, **settings})
        self._monitor = monitor
        self._loss = StepLoss()
        self._state: list[dict[str, Any]] | None = None
        self._give_back: Callable[[], None] | None = None
        self._steps: list[int] = []  # of each guard, when it was last looked at
        self._under_way: tuple[Guard, Any] | None = None  # a manual step, and its loss
        self.guards: list[Guard] = []

    @property
    def guard(self) -> Guard | None:
        """The guard of the first optimizer; None until training begins."""
        return self.guards[0] if self.guards else None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Guards the optimizers."""
        self._leave(trainer)
        optimizers = trainer.optimizers
        if len(optimizers) > 1 and self._settings.get("sinks"):
            raise ValueError(
                f"`sinks` must be given to each of {len(optimizers)} optimizers by itself: use "
                "fastguard.wrap(optimizer, self, sinks=...) in configure_optimizers."
            )
        clipped_elsewhere = self._check_clipping(trainer, pl_module)
        before = self.guards
        self.guards = [guard_of(one, pl_module, copy.copy(self._settings)) for one in optimizers]
        if not clipped_elsewhere:
            self._take_over(trainer)
        state, self._state = self._state, None
        if state is None and trainer.global_step and trainer.ckpt_path is None and len(before) == len(self.guards):
            state = [guard.state_dict() for guard in before]  # `fit` continues with new optimizers
        if state is not None and len(state) != len(self.guards):
            raise ValueError(
                f"the checkpoint must hold the state of {len(self.guards)} guards, one per optimizer, got {len(state)}"
            )
        for index, guard in enumerate(self.guards):
            begin(guard, None if state is None else state[index], trainer.ckpt_path)
        self._steps = [guard._run.step for guard in self.guards]
        self._loss.take(mean=True)

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        """Under manual optimization, adds a loss."""
        if pl_module.automatic_optimization or not self.guards:
            return
        self._settle()
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        self._loss.add(loss if scaler is None else loss.detach() / scaler.scale(loss.detach().new_ones(())))

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Under manual optimization, notes which optimizer is about to step."""
        if pl_module.automatic_optimization or not self.guards:
            return
        before = self._settle()
        loss = self._loss.take(mean=False)
        self._under_way = Guard.of(optimizer), before if loss is None else loss  # of two that step one after the other

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Gives the guards the loss of a step, and the loggers the guards' values."""
        if pl_module.automatic_optimization:
            loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
            self._loss.add(None if loss is None else loss * trainer.accumulate_grad_batches)
        else:
            self._settle()
        steps = [guard._run.step for guard in self.guards]
        if steps == self._steps:
            return
        self._steps = steps
        if pl_module.automatic_optimization:
            self._loss.give(self.guards[0], mean=True)
        if trainer.loggers and trainer._logger_connector.should_update_logs:
            pl_module.log_dict(figures(self.guards), on_step=True, on_epoch=False)

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Gives the guards the validation loss."""
        if trainer.sanity_checking or trainer.state.fn != "fit":
            return  # `Trainer.validate` belongs to no step
        for guard in self.guards:
            observe_validation(guard, trainer.callback_metrics.get(self._monitor))

    def state_dict(self) -> dict[str, Any]:
        """The states of the guards."""
        return {"guards": [guard.state_dict() for guard in self.guards]} if self.guards else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keeps the states for the guards, which are made when training begins."""
        self._state = state_dict["guards"]

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Leaves the trainer as it was. The optimizers stay guarded."""
        if self._give_back is not None or stage == "fit":
            self._leave(trainer)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """As `teardown`."""
        self._leave(trainer)

    def _leave(self, trainer: Any) -> None:
        self._under_way = None
        if self._give_back is not None:
            self._give_back()
            self._give_back = None
        for guard in self.guards:
            end(guard)

    def _check_clipping(self, trainer: Any, pl_module: Any) -> bool:
        """Whether the module clips by itself, which gives a warning."""
        limit, given = trainer.gradient_clip_val, self._settings
        if is_overridden("configure_gradient_clipping", pl_module):
            _log.warning(
                "%s.configure_gradient_clipping clips before the guard, which then measures clipped gradients. Remove "
                "it, and let the guard clip.",
                type(pl_module).__name__,
            )
            return True
        if limit and (given.get("max_norm") is not None or given.get("clip") is not None):
            raise ValueError(
                f"gradients must be clipped once, got Trainer(gradient_clip_val={limit}) and a limit for "
                "FastguardCallback. Remove one of them: the guard clips in both cases."
            )
        return False

    def _take_over(self, trainer: Any) -> None:
        limit = trainer.gradient_clip_val
        if not limit:
            return
        policy = Value if trainer.gradient_clip_algorithm == "value" else GlobalNorm
        for guard in self.guards:
            if guard.clip is None:
                guard.clip = policy(limit)
        if trainer.is_global_zero:
            _log.info("gradient_clip_val=%g: the guard clips instead of Lightning", limit)
        trainer.gradient_clip_val = None
        self._give_back = functools.partial(setattr, trainer, "gradient_clip_val", limit)

    def _settle(self) -> Any:
        """Ends a manual step that was under way: gives its guard the loss, and returns it."""
        loss = None
        if self._under_way is not None:
            (guard, loss), self._under_way = self._under_way, None
            if loss is not None:
                guard.observe(loss=loss)
        return loss
