"""Clipping: ours and torch's, with the limit not reached and reached at every call."""

from __future__ import annotations

import pytest

from benchmarks.speed.cases import CASES


@pytest.mark.parametrize("rival", ["clip", "torch-clip", "norm", "torch-norm"])
@pytest.mark.parametrize("case", list(CASES), scope="session")
def test_not_clipping(time_rival, case, rival):
    time_rival(case, rival, ": clip, limit not reached")


@pytest.mark.parametrize("rival", ["clip-always", "torch-clip-always"])
@pytest.mark.parametrize("case", ["gpt2-float32", "gpt2-bfloat16", "resnet50"], scope="session")
def test_clipping(time_rival, case, rival):
    time_rival(case, rival, ": clip, limit reached")
