"""What `wrap` refuses, also of what has a guard already, what ends a run, and how it is said."""

import logging
import math
import re

import pytest
import torch
from guard_helpers import (
    assert_identical,
    gradients,
    guarded_model,
    loss_at,
    make_model,
    poison,
    snapshot,
    take_step,
    train,
)
from torch import nn

import fastguard
from fastguard import BackendUnavailableError
from fastguard.integrations.common import checked
from fastguard.kernels.registry import BACKENDS


def _sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


_model = make_model()
_lazy = nn.Sequential(nn.Linear(6, 4), nn.LazyLinear(4))
_sharded = nn.Sequential(type("FullyShardedDataParallel", (nn.Linear,), {})(2, 2))  # known by its name
_policy = "`clip` must be a clip policy such as GlobalNorm(1.0), got "
_is_model = "`optimizer` must be a torch.optim.Optimizer, got the model Sequential. "
_elsewhere = nn.Linear(2, 2, device="meta")
MISTAKES = {
    "parameters": ((_sgd(_model), _model.parameters()), {}, "got a generator. Pass the model itself, not its param"),
    "swapped": ((_model, _sgd(_model)), {}, _is_model + "The two are swapped: wrap(optimizer, model)."),
    "only a model": ((_model,), {}, _is_model + "Pass the optimizer first: wrap(optimizer, model)."),
    "nothing": ((None,), {}, "`optimizer` must be a torch.optim.Optimizer"),
    "a number": ((_sgd(_model), 1.0), {}, "`model` must be a torch.nn.Module, got a float. Write max_norm=1.0."),
    "two optimizers": ((_sgd(_model), _sgd(_model)), {}, "Pass several optimizers as a list: wrap([first, second]"),
    "three": ((_sgd(_model), _model, 1.0), {}, "only optimizer, model without a name. Write max_norm=1.0."),
    "misspelt": ((_sgd(_model),), {"maxnorm": 1}, "`wrap` has no argument `maxnorm`. Did you mean `max_norm`?"),
    "unknown": ((_sgd(_model),), {"zzz": 1}, "`wrap` has no argument `zzz`. Known names: activations, backend"),
    "clip a number": ((_sgd(_model),), {"clip": 1.0}, _policy + "1.0. Write max_norm=1.0."),
    "clip a class": ((_sgd(_model),), {"clip": fastguard.Spikes}, "Write clip=Spikes()."),
    "clip a name": ((_sgd(_model),), {"clip": "norm"}, _policy + "'norm'"),
    "a policy as number": ((_sgd(_model),), {"max_norm": fastguard.Spikes()}, "got a clip policy. Write clip=Spikes()"),
    "a negative norm": ((_sgd(_model),), {"max_norm": -1.0}, "`max_norm` must be a number > 0, got -1.0"),
    "no sink": ((_sgd(_model),), {"sinks": [3]}, "`sink` must be an object with"),
    "a lone sink": ((_sgd(_model),), {"sinks": fastguard.MemorySink()}, "`sinks` must be a list of sinks, got Memory"),
    "a path": ((_sgd(_model),), {"sinks": "run.jsonl"}, "`sinks` must be a list of sinks, got 'run.jsonl'"),
    "no group": ((_sgd(_model),), {"process_group": -100}, "`process_group` must be a process group that this process"),
    "no objective": ((_sgd(_model),), {"objective": "max"}, "`objective` must be None or one of ['minimise', 'game', "),
    "an odd interval": ((_sgd(_model),), {"check_every": 1.5}, "`check_every` must be an integer >= 0, got"),
    "no clip_through": ((_sgd(_model),), {"clip_through": "magic"}, "`clip_through` must be one of ['"),
    "no ranks": ((_sgd(_model),), {"ranks": "some"}, "`ranks` must be one of ['"),
    "lazy": ((_sgd(_lazy), _lazy), {}, "got 2 of lazy modules. Run one forward pass before wrapping it."),
    "FSDP": ((_sgd(_sharded), _sharded), {}, "must not be sharded, got a FullyShardedDataParallel module"),
    "a stranger": ((_sgd(_model), make_model()), {}, "`model` must hold parameters of `optimizer`"),
    "none": (([],), {}, "at least one"),
    "twice": (([_sgd(_model)] * 2,), {}, "twice"),
    "shared": (([_sgd(_model), _sgd(_model)],), {}, "share no parameters, whose gradients would count twice"),
    "elsewhere": ((_sgd(_elsewhere),), {"backend": "cpu"}, "'cpu' cannot "),
}


