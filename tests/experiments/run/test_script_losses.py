"""The losses of a step, and of an evaluation, are those that the script has computed."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from script_trainings import batch, net, watching
from torch import nn


def _steps(step, number=8, num_losses=1, after=lambda: None):
    """Trains a model by `step(loss)`, `num_losses` times a step, then `after()`; the AutoGuard, and the mean losses."""
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
            after()
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
    notes = auto.guards[0].history.model
    assert notes.loss_ops[0] in ("NllLossBackward0", "DivBackward0", "MulBackward0")
    is_divided = notes.loss_ops[0] != "NllLossBackward0"
    assert notes.num_summed == (num_losses if num_losses > 1 and not is_divided else None)


def test_a_disabled_scaler_moves_no_loss_to_another_step():
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    auto, expected = _steps(lambda loss: scaler.scale(loss).backward(), number=12, after=lambda: scaler.update())
    assert auto.seen("loss") == pytest.approx(expected, rel=1e-6)


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


class Body(Parts):
    """A model whose script applies its last layer."""

    def forward(self, x):
        return torch.relu(self.encoder(x))

    def loss(self, x, y):
        return F.cross_entropy(self.decoder(self(x)), y)


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


@pytest.mark.parametrize("kind", [Parts, Whole, Body])
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
