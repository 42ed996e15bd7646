"""Clipping, fastguard's against torch's, each proved right against float64 before it is timed."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

import fastguard

from .cases import Case, Subject
from .harness import NUM_SETS, Settings, WrongResultError, compared, take_turns

NO_CLIPPING = 1e9  # a max_norm that is never reached
FUNCTIONS: dict[str, Callable[..., torch.Tensor]] = {
    "ours": fastguard.clip_grad_norm_,
    "theirs": torch.nn.utils.clip_grad_norm_,
}
_FADE = 0.99
_FADED = 1e-4  # of the norm: below that the values are filled again
_FLOAT32_NORM_MAX = 50_000_000


def tolerance(name: str, subject: Subject) -> float:
    """What a norm may be off by. fastguard promises 1e-6, here rounded to the gradients' dtype as torch does.

    torch adds the squares of one tensor in a few float32 lanes, which lose more the more they hold: it is off by 3e-3
    at 38M elements, by 1e-2 at 100M. From 50M on its error is reported and not judged.
    """
    epsilon = torch.finfo(subject.case.dtype).eps
    if name == "ours":
        return 1e-6 + epsilon
    largest = max(g.numel() for g in subject.gradients)
    return 7e-3 + 4 * epsilon if largest < _FLOAT32_NORM_MAX else math.inf


def require_close(what: str, found: float, true: float, allowed: float) -> float:
    """The relative error of `found`; raises WrongResultError where it is above `allowed`."""
    error = abs(found - true) / true
    if not error <= allowed:
        raise WrongResultError(f"{what}: found {found!r}, in float64 it is {true!r}")
    return error


def check(name: str, result: Any, subject: Subject, *, clips: bool = False) -> float:
    """The relative error of the norm that a call on freshly filled gradients returned.

    Raises:
        WrongResultError: it is too large, or, if the call clips, the gradients were not scaled as they should.
    """
    allowed = tolerance(name, subject)
    if clips:
        limit = subject.limit * subject.norm / (subject.norm + 1e-6)
        require_close("norm after clipping", subject.norm_now(), limit, allowed)
    return require_close("norm", float(result), subject.norm, allowed)


def call_on(name: str, subject: Subject, *, clips: bool = False) -> Callable[[], torch.Tensor]:
    """The call that is timed: never clipping, or with a limit that is a hundredth lower each time."""
    function, parameters = FUNCTIONS[name], subject.parameters
    if not clips:
        return lambda: function(parameters, NO_CLIPPING)

    def call() -> torch.Tensor:
        subject.limit *= _FADE
        return function(parameters, subject.limit)

    return call


class Clipping:
    """Both functions on three sets of tensors, in turn: one is called straight after the other, on another set.

    Raises:
        WrongResultError: a result is not what float64 says.
    """

    def __init__(self, case: Case, *, clips: bool = False) -> None:
        self.case = case
        self.subjects = [Subject(case, seed) for seed in range(NUM_SETS)]
        self.calls = {name: [call_on(name, s, clips=clips) for s in self.subjects] for name in FUNCTIONS}
        self.norm_errors: dict[str, float] = {}
        for name, calls in self.calls.items():
            errors = []
            for call, subject in zip(calls, self.subjects, strict=True):
                if clips:
                    subject.fill()
                errors.append(check(name, call(), subject, clips=clips))
            self.norm_errors[name] = max(errors)

    def _freshen(self, name: str, index: int) -> None:
        """Fills a set again before clipping makes its values so small that arithmetic becomes slow."""
        subject = self.subjects[index]
        if subject.limit < _FADED * subject.norm:
            subject.fill()

    def measure(self, settings: Settings) -> dict[str, Any]:
        """Times and their ratio."""
        rounds = take_turns(self.calls, settings, self._freshen)
        return {**compared(rounds["ours"], rounds["theirs"]), "norm_errors": self.norm_errors, "rounds_us": rounds}
