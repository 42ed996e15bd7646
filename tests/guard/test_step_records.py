"""What is recorded of a step, and how it reaches history and sinks: exactly one record a step, the last one too."""

import dataclasses
import gc
import math

import pytest
import torch
from guard_helpers import clip_by_torch, gradients, guarded_model, loss_at, make_model, take_step, true_norm
from torch import nn

import fastguard

NAMES = ("0.weight", "0.bias", "2.weight", "2.bias")


def _sgd(model, lr=0.1):
    return torch.optim.SGD(model.parameters(), lr=lr)


class Recording(fastguard.MemorySink):
    """Also counts how often it was closed."""

    num_closed = 0

    def close(self):
        self.num_closed += 1


def test_every_field(backend):
    model = make_model()
    optimizer = fastguard.wrap(_sgd(model, lr=0.25), model, max_norm=0.1, backend=backend)
    assert optimizer.guard.last is None
    loss = loss_at(model, 0)
    loss.backward()
    model[2].bias.grad[1] = 0.0
    whole = [g.clone() for g in gradients(model)]
    flat = torch.cat([g.reshape(-1) for g in whole]).double()
    optimizer.step()
    optimizer.guard.observe(loss=loss, val_loss=0.5)

    last = optimizer.guard.last
    assert last is optimizer.guard.last
    assert last.step == 0
    assert last.norm == pytest.approx(float(flat.norm()), rel=1e-6)
    assert last.clip_coef == pytest.approx(0.1 / (float(flat.norm()) + 1e-6), rel=1e-6)
    assert (last.clipped, last.skipped, last.is_finite, last.nonfinite) == (True, False, True, [])
    assert (last.loss, last.val_loss, last.lr, last.loss_scale) == (loss.item(), 0.5, 0.25, None)

    total = last.gradients
    assert total.norm == last.norm
    assert total.max_val == float(flat.abs().max())
    assert total.min_val == float(flat[flat != 0].abs().min())
    assert total.mean == pytest.approx(float(flat.mean()), rel=1e-6, abs=1e-9)
    assert total.std == pytest.approx(float(flat.std(correction=0)), rel=1e-6)
    assert (total.num_zeros, total.num_nans, total.num_infs, total.total_elements) == (1, 0, 0, flat.numel())

    assert last.tensors.names == NAMES
    for name, gradient in zip(NAMES, whole, strict=True):
        assert last.tensors[name].norm == pytest.approx(true_norm([gradient]), rel=1e-6)
        assert last.tensors[name].numel == gradient.numel()
    for field in dataclasses.fields(last):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(last, field.name, None)


def test_bad_tensors_are_named_in_backward_order(backend):
    model, optimizer = guarded_model(backend=backend)
    loss_at(model, 0).backward()
    model[0].weight.grad[0, 0] = math.nan
    model[2].weight.grad[1, 1] = -math.inf
    model[2].weight.grad[2, 2] = math.inf
    model[0].bias.grad[3] = math.nan
    optimizer.step()
    last = optimizer.guard.last
    assert last.nonfinite == ["2.weight", "0.bias", "0.weight"]
    assert math.isnan(last.norm)
    assert (last.gradients.num_nans, last.gradients.num_infs) == (2, 2)
    assert last.tensors["2.weight"].norm == math.inf
    assert math.isfinite(last.tensors["2.bias"].norm)
    assert math.isfinite(last.gradients.max_val)  # of the finite elements
    assert (last.skipped, last.clip_coef, last.clipped) == (True, 1.0, False)


@pytest.mark.parametrize("by", ["model", "named parameters", "place"])
def test_names(by):
    """Those of the model go before the optimizer's own; without either, a parameter goes by its group and place."""
    model = make_model()
    named = [(f"mine.{n}" if by == "model" else n, p) for n, p in model.named_parameters()]
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters()}]
    optimizer = torch.optim.SGD(groups if by == "place" else named, lr=0.1)
    fastguard.wrap(optimizer, model if by == "model" else None)
    take_step(model, optimizer, 0)
    placed = ("group0.param0", "group0.param1", "group1.param0", "group1.param1")
    assert optimizer.guard.last.tensors.names == (placed if by == "place" else NAMES)


def test_a_part_that_is_really_called_module_keeps_its_name_where_needed():
    model = nn.ModuleDict({"module": nn.Linear(2, 2), "other": nn.Linear(2, 2)})
    model.register_parameter("bias", nn.Parameter(torch.ones(1)))  # "module.bias" stripped would be this one
    optimizer = fastguard.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    expected = {"bias", "module.weight", "module.bias", "other.weight", "other.bias"}
    assert set(optimizer.guard.last.tensors.names) == expected


def test_names_outlive_a_model_made_only_for_wrap():
    first, second, scale = nn.Linear(2, 2), nn.Linear(2, 2), nn.Parameter(torch.ones(()))
    second.bias.requires_grad_(False)
    optimizer = torch.optim.SGD([scale, *first.parameters(), second.weight], lr=0.1)
    whole = nn.ModuleDict({"encoder": first, "decoder": second})
    whole.scale = scale
    fastguard.wrap(optimizer, whole)
    del whole
    (second(first(torch.ones(1, 2))).sum() * scale).backward()
    optimizer.step()
    assert optimizer.guard.last.tensors.names == ("scale", "encoder.weight", "encoder.bias", "decoder.weight")
    optimizer.guard.flush()
    assert optimizer.guard.history.model.without_gradient == ("decoder.bias",)


