"""Every optimizer is guarded at its first step, with the losses that the script computes; training does not notice."""

import os
import random

import pytest
import torch
import torch.nn.functional as F
from script_trainings import TRAININGS, around_another, batch, gan, nan_at_step_6, net, plain, watching
from torch import nn
from torch.optim.optimizer import _global_optimizer_pre_hooks as global_hooks

import fastguard
from fastguard.experiments.auto import find_model
from fastguard.step import judge

REPLACED = [
    (torch.autograd, "backward"),
    (torch.amp.GradScaler, "scale"),
    (torch.amp.GradScaler, "update"),
    (nn.Module, "eval"),
    (torch.optim.Optimizer, "_patch_step_function"),
    (torch._C._nn, "cross_entropy_loss"),
    (torch, "binary_cross_entropy_with_logits"),
]


def _trained(training):
    torch.manual_seed(3)
    random.seed(3)
    tensors = [t for model in training() for t in model.state_dict().values()]
    return [*tensors, torch.get_rng_state(), torch.tensor(random.getrandbits(32))]


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
@pytest.mark.parametrize("training", TRAININGS, ids=lambda training: training.__name__)
def test_training_is_bit_identical_and_torch_is_left_as_it_was(training):
    before = [getattr(owner, name) for owner, name in REPLACED]
    expected = _trained(training)
    with watching() as auto:
        found = _trained(training)
    assert all(torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0)) for one, other in zip(found, expected))
    assert auto.guards and not auto.problems
    assert [getattr(owner, name) for owner, name in REPLACED] == before
    assert not global_hooks


def test_every_optimizer_has_a_guard_that_knows_its_model():
    with watching() as auto:
        generator, critic = gan()
    assert [guard.model for guard in auto.guards] == [critic, generator]
    assert [len(auto.records(index)) for index in (0, 1)] == [10, 10]
    with watching() as auto:
        around_another()
    assert [len(auto.records())] == [8], "the inner optimizer has no guard of its own"


def _steps(model, part):
    optimizer = torch.optim.SGD(part.parameters(), lr=1e-2)
    for _ in range(4):
        x, y, _ = batch()
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return optimizer


class _Columns(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList([net(), net()])
        self.active = 0

    def forward(self, x):
        return self.parts[self.active](x)


def test_the_parts_of_a_model_that_optimizers_train_in_turn_are_not_left_out():
    model, optimizers = _Columns(), []
    with watching() as auto:
        for index, part in enumerate(model.parts):
            model.active = index
            optimizers.append(_steps(model, part))
    assert [guard.history.model.not_in_optimizer for guard in auto.guards] == [(), ()]
    assert all(guard.history.model.initialization for guard in auto.guards)


def test_weights_of_a_copy_that_trains_later_are_no_initialization():
    models = [net(), net()]
    with watching() as auto:
        for model in models:
            _steps(model, model)
    first, second = (guard.history.model for guard in auto.guards)
    assert first.names == second.names
    assert first.initialization and not second.initialization


def test_a_nan_is_recorded_and_skipped_only_under_protection():
    with watching() as auto:
        plain()
        (model,) = nan_at_step_6()
    assert not all(p.isfinite().all() for p in model.parameters())
    assert not any(record.skipped for record in auto.records(1))
    with watching(protects=True, max_norm=0.1) as auto:
        (model,) = nan_at_step_6()
    assert all(p.isfinite().all() for p in model.parameters())
    assert [record.step for record in auto.records() if record.skipped] == [6]
    assert all(record.clipped for record in auto.records() if not record.skipped)


def test_an_optimizer_with_a_guard_of_its_own_is_left_alone():
    model = net()
    with watching() as auto:
        optimizer = fastguard.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, max_norm=1.0)
        F.cross_entropy(model(batch()[0]), batch()[1]).backward()
        optimizer.step()
    assert auto.guards == [] and auto.others == [optimizer.guard]


def test_what_steps_within_the_backward_pass_is_named():
    model = net()
    with watching() as auto:
        optimizers = {p: torch.optim.SGD([p], lr=1e-3) for p in model.parameters()}
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(lambda p: optimizers[p].step())
        F.cross_entropy(model(batch()[0]), batch()[1]).backward()
    assert auto.guards == [] and "wrap_backward" in auto.problems["SGD"]


@pytest.mark.parametrize("where", ["wrap", "settings", "measure", "observe"])
def test_no_error_of_ours_reaches_the_training(where, monkeypatch):
    expected = _trained(plain)

    def fail(*_, **__):
        raise ZeroDivisionError("injected")

    with watching() as auto:
        if where == "wrap":
            monkeypatch.setattr("fastguard.experiments.auto.wrap", fail)
        elif where == "settings":
            auto._settings = fail
        elif where == "measure":
            monkeypatch.setattr(judge.Judge, "_measure", fail)
        else:
            monkeypatch.setattr(fastguard.Guard, "observe", fail)
        found = _trained(plain)
    assert all(map(torch.equal, found, expected))
    assert "injected" in " ".join(auto.problems.values())


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_a_guarded_model_can_be_scripted():
    with watching() as auto:
        (model,) = plain()
        scripted = torch.jit.script(model.eval())
        x, _, _ = batch()
        assert torch.equal(scripted(x), model(x))
        assert auto.guards[0].model is model and len(model._forward_hooks) == 1, "its hook is there again"


class Fails(torch.autograd.Function):
    """Raises in its backward pass."""

    num_calls = 0

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, *gradients):
        Fails.num_calls += 1
        raise ValueError("of the script")


@pytest.mark.parametrize("after", [0, 2, 12], ids="after {} steps".format)
def test_an_error_in_the_backward_pass_is_the_scripts(after):
    model, Fails.num_calls = net(), 0
    with watching() as auto:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        for _ in range(after):
            F.cross_entropy(model(batch()[0]), batch()[1]).backward()
            optimizer.step()
        for _ in range(2):
            with pytest.raises(ValueError, match="of the script"):
                Fails.apply(model(batch()[0]).sum()).backward()
    assert Fails.num_calls == 2
    assert not auto.problems


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no os.fork here")
def test_a_forked_child_is_not_guarded():
    with watching() as auto:
        plain()
        child = os.fork()
        if not child:
            plain()
            os._exit(len(auto.guards) - 1)
        assert os.waitpid(child, 0)[1] == 0


class Holder(nn.Module):
    """Holds two models, and has no `forward`, as a LightningModule of a GAN may have none."""

    def __init__(self):
        super().__init__()
        self.first, self.second = net(), net()


def test_finds_the_model_that_is_called():
    holder, wrapper = Holder(), nn.ModuleList([nn.Sequential(net())])
    assert find_model(holder.second.parameters())[0] is holder.second
    assert find_model(holder.parameters())[0] is holder
    assert find_model(wrapper.parameters())[0] is wrapper[0]
    encoder, decoder = nn.Linear(8, 40), nn.Linear(40, 3)
    model, names = find_model([*decoder.parameters(), *encoder.parameters()])
    assert model is encoder
    assert [names[p] for p in decoder.parameters()] == ["Linear2.weight", "Linear2.bias"]
    assert find_model([torch.zeros(2, requires_grad=True)]) == (None, {})
    parallel = nn.DataParallel(net())
    assert find_model(parallel.parameters())[0] is parallel
