"""Code shared by the integrations: making the guard, adding up the loss of a step, values for a framework's log."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from .._text import did_you_mean
from ..errors import AlreadyGuardedError
from ..step import Guard, wrap
from ..step.settings import GuardSettings

_log = logging.getLogger("fastguard")


def checked(given: Mapping[str, Any]) -> dict[str, Any]:
    """Checks keyword arguments for `fastguard.wrap` before there is an optimizer, and raises what `wrap` would."""
    known = inspect.signature(wrap).parameters.keys() - {"optimizer", "model"}
    for name in given.keys() - known:
        raise TypeError(f"`fastguard.wrap` has no argument `{name}`. {did_you_mean(name, known)}")
    GuardSettings.of(given)
    return dict(given)


def guard_of(optimizer: Any, model: torch.nn.Module | None, settings: Mapping[str, Any]) -> Guard:
    """The guard of `optimizer`; makes one with `fastguard.wrap(optimizer, model, **settings)` if it has none."""
    # Without a scaler accelerate's wrapper only forwards calls, and guarding the inner optimizer is cheaper.
    inner = optimizer.__dict__.get("optimizer") if getattr(optimizer, "scaler", None) is None else None
    try:
        wrap(optimizer if inner is None else inner, model, **settings)
    except AlreadyGuardedError:
        given = [name for name, value in settings.items() if value is not None]
        if given:
            _log.warning("the optimizer is guarded already, and keeps its guard: %s of the callback is not used", given)
    return Guard.of(optimizer)


def begin(guard: Guard, state: Mapping[str, Any] | None, checkpoint: Any) -> None:
    """Resumes `guard` from the checkpoint that training resumes from."""
    guard.history.has_ended = False
    if state is not None:
        guard.load_state_dict(dict(state))
    elif checkpoint is not None:
        _log.warning("%s contains no state of the guard: its steps and history start again", checkpoint)


def end(guard: Guard) -> None:
    """Delivers the newest record, and notes the end of the run. Sinks stay open, because training may continue."""
    guard.flush()
    guard.history.has_ended = True
    guard._ledger.note_changes()


class StepLoss:
    """Adds up the losses of micro-batches until a step is taken, on their device and without a sync."""

    def __init__(self) -> None:
        self._sum: Any = None
        self._count = 0

    def add(self, loss: Any) -> None:
        """Adds the loss of a micro-batch; None is ignored."""
        if isinstance(loss, torch.Tensor):
            loss = loss.detach().mean()  # of one element, whatever its shape
        if loss is not None:
            self._sum = loss if self._sum is None else self._sum + loss
            self._count += 1

    def take(self, *, mean: bool) -> Any:
        """The sum or mean of the losses since the last call; None if there were none."""
        total, count = self._sum, self._count
        self._sum, self._count = None, 0
        return total if total is None or not mean else total / count

    def give(self, guard: Guard | None, *, mean: bool) -> None:
        """Has `guard` observe what `take` returns, if there is anything."""
        loss = self.take(mean=mean)
        if loss is not None and guard is not None:
            guard.observe(loss=loss)


def observe_validation(guard: Guard | None, loss: Any) -> None:
    """Adds a validation loss to the newest step of `guard`, if there are any."""
    if loss is not None and guard is not None and guard.last is not None:
        guard.observe(val_loss=loss)


def figures(guards: Sequence[Guard], prefix: str = "fastguard/") -> dict[str, float]:
    """Values for a framework's log: `loss`, `grad/norm`, `grad/max` and `clip/coef` of the newest record, as
    `fastguard.sinks.flatten` names them, and the numbers of clipped and skipped steps so far.
    """
    found: dict[str, float] = {}
    for index, guard in enumerate(guards):
        key = prefix if len(guards) == 1 else f"{prefix}{index}/"
        last, history = guard.last, guard.history
        if last is None:
            continue
        is_new = history.newest_step < last.step  # the history is without the step that is held
        if last.loss is not None:
            found[key + "loss"] = last.loss
        found[key + "grad/norm"] = last.norm
        found[key + "grad/max"] = last.gradients.max_val
        found[key + "clip/coef"] = last.clip_coef
        found[key + "num_clipped"] = history.num_clipped + (is_new and last.clipped and not last.skipped)
        found[key + "num_skipped"] = history.num_skipped + (is_new and last.skipped)
    return found


def replace_method(owner: Any, name: str, call: Callable[..., Any]) -> Callable[[], None]:
    """Replaces a method of one object by `call(method, ...)`; returns a function that restores it."""
    own, method = owner.__dict__.get(name), getattr(owner, name)

    @functools.wraps(method)
    def made(*args: Any, **kwargs: Any) -> Any:
        return call(method, *args, **kwargs)

    owner.__dict__[name] = made

    def put_back() -> None:
        if owner.__dict__.get(name) is not made:
            return  # replaced again since, by something that calls ours
        if own is None:
            del owner.__dict__[name]
        else:
            owner.__dict__[name] = own

    return put_back
