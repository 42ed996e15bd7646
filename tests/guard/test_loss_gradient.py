"""What is noted of a loss from the gradients of the outputs that are watched, and by a guard."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from guard_helpers import classes, guarded_model, make_model, needs_extension, numbers
from torch import nn
from torch.nn import functional as F

import fastguard
from fastguard.observers.loss_gradient import NUM_LOOKED_AT, LossGradient
from fastguard.observers.loss_kind import OutputSample
from fastguard.records.failures import Failures

pytestmark = needs_extension
CROSS_ENTROPY = "cross-entropy"


class TestFacts:
    @pytest.mark.parametrize(
        "loss",
        [
            lambda y: F.smooth_l1_loss(y, 3 * numbers(32, seed=2)),
            lambda y: y.exp().mean(),
            lambda y: F.mse_loss(y, numbers(32, seed=2), reduction="sum"),
            lambda y: (y - numbers(32, seed=2)).pow(4).mean(),
        ],
        ids=["smooth", "exponential", "sum of squares", "fourth power"],
    )
    def test_what_is_none_of_them_stays_unproved(self, loss: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """It counts as a squared error, until the loss is not what that would have been."""
        looker, y = LossGradient(Failures()), numbers(32).requires_grad_()
        output = y * 1.0
        looker.watch(output)
        made = loss(output)
        made.backward()
        assert looker.facts["loss_kind"] == "squared error"
        [then] = looker.facts["squared_losses"]
        assert abs(float(made.detach()) - then) > 2e-3 * then

    def test_a_squared_error_proves_itself(self) -> None:
        looker, y, targets = LossGradient(Failures()), numbers(32).requires_grad_(), 5 + numbers(32, seed=2)
        output = y * 1.0
        looker.watch(output)
        loss = F.mse_loss(output, targets)
        loss.backward()
        assert looker.facts["squared_losses"] == pytest.approx((float(loss.detach()),), rel=1e-5)
        assert looker.facts["target_mean"] == pytest.approx(float(targets.mean()), abs=1e-5)
        assert looker.facts["target_std"] == pytest.approx(float(targets.std(correction=0)), abs=1e-5)
        assert looker.facts["target_range"] == pytest.approx((float(targets.min()), float(targets.max())), abs=1e-5)
        assert looker.facts["target_binary_share"] == 0.0


def watched(model: nn.Module, batches: int, output: Callable[[torch.Tensor], Any] = lambda y: y) -> LossGradient:
    looker = LossGradient(Failures())
    for step in range(batches):
        y = model(numbers(16, 6, seed=step))
        looker.watch(output(y))
        F.cross_entropy(y, classes(16, num=4, seed=step)).backward()
    return looker


class TestWatch:
    @pytest.mark.parametrize(
        "output",
        [
            lambda y: {"loss": y.sum() * 0.0, "logits": y},
            lambda y: (None, [y], 3),
            lambda y: {"ids": torch.ones(3, dtype=torch.long), "logits": y},
            lambda y: (torch.ones(16, 4), y),  # which has no gradient
        ],
        ids=["a loss first", "nested", "integers first", "a constant first"],
    )
    def test_the_first_tensor_that_has_dimensions_and_a_gradient(self, output: Callable[[torch.Tensor], Any]) -> None:
        assert watched(make_model(), 1, output).facts["loss_kind"] == CROSS_ENTROPY

    @pytest.mark.parametrize(
        "returned",
        [
            torch.ones((), requires_grad=True),
            torch.ones(4, dtype=torch.complex64, requires_grad=True),
            torch.ones(4),
            torch.ones(4, dtype=torch.long),
            nn.Parameter(torch.ones(4)),
            None,
            "text",
            {},
        ],
        ids=["a scalar", "complex", "no gradient", "integers", "a parameter", "None", "text", "nothing"],
    )
    def test_what_is_not_watched(self, returned: Any) -> None:
        looker = LossGradient(Failures())
        looker.watch(returned)
        assert looker._left == NUM_LOOKED_AT
        assert not getattr(returned, "_backward_hooks", None)

    def test_target_shares_within_a_batch_and_over_all(self) -> None:
        looker, model = LossGradient(Failures()), make_model()
        for step in range(4):
            y = model(numbers(16, 6, seed=step))
            looker.watch(y)
            F.cross_entropy(y, torch.full((16,), step)).backward()
        facts = looker.facts
        assert (facts["target_batch_top_share"], facts["target_top_share"]) == (1.0, 0.25)
        assert (facts["num_targets"], facts["num_target_classes"]) == (64, 4)

    @pytest.mark.parametrize("kind", ["classes", "numbers", "symbols", "elsewhere", "single", "alike"])
    def test_whether_an_input_is_the_target(self, kind: str) -> None:
        looker, width = LossGradient(Failures()), 1 if kind in ("numbers", "single") else 4
        for step in range(3):
            x, labels = numbers(16, 6, seed=step), classes(16, num=4)
            place = step if kind == "elsewhere" else 2
            if kind in ("classes", "elsewhere"):
                x[:, place] = 4.0 * labels - 2.0
            y = numbers(16, width, seed=9).requires_grad_()
            if kind in ("numbers", "single"):
                x = x[:, 2:3] if kind == "single" else x
                looker.watch(given := y * 1.0, [x])
                F.mse_loss(given, 3.0 * x[:, -1:] + 1.0).backward()
                continue
            if kind in ("symbols", "alike"):
                x = torch.randint(4, (16, 5)) if kind == "symbols" else torch.ones(16, 5, dtype=torch.long)
                y = numbers(16, 5, width, seed=9).requires_grad_()
                looker.watch(given := y * 1.0, [x])
                F.cross_entropy(given.flatten(0, 1), x.flatten()).backward()
                continue
            looker.watch(given := y * 1.0, [x])
            F.cross_entropy(given, labels).backward()
        found = looker.facts.get("target_in_inputs")
        if kind in ("single", "alike"):
            assert found is None  # a line through one feature, and one symbol, say nothing
        else:
            assert (found is not None and found > 0.9995) == (kind != "elsewhere")

    def test_a_failure_is_caged(self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
        def fail(sample: OutputSample, gradient: torch.Tensor) -> None:
            raise ZeroDivisionError("of its own")

        monkeypatch.setattr(OutputSample, "loss_of", fail)
        failures = Failures()
        looker, model = LossGradient(failures), make_model()
        for step in range(3):
            y = model(numbers(16, 6, seed=step))
            looker.watch(y)
            y.sum().backward()
        assert failures.counts() == {"loss gradient": 3} and looker.facts == {}
        assert len(caplog.records) == 1 and "of its own" in caplog.text
        assert all(p.grad is not None for p in model.parameters())


def train(num_steps: int = 6, model: nn.Module | None = None, scaler: Any = None, **options: Any) -> Any:
    """A guard over a few steps of a classifier."""
    model = make_model() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    guarded: Any = fastguard.wrap(optimizer, model, **options)
    for step in range(num_steps):
        guarded.zero_grad()
        loss = F.cross_entropy(model(numbers(16, 6, seed=step)), classes(16, num=4, seed=step))
        (loss if scaler is None else scaler.scale(loss)).backward()
        if scaler is None:
            guarded.step()
        else:
            scaler.step(guarded)
            scaler.update()
        guarded.guard.observe(loss=loss)
    guarded.guard.report()
    return guarded.guard


class TestUnderGuard:
    def test_notes_are_the_same_under_a_scale_and_in_the_log(self, tmp_path: Path) -> None:
        guard = train(num_steps=40, sinks=[fastguard.JsonlSink(tmp_path / "run.jsonl")])
        guard.close()
        notes = guard.history.model
        assert notes.loss_kind == CROSS_ENTROPY and (notes.num_target_classes, notes.num_targets) == (4, 4 * 16)
        assert 0.25 <= notes.target_top_share <= notes.target_batch_top_share < 1.0
        scaled = train(num_steps=40, scaler=torch.amp.GradScaler("cpu", init_scale=1024.0)).history.model
        read = fastguard.TrainingHistory.from_jsonl(tmp_path / "run.jsonl").model
        for name in ("loss_kind", "num_targets", "num_target_classes", "target_top_share", "target_batch_top_share"):
            assert getattr(scaled, name) == getattr(read, name) == getattr(notes, name)

    def test_transforms_of_functions_are_left_alone(self) -> None:
        model, optimizer = guarded_model()
        params = {name: p.detach() for name, p in model.named_parameters()}

        def loss(params: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
            return torch.func.functional_call(model, params, (x,)).square().mean()

        torch.vmap(torch.func.grad(loss), in_dims=(None, 0))(params, torch.randn(5, 3, 6))  # gradients of each sample
        y = model(torch.randn(3, 6))
        torch.autograd.grad(y, list(model.parameters()), torch.ones(2, 3, 4), is_grads_batched=True)
        assert not optimizer.guard._run.failures.counts()
