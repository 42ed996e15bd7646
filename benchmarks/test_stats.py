"""Statistics: one pass, against reading the same bytes, and against every statistic as its own pass."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize("rival", ["stats", "read", "read-prefetch", "memcpy"])
@pytest.mark.parametrize("case", ["gpt2-float32", "gpt2-bfloat16", "resnet50", "one-100m"], scope="session")
def test_one_pass(time_rival, case, rival):
    time_rival(case, rival, ": one pass")


@pytest.mark.parametrize("rival", ["stats-rows", "separate-ops", "toolkit"])
@pytest.mark.parametrize("case", ["gpt2-float32", "resnet50", "300x1000", "3000x64"], scope="session")
def test_all_statistics(time_rival, case, rival):
    time_rival(case, rival, ": every statistic as a Python number")
