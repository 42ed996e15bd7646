"""Whole training steps: unguarded, with torch's clip_grad_norm_, guarded.

What guarding adds is a small difference of two large times. `benchmarks/speed` measures it by alternating single steps;
here each kind runs on its own.
"""

from __future__ import annotations

import pytest

from fastguard.commands.bench.cases import STEP_CASES
from fastguard.commands.bench.harness import QUICK
from fastguard.commands.bench.steps import CLIP, GUARDED, PLAIN, StepRun, measure_steps


@pytest.mark.parametrize("kind", [PLAIN, CLIP, GUARDED])
@pytest.mark.parametrize("case", list(STEP_CASES))
def test_step(benchmark, case, kind):
    chosen = STEP_CASES[case]
    measure_steps(chosen, QUICK, max_steps=6)  # raises unless all kinds train to the same bits
    benchmark.group = chosen.title
    benchmark.pedantic(StepRun(chosen, kind).step, rounds=20, warmup_rounds=5)
