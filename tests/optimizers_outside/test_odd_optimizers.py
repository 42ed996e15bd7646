"""Every odd way of being an optimizer: guarding it changes nothing, a skipped step has changed nothing, clipping is
the same as by hand."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("benchmarks.optimizers", reason="what measures is not beside these tests", exc_type=ImportError)

import odd_optimizers as odd

from benchmarks.optimizers import table
from benchmarks.optimizers.training import Way
from benchmarks.optimizers.trial import Verdict, judge

STEPS: dict[str, Any] = {"num_steps": 6, "width": 6}
BAD = 3
WAYS: dict[type, dict[str, Any]] = {
    **{cls: {} for cls in odd.PLAIN},
    **{cls: {"closure": "step"} for cls in odd.WITH_CLOSURE},
    odd.SharpnessAware: {"closure": "after"},
    odd.Curvature: {"graph": True},
}
# Each has a twin among the others.
TWINS = (
    odd.NewTensorInGroup,
    odd.EntryMadeInGroup,
    odd.ObjectOfItsOwn,
    odd.NewStateAtEachStep,
    odd.Averages,
    odd.LooksAhead,
    odd.CountsBeforeClosure,
)
CASES = [pytest.param(c, way, marks=pytest.mark.slow if c in TWINS else (), id=c.__name__) for c, way in WAYS.items()]


def verdict_on(cls: Any, **way: Any) -> Verdict:
    return judge(cls, Way(lambda model: cls(model.parameters()), **STEPS, **way), bad=BAD)


@pytest.mark.thinned(n=3)
@pytest.mark.parametrize(("cls", "way"), CASES)
def test_guarded(cls, way):
    verdict = verdict_on(cls, **way)
    assert verdict.unusable is None
    signs = table.failures(table.record(verdict))
    assert signs == {}
    assert verdict.gradients_kept
    assert verdict.clip_unknown is None and verdict.clip_torch < 1e-5
