"""Every optimizer is guarded at its first step, with the losses that the script computes; training does not notice."""

import contextlib
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


def _steps(step, number=8, num_losses=1):
    """Trains a model by `step(loss)`, after `num_losses` calls of `backward`; the AutoGuard, and the mean losses."""
    losses = []
    torch.manual_seed(0)
    model = net()
    with watching() as auto:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        for _ in range(number):
            optimizer.zero_grad()
            of_step = []
            for _ in range(num_losses):
                x, y, _ = batch()
                loss = F.cross_entropy(model(x), y)
                of_step.append(loss.item())
                step(loss)
            optimizer.step()
            losses.append(sum(of_step) / num_losses)
    return auto, losses


@pytest.mark.parametrize(
    ("step", "num_losses"),
    [
        (lambda loss: loss.backward(), 1),
        (lambda loss: loss.backward(), 3),
        (lambda loss: (loss / 3).backward(), 3),
        (lambda loss: (loss * (1 / 3)).backward(), 3),
        (lambda loss: torch.autograd.backward([loss]), 1),
        (lambda loss: loss.backward(torch.ones(())), 1),
        (lambda loss: torch.amp.GradScaler("cpu").scale(loss).backward(), 1),
    ],
    ids=["plain", "accumulated", "divided", "multiplied", "list", "with a gradient", "scaled"],
)
def test_the_loss_of_a_step_is_what_backward_was_called_on(step, num_losses):
    auto, expected = _steps(step, num_losses=num_losses)
    assert auto.seen("loss") == pytest.approx(expected, rel=1e-6)
    assert auto.guards[0].history.model.loss_ops[0] in ("NllLossBackward0", "DivBackward0", "MulBackward0")


def test_a_step_that_the_scaler_skips_has_no_loss():
    model, losses = net(), []
    with watching() as auto:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for i in range(8):
            x, y, _ = batch()
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            scaler.scale(loss * (float("inf") if i == 4 else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
            losses += [loss.item()] if i != 4 else []
    assert auto.seen("loss") == pytest.approx(losses, rel=1e-6)
    assert auto.losses.num_scaler_skips == 1
    assert auto.guards[0].history.model.has_scaler


def test_two_optimizers_after_one_backward_pass_get_the_same_loss_and_those_in_turns_their_own():
    first, second, losses = nn.Linear(8, 16), nn.Linear(16, 3), []
    with watching() as auto:
        optimizers = [torch.optim.SGD(part.parameters(), lr=1e-2) for part in (first, second)]
        for i in range(9):
            x, y, _ = batch()
            loss = F.cross_entropy(second(first(x)), y)
            loss.backward()
            losses.append(loss.item())
            for optimizer in optimizers if i < 5 else optimizers[i % 2 :][:1]:
                optimizer.step()
                optimizer.zero_grad()
    assert auto.seen("loss", 0) == pytest.approx([*losses[:5], losses[6], losses[8]])
    assert auto.seen("loss", 1) == pytest.approx([*losses[:5], losses[5], losses[7]])


def _evaluated(evaluate, loss_fn=F.cross_entropy):
    """Validation losses that were seen after every fourth step, and those that `evaluate` has computed."""
    model, expected = net(), []
    with watching() as auto:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        for i in range(12):
            model.train()
            x, y, _ = batch()
            optimizer.zero_grad()
            loss_fn(model(x), y).backward()
            optimizer.step()
            if i % 4 == 3:
                expected.append(evaluate(model))
    return [loss for loss in auto.seen("val_loss") if loss is not None], expected


def _eval_mode(model):
    model.eval()
    with torch.no_grad():
        parts = [(size, F.cross_entropy(model(x), y).item()) for size in (32, 32, 16) for x, y, _ in [batch(size)]]
    return sum(size * loss for size, loss in parts) / 80


def _sums(model):
    model.eval()
    with torch.inference_mode():
        return sum(F.cross_entropy(model(x), y, reduction="sum").item() for x, y, _ in (batch(), batch(16))) / 48


def _in_train_mode(model):
    with torch.no_grad():
        return sum(F.cross_entropy(model(x), y).item() for x, y, _ in (batch(), batch())) / 2


def _with_gradients(model):
    model.eval()
    return nn.CrossEntropyLoss()(model(batch()[0]), torch.zeros(32, dtype=torch.long)).item()


@pytest.mark.parametrize("evaluate", [_eval_mode, _sums, _in_train_mode, _with_gradients])
def test_validation_losses_are_averaged_over_an_evaluation(evaluate):
    seen, expected = _evaluated(evaluate)
    assert seen == pytest.approx(expected, rel=1e-5)


def test_no_validation_loss_where_it_cannot_be_compared():
    def with_another_term(output, y):
        return F.cross_entropy(output, y) + output.pow(2).mean() * torch.rand(())

    assert _evaluated(_eval_mode, with_another_term)[0] == []

    def other_loss(model):
        model.eval()
        with torch.no_grad():
            return F.mse_loss(model(batch()[0]), torch.zeros(32, 3)).item()

    assert _evaluated(other_loss)[0] == []

    def a_teacher(model):
        with torch.no_grad():
            return F.cross_entropy(model(batch()[0]), batch()[1]).item()

    assert _evaluated(a_teacher)[0] == [], "one call in train mode is no evaluation"


_CROSS_ENTROPY = torch._C._nn.cross_entropy_loss


class Parts(nn.Module):
    """A model whose script calls other methods than `forward`."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(8, 16), nn.Linear(16, 3)

    def answer(self, x):
        return self.decoder(torch.relu(self.encoder(x)))

    def loss(self, x, y):
        return F.cross_entropy(self.answer(x), y)


class Whole(Parts):
    """A model that returns its loss."""

    forward = Parts.loss


def _parts_after(number, kind, watches):
    torch.manual_seed(0)
    model = kind()
    with watching() if watches else contextlib.nullcontext() as auto:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        for _ in range(number):
            x, y, _ = batch()
            optimizer.zero_grad()
            (model if kind is Whole else model.loss)(2.0 * x, y).backward()
            optimizer.step()
    return auto, model, [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("kind", [Parts, Whole])
def test_the_loss_function_shows_the_output_of_a_model_that_is_not_called_or_returns_its_loss(kind):
    auto, model, weights = _parts_after(80, kind, watches=True)
    history = auto.guards[0].history
    assert [batch.output_width for _, batch in history.batches][-4:] == [3] * 4
    assert len(history.batches) >= 5 and all(1.5 < batch.input_std < 2.5 for _, batch in history.batches)
    assert history.model.loss_kind == "cross-entropy" and history.model.num_target_classes == 3
    assert history.model.last_modules[:2] == ("Linear", "Linear")
    assert torch._C._nn.cross_entropy_loss is _CROSS_ENTROPY
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in (model.encoder, model.decoder))
    assert all(map(torch.equal, weights, _parts_after(80, kind, watches=False)[2]))


@pytest.mark.parametrize("is_game", [True, False])
def test_two_optimizers_play_a_game_only_if_their_losses_differ(is_game):
    parts = nn.Linear(8, 4), nn.Linear(4, 8)
    with watching() as auto:
        optimizers = [torch.optim.SGD(part.parameters(), lr=1e-2) for part in parts]
        for i in range(6):
            x = torch.randn(32, 8)
            (parts[1](parts[0](x)) - x).pow(2).mean().backward()
            for optimizer in [optimizers[i % 2]] if is_game else optimizers:
                optimizer.step()
                optimizer.zero_grad()
    assert [bool(guard.history.model.num_foreign_parameters) for guard in auto.guards] == [is_game] * 2
