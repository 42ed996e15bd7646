"""What costs next to nothing to see beside the gradients, now and then: batches, cosines, what is left or changed."""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..stats import values
from .batches import BatchWatch
from .coverage import CoverageWatch
from .left_gradients import LeftGradients
from .ranks import LocalGradients, Parity
from .run import Run, held_weakly
from .sketches import GradientSketch, ParameterSketch

_NUM_FIRST = 20  # steps at all of which gradients are compared
_EARLY, _LATE, _FROM = 10, 50, 1000  # in how many steps they then are once; and from which step on
_WHAT = "sampled evidence"
_LEFT_OUT = "What it saw of that step was left out."


def _span(step: int) -> int:
    return _EARLY if step < _FROM else _LATE


def _start(step: int) -> int:
    """The first of two steps in a row within the span of `step`: at another place in each, so that nothing hides that
    has a period."""
    span = _span(step)
    number = step // span
    return number * span + number * 7 % (span - 1)


def is_pair(step: int) -> tuple[bool, bool]:
    """Whether gradients are sketched at `step`, and whether they are compared with those of the step before.

    At the first twenty steps, then at two in a row of every ten, and from the thousandth on of every fifty.

    >>> [step for step in range(15, 50) if is_pair(step)[1]]
    [15, 16, 17, 18, 19, 20, 26, 34, 42]
    """
    if step <= _NUM_FIRST:
        return True, step > 0
    start = _start(step)
    return step in (start, start + 1), step == start + 1


