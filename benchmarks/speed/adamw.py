"""Clipping and the optimizer's step together: `clip_grad_norm_` and fused AdamW, against guarded fused AdamW.

By traffic, in reads and writes of the parameters' size: torch reads the gradients for the norm (1) and scales them (2);
AdamW reads parameters, gradients and both moments and writes three of them back (7): 10. Where the optimizer divides
itself it writes the gradients back: 1 + 7 + 1 = 9.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

import fastguard

from .clipping import Case, Subject, require_close, tolerance
from .timing import Settings, compared, take_turns

THEIRS, WAYS = "theirs", ("scale", "grad_scale")  # wrap's `clip_through`
_BETA1 = 0.9


class Run:
    """Parameters with gradients and an optimizer, which clips to half of the norm at every step."""

    def __init__(self, subject: Subject, kind: str) -> None:
        self.source = subject.gradients
        self.max_norm = subject.norm / 2
        self.parameters = [torch.nn.Parameter(torch.zeros_like(g)) for g in subject.gradients]
        self.gradients = [torch.empty_like(g) for g in subject.gradients]
        for parameter, gradient in zip(self.parameters, self.gradients, strict=True):
            parameter.grad = gradient
        self.optimizer: Any = torch.optim.AdamW(self.parameters, lr=1e-6, betas=(_BETA1, 0.999), fused=True)
        if kind != THEIRS:
            fastguard.wrap(self.optimizer, max_norm=self.max_norm, clip_through=kind)
        self.step: Callable[[], Any] = self._clip_and_step if kind == THEIRS else self.optimizer.step

    def backward(self) -> None:
        """Writes the gradients anew, as a backward pass does."""
        torch._foreach_copy_(self.gradients, self.source)

    def _clip_and_step(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.parameters, self.max_norm)
        self.optimizer.step()

    def first_moments_norm(self) -> float:
        """Norm of AdamW's first moments, in float64."""
        moments: Sequence[torch.Tensor] = [self.optimizer.state[p]["exp_avg"] for p in self.parameters]
        return math.sqrt(math.fsum(float(m.double().square().sum()) for m in moments))


def clipping_adamw(case: Case) -> Callable[[Settings], dict[str, Any]]:
    """Measures whole optimizer steps that clip, each on parameters of its own, after their gradients were written.

    Raises:
        WrongResultError: the first moments after the first step are not those of the clipped gradients.
    """
    subject = Subject(case)
    runs = {kind: Run(subject, kind) for kind in (THEIRS, *WAYS)}
    for kind, run in runs.items():
        run.backward()
        run.step()
        allowed = 1e-6 + tolerance("theirs" if kind == THEIRS else "ours", subject)
        clipped = run.max_norm * subject.norm / (subject.norm + 1e-6)
        require_close(f"{kind}: norm", run.first_moments_norm(), (1 - _BETA1) * clipped, allowed)

    def measure(settings: Settings) -> dict[str, Any]:
        rounds = take_turns({k: [r.step] for k, r in runs.items()}, settings, lambda kind, _: runs[kind].backward())
        found: dict[str, Any] = {way: compared(rounds[way], rounds[THEIRS]) for way in WAYS}
        return {**found, "rounds_us": rounds}

    return measure
