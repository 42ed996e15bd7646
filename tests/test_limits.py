"""The table of limits: what each sign says of a run, and of those beside it."""

from __future__ import annotations

import limits_data
import limits_gradients
import limits_loss
import limits_model
import pytest

from made_runs import severity

TABLES = {"loss": limits_loss, "gradients": limits_gradients, "data": limits_data, "model": limits_model}
CASES = [
    (name, sign, i) for name, table in TABLES.items() for sign, rows in table.LIMITS.items() for i in range(len(rows))
]


@pytest.mark.parametrize(("table", "sign", "place"), CASES)
def test_limits(table, sign, place):
    """`expected` is a severity, None for silence, or True for any severity."""
    history, expected = TABLES[table].LIMITS[sign][place]
    said = severity(sign, history)
    assert said is not None if expected is True else said == expected
