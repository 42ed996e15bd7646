"""What is measured, and clipping: fastguard's against torch's, each proved right against float64 before it is timed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastguard

from .harness import NUM_SETS, Settings, WrongResultError, compared, take_turns

Shape = tuple[int, ...]
_NUM_BATCHES = 8  # several, so that the gradient norm is not the same at every step
# Zeros, rare enough to leave timings alone, there to be counted.
_ZERO_START, _ZERO_STEP = 500, 997
_STD = 1e-3
_BLOCK = 1 << 24  # elements converted to float64 at a time
NO_CLIPPING = 1e9  # a max_norm that is never reached
FUNCTIONS: dict[str, Callable[..., torch.Tensor]] = {
    "ours": fastguard.clip_grad_norm_,
    "theirs": torch.nn.utils.clip_grad_norm_,
}
_FADE = 0.99
_FADED = 1e-4  # of the norm: below that the values are filled again
_FLOAT32_NORM_MAX = 50_000_000


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


@dataclass(frozen=True)
class StepCase:
    """A model and a batch; a whole step is zero_grad, forward, backward, clip if asked for, AdamW(fused=True)."""

    name: str
    title: str
    build: Callable[[], Task]


def gpt2_shapes(width: int = 768, depth: int = 12, vocabulary: int = 50257, context: int = 1024) -> tuple[Shape, ...]:
    """GPT-2's tensors; the head is the token embedding again, so it is not a tensor of its own."""
    block: list[Shape] = [
        *((width,), (width,)),
        *((width, 3 * width), (3 * width,), (width, width), (width,)),
        *((width,), (width,)),
        *((width, 4 * width), (4 * width,), (4 * width, width), (width,)),
    ]
    return ((vocabulary, width), (context, width), *(block * depth), (width,), (width,))


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
            gradient.normal_(std=_STD, generator=generator)
            gradient.view(-1)[_ZERO_START::_ZERO_STEP] = 0.0
        self.limit = self.norm  # the `max_norm` of calls that clip; each lowers it by a hundredth

    def norm_now(self) -> float:
        """Norm of the gradients as they are now, in float64."""
        squares = (float(block.double().square().sum()) for g in self.gradients for block in g.flatten().split(_BLOCK))
        return math.sqrt(math.fsum(squares))


class Task(NamedTuple):
    """A model, and a function that runs it forward on the next of its batches and returns the loss."""

    model: nn.Module
    loss: Callable[[], Tensor]


def task(model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]]) -> Task:
    """Cross-entropy on the batches, in turn and for ever."""
    endless = itertools.cycle(list(batches))

    def loss() -> Tensor:
        x, y = next(endless)
        return F.cross_entropy(model(x).flatten(0, -2), y.flatten())

    return Task(model, loss)


def mlp(width: int = 256, inputs: int = 128, classes: int = 10, batch: int = 32, seed: int = 0) -> Task:
    """An MLP of three layers; the same weights and batches for the same seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = nn.Sequential(
            nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, classes)
        )
        batches = [(torch.randn(batch, inputs), torch.randint(classes, (batch,))) for _ in range(_NUM_BATCHES)]
    return task(model, batches)


CASES = {
    case.name: case
    for case in (
        Case("gpt2-float32", "GPT-2 124M float32, 148 tensors", gpt2_shapes()),
        Case("300x1000", "300 tensors × 1000 float32", ((1000,),) * 300),
    )
}
STEP_MLP = StepCase("step-mlp", "MLP of 101k parameters", mlp)


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