def test_a_new_parameter_is_not_called_as_one_that_is_gone():
    model = nn.Linear(2, 2)
    optimizer = fastguard.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    del model
    group = optimizer.param_groups[0]
    group["params"] = []
    group["params"] = [nn.Parameter(torch.ones(2)) for _ in range(8)]
    for p in group["params"]:
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert optimizer.guard.last.tensors.names == tuple(f"group0.param{i}" for i in range(8))


def test_a_record_is_delivered_when_the_next_step_begins():
    model = make_model()
    sink, seen = Recording(), []
    optimizer = fastguard.wrap(_sgd(model), model, sinks=[sink, seen.append])
    for step in range(4):
        take_step(model, optimizer, step)
        optimizer.guard.observe(loss=float(step))
        assert [record.step for record in sink.records] == list(range(step))
    optimizer.guard.flush()
    optimizer.guard.flush()
    assert sink.series("step") == optimizer.guard.history.step == [0, 1, 2, 3]
    assert sink.series("loss") == [0.0, 1.0, 2.0, 3.0]
    assert [record.step for record in seen] == [0, 1, 2, 3]


@pytest.mark.parametrize("ending", ["drop", "detach", "close"])
def test_the_last_record_is_delivered_at_the_end(ending):
    model, sink = make_model(), Recording()
    optimizer = fastguard.wrap(_sgd(model), model, sinks=[sink])
    for step in range(2):
        take_step(model, optimizer, step)
    guard = optimizer.guard
    if ending != "drop":
        getattr(guard, ending)()
        guard.detach()
        take_step(model, optimizer, 2)  # is not recorded any more
    del optimizer, guard
    gc.collect()
    assert (sink.series("step"), sink.num_closed) == ([0, 1], int(ending == "close"))


def test_a_bad_batch_is_one_message(caplog):
    model, optimizer = guarded_model()
    for step in range(40):
        take_step(model, optimizer, step, bad=math.nan if step == 30 else None)
        optimizer.guard.observe(loss=math.nan if step == 30 else math.exp(-step / 100))
    found = {finding.rule for finding in optimizer.guard.report().findings}
    assert found >= {"non-finite-gradients", "non-finite-loss"}
    (message,) = (record.getMessage() for record in caplog.records if record.levelname != "INFO")
    assert message.startswith("step 30: gradients are not finite")


@pytest.mark.long_interpreted
def test_trap_2_10_another_clipper_that_ran_first_is_noticed(caplog):
    model = make_model()
    optimizer = fastguard.wrap(_sgd(model, lr=0.01), model, max_norm=1.0)
    for step in range(12):
        take_step(model, optimizer, step, before_step=lambda: clip_by_torch(model, 0.05))
    report = optimizer.guard.report()
    finding = next(f for f in report.findings if f.rule == "already-clipped")
    assert finding.evidence["norm"] == pytest.approx(0.05, rel=1e-3)
    assert not caplog.records  # looked for every 32 steps
    for step in range(12, 70):
        take_step(model, optimizer, step, before_step=lambda: clip_by_torch(model, 0.05))
    assert [record.levelname for record in caplog.records] == ["WARNING"]  # said once, while training runs
    assert "0.05" in caplog.text


def test_overhead_is_measured_at_every_step():
    model, optimizer = guarded_model()
    for step in range(3):
        take_step(model, optimizer, step, closure=step == 1)
    optimizer.guard.flush()
    assert optimizer.guard.history.num_timed == 3
    assert all(0.0 < entry.overhead_s < 1.0 for entry in optimizer.guard.history.recent)


@pytest.mark.parametrize("as_dict", [False, True])
def test_names_of_master_copies_are_those_that_are_given(as_dict):
    model = make_model(dtype=torch.bfloat16)
    masters = [p.detach().float().requires_grad_() for p in model.parameters()]
    optimizer = torch.optim.SGD(masters, lr=0.1)
    with pytest.raises(ValueError, match="say by `names` what they are called, if they are copies"):
        fastguard.wrap(optimizer, model)
    names = [f"module.{name}" for name, _ in model.named_parameters()]
    fastguard.wrap(optimizer, model, names=dict(zip(masters, names)) if as_dict else names)
    for step in range(3):
        loss_at(model, step).backward()
        for p, master in zip(model.parameters(), masters, strict=True):
            master.grad, p.grad = p.grad.float(), None
        optimizer.step()
        with torch.no_grad():
            for p, master in zip(model.parameters(), masters, strict=True):
                p.copy_(master)
    assert optimizer.guard.last.tensors.names == NAMES
    assert optimizer.guard.history.model.not_in_optimizer == ()


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["a"], "must have one name for each of the optimizer's 4 parameters, got 1"),
        ("abcd", "got a string"),
        (["a", "b", "c", "module.a"], "must all be different"),
        ({nn.Parameter(torch.ones(1)): "a"}, "got a key that is none of them"),
    ],
)
def test_names_that_do_not_fit_are_refused(names, message):
    with pytest.raises(ValueError, match=f"`names` .*{message}"):
        fastguard.wrap(torch.optim.SGD(make_model().parameters(), lr=0.1), names=names)


def test_names_without_pefts_prefix():
    model = nn.Module()
    model.base_model = nn.Module()
    model.base_model.model = make_model()
    optimizer = fastguard.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model)
    assert optimizer.guard._run.names(0) == NAMES
