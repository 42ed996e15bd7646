"""What `wrap` refuses, what `observe` refuses, and the error that ends a run of skips: messages are part of it."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest
import torch
from guard_helpers import assert_identical, gradients, loss_at, make_model, poison, snapshot, take_step
from torch import nn

import fastguard
from fastguard import BackendUnavailableError, kernels
from fastguard.kernels.registry import BACKENDS


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


@pytest.mark.parametrize("max_norm", [0, 0.0, -1.0, -math.inf, math.nan, True, "1.0", 1j, [1.0]])
def test_max_norm_must_be_a_positive_number(max_norm: Any) -> None:
    optimizer = _sgd(make_model())
    with pytest.raises(ValueError, match=r"`max_norm` must be > 0, got"):
        fastguard.wrap(optimizer, max_norm=max_norm)
    assert vars(optimizer).keys() == vars(_sgd(make_model())).keys()
    assert not optimizer._optimizer_step_pre_hooks


@pytest.mark.parametrize("max_norm", [1, 1e-30, math.inf])
def test_max_norm_may_be_any_positive_number(max_norm: float) -> None:
    model = make_model()
    optimizer = fastguard.wrap(_sgd(model), model, max_norm=max_norm)
    take_step(model, optimizer, 0)
    assert optimizer.guard.last.clipped == (max_norm < 0.1)


def test_max_norm_and_clip_exclude_one_another() -> None:
    with pytest.raises(ValueError, match=r"`max_norm` and `clip` must not both be given"):
        fastguard.wrap(_sgd(make_model()), max_norm=1.0, clip=fastguard.GlobalNorm(1.0))


@pytest.mark.parametrize("clip", [1.0, "norm", object()])
def test_clip_must_be_a_policy(clip: Any) -> None:
    with pytest.raises(TypeError, match=r"`clip` must be a clip policy such as GlobalNorm\(1\.0\), got"):
        fastguard.wrap(_sgd(make_model()), clip=clip)


def test_a_policy_of_ones_own() -> None:
    class Halve:
        def coefficient(self, norm: float) -> float:
            return 0.5

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            pass

    model = make_model()
    optimizer = fastguard.wrap(_sgd(model), model, clip=Halve())
    loss_at(model, 0).backward()
    whole = [g.clone() for g in gradients(model)]
    optimizer.step()
    assert all(torch.equal(g, 0.5 * w) for g, w in zip(gradients(model), whole, strict=True))
    assert (optimizer.guard.last.clip_coef, optimizer.guard.last.clipped) == (0.5, True)


@pytest.mark.parametrize("limit", [0, -1, 2.5, None])
def test_max_consecutive_skips_must_be_a_count(limit: Any) -> None:
    with pytest.raises(ValueError, match="`max_consecutive_skips` must be an integer >= 1, got"):
        fastguard.wrap(_sgd(make_model()), max_consecutive_skips=limit)


def test_an_optimizer_is_wrapped_once() -> None:
    model = make_model()
    optimizer = fastguard.wrap(_sgd(model), model)
    guard = optimizer.guard
    with pytest.raises(fastguard.AlreadyGuardedError, match=r"SGD is guarded already\. Use optimizer\.guard.*detach"):
        fastguard.wrap(optimizer, model, on_guarded="raise")
    assert optimizer.guard is guard
    take_step(model, optimizer, 0)
    guard.flush()
    assert guard.history.num_steps == 1
    guard.detach()
    assert fastguard.wrap(optimizer, model).guard is not guard


def test_an_unknown_backend() -> None:
    optimizer = _sgd(make_model())
    with pytest.raises(ValueError, match=r"`backend` must be one of \[auto, cpu, .*reference.*\], got 'gpu'"):
        fastguard.wrap(optimizer, backend="gpu")
    assert not hasattr(optimizer, "guard")


def test_a_backend_that_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BACKENDS["cpu"], "unavailable", lambda: "the extension was not built")
    optimizer = _sgd(make_model())
    with pytest.raises(fastguard.BackendUnavailableError) as caught:
        fastguard.wrap(optimizer, backend="cpu")
    # A failure lists every backend with every reason.
    assert "'cpu' cannot run here" in str(caught.value)
    assert "cpu: the extension was not built" in str(caught.value)
    assert "reference: can run" in str(caught.value)
    assert not hasattr(optimizer, "guard")


def test_a_model_that_shares_no_parameter_with_the_optimizer() -> None:
    optimizer = _sgd(make_model())
    with pytest.raises(ValueError, match=r"`model` must hold parameters of `opt.*with 4.*none.*optimizer's 4\. Make"):
        fastguard.wrap(optimizer, make_model())
    assert not hasattr(optimizer, "guard")


def test_a_model_that_shares_some_is_fine() -> None:
    model = make_model()
    extra = nn.Parameter(torch.ones(2))
    optimizer = fastguard.wrap(torch.optim.SGD([*model[0].parameters(), extra], lr=0.1), model)
    extra.grad = torch.ones(2)
    take_step_without_zeroing(model, optimizer)
    assert optimizer.guard.last.tensors.names == ("0.weight", "0.bias", "group0.param2")


def take_step_without_zeroing(model: nn.Module, optimizer: Any) -> None:
    loss_at(model, 0).backward()
    optimizer.step()


@pytest.mark.parametrize("sink", [3, "log.jsonl", fastguard.MemorySink])
def test_a_sink_that_is_none(sink: Any) -> None:
    optimizer = _sgd(make_model())
    with pytest.raises(TypeError, match="`sink` must be an object with"):
        fastguard.wrap(optimizer, sinks=[sink])
    assert not optimizer._optimizer_step_pre_hooks and not hasattr(optimizer, "guard")


# --- observe ---


def test_observe_is_too_late_once_the_record_was_handed_over() -> None:
    model = make_model()
    optimizer = fastguard.wrap(_sgd(model), model)
    guard = optimizer.guard
    take_step(model, optimizer, 0)
    guard.observe(loss=1.0)
    guard.flush()
    with pytest.raises(RuntimeError, match=r"`observe` must follow a step.*after optimizer\.step\(\)"):
        guard.observe(loss=1.0)
    assert guard.history.loss == [1.0]


@pytest.mark.parametrize("name", ["loss", "val_loss"])
def test_observe_needs_a_scalar(name: str) -> None:
    model = make_model()
    optimizer = fastguard.wrap(_sgd(model), model)
    take_step(model, optimizer, 0)
    with pytest.raises(ValueError, match=rf"`{name}` must be a scalar, got a tensor of shape \(2, 3\)\. Reduce it"):
        optimizer.guard.observe(**{name: torch.ones(2, 3)})
    assert getattr(optimizer.guard.last, name) is None


# --- runs of skipped steps ---


def test_a_run_of_skips_ends_in_an_error_that_names_tensors_and_steps() -> None:
    model = make_model()
    optimizer = fastguard.wrap(_sgd(model), model, max_consecutive_skips=3)
    take_step(model, optimizer, 0)
    before = snapshot(model, optimizer)
    take_step(model, optimizer, 1, bad=math.nan, bad_index=3)
    take_step(model, optimizer, 2, bad=math.inf, bad_index=0)
    with pytest.raises(fastguard.NonFiniteGradientsError) as caught:
        take_step(model, optimizer, 3, bad=math.nan, bad_index=3)
    assert caught.value.steps == [1, 2, 3]
    assert caught.value.tensors == ["2.bias", "0.weight"]
    assert "3 steps in a row (steps 1 to 3)" in str(caught.value)
    assert "2.bias, 0.weight" in str(caught.value)
    assert_identical(snapshot(model, optimizer), before)
    assert all(g is not None for g in gradients(model))
    # The record of the step that raised is not lost.
    assert optimizer.guard.history.step == [0, 1, 2, 3]
    assert optimizer.guard.history.num_skipped == 3


def test_twenty_five_skips_in_a_row_by_default() -> None:
    model = make_model()
    optimizer = fastguard.wrap(_sgd(model), model)
    loss_at(model, 0).backward()
    poison(model)
    for _ in range(24):
        optimizer.step()
    with pytest.raises(fastguard.NonFiniteGradientsError) as caught:
        optimizer.step()
    assert caught.value.steps == list(range(25))


def test_a_good_step_ends_the_run() -> None:
    model = make_model()
    optimizer = fastguard.wrap(_sgd(model), model, max_consecutive_skips=2)
    for step in range(9):
        take_step(model, optimizer, step, bad=math.nan if step % 2 else None)
    optimizer.guard.flush()
    assert optimizer.guard.history.num_skipped == 4
    take_step(model, optimizer, 9, bad=math.nan, bad_index=1)
    with pytest.raises(fastguard.NonFiniteGradientsError) as caught:
        take_step(model, optimizer, 10, bad=math.nan, bad_index=1)
    assert caught.value.steps == [9, 10]
    assert caught.value.tensors == ["0.bias"]  # those of this run alone


def test_training_may_go_on_after_the_error() -> None:
    model = make_model()
    optimizer = fastguard.wrap(_sgd(model), model, max_consecutive_skips=1)
    with pytest.raises(fastguard.NonFiniteGradientsError):
        take_step(model, optimizer, 0, bad=math.nan)
    before = snapshot(model)["parameters"]
    take_step(model, optimizer, 1)
    assert not torch.equal(model[0].weight, before["0.weight"])
    assert not optimizer.guard.last.skipped


def test_nothing_raises_where_nothing_is_skipped() -> None:
    model = make_model()
    optimizer = fastguard.wrap(_sgd(model), model, skip_nonfinite=False, max_consecutive_skips=1)
    for step in range(3):
        take_step(model, optimizer, step, bad=math.nan)
    optimizer.guard.flush()
    assert optimizer.guard.history.num_nonfinite == 3
    assert optimizer.guard.history.num_skipped == 0


def test_a_norm_that_overflows_is_not_finite() -> None:
    model = nn.Linear(2, 1, bias=False).double()
    optimizer = fastguard.wrap(_sgd(model), model, max_consecutive_skips=1)
    model.weight.grad = torch.full_like(model.weight, 1.5e308)
    with pytest.raises(fastguard.NonFiniteGradientsError, match=r"weight|only their norm overflowed"):
        optimizer.step()
    assert optimizer.guard.last.norm == math.inf


@pytest.mark.parametrize("skips", [True, False])
def test_skips_are_loud(skips: bool, caplog: pytest.LogCaptureFixture) -> None:
    model = make_model()
    optimizer = fastguard.wrap(_sgd(model), model, skip_nonfinite=skips)
    with caplog.at_level(logging.INFO, "fastguard"):
        take_step(model, optimizer, 0)
        assert not caplog.records
        take_step(model, optimizer, 1, bad=math.nan, bad_index=2)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "step 1" in record.message and "'2.weight'" in record.message
    assert ("was skipped" if skips else "taken all the same") in record.message


def test_many_steps_that_are_taken_all_the_same_are_told_ever_more_rarely(caplog: pytest.LogCaptureFixture) -> None:
    model = make_model()
    optimizer = fastguard.wrap(_sgd(model), model, skip_nonfinite=False, check_every=0)
    for step in range(40):
        take_step(model, optimizer, step, bad=math.nan)
    said = [record.getMessage().partition(":")[0] for record in caplog.records]
    assert said == [f"step {step}" for step in (*range(9), 16, 32)]


def test_a_scalers_skips_are_quieter(caplog: pytest.LogCaptureFixture) -> None:
    model = make_model()
    optimizer = fastguard.wrap(_sgd(model), model)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(loss_at(model, 0)).backward()
    poison(model, math.inf)
    with caplog.at_level(logging.INFO, "fastguard"):
        scaler.step(optimizer)
    assert [record.levelno for record in caplog.records] == [logging.INFO]


def test_a_backend_that_cannot_serve_the_parameters_device() -> None:
    if not kernels.backends()["cpu"].available:
        pytest.skip("without the extension the backend is refused for that reason")
    elsewhere = torch.nn.Linear(2, 2, device="meta")
    with pytest.raises(BackendUnavailableError, match="`backend` 'cpu' cannot serve tensors on meta"):
        fastguard.wrap(torch.optim.SGD(elsewhere.parameters(), lr=0.1), backend="cpu")


def test_fsdp_is_refused() -> None:
    class FullyShardedDataParallel(torch.nn.Linear):
        """As torch's: known by its name, so that torch.distributed need not be imported."""

    model = torch.nn.Sequential(FullyShardedDataParallel(2, 2))
    with pytest.raises(TypeError, match="must not be sharded, got a FullyShardedDataParallel module"):
        fastguard.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model)


