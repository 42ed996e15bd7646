"""Every optimizer: clipping is torch's, and a skip is no step at all. Where neither happens, torch_suite/ holds guarded
training to the bits of unguarded training."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from guard_helpers import (
    assert_close,
    assert_identical,
    clip_by_torch,
    gradients,
    make_model,
    snapshot,
    take_step,
    true_norm,
    twins,
)
from optimizer_cases import CASES, SKIPPING, Case

import fastguard

NUM_STEPS = 6
# A tenth of the norms that occur, so that every step is clipped.
MAX_NORM = 0.02

every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
every_skipping_case = pytest.mark.parametrize("case", SKIPPING, ids=lambda case: case.id)


@pytest.mark.thinned(n=5)
@every_case
def test_clipping_is_torchs(case: Case, backend: str) -> None:
    # In float64, so that the rounding of torch's own norm does not count.
    plain, optimizer, model, guarded = twins(
        case.make, kind=case.model, dtype=torch.float64, max_norm=MAX_NORM, backend=backend
    )
    for step in range(NUM_STEPS):
        norms: list[float] = []

        def clip(norms: list[float] = norms) -> None:
            norms.append(clip_by_torch(plain, MAX_NORM))

        take_step(plain, optimizer, step, closure=case.closure, before_step=clip)
        take_step(model, guarded, step, closure=case.closure)
        last = guarded.guard.last
        assert last.clipped
        assert last.norm == pytest.approx(norms[0], rel=1e-12)  # before clipping, of the step's first evaluation
        assert last.clip_coef == pytest.approx(MAX_NORM / (norms[0] + 1e-6), rel=1e-12)
        assert true_norm(gradients(model)) == pytest.approx(true_norm(gradients(plain)), rel=1e-10)
    # 1e-10: LBFGS divides differences of gradients by one another; all others stay within 1e-13.
    assert_close(snapshot(model, guarded), snapshot(plain, optimizer), rtol=1e-10, atol=1e-12)


@pytest.mark.thinned(n=5)
@every_skipping_case
@pytest.mark.parametrize(
    ("bad_step", "value", "closure"), [(0, math.nan, False), (3, -math.inf, False), (2, math.nan, True)]
)
def test_a_skipped_step_never_was(case: Case, bad_step: int, value: float, closure: bool, backend: str) -> None:
    plain, optimizer, model, guarded = twins(case.make, kind=case.model, max_norm=1e6, backend=backend)
    for step in range(NUM_STEPS):
        if step != bad_step:
            take_step(plain, optimizer, step, closure=closure)
            take_step(model, guarded, step, closure=closure)
            continue
        before = snapshot(model, guarded)
        seen: list[torch.Tensor | None] = []
        look = lambda seen=seen: seen.extend(gradients(model))  # noqa: E731
        loss = take_step(model, guarded, step, closure=closure, bad=value, before_step=look)
        assert guarded.guard.last.skipped and (math.isfinite(loss) if closure else loss is None)
        assert_identical(snapshot(model, guarded), before, "across the skip")
        assert all(now is then for now, then in zip(gradients(model), seen, strict=True)), "gradients are given back"
    assert_identical(snapshot(model, guarded), snapshot(plain, optimizer), "as if the bad step had never been")
    guarded.guard.flush()
    assert [entry.skipped for entry in guarded.guard.history.recent] == [s == bad_step for s in range(NUM_STEPS)]


@pytest.mark.parametrize("line_search_fn", [None, "strong_wolfe"])
def test_lbfgs_is_not_skipped_and_says_so(line_search_fn: str | None) -> None:
    plain = make_model()
    model = copy.deepcopy(plain)
    optimizer = torch.optim.LBFGS(plain.parameters(), lr=0.5, max_iter=3, line_search_fn=line_search_fn)
    guarded = fastguard.wrap(
        torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=3, line_search_fn=line_search_fn), model
    )
    take_step(plain, optimizer, 0, closure=True, bad=math.inf)
    take_step(model, guarded, 0, closure=True, bad=math.inf)
    assert_identical(snapshot(model, guarded), snapshot(plain, optimizer))
    assert not guarded.guard.last.skipped
    assert not guarded.guard.last.is_finite
    assert guarded.guard.last.nonfinite[0] == "0.weight"
