"""The learning-rate range test: schedule, stop, suggestion, and everything back where it was."""

import copy
import itertools
import math
import random

import numpy as np
import pytest
import torch
from guard_helpers import assert_identical
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import fastguard


def test_the_schedule_is_exponential_with_both_ends():
    lrs = fastguard.LearningRateFinder().schedule()
    assert len(lrs) == 100 and lrs[0] == 1e-7 and lrs[-1] == 10.0
    ratios = [b / a for a, b in itertools.pairwise(lrs)]
    assert ratios == pytest.approx([1e8 ** (1 / 99)] * 99)


def test_every_way_to_read_the_result():
    result = fastguard.LearningRateFinder(num_steps=20).range_test(lambda lr: 1 / (1 + lr))
    lr, lrs, losses = result
    assert lr == result.suggested_lr == result["suggested_lr"] == result[0]
    assert lrs == result.lrs == result["lrs"] and losses == result.losses == result["losses"]
    assert dict(result) == {"suggested_lr": lr, "lrs": lrs, "losses": losses}
    assert "lrs" in result and "stopped" in result and "nothing" not in result and result["stopped"] is None
    assert str(result).startswith(f"suggested learning rate: {lr:.3g}")
    with pytest.raises(KeyError, match="a range test has no 'best'"):
        result["best"]