def test_a_lone_sink_is_refused_with_the_remedy() -> None:
    with pytest.raises(TypeError, match=r"`sinks` must be a list of sinks, got MemorySink.*\. Pass \[sink\] for one"):
        fastguard.wrap(_sgd(make_model()), sinks=fastguard.MemorySink())
    with pytest.raises(TypeError, match=r"`sinks` must be a list of sinks, got 'run.jsonl'"):
        fastguard.wrap(_sgd(make_model()), sinks="run.jsonl")


def test_a_process_group_that_this_process_is_not_in_is_refused() -> None:
    with pytest.raises(TypeError, match=r"`process_group` must be a process group that this process is in, got -100"):
        fastguard.wrap(_sgd(make_model()), process_group=-100)  # torch's NON_GROUP_MEMBER


@pytest.mark.parametrize(("dtype", "max_norm"), [(torch.int64, None), (torch.float8_e4m3fn, 1e-3)])
def test_a_gradient_that_cannot_be_served_is_told_by_its_name(dtype: torch.dtype, max_norm: float | None) -> None:
    model = make_model()
    loss_at(model, 0).backward()
    next(model.parameters()).grad = None
    model.register_parameter("odd", nn.Parameter(torch.ones(3).to(dtype), requires_grad=False))
    optimizer = fastguard.wrap(_sgd(model), model, max_norm=max_norm)
    model.odd.grad = torch.ones(3).to(dtype)
    with pytest.raises(fastguard.UnsupportedTensorError, match=r"`odd\.grad` must be .*, got .* - at optimizer\.step"):
        optimizer.step()
