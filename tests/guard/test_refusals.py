"""What `wrap` refuses, what `observe` refuses, and the error that ends a run of skips: messages are part of it."""

from __future__ import annotations

import logging
import math
import re
from typing import Any

import pytest
import torch
from guard_helpers import assert_identical, gradients, loss_at, make_model, poison, snapshot, take_step
from torch import nn

import fastguard
from fastguard import BackendUnavailableError, kernels
from fastguard.integrations.common import checked
from fastguard.kernels.registry import BACKENDS


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


@pytest.mark.parametrize("max_norm", [0, 0.0, -1.0, -math.inf, math.nan, True, "1.0", 1j, [1.0]])
def test_max_norm_must_be_a_positive_number(max_norm: Any) -> None:
    optimizer = _sgd(make_model())
    with pytest.raises(ValueError, match=r"`max_norm` must be a number > 0, got"):
        fastguard.wrap(optimizer, max_norm=max_norm)
    assert vars(optimizer).keys() == vars(_sgd(make_model())).keys()
    assert not optimizer._optimizer_step_pre_hooks


_model = make_model()
_policy = "`clip` must be a clip policy such as GlobalNorm(1.0), got "
_is_model = "`optimizer` must be a torch.optim.Optimizer, got the model Sequential. "
MISTAKES = {
    "parameters": ((_sgd(_model), _model.parameters()), {}, "got a generator. Pass the model itself, not its param"),
    "swapped": ((_model, _sgd(_model)), {}, _is_model + "The two are swapped: wrap(optimizer, model)."),
    "only a model": ((_model,), {}, _is_model + "Pass the optimizer first: wrap(optimizer, model)."),
    "a number": ((_sgd(_model), 1.0), {}, "`model` must be a torch.nn.Module, got a float. Write max_norm=1.0."),
    "two optimizers": ((_sgd(_model), _sgd(_model)), {}, "Pass several optimizers as a list: wrap([first, second]"),
    "three": ((_sgd(_model), _model, 1.0), {}, "only optimizer, model without a name. Write max_norm=1.0."),
    "misspelt": ((_sgd(_model),), {"maxnorm": 1}, "`wrap` has no argument `maxnorm`. Did you mean `max_norm`?"),
    "unknown": ((_sgd(_model),), {"zzz": 1}, "`wrap` has no argument `zzz`. Known names: activations, backend"),
    "clip a number": ((_sgd(_model),), {"clip": 1.0}, _policy + "1.0. Write max_norm=1.0."),
    "clip a class": ((_sgd(_model),), {"clip": fastguard.Spikes}, "Write clip=Spikes()."),
    "clip a name": ((_sgd(_model),), {"clip": "norm"}, _policy + "'norm'"),
    "a policy as number": ((_sgd(_model),), {"max_norm": fastguard.Spikes()}, "got a clip policy. Write clip=Spikes()"),
}


@pytest.mark.parametrize(("given", "named", "message"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes_are_told_with_what_to_write(given: Any, named: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=re.escape(message)):
        fastguard.wrap(*given, **named)
    assert not any(hasattr(one, "guard") for one in given)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: fastguard.Spikes(window="128"), "`window` must be an integer >= 32, got '128'"),
        (lambda: fastguard.Spikes(ratio="2"), "`ratio` must be a number > 1, got '2'"),
        (lambda: fastguard.ZClip(alpha=1.0), "`alpha` must be a number between 0 and 1, got 1.0"),
        (lambda: fastguard.clip_grad_norm_(_model, 1.0), "Write clip_grad_norm_(model.parameters(), max_norm)."),
        (lambda: checked({"maxnorm": 1}), "`fastguard.wrap` has no argument `maxnorm`. Did you mean `max_norm`?"),
        (lambda: checked({"max_norm": -1}), "`max_norm` must be a number > 0, got -1"),
        (lambda: checked({"backend": "gpu"}), f"`backend` must be one of [auto, {', '.join(BACKENDS)}], got 'gpu'"),
        (lambda: checked({"max_norm": 1, "clip": fastguard.Spikes()}), "`max_norm` and `clip` must not both be given"),
        (lambda: checked({"max_consecutive_skips": 2.5}), "`max_consecutive_skips` must be an integer >= 1, got 2.5"),
        (lambda: checked({"on_guarded": "keep"}), "`on_guarded` must be one of"),
    ],
)
def test_mistakes_in_policies_and_callbacks_are_told_when_they_are_made(make: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        make()


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
    loss_at(model, 0).backward()
    optimizer.step()
    assert optimizer.guard.last.tensors.names == ("0.weight", "0.bias", "group0.param2")


@pytest.mark.parametrize("sink", [3, "log.jsonl", fastguard.MemorySink])
def test_a_sink_that_is_none(sink: Any) -> None:
    optimizer = _sgd(make_model())
    with pytest.raises(TypeError, match="`sink` must be an object with"):
        fastguard.wrap(optimizer, sinks=[sink])
    assert not optimizer._optimizer_step_pre_hooks and not hasattr(optimizer, "guard")


def _in_backward(model: nn.Module) -> Any:
    return fastguard.wrap_backward(model, {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()})


@pytest.mark.parametrize("wrap", [lambda model: fastguard.wrap(_sgd(model), model), _in_backward])
def test_lazy_parameters_must_be_initialized(wrap: Any) -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.LazyLinear(4))
    with pytest.raises(ValueError, match=r"got 2 of lazy modules\. Run one forward pass before wrapping it\."):
        wrap(model)
    model(torch.ones(2, 6))
    assert wrap(model)


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


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"loss": torch.ones(2, 3)}, "`loss` must be a scalar, got a tensor of shape (2, 3). Reduce it"),
        ({"val_loss": torch.ones(2, 3)}, "`val_loss` must be a scalar, got a tensor of shape (2, 3). Reduce it"),
        ({"loss": [1.0]}, "`loss` must be a number or a tensor of one element, got a list."),
        ({"loss": 1.0, "accuracy": 0.3}, "`observe` takes `loss` and `val_loss`, got accuracy. Log it with"),
    ],
)
def test_observe_needs_a_scalar(given: dict[str, Any], message: str) -> None:
    model = make_model()
    optimizer = fastguard.wrap(_sgd(model), model)
    take_step(model, optimizer, 0)
    with pytest.raises((TypeError, ValueError), match=f"^{re.escape(message)}"):
        optimizer.guard.observe(**given)
    assert (optimizer.guard.last.loss, optimizer.guard.last.val_loss) == (None, None)
    with pytest.raises(ValueError, match=r"got that of an optimizer\. Save guard\.state_dict\(\) beside"):
        optimizer.guard.load_state_dict(optimizer.state_dict())


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
