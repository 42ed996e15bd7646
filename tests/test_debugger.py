"""TrainingDebugger: the toolkit's interface, over the package's own kernels and rules."""

import importlib.util
import math

import pytest
import torch

import fastguard
from fastguard import TrainingDebugger
from fastguard.diagnosis import RULES, rule
from fastguard.errors import UnsupportedTensorError

has_monitor = importlib.util.find_spec("fastguard.observers.activations") is not None


def train(debugger, losses, gradient=None, **fields):
    for step, loss in enumerate(losses):
        generator = torch.Generator().manual_seed(step)
        given = [torch.randn(10, generator=generator)] if gradient is None else gradient(step)
        debugger.step(step, loss, given, 1e-3, **fields)
    return debugger


def healthy_losses(count):
    return [1.0 / (step + 1) for step in range(count)]


class TestReport:
    def test_nan_gradient_is_critical_and_named(self):
        debugger = train(TrainingDebugger(), healthy_losses(10))
        debugger.step(10, 0.1, {"a": torch.ones(2), "b": torch.tensor([math.nan])}, 1e-3)
        report = debugger.report()
        assert (report["status"], report["gradient_healthy"]) == ("critical", False)
        assert any("NaN" in issue for issue in report["issues"])
        assert debugger.history.first_events[0].names == ("b",)


class TestQuickCheck:
    @pytest.mark.parametrize(
        ("losses", "gradient", "expected"),
        [
            (healthy_losses(10), None, True),
            ([*healthy_losses(10), math.nan], None, False),
            ([*healthy_losses(5), math.nan, *healthy_losses(5)], None, True),  # six steps ago
            (healthy_losses(10), lambda step: [torch.tensor([math.nan])], False),
            (healthy_losses(10), lambda step: [torch.tensor([1000.0])], True),
            (healthy_losses(10), lambda step: [torch.tensor([1000.1])], False),
        ],
    )
    def test_limits(self, losses, gradient, expected):
        assert train(TrainingDebugger(), losses, gradient).quick_check() is expected


class TestStep:
    def test_what_is_no_list_is_refused(self):
        with pytest.raises(TypeError, match="`gradients` must be a list of tensors or arrays, or a dict"):
            TrainingDebugger().step(0, 1.0, torch.ones(3), 0.1)
        with pytest.raises(UnsupportedTensorError):
            TrainingDebugger().step(0, 1.0, [torch.ones(3, dtype=torch.int64)], 0.1)

    @pytest.mark.skipif(not has_monitor, reason="the activation monitor is not there")
    def test_activations(self):
        debugger = train(TrainingDebugger(), healthy_losses(12), activations={"relu": torch.zeros(8)})
        assert list(debugger.report()["activation_issues"]) == ["relu"]
        assert debugger.report()["status"] == "warning"


def test_a_rule_that_fails_is_no_sign_of_health(caplog):
    debugger = fastguard.TrainingDebugger()
    for step in range(6):
        debugger.step(step, 1.0 / (step + 1), [torch.ones(3)], 1e-3)
    assert debugger.report()["status"] == "healthy"

    @rule("odd")
    def odd(history):
        raise IndexError("nothing there")

    try:
        reports = [debugger.report() for _ in range(2)]
        full = debugger.full_report()
    finally:
        del RULES["odd"]
    for report in reports:
        assert report["status"] == "warning" and "1 rule failed" in report["issues"][0]
    assert full.status == "warning" and len(caplog.records) == 1
    assert debugger.report()["status"] == "healthy"  # it is gone