@pytest.mark.parametrize(("given", "named", "message"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes_are_told_with_what_to_write(given, named, message):
    with pytest.raises((TypeError, ValueError, BackendUnavailableError), match=re.escape(message)):
        fastguard.wrap(*given, **named)
    for one in given:
        assert not hasattr(one, "guard") and not getattr(one, "_optimizer_step_pre_hooks", None)


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
def test_mistakes_in_policies_and_callbacks_are_told_when_they_are_made(make, message):
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        make()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"loss": torch.ones(2, 3)}, "`loss` must be a scalar, got a tensor of shape (2, 3). Reduce it"),
        ({"val_loss": torch.ones(2, 3)}, "`val_loss` must be a scalar, got a tensor of shape (2, 3). Reduce it"),
        ({"loss": [1.0]}, "`loss` must be a number or a tensor of one element, got a list."),
        ({"loss": 1.0, "accuracy": 0.3}, "`observe` takes `loss` and `val_loss`, got accuracy. Log it with"),
    ],
)
def test_observe_needs_a_scalar_and_a_step(given, message):
    model, optimizer = guarded_model()
    take_step(model, optimizer, 0)
    with pytest.raises((TypeError, ValueError), match=f"^{re.escape(message)}"):
        optimizer.guard.observe(**given)
    assert (optimizer.guard.last.loss, optimizer.guard.last.val_loss) == (None, None)
    optimizer.guard.flush()
    with pytest.raises(RuntimeError, match=r"`observe` must follow a step.*after optimizer\.step\(\)"):
        optimizer.guard.observe(loss=1.0)
    with pytest.raises(ValueError, match=r"got that of an optimizer\. Save guard\.state_dict\(\) beside"):
        optimizer.guard.load_state_dict(optimizer.state_dict())


def test_a_run_of_skips_ends_in_an_error_that_names_tensors_and_steps():
    model, optimizer = guarded_model(max_consecutive_skips=2)
    for step in range(9):  # a good step ends a run
        take_step(model, optimizer, step, bad=math.nan if step % 2 else None)
    before = snapshot(model, optimizer)
    take_step(model, optimizer, 9, bad=math.nan, bad_index=3)
    with pytest.raises(fastguard.NonFiniteGradientsError) as caught:
        take_step(model, optimizer, 10, bad=math.inf, bad_index=1)
    assert (caught.value.steps, caught.value.tensors) == ([9, 10], ["2.bias", "0.bias"])  # those of this run alone
    assert "2 steps in a row (steps 9 to 10)" in str(caught.value) and "2.bias, 0.bias" in str(caught.value)
    assert_identical(snapshot(model, optimizer), before)
    assert all(g is not None for g in gradients(model))
    take_step(model, optimizer, 11)  # who goes on may
    assert not optimizer.guard.last.skipped and not torch.equal(model[0].weight, before["parameters"]["0.weight"])
    assert optimizer.guard.history.step == list(range(11))  # the record of the step that raised is not lost
    by_default = fastguard.wrap(_sgd(make_model()))
    for p in by_default.param_groups[0]["params"]:
        p.grad = torch.full_like(p, math.nan)
    for _ in range(24):
        by_default.step()
    with pytest.raises(fastguard.NonFiniteGradientsError):
        by_default.step()


def test_a_norm_that_overflows_is_not_finite():
    model = nn.Linear(2, 1, bias=False).double()
    optimizer = fastguard.wrap(_sgd(model), model, max_consecutive_skips=1)
    model.weight.grad = torch.full_like(model.weight, 1.5e308)
    with pytest.raises(fastguard.NonFiniteGradientsError, match=r"weight|only their norm overflowed"):
        optimizer.step()
    assert optimizer.guard.last.norm == math.inf


