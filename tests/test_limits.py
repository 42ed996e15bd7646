"""The table of limits: what each sign says of a run, and of those beside it."""

from __future__ import annotations

import limits_data
import limits_loss
import limits_model
import pytest

from made_runs import severity

TABLES = (limits_loss.LIMITS, limits_data.LIMITS, limits_model.LIMITS)
CASES = [(sign, place) for table in TABLES for sign, rows in table.items() for place in range(len(rows))]


@pytest.mark.parametrize(("sign", "place"), CASES)
def test_limits(sign, place):
    """`expected` is a severity, None for silence, or True for any severity."""
    history, expected = next(table[sign] for table in TABLES if sign in table)[place]
    said = severity(sign, history)
    assert said is not None if expected is True else said == expected
