"""The helper that stands for full products misses no pair, and is worth it."""

from __future__ import annotations

from itertools import combinations, product

from pairs import pairs


def test_every_two_values_of_two_parameters_meet() -> None:
    values = [range(45), "ab", [True, False], (0, 3, 5), ["alone"]]
    rows = pairs(*values)
    for i, j in combinations(range(len(values)), 2):
        assert {(row[i], row[j]) for row in rows} == set(product(values[i], values[j]))
    assert 135 <= len(rows) <= 140  # the full product has 540
    assert rows == pairs(*values)
