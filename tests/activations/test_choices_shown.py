"""Attention and routers in the report and in figures."""

from __future__ import annotations

import pytest

from fastguard.report import build_report
from fastguard.report.tables import module_rows, sample_tables
from fastguard.visualization import plot_activations

from made_runs import activity, attending, routing, with_activities


@pytest.fixture
def history():
    return with_activities(activity("relu"), attending(max_logit=123.0, entropy=0.25), routing([0.9, 0.9, 0.2, 0.0]))


def test_in_the_report(history):
    activations, choices = sample_tables(module_rows(history), ())
    assert [line.split() for line in choices] == [
        ["choices", "of", "entropy", "max", "logit", "max", "load", "unused", "experts"],
        ["attn[attention]", "25%", "123", "-", "-"],
        ["moe.gate[router]", "50%", "-", "90%", "1", "of", "4"],
    ]
    assert [line.split()[0] for line in activations] == ["activations", "relu"]
    assert "choices of" in str(build_report(history))


def test_in_figures(history):
    pytest.importorskip("plotly", reason="plotly is not installed")
    rows = lambda value: plot_activations(history, value).data[0].y  # noqa: E731
    assert {"attn[attention]", "moe.gate[router]"} == {*rows("entropy")} and {*rows("zeros")} == {"relu"}