@pytest.mark.parametrize("kind", ["skipped", "taken", "a scaler's"])
def test_skips_are_loud(kind, caplog):
    model, optimizer = guarded_model(skip_nonfinite=kind != "taken", check_every=0)
    scaler = torch.amp.GradScaler("cpu", enabled=kind == "a scaler's")
    with caplog.at_level(logging.INFO, "fastguard"):
        for step in range(41 if kind == "taken" else 2):
            optimizer.zero_grad()
            scaler.scale(loss_at(model, step)).backward()
            if step:
                poison(model, index=2)
            scaler.step(optimizer)
            scaler.update()
    record, *others = caplog.records
    assert record.levelno == (logging.INFO if kind == "a scaler's" else logging.WARNING)
    assert "step 1" in record.message and "'2.weight'" in record.message
    assert ("taken all the same" if kind == "taken" else "was skipped") in record.message
    rarely = [f"step {step}" for step in (*range(2, 10), 17, 33)]  # ever more so
    assert [r.getMessage().partition(":")[0] for r in others] == (rarely if kind == "taken" else [])
    if kind == "taken":
        assert (optimizer.guard.history.num_nonfinite, optimizer.guard.history.num_skipped) == (39, 0)


@pytest.mark.parametrize(("dtype", "max_norm"), [(torch.int64, None), (torch.float8_e4m3fn, 1e-3)])
def test_a_gradient_that_cannot_be_served_is_told_by_its_name(dtype, max_norm):
    model = make_model()
    loss_at(model, 0).backward()
    next(model.parameters()).grad = None
    model.register_parameter("odd", nn.Parameter(torch.ones(3).to(dtype), requires_grad=False))
    optimizer = fastguard.wrap(_sgd(model), model, max_norm=max_norm)
    model.odd.grad = torch.ones(3).to(dtype)
    with pytest.raises(fastguard.UnsupportedTensorError, match=r"`odd\.grad` must be .*, got .* - at optimizer\.step"):
        optimizer.step()


SETTINGS = {
    "nothing": dict,
    "max_norm": lambda: {"max_norm": 1.0},
    "a policy": lambda: {"clip": fastguard.PerGroup({"0.*": 0.5, "*": fastguard.Percentile(90)})},
    "what is watched": lambda: {"activations": {"every": 5}, "weights": {"every": 3}},
    "recovery": lambda: {"recovery": fastguard.Recovery(every=20)},
    "names": lambda: {"names": ["a", "b", "c", "d"]},
}


@pytest.mark.parametrize("make", SETTINGS.values(), ids=SETTINGS.keys())
def test_the_same_settings_leave_the_guard_and_its_steps(make):
    model, optimizer = guarded_model(**make())
    train(model, optimizer, range(4))
    guard = optimizer.guard
    assert fastguard.wrap(optimizer, model, **make()) is optimizer
    assert optimizer.guard is guard
    take_step(model, optimizer, 4)
    assert guard.last.step == 4 and len(optimizer._optimizer_step_pre_hooks) == 1


@pytest.mark.parametrize(
    ("before", "after", "named"),
    [
        ({"max_norm": 1.0}, {"max_norm": 2.0}, "clip"),
        ({}, {"max_norm": 2.0}, "clip"),
        ({"clip": fastguard.Percentile(90)}, {"clip": fastguard.Percentile(95)}, "clip"),
        ({}, {"skip_nonfinite": False, "check_every": 7}, "skip_nonfinite, check_every"),
        ({"names": list("abcd")}, {"names": list("abce")}, "names"),
        ({"recovery": True}, {"recovery": fastguard.Recovery(every=7)}, "recovery"),
    ],
)
def test_other_settings_are_refused_by_name_or_replace(before, after, named):
    model, optimizer = guarded_model(**before)
    take_step(model, optimizer, 0)
    guard = optimizer.guard
    with pytest.raises(fastguard.AlreadyGuardedError, match=f"with another {named}. Use optimizer.guard, or.*replace"):
        fastguard.wrap(optimizer, model, **after)
    assert optimizer.guard is guard
    fastguard.wrap(optimizer, model, **after, on_guarded="replace")
    assert optimizer.guard is not guard and len(optimizer._optimizer_step_pre_hooks) == 1
    take_step(model, optimizer, 1)
    assert (guard.history.num_steps, optimizer.guard.last.step) == (1, 0)


