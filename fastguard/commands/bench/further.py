"""What each further tensor costs, and what gradients straight from a backward pass cost.

After a backward pass a gradient has no Python object yet; the first `.grad` makes one, and it lives as long as the
gradient does. Every clipping function pays for that once a step, torch's and ours.
"""

from __future__ import annotations

import statistics
from typing import Any

import torch

import fastguard

from .cases import CASES, Case
from .harness import Settings, Spread, call_ns, garbage_collector_off
from .rivals import NO_CLIPPING, WrongResultError
from .subject import Subject

_CALLS_ALIVE = 5
_FUNCTIONS = {"fastguard": fastguard.clip_grad_norm_, "torch": torch.nn.utils.clip_grad_norm_}
Times = dict[str, list[float]]  # µs in each round, by function


class Fresh:
    """Parameters that get new gradients of ones, each with memory of its own, from a backward pass."""

    def __init__(self, case: Case) -> None:
        self.parameters = [torch.nn.Parameter(torch.zeros(shape, dtype=case.dtype)) for shape in case.shapes]
        self.norm = case.num_elements**0.5

    def backward(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None
        copies = torch._foreach_mul(list[torch.Tensor](self.parameters), 1.0)
        torch.cat([copy.flatten() for copy in copies]).sum().backward()


def _check(norm: torch.Tensor, true: float) -> None:
    if abs(float(norm) - true) > 2e-6 * true:
        raise WrongResultError(f"norm: found {float(norm)!r}, in float64 it is {true!r}")


def time_alive(cases: tuple[Case, ...], num_rounds: int) -> dict[str, Times]:
    """Times of clipping without reaching the limit, again and again on the same gradients."""
    subjects = {case.name: Subject(case) for case in cases}
    times: dict[str, Times] = {name: {function: [] for function in _FUNCTIONS} for name in subjects}
    with garbage_collector_off():
        for _ in range(num_rounds):
            for name, subject in subjects.items():
                for key, function in _FUNCTIONS.items():
                    parameters = subject.parameters
                    _check(function(parameters, NO_CLIPPING), subject.norm)
                    calls = [call_ns(lambda: function(parameters, NO_CLIPPING)) for _ in range(_CALLS_ALIVE)]  # noqa: B023
                    times[name][key].append(statistics.median(calls) / 1e3)
    return times


def time_fresh(cases: tuple[Case, ...], num_rounds: int) -> dict[str, Times]:
    """Times of clipping without reaching the limit, once after each backward pass."""
    subjects = {case.name: Fresh(case) for case in cases}
    times: dict[str, Times] = {name: {function: [] for function in _FUNCTIONS} for name in subjects}
    with garbage_collector_off():
        for index in range(-1, num_rounds):
            for name, subject in subjects.items():
                for key, function in _FUNCTIONS.items():
                    subject.backward()
                    parameters, norms = subject.parameters, []
                    elapsed = call_ns(lambda: norms.append(function(parameters, NO_CLIPPING)))  # noqa: B023
                    _check(norms[0], subject.norm)
                    if index >= 0:
                        times[name][key].append(elapsed / 1e3)
    return times


def measure_further(settings: Settings, many: int = 10_000, few: int = 1_000) -> dict[str, Any]:
    """(t(many) - t(few)) / (many - few) for tensors of one element, in ns, on the same gradients and on fresh ones; and
    ours / torch's on fresh gradients of other cases."""
    large, small = (Case(f"{n}x1", f"{n} tensors × 1", ((1,),) * n) for n in (many, few))
    others = tuple(CASES[name] for name in ("300x1000", "3000x64"))
    num_rounds = 2 * settings.num_rounds
    alive, fresh = time_alive((large, small), num_rounds), time_fresh((large, small, *others), num_rounds)
    result: dict[str, Any] = {"many": many, "few": few}
    for kind, times in (("alive", alive), ("fresh", fresh)):
        for function in _FUNCTIONS:
            pairs = zip(times[large.name][function], times[small.name][function], strict=True)
            slopes = [(a - b) * 1e3 / (many - few) for a, b in pairs]
            result[f"{function}_{kind}_ns"] = Spread.of(slopes).to_dict()
    for case in others:
        ours, theirs = fresh[case.name]["fastguard"], fresh[case.name]["torch"]
        result[f"{case.name}-fresh"] = {
            "fastguard_us": Spread.of(ours).to_dict(),
            "torch_us": Spread.of(theirs).to_dict(),
            "ratio": Spread.of(a / b for a, b in zip(ours, theirs, strict=True)).to_dict(),
        }
    return result
