"""An exception at any line of the guard's, as Ctrl-C makes one: what a step has taken is there again, whatever it had
done is undone, and the next step is as ever.

Real interrupts come at calls and at loops only; a trace function raises at every line that a step runs.
"""

import inspect
import math
import sys
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from foreign_optimizers import TensorInGroup, WantsGradients, everything
from guard_helpers import gradients, guarded_model, is_identical, loss_at, poison

import fastguard

_GUARD = str(Path(inspect.getfile(fastguard.Guard)).parent)
_NAMES = ("hooks", "skip", "backup", "judge", "run", "wrappers", "../recovery/snapshots")
_FILES = {str(Path(_GUARD, f"{name}.py").resolve()) for name in _NAMES}


class _Interrupt(KeyboardInterrupt):
    """Ours."""


@contextmanager
def _interrupted(at):
    """Raises at line number `at` of those that run; gives the lines."""
    lines = []
    if at == _NEVER:
        yield lines
        return

    def trace(frame, event, argument):
        if frame.f_code.co_filename not in _FILES:
            return None
        if event == "line":
            lines.append(f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}")
            if len(lines) == at + 1:
                raise _Interrupt(lines[-1])
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield lines
    finally:
        sys.settrace(before)


class Way(NamedTuple):
    """One way that a step goes."""

    id: str
    make: Callable[[Any], torch.optim.Optimizer]
    closure: bool = False
    bad: bool = False
    max_norm: float | None = None
    scaler: bool = False
    clip_through: str = "scale"


def _sgd(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def _fused(params):
    return torch.optim.AdamW(params, lr=0.1, fused=True)


WAYS = [
    Way("short", _sgd),
    Way("short-skipped", _sgd, bad=True),
    Way("short-clipped", _sgd, max_norm=0.05),
    Way("fused-divides", _fused, max_norm=0.05, clip_through="grad_scale"),
    Way("closure", _sgd, closure=True),
    Way("closure-clipped", _sgd, closure=True, max_norm=0.05),
    Way("closure-skipped", _sgd, closure=True, bad=True),
    Way("foreign-skipped", WantsGradients, bad=True),
    Way("foreign-closure-skipped", WantsGradients, closure=True, bad=True),
    Way("foreign-group-closure-skipped", TensorInGroup, closure=True, bad=True),
    Way("scaler", _sgd, scaler=True),
    Way("scaler-skipped", _sgd, scaler=True, bad=True),
    Way("scaler-fused-skipped", _fused, scaler=True, bad=True),
]
_WARM_UP = 4
_NEVER, _END = -1, 1 << 30


def _prepared(way):
    # An exception that is put between the end of a `with` block and its `__exit__`, where no signal handler ever runs,
    # leaves the no_grad of an earlier case on.
    torch.set_grad_enabled(True)
    model, guarded = guarded_model(way.make, max_norm=way.max_norm, clip_through=way.clip_through)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, enabled=way.scaler)
    for step in range(_WARM_UP):
        _step(way, model, guarded, scaler, step)
    return model, guarded, scaler


def _step(way, model, guarded, scaler, step, bad=False, at=_NEVER, given=None):
    """One step, interrupted when it comes to line number `at`. Gives its lines, and puts the gradients into `given`."""

    def evaluate():
        guarded.zero_grad()
        loss = loss_at(model, step)
        scaler.scale(loss).backward()
        if bad:
            poison(model, math.inf)
        if given is not None:
            given[:] = gradients(model)
        return loss.detach()

    if not way.closure:
        evaluate()
    with _interrupted(at) as lines:
        if way.closure:
            guarded.step(evaluate)
        else:
            scaler.step(guarded)
    if way.scaler:
        scaler.update()
    return lines


def _num_lines(way):
    return len(_step(way, *_prepared(way), _WARM_UP, way.bad, at=_END))


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.id)
def test_interrupted_at_every_line(way):
    """But for the first, where nothing of ours is at work. Where many tensors are copied, the same lines run for each:
    at every seventh there."""
    number = _num_lines(way)
    _check(way, range(1, number, 1 if number < 300 else 7))


@pytest.mark.thinned(n=4)
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.id)
def test_interrupted_at_some_lines(way):
    number = _num_lines(way)
    _check(way, range(3, number, max(13, number // 5)))


def _outcome(way, first):
    model, guarded, scaler = _prepared(way)
    for step, bad in first:
        _step(way, model, guarded, scaler, step, bad)
    return everything(model, guarded)


def _check(way, places):
    this, following = (_WARM_UP, way.bad), (_WARM_UP + 1, False)
    outcomes = [
        (_outcome(way, [this]), _outcome(way, [this, following])),
        (_outcome(way, []), _outcome(way, [following])),
    ]
    wrong = [problem for place in places if (problem := _problem(way, place, outcomes))]
    assert not wrong, "\n".join([f"{len(wrong)} places:", *wrong])


def _problem(way, place, outcomes):
    """What is wrong after an interrupt at the line number `place`, and after the step that follows it."""
    model, guarded, scaler = _prepared(way)
    given = []
    try:
        _step(way, model, guarded, scaler, _WARM_UP, way.bad, at=place, given=given)
        return ""  # it has fewer lines than the first of them
    except _Interrupt as interrupt:
        at = f"{place} ({interrupt})"
    if any(p.grad is None for p in model.parameters()):
        return f"{at}: a gradient is missing"
    if given and not all(now is then for now, then in zip(gradients(model), given)):
        return f"{at}: the gradients are others"
    now = everything(model, guarded)
    for name in ("grad_scale", "found_inf"):  # gone with the next step, at the latest
        now["optimizer"].pop(name, None)
    after = next((after for then, after in outcomes if is_identical(now, then)), None)
    if after is None:
        return f"{at}: neither taken nor as it was"
    guarded.zero_grad()
    if way.scaler:
        scaler.update(4.0)
    _step(way, model, guarded, scaler, *(_WARM_UP + 1, False))
    if not is_identical(everything(model, guarded), after):
        return f"{at}: the next step goes another way"
    if {"grad_scale", "found_inf"} & vars(guarded).keys():
        return f"{at}: attributes stay"
    guarded.guard.flush()
    steps = guarded.guard.history.step
    if steps != list(range(len(steps))) or len(steps) not in (_WARM_UP + 1, _WARM_UP + 2):
        return f"{at}: records {steps}"
    return ""
