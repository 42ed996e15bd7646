"""Gradients that do not arrive, in the ways in which loops lose them: what the rules say within ten steps."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from guard_helpers import loss_at, make_model
from torch import nn

import fastguard

Loop = Callable[[nn.Module, Any], Iterator[torch.Tensor]]


def guarded(model: nn.Module, make: Any = torch.optim.AdamW, **settings: Any) -> Any:
    return fastguard.wrap(make(model.parameters(), lr=1e-2), model, **settings)


def found(optimizer: Any) -> dict[str, Any]:
    return fastguard.diagnosis.by_sign(optimizer.guard.report().findings)


class Other(torch.optim.Optimizer):
    """Takes its gradients from an attribute of the parameters."""

    attribute = "main_grad"

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if hasattr(p, self.attribute):
                    p.add_(getattr(p, self.attribute), alpha=-group["lr"])


class Projected(Other):
    attribute = "of_my_own"


def take_away(optimizer: Any) -> None:
    for p in optimizer.param_groups[0]["params"]:

        def hook(p: torch.Tensor) -> None:
            setattr(p, optimizer.attribute, p.grad)
            p.grad = None

        p.register_post_accumulate_grad_hook(hook)


def forgotten(model: nn.Module, optimizer: Any) -> Iterator[torch.Tensor]:
    for number in range(10):
        yield loss_at(model, number)
        optimizer.step()


def replaced(model: nn.Module, optimizer: Any) -> Iterator[torch.Tensor]:
    model[0], model[2] = nn.Linear(6, 8), nn.Linear(8, 4)  # type: ignore[operator]
    yield from usual(model, optimizer)


def usual(model: nn.Module, optimizer: Any) -> Iterator[torch.Tensor]:
    for number in range(10):
        loss = loss_at(model, number)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss


def too_early(*, set_to_none: bool) -> Loop:
    def loop(model: nn.Module, optimizer: Any) -> Iterator[torch.Tensor]:
        for number in range(10):
            loss = loss_at(model, number)
            loss.backward()
            optimizer.zero_grad(set_to_none=set_to_none)
            optimizer.step()
            yield loss

    return loop


def in_backward(model: nn.Module, optimizer: Any, only: int | None = None) -> Iterator[torch.Tensor]:
    for p in list(model.parameters())[:only]:
        inner = torch.optim.SGD([p], lr=1e-2)

        def hook(p: torch.Tensor, inner: Any = inner) -> None:
            inner.step()
            inner.zero_grad()

        p.register_post_accumulate_grad_hook(hook)
    yield from usual(model, optimizer)


def elsewhere(model: nn.Module, optimizer: Any) -> Iterator[torch.Tensor]:
    take_away(optimizer)
    yield from usual(model, optimizer)


LOOPS: dict[str, tuple[Any, Loop]] = {
    "no-backward": (torch.optim.AdamW, forgotten),
    "other-parameters": (torch.optim.AdamW, replaced),
    "cleared-before-step": (torch.optim.AdamW, too_early(set_to_none=True)),
    "cleared-before-step, zeros": (torch.optim.AdamW, too_early(set_to_none=False)),
    "step-in-backward": (torch.optim.AdamW, in_backward),
    "elsewhere": (Other, elsewhere),
    "other-gradients": (Projected, elsewhere),
}


@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.parametrize("observes", [True, False])
def test_no_gradient_is_critical_within_ten_steps_and_says_why(
    name: str, observes: bool, caplog: pytest.LogCaptureFixture
) -> None:
    model = make_model()
    make, loop = LOOPS[name]
    optimizer = guarded(model, make)
    with caplog.at_level(logging.ERROR, "fastguard"):
        for loss in loop(model, optimizer):
            if observes and optimizer.guard.last is not None:
                optimizer.guard.observe(loss=loss)
        report = optimizer.guard.report()
        for _ in range(2):  # gradients that are there are delivered a step later
            optimizer.step()
    finding = next(finding for finding in report.findings if finding.rule == "no-gradient")
    assert report.status == finding.severity == "critical"
    assert finding.evidence["pattern"] == name.partition(",")[0] and report.causes[0].rule == "no-gradient-arrives"
    assert any("no-gradient" in record.getMessage() for record in caplog.records)


def test_some_that_step_in_the_backward_pass_are_named() -> None:
    model = make_model()
    optimizer = guarded(model)
    for _ in in_backward(model, optimizer, only=2):
        pass
    finding = found(optimizer)["unseen-updates"]
    assert (finding.severity, finding.layers) == ("warning", ("0.weight", "0.bias"))
    assert "missing-gradients" not in found(optimizer)
    assert optimizer.guard.report().causes[0].rule == "trained-elsewhere"


def test_what_another_guard_sees_is_not_missing() -> None:
    model = make_model()
    ends = fastguard.wrap(torch.optim.SGD(model[0].parameters(), lr=1e-2), model)  # type: ignore[index]
    other = fastguard.wrap(torch.optim.SGD(model[2].parameters(), lr=1e-2), model)  # type: ignore[index]
    for number in range(30):
        model.zero_grad()
        loss_at(model, number).backward()
        (ends, other)[number % 2].step()
    assert not found(ends).keys() & {"parameters-not-in-optimizer", "unseen-updates", "missing-gradients"}


class Routed(nn.Module):
    """Each batch goes to one of its experts."""

    def __init__(self, num: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList(make_model(seed=i) for i in range(num))
        self.at = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.experts[self.at](x)
        return out


def route(model: Routed, optimizer: Any, at: Callable[[int], int], steps: range) -> None:
    for number in steps:
        model.at = at(number)
        loss = loss_at(model, number)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        optimizer.guard.observe(loss=loss)


def test_one_that_never_is_chosen_is_told_after_a_while_and_not_again_once_it_is() -> None:
    model = Routed(4)
    optimizer = guarded(model)
    route(model, optimizer, lambda step: step % 3, range(35))
    assert not found(optimizer).keys() & {"missing-gradients", "idle-experts"}
    route(model, optimizer, lambda step: step % 3, range(35, 80))
    assert found(optimizer)["idle-experts"].layers[0].startswith("experts.3.")
    assert "missing-gradients" not in found(optimizer)
    route(model, optimizer, lambda step: 3 if step == 87 else step % 3, range(80, 90))  # a step that is in no sample
    assert "idle-experts" not in found(optimizer)
    assert (optimizer.guard.history.model.num_seen, optimizer.guard.history.model.never_seen) == (16, ())
    route(model, optimizer, lambda step: step % 3, range(90, 300))
    optimizer.guard.report()
    route(model, optimizer, lambda step: step % 3, range(300, 410))
    assert found(optimizer)["idle-experts"].layers[0].startswith("experts.3.")  # not for a hundred steps


def _clipped(clip: Callable[[nn.Module], Any], steps: int = 70, dtype: torch.dtype = torch.float32) -> Any:
    model = make_model(dtype=dtype)
    optimizer = guarded(model, torch.optim.SGD)
    for number in range(steps):
        optimizer.zero_grad()
        loss_at(model, number).backward()
        clip(model)
        optimizer.step()
    return optimizer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_clipper_that_bites_in_half_of_the_steps_is_noticed(
    dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    usual_norm = sorted(entry.norm for entry in _clipped(lambda model: None).guard.history.clean)[30]
    limit = float(f"{usual_norm:.1e}")
    optimizer = _clipped(lambda model: nn.utils.clip_grad_norm_(model.parameters(), limit), dtype=dtype)
    finding = found(optimizer)["already-clipped"]
    assert 10 <= finding.evidence["num_steps"] < 60 and finding.evidence["norm"] == pytest.approx(limit, rel=1e-2)
    assert optimizer.guard.history.equal_run < 10
    assert any("clip_grad_norm_" in record.getMessage() for record in caplog.records)


def test_clipping_by_value_is_noticed_soon() -> None:
    optimizer = _clipped(lambda model: nn.utils.clip_grad_value_(model.parameters(), 0.05), steps=8)
    assert found(optimizer)["already-clipped"].evidence["largest"] == pytest.approx(0.05)


@pytest.mark.parametrize("kind", ["labels", "rewards", "rewards, observed"])
def test_batches_without_a_signal_are_told_as_what_they_are(kind: str) -> None:
    model = make_model()
    optimizer = guarded(model, torch.optim.SGD, objective="reward" if "rewards" in kind else None)
    for number in range(60):
        x = torch.randn(5, 6, generator=torch.Generator().manual_seed(number))
        logits, is_empty = model(x), number % 4 == 1
        if kind == "labels":  # of a sum over tokens, as where the batch's labels are counted elsewhere
            labels = torch.full((5,), -100) if is_empty else torch.arange(5) % 4
            loss = nn.functional.cross_entropy(logits, labels, reduction="sum") / 5
        else:
            rewards = torch.ones(5) if is_empty else x[:, 0]
            loss = -((rewards - rewards.mean()) * logits.log_softmax(-1)[:, 0]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if kind != "rewards":
            optimizer.guard.observe(loss=loss)
    finding = found(optimizer)["no-signal"]
    assert (finding.severity, finding.evidence["num_steps"]) == ("info", 15)
    assert optimizer.guard.report().status == "healthy"
