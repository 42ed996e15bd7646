"""Clipping: fastguard's against torch's, each proved right against float64 before it is timed."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastguard.commands.bench import NO_CLIPPING, Shape, WrongResultError

from .timing import FUNCTIONS, NUM_SETS, Settings, compared, take_turns

_FADED = 1e-4  # of the norm: below that the values are filled again, before arithmetic becomes slow
_FLOAT32_NORM_MAX = 50_000_000


def require_close(what: str, found: float, true: float, allowed: float) -> float:
    """The relative error of `found`; raises WrongResultError where it is above `allowed`."""
    error = abs(found - true) / true
    if not error <= allowed:
        raise WrongResultError(f"{what}: found {found!r}, in float64 it is {true!r}")
    return error


@dataclass(frozen=True)
class Case:
    """A list of gradients. `shapes` is in the order in which the model holds its parameters."""

    name: str
    title: str
    shapes: tuple[Shape, ...]
    dtype: torch.dtype = torch.float32

    @property
    def num_tensors(self) -> int:
        return len(self.shapes)

    @property
    def num_elements(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes)


class Subject:
    """The gradients of a case: normal values of standard deviation 1e-3, one in 997 of them zero.

    Attributes:
        gradients: filled from the seed; kept here, so their Python objects stay alive.
        parameters: take no memory, and have the gradients as their `grad`.
        norm: true norm of all gradients together, as filled.
        limit: the `max_norm` of calls that clip; each lowers it by a hundredth.
    """

    def __init__(self, case: Case, seed: int = 0) -> None:
        self.case = case
        self._seed = seed
        self.gradients = [torch.empty(shape, dtype=case.dtype) for shape in case.shapes]
        self.norm = 0.0
        self.fill()
        self.norm = self.limit = self.norm_now()
        self.parameters = []
        for gradient in self.gradients:
            parameter = torch.nn.Parameter(torch.zeros((), dtype=gradient.dtype).expand(gradient.shape))
            parameter.grad = gradient
            self.parameters.append(parameter)

    def fill(self) -> None:
        """Gives the gradients the values that they had at first."""
        generator = torch.Generator().manual_seed(self._seed)
        for gradient in self.gradients:
            gradient.normal_(std=1e-3, generator=generator)
            gradient.view(-1)[500::997] = 0.0  # rare enough to leave timings alone
        self.limit = self.norm

    def norm_now(self) -> float:
        """Norm of the gradients as they are now, in float64."""
        squares = (float(block.double().square().sum()) for g in self.gradients for block in g.flatten().split(1 << 24))
        return math.sqrt(math.fsum(squares))


def tolerance(name: str, subject: Subject) -> float:
    """What a norm may be off by. fastguard promises 1e-6, here rounded to the gradients' dtype as torch does. From 50M
    elements on, torch's own error, 1e-2 at 100M, is reported and not judged.
    """
    epsilon = torch.finfo(subject.case.dtype).eps
    if name == "ours":
        return 1e-6 + epsilon
    largest = max(g.numel() for g in subject.gradients)
    return 7e-3 + 4 * epsilon if largest < _FLOAT32_NORM_MAX else math.inf


def check(name: str, result: Any, subject: Subject, *, clips: bool = False) -> float:
    """The relative error of the norm that a call on freshly filled gradients returned; raises if it is too large."""
    allowed = tolerance(name, subject)
    if clips:
        limit = subject.limit * subject.norm / (subject.norm + 1e-6)
        require_close("norm after clipping", subject.norm_now(), limit, allowed)
    return require_close("norm", float(result), subject.norm, allowed)


def call_on(name: str, subject: Subject, *, clips: bool = False) -> Callable[[], Tensor]:
    """The call that is timed: never clipping, or with a limit that is a hundredth lower each time."""

    def call() -> Tensor:
        subject.limit *= 0.99
        return FUNCTIONS[name](subject.parameters, subject.limit)

    return call if clips else lambda: FUNCTIONS[name](subject.parameters, NO_CLIPPING)


class Clipping:
    """Both functions on three sets of tensors, in turn: one is called straight after the other, on another set."""

    def __init__(self, case: Case, *, clips: bool = False) -> None:
        self.subjects = [Subject(case, seed) for seed in range(NUM_SETS)]
        self.calls = {name: [call_on(name, s, clips=clips) for s in self.subjects] for name in FUNCTIONS}
        self.norm_errors = dict.fromkeys(FUNCTIONS, 0.0)
        for name, calls in self.calls.items():
            for call, subject in zip(calls, self.subjects, strict=True):
                if clips:
                    subject.fill()
                self.norm_errors[name] = max(self.norm_errors[name], check(name, call(), subject, clips=clips))

    def _freshen(self, name: str, index: int) -> None:
        subject = self.subjects[index]
        if subject.limit < _FADED * subject.norm:
            subject.fill()

    def measure(self, settings: Settings) -> dict[str, Any]:
        """Times and their ratio."""
        rounds = take_turns(self.calls, settings, self._freshen)
        return {**compared(rounds["ours"], rounds["theirs"]), "norm_errors": self.norm_errors, "rounds_us": rounds}