def test_the_suggestion_is_left_of_the_steepest_fall():
    finder = fastguard.LearningRateFinder(min_lr=1e-6, max_lr=1.0, num_steps=61)  # ten a decade
    centre = 1e-3

    def loss(lr):
        return 1.0 / (1.0 + (lr / centre) ** 3)  # falls most steeply over log(lr) at the centre

    result = finder.range_test(loss)
    assert result.lrs.index(result.suggested_lr) == 30 - 61 // 10
    assert result.suggested_lr == pytest.approx(centre * 10**-0.6)
    log_lrs, losses = np.log(result.lrs), np.array(result.losses)
    steepest = int(np.argmin(np.gradient(losses, log_lrs)))  # the same rule by another's code
    assert result.suggested_lr == result.lrs[max(0, steepest - len(losses) // 10)]


def test_it_stops_where_the_loss_diverges_or_is_not_finite():
    finder = fastguard.LearningRateFinder(num_steps=50)
    seen = []

    def diverging(lr):
        seen.append(lr)
        return 1.0 if lr < 1e-2 else 10.1

    result = finder.range_test(diverging)
    assert result.stopped == "diverged" and seen[:-1] == result.lrs and max(result.losses) == 1.0
    for bad in (math.nan, math.inf):
        result = finder.range_test(lambda lr, bad=bad: torch.tensor(bad) if lr > 1e-2 else torch.tensor(1.0))
        assert result.stopped == "nan" and all(map(math.isfinite, result.losses))
    assert finder.range_test(lambda lr: 10.0 if lr > 1 else 1.0).stopped is None  # not more than 10 times


@pytest.mark.parametrize("number", [0, 1, 9])
def test_too_few_points(number):
    losses = iter([*[5.0 - i for i in range(number)], math.nan])
    result = fastguard.LearningRateFinder(min_lr=1e-5).range_test(lambda lr: next(losses))
    assert len(result.lrs) == number and result.suggested_lr == pytest.approx(1e-4) and "points" in result.reason
    assert "suggested" in str(result)


class Net(nn.Module):
    """With everything that a step changes: weights, buffers, dropout."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 1))
        self.register_buffer("seen", torch.zeros(()), persistent=False)

    def forward(self, x):
        self.seen = self.seen + 1  # a new tensor at each call
        return self.layers(x)


def make_loader(**settings):
    x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=16, shuffle=True, **settings)


def state_of(model, optimizer):
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "seen": model.seen}
    state["gradients"] = [p.grad for p in model.parameters()]
    state["modes"] = [m.training for m in model.modules()]
    return copy.deepcopy(state)


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
    "tensor-lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(1e-3)),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=2),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
@pytest.mark.parametrize("warm", [False, True], ids=["fresh", "warm"])
def test_find_puts_everything_back(make, warm):
    torch.manual_seed(0)
    model, loader = Net(), make_loader(generator=torch.Generator().manual_seed(7))
    optimizer = make(model.parameters())
    model.layers[3].eval()
    if warm:  # state and gradients from a step before
        x, y = next(iter(loader))

        def closure():
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            return loss

        closure()
        optimizer.step(closure)
    before = state_of(model, optimizer)
    own_tensors = [p.data_ptr() for p in model.parameters()]
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy(), loader.generator.get_state()
    result = fastguard.LearningRateFinder(1e-6, 1.0, 30).find(model, optimizer, loader, nn.functional.mse_loss)
    assert len(result.losses) > 10 and result.losses[0] != result.losses[-1]
    assert_identical(state_of(model, optimizer), before)
    assert [p.data_ptr() for p in model.parameters()] == own_tensors
    assert torch.equal(torch.get_rng_state(), states[0]) and random.getstate() == states[1]
    assert np.array_equal(np.random.get_state()[1], states[2])
    assert torch.equal(loader.generator.get_state(), states[3])


def test_the_guard_hears_nothing_of_it_and_clips_as_ever_afterwards():
    torch.manual_seed(0)
    model, sink, loader = Net(), fastguard.MemorySink(), make_loader()
    optimizer = fastguard.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, max_norm=0.01, sinks=[sink])
    finder = fastguard.LearningRateFinder(1e-4, 10.0, 30)
    clipped = finder.find(model, optimizer, loader, nn.functional.mse_loss)
    assert optimizer.guard.last is None
    optimizer.guard.flush()
    assert not sink.records
    optimizer.guard.detach()
    free = finder.find(model, optimizer, loader, nn.functional.mse_loss)
    assert clipped.losses[0] == free.losses[0]  # the same batches and dropout
    assert clipped.stopped is None and free.stopped == "diverged"  # held by the guard's clipping
    fastguard.wrap(optimizer, model, max_norm=0.01)
    nn.functional.mse_loss(model(torch.ones(2, 4)), torch.ones(2, 1)).backward()
    optimizer.step()
    assert optimizer.guard.last.step == 0 and optimizer.guard.last.clipped


def test_groups_keep_their_ratios():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    groups = [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[1].parameters(), "lr": 0.01}]
    optimizer, seen = torch.optim.SGD(groups), []
    optimizer.register_step_pre_hook(lambda o, args, kwargs: seen.append([g["lr"] for g in o.param_groups]))
    fastguard.LearningRateFinder(1e-6, 1e-2, 5).find(model, optimizer, make_loader(), nn.functional.mse_loss)
    assert [a / b for a, b in seen] == pytest.approx([10.0] * 5) and seen[0][0] == 1e-6 and seen[-1][0] == 1e-2
    assert [g["lr"] for g in optimizer.param_groups] == [0.1, 0.01]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"min_lr": 0.0}, "`min_lr` and `max_lr` must be 0 < min_lr < max_lr"),
        ({"min_lr": 1.0, "max_lr": 0.1}, "must be 0 < min_lr < max_lr, got 1.0 and 0.1"),
        ({"max_lr": math.nan}, "must be 0 < min_lr < max_lr"),
        ({"num_steps": 1}, "`num_steps` must be an integer >= 2, got 1"),
    ],
)
def test_refused_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        fastguard.LearningRateFinder(**settings)


def test_refused_calls():
    finder, model = fastguard.LearningRateFinder(), nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"`loss` must be a scalar, got a tensor of shape \(2,\)"):
        finder.range_test(lambda lr: torch.ones(2))
    with pytest.raises(ValueError, match="must be a number or a tensor of one element, got a NoneType"):
        finder.range_test(lambda lr: None)
    with pytest.raises(ValueError, match="exactly one of `loss_fn` and `compute_loss`"):
        finder.find(model, optimizer, [])
    with pytest.raises(TypeError, match=r"`model` must be a torch.nn.Module, got generator"):
        finder.find(model.parameters(), optimizer, [], nn.functional.mse_loss)
    with pytest.raises(ValueError, match="`loader` must be iterable again and again, got list_iterator"):
        finder.find(model, optimizer, iter([1]), nn.functional.mse_loss)
    with pytest.raises(ValueError, match="`loader` must give at least one batch, got none"):
        finder.find(model, optimizer, [], nn.functional.mse_loss)
    with pytest.raises(ValueError, match=r"must give pairs \(inputs, targets\) for `loss_fn`, got Tensor"):
        finder.find(model, optimizer, [torch.ones(4)], nn.functional.mse_loss)
    with pytest.raises(ValueError, match="must have a learning rate > 0 in its first group, got 0"):
        finder.find(model, torch.optim.SGD(model.parameters(), lr=0.0), [1], nn.functional.mse_loss)
