"""What each further tensor costs, and what gradients straight from a backward pass cost.

After a backward pass a gradient has no Python object yet; the first `.grad` makes one, and it lives as long as the
gradient does. Every clipping function pays for that once a step, torch's and ours.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fastguard.commands.bench import NO_CLIPPING

from . import clipping
from .timing import FUNCTIONS, Settings, Spread, compared, take_turns


def further_tensor(many: clipping.Case, few: clipping.Case) -> Callable[[Settings], dict[str, Any]]:
    """Measures what the further tensors of `many` cost each, in ns, with both functions in turn; limit not reached."""
    sides = {"many": clipping.Clipping(many), "few": clipping.Clipping(few)}
    calls = {f"{side}-{size}": calls for size, both in sides.items() for side, calls in both.calls.items()}
    num_further = many.num_tensors - few.num_tensors

    def measure(settings: Settings) -> dict[str, Any]:
        rounds = take_turns(calls, settings)
        slopes = {
            side: [(a - b) * 1e3 / num_further for a, b in zip(rounds[f"{side}-many"], rounds[f"{side}-few"])]
            for side in FUNCTIONS
        }
        return {
            "ours_ns": Spread.of(slopes["ours"])._asdict(),
            "theirs_ns": Spread.of(slopes["theirs"])._asdict(),
            "rounds_us": rounds,
        }

    return measure


class Fresh:
    """Parameters that get new gradients of ones, each with memory of its own, from a backward pass."""

    def __init__(self, case: clipping.Case) -> None:
        self.parameters = [torch.nn.Parameter(torch.zeros(shape, dtype=case.dtype)) for shape in case.shapes]
        self.norm = case.num_elements**0.5

    def backward(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None
        copies = torch._foreach_mul(list[torch.Tensor](self.parameters), 1.0)
        torch.cat([copy.flatten() for copy in copies]).sum().backward()


def after_backward(case: clipping.Case) -> Callable[[Settings], dict[str, Any]]:
    """Measures clipping without reaching the limit, once after each backward pass, each function on its own tensors."""
    subjects = {side: Fresh(case) for side in FUNCTIONS}
    for side, subject in subjects.items():
        subject.backward()
        clipping.require_close("norm", float(FUNCTIONS[side](subject.parameters, NO_CLIPPING)), subject.norm, 2e-6)

    def call(side: str) -> Callable[[], Any]:
        return lambda: FUNCTIONS[side](subjects[side].parameters, NO_CLIPPING)

    def measure(settings: Settings) -> dict[str, Any]:
        calls = {side: [call(side)] for side in FUNCTIONS}
        rounds = take_turns(calls, settings, lambda side, _: subjects[side].backward())
        return {**compared(rounds["ours"], rounds["theirs"]), "rounds_us": rounds}

    return measure