def is_compared(step: int) -> bool:
    """Whether the gradient of `step` is compared with that of the step before: at the first twenty, then one in fifty.

    A record with a cosine takes the long way into the log.

    >>> [step for step in range(18, 120) if is_compared(step)]
    [18, 19, 20, 59, 108]
    """
    if step <= _NUM_FIRST:
        return step > 0
    return is_pair(step)[1] and step >= _LATE and (step >= _FROM or step // _EARLY % 5 == 0)


def is_sketched(step: int) -> bool:
    """Whether parameters are sketched as `step` has left them: at five of the first twenty, then at each other pair."""
    if step < _NUM_FIRST:
        return step % 4 == 3
    return step // _span(step) % 2 == 0 and step == _start(step)


def _next_after(step: int) -> int:
    """The next step at which something is sketched, compared, or to be compared when it begins."""
    if step < _NUM_FIRST:
        return step + 1
    start, span = _start(step), _span(step)
    if step <= start and _has_some(step):
        return start + (step == start)
    step = (step // span + 1) * span
    while not _has_some(step):
        step += _span(step)
    return _start(step)


def _has_some(step: int) -> bool:
    """Whether the pair in the span of `step` is looked at: of every ten steps six in ten are."""
    start = _start(step)
    return is_sketched(start) or is_compared(start + 1)


def checked(state: Any) -> dict[str, list[int]]:
    """What `EvidenceSampling.state_dict` gave; a MisfitError for anything else."""
    found = {}
    for name, lengths in (("batches", (0, 5)), ("left_gradients", (4, 5)), ("parameters", (2,)), ("may_wait", (1,))):
        found[name] = values.entry(state, name, lambda plain: values.each(values.count, plain))
        if len(found[name]) not in lengths:
            raise values.MisfitError(f"must have {lengths[-1]} numbers, got {len(found[name])}", (name,))
    return found


class EvidenceSampling:
    """Beside the steps of one guard. Where something raises, it is counted, and training goes on.

    What would have to be waited for is not read: on a GPU there are left gradients, and no other evidence.

    Args:
        run: of the guard; `run.wakes_at` says at which step `begin_step` is to be called, `run.has_more_to_do` that
            `end_step` is.
        parity: compares replicas.
        local: compares the ranks' own gradients.
    """

    def __init__(
        self,
        run: Run,
        model: torch.nn.Module | None,
        optimizers: Sequence[torch.optim.Optimizer],
        parity: Parity | None = None,
        local: LocalGradients | None = None,
    ) -> None:
        self._run, self._parity, self._local = run, parity, local
        self._due = -1
        self._left = LeftGradients(optimizers)
        self._gradients = GradientSketch()
        self._parameters = ParameterSketch(optimizers)
        self._coverage = CoverageWatch(run)
        self._batches: BatchWatch | None = None
        if model is not None and not isinstance(model, torch.jit.ScriptModule):  # which takes no hooks
            device = next((p.device.type for o in optimizers for g in o.param_groups for p in g["params"]), "cpu")
            with run.failures.kept("batch sampler", "No forward pass is looked at."):
                self._batches = BatchWatch(
                    model, held_weakly(self._place), held_weakly(self._awake), run.failures, device
                )
                weakref.finalize(self, self._batches.close).atexit = False
        for watch in (self._left, self._coverage):
            weakref.finalize(self, watch.close).atexit = False  # no hook outlives the guard

    def _place(self) -> int | None:
        """Number of the step under way; None where nothing may be read."""
        return self._run.step if self._run.may_wait else None

    def _awake(self) -> None:
        self._run.has_more_to_do = True

    def begin_step(self, step: int) -> None:
        """Ahead of a step at which something is to be seen, before anything is judged."""
        run = self._run
        self._due = step
        run.wakes_at, run.has_more_to_do = step + 1, True  # should the step raise, the next one wakes this again
        if run.may_wait and self._parameters.awaits:
            with run.failures.kept(_WHAT, _LEFT_OUT), torch.no_grad():
                self._parameters.compare(step, run.known_names)
        with run.failures.kept(_WHAT, _LEFT_OUT), torch.no_grad():
            self._coverage.begin_step(step)
        if self._parity is not None:
            with run.failures.kept("comparison of replicas", _LEFT_OUT), torch.no_grad():
                self._parity.compare(step, self._params(), run.known_names or run.names_now())
        if self._local is not None:
            self._local.begin_step(step)

    def end_step(self, *, is_whole: bool) -> bool:
        """A step has been taken; with `is_whole` by all optimizers. Whether to tell this of the next one too."""
        run = self._run
        with run.failures.kept(_WHAT, _LEFT_OUT), torch.no_grad():
            self._left.end_step(may_read=run.may_wait)
            if not is_whole:
                return True
            due, self._due = self._due, -1
            step = run.step - 1
            if due == step:
                self._coverage.end_step(step)
                if run.may_wait:
                    self._look(step)
                parity = math.inf if self._parity is None else self._parity.next_after(step)
                local = math.inf if self._local is None else self._local.next_after(step)
                run.wakes_at = int(min(_next_after(step), parity, local))
            self.attach()
        return not self._left.is_over

    def _look(self, step: int) -> None:
        cosine = None
        if is_compared(step) or is_compared(step + 1):
            cosine = self._gradients.cosine(step, self._params, is_wanted=is_compared(step))
        ring = self._run.ring
        if cosine is not None and (ring.step != step or ring.is_finite):
            ring.attach(step, grad_cosine=cosine)
        if is_sketched(step):
            self._parameters.take(step, self._params())

    def _params(self) -> list[torch.Tensor]:
        members = [member for member in self._run.members if member.is_alive]
        return [p for member in members for group in member.optimizer.param_groups for p in group["params"]]

    def attach(self) -> None:
        """Hands samples of batches to the record of the step just taken, or, if that is delivered, of the next."""
        run, ring = self._run, self._run.ring
        if self._batches is None or not self._batches.found or not run.step:
            return
        step = run.step - 1
        if ring.newest >= 0 and ring.step >= step:
            step = ring.step + (not ring.num_open)
        known = ring.samples.get(step, {}).get("batches", ())
        ring.attach(step, batches=known + self._batches.take())

    def facts(self) -> dict[str, Any]:
        """What was found, as facts about the model."""
        batches, first = self._batches, {}
        if batches is not None:
            first = {**batches.first.facts, **batches.loss.facts}
            if batches.norms.found:
                first["norm_statistics"] = dict(batches.norms.found)
        coverage = self._coverage.facts(self._run.step, self._params())
        differ = {} if self._parity is None else self._parity.facts()
        own = {} if self._local is None else self._local.facts()
        return {**first, **self._left.facts(), **self._parameters.facts(), **coverage, **differ, **own}

    def state_dict(self) -> dict[str, list[int]]:
        """Where a resumed run goes on; what was found is in the history."""
        batches = [] if self._batches is None else self._batches.state()
        return {
            "batches": batches,
            "left_gradients": self._left.state(),
            "parameters": self._parameters.state(),
            "may_wait": [int(self._run.may_wait)],  # until the first step tells
        }

    def load_state_dict(self, state: Mapping[str, Sequence[int]], overwritten: Sequence[str]) -> None:
        """Goes on from `state`, which `checked` gave; `overwritten` are the names that the notes of the model have."""
        self._left.load(state["left_gradients"])
        self._parameters.load(state["parameters"], overwritten)
        if self._batches is not None and state["batches"]:
            self._batches.load(state["batches"])
        self._run.may_wait = bool(state["may_wait"][0])
        self.forget()

    def forget(self) -> None:
        """Steps are taken that nobody sees, or the run goes on from another place."""
        for part in (self._gradients, self._parameters, self._coverage):
            part.forget()
        self._run.wakes_at = 0

    def pause(self, is_paused: bool) -> bool:
        """Whether it was paused before; passes through the model are not looked at while it is."""
        if self._batches is None:
            return False
        before, self._batches.is_paused = self._batches.is_paused, is_paused
        return before

    def close(self) -> None:
        """Takes all hooks away."""
        for part in (self._left, self._parameters, self._coverage):
            part.close()
        for more in (self._batches, self._local):
            if more is not None:
                more.close()