def test_other_optimizers_or_another_model_are_refused():
    model = make_model()
    first, second = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model[0], model[2]))
    fastguard.wrap([first, second], model)
    assert fastguard.wrap([second, first], model) == [second, first]
    assert fastguard.wrap([first, second], nn.DataParallel(model))[0] is first  # the same one inside
    for given, of, named in ((first, model, "optimizers"), ([first, second], make_model(), "model")):
        with pytest.raises(fastguard.AlreadyGuardedError, match=f"another {named}"):
            fastguard.wrap(given, of)
    with pytest.raises(ValueError, match=r"`on_guarded` must be one of \['reuse', 'raise', 'replace'\], got 'again'"):
        fastguard.wrap(first, model, on_guarded="again")


def test_sinks_that_are_given_again_take_the_place_of_the_old_ones(tmp_path):
    """Otherwise the list that the rerun cell created would stay empty."""
    model, path = make_model(), tmp_path / "run.jsonl"
    first, both = fastguard.MemorySink(), fastguard.MemorySink()
    optimizer = fastguard.wrap(_sgd(model), model, sinks=[first, both, fastguard.JsonlSink(path)])
    old = optimizer.guard._ledger.sinks[2].sink
    train(model, optimizer, range(3))
    second = fastguard.MemorySink()
    fastguard.wrap(optimizer, model, sinks=[second, both, fastguard.JsonlSink(path)])
    with pytest.raises(ValueError, match="must be open to write"):
        old.write(optimizer.guard.last)
    train(model, optimizer, range(3, 5))
    fastguard.wrap(optimizer, model)  # none are given: these stay
    take_step(model, optimizer, 5)
    optimizer.guard.close()
    steps = [[r.step for r in sink.records] for sink in (first, second, both)]
    assert steps == [[0, 1, 2], [3, 4, 5], [0, 1, 2, 3, 4, 5]]
    log = fastguard.sinks.read_jsonl(path)
    assert [r["step"] for r in log] == [0, 1, 2, 3, 4, 5]


def test_a_guard_says_of_what_it_is_and_how_far():
    model, optimizer = guarded_model(max_norm=1.0)
    train(model, optimizer, range(2))
    assert repr(optimizer.guard) == "<fastguard.Guard of SGD at step 2, clip=GlobalNorm(1)>"
    assert "clip=None" in repr(fastguard.wrap(torch.optim.Adam(model.parameters()), model).guard)


def _refused_in_backward():
    model = make_model()
    params = list(model.parameters())
    yield model, {}, ValueError, "got an empty dict"
    yield model, {"3.weight": torch.optim.AdamW(params[:1])}, ValueError, "'3.weight', which it does not have"
    yield (
        model,
        {params[0]: torch.optim.AdamW(params[1:2])},
        ValueError,
        "an optimizer of it alone, got one of 1 for '0.weight'",
    )
    yield model, {params[0]: torch.optim.AdamW(params)}, ValueError, "got one of 4 for '0.weight'"
    yield model, torch.optim.AdamW(params), ValueError, r"steps all of its parameters at once. Write \{p: AdamW"
    yield model, {params[0]: 3}, TypeError, r"must be a torch\.optim\.Optimizer, got int"
    yield (
        make_model(),
        {p: torch.optim.AdamW([p]) for p in params},
        ValueError,
        "`model` must hold parameters of `optimizer`",
    )


@pytest.mark.parametrize(("model", "optimizers", "error", "message"), list(_refused_in_backward()))
def test_optimizers_that_cannot_step_in_the_backward_pass(model, optimizers, error, message):
    with pytest.raises(error, match=message):
        fastguard.wrap_backward(model, optimizers)
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    for given in optimizers.values() if isinstance(optimizers, dict) else [optimizers]:
        assert not isinstance(given, torch.optim.Optimizer) or "_guard" not in vars(given)


def test_a_cell_that_wraps_the_backward_pass_again():
    model = make_model()
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}
    guard = fastguard.wrap_backward(model, optimizers, max_norm=1.0)
    assert fastguard.wrap_backward(model, optimizers, max_norm=1.0) is guard
    with pytest.raises(fastguard.AlreadyGuardedError, match="another clip"):
        fastguard.wrap_backward(model, optimizers, max_norm=2.0)
    other = fastguard.wrap_backward(model, optimizers, max_norm=2.0, on_guarded="replace")
    loss_at(model, 0).backward()
    assert guard.last is None and other.last.step == 0
