"""Loops that people write by hand: two passes a step, weights put back, averaged, clamped or kept, tasks one by one."""

from __future__ import annotations

import copy
import functools

import torch
from torch import nn
from torch.nn import functional as F

from .. import data, nets
from .. import optimizers as o
from ..case import Case
from ..loop import Plan, Tensors, Watch
from ..qualities import accuracy
from ..wild.case import dice_of
from . import case as c

_sound, _faulty = functools.partial(c.sound, __name__), functools.partial(c.faulty, __name__)


def _digits(seed: int, play=c.plain, least: float = 0.92, **options) -> Plan:
    torch.manual_seed(seed)
    words = {"lr": 3e-3, "num_epochs": 7, "play": play, **options}
    return c.planned(seed, nets.mlp((64, 64, 10)), c.cross_entropy, *data.digits(), accuracy, least, **words)


def _started(plan: Plan, watch: Watch) -> torch.optim.Optimizer:
    return watch.wrap(plan.optimizer(plan.model, plan.lr), plan.model, plan.max_norm)


def _sharpness(plan: Plan, watch: Watch, *, goes_back: bool = True) -> None:
    """The gradient is that of the worst point near by."""
    optimizer = _started(plan, watch)
    for epoch in range(plan.num_epochs):
        for batch in plan.batches(epoch):
            loss = plan.loss(plan.model, batch)
            loss.backward()
            with torch.no_grad():
                size = torch.stack([p.grad.norm() for p in plan.model.parameters()]).norm() + 1e-12
                moves = [0.05 * p.grad / size for p in plan.model.parameters()]
                for p, move in zip(plan.model.parameters(), moves):
                    p.add_(move if goes_back else 8.0 * move)
            optimizer.zero_grad()
            plan.loss(plan.model, batch).backward()
            with torch.no_grad():
                for p, move in zip(plan.model.parameters(), moves):
                    if goes_back:
                        p.sub_(move)
            optimizer.step()
            optimizer.zero_grad()
            watch.observe(optimizer, loss=loss.detach())


def _slow_weights(plan: Plan, watch: Watch) -> None:
    """Each fifth step back half-way to weights that lag."""
    optimizer, slow, step = _started(plan, watch), copy.deepcopy(plan.model), 0
    for epoch in range(plan.num_epochs):
        for batch in plan.batches(epoch):
            optimizer.zero_grad()
            loss = plan.loss(plan.model, batch)
            loss.backward()
            optimizer.step()
            watch.observe(optimizer, loss=loss.detach())
            step += 1
            if step % 5 == 0:
                with torch.no_grad():
                    for old, new in zip(slow.parameters(), plan.model.parameters()):
                        old.lerp_(new, 0.5)
                        new.copy_(old)


class NonNegative(nn.Module):
    """A product of two factors that are to stay above zero."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Parameter(torch.rand(150, 6)), nn.Parameter(torch.rand(6, 40))

    def forward(self) -> torch.Tensor:
        return self.left @ self.right


def _clamping(plan: Plan, watch: Watch) -> None:
    optimizer = _started(plan, watch)
    for _ in range(plan.num_epochs):
        optimizer.zero_grad()
        loss = F.mse_loss(plan.model(), plan.train[0])
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for p in plan.model.parameters():
                p.clamp_(min=0.0)
        watch.observe(optimizer, loss=loss.detach())


def factors(seed: int) -> Plan:
    """A table as a product of what is not negative."""
    dice = dice_of(330)
    table = torch.rand(150, 5, generator=dice).square() @ torch.rand(5, 40, generator=dice)
    table = table + 0.02 * torch.randn(150, 40, generator=dice)
    torch.manual_seed(seed)

    @torch.no_grad()
    def quality(model: nn.Module, held_out: Tensors) -> float:
        return 1.0 - float((model() - held_out[0]).square().mean() / held_out[0].var())

    return c.planned(
        seed, NonNegative(), c.squared_error, (table,), (table,), quality, 0.9, lr=2e-2, num_epochs=300, play=_clamping
    )


def _federated(plan: Plan, watch: Watch) -> None:
    """Four clients train a copy each in turn, and their mean goes on: one guard on the client's optimizer."""
    x, y = plan.train
    parts = torch.arange(len(x)).chunk(4)
    shared = copy.deepcopy(plan.model.state_dict())
    optimizer = _started(plan, watch)
    for _ in range(plan.num_epochs):
        found = []
        for part in parts:
            plan.model.load_state_dict(shared)
            for chosen in part[torch.randperm(len(part))].split(plan.batch_size):
                optimizer.zero_grad()
                loss = plan.loss(plan.model, (x[chosen], y[chosen]))
                loss.backward()
                optimizer.step()
                watch.observe(optimizer, loss=loss.detach())
            found.append(copy.deepcopy(plan.model.state_dict()))
        shared = {name: torch.stack([one[name] for one in found]).mean(0) for name in shared}
    plan.model.load_state_dict(shared)


def _one_after_another(plan: Plan, watch: Watch) -> None:
    """Two classes at a time, and a memory of the former ones beside them."""
    x, y = plan.train
    optimizer = _started(plan, watch)
    kept = torch.empty(0, dtype=torch.long)
    for first in range(0, 10, 2):
        now = torch.nonzero((y == first) | (y == first + 1))[:, 0]
        for _ in range(plan.num_epochs):
            for chosen in now[torch.randperm(len(now))].split(plan.batch_size // 2):
                if len(kept):
                    chosen = torch.cat([chosen, kept[torch.randint(len(kept), (len(chosen),))]])
                optimizer.zero_grad()
                loss = plan.loss(plan.model, (x[chosen], y[chosen]))
                loss.backward()
                optimizer.step()
                watch.observe(optimizer, loss=loss.detach())
        kept = torch.cat([kept, now[:80]])


def _privately(plan: Plan, watch: Watch) -> None:
    """Noise on every gradient, as large as the gradient."""
    optimizer = _started(plan, watch)
    for epoch in range(plan.num_epochs):
        for batch in plan.batches(epoch):
            optimizer.zero_grad()
            loss = plan.loss(plan.model, batch)
            loss.backward()
            for p in plan.model.parameters():
                p.grad.add_(0.01 * torch.randn_like(p.grad))
            optimizer.step()
            watch.observe(optimizer, loss=loss.detach())


def _mean_teacher(plan: Plan, watch: Watch) -> None:
    """A fifth has labels; the rest is to be answered as a lagging average does, with a weight that grows."""
    x, y = plan.train
    optimizer, teacher, step = _started(plan, watch), copy.deepcopy(plan.model), 0
    known = len(x) // 5
    for _ in range(plan.num_epochs):
        for chosen in torch.randperm(len(x)).split(48):
            some = torch.randint(known, (32,))
            noisy = x[chosen] + 0.3 * torch.randn_like(x[chosen])
            with torch.no_grad():
                wanted = teacher(x[chosen] + 0.3 * torch.randn_like(x[chosen])).softmax(1)
            optimizer.zero_grad()
            loss = F.cross_entropy(plan.model(x[some]), y[some])
            loss = loss + min(1.0, step / 100.0) * 5.0 * F.mse_loss(plan.model(noisy).softmax(1), wanted)
            loss.backward()
            optimizer.step()
            watch.observe(optimizer, loss=loss.detach())
            step += 1
            with torch.no_grad():
                for old, new in zip(teacher.parameters(), plan.model.parameters()):
                    old.lerp_(new, 0.05)


def _adversarial(plan: Plan, watch: Watch) -> None:
    """Each batch moved against the model first."""
    optimizer = _started(plan, watch)
    for epoch in range(plan.num_epochs):
        for x, y in plan.batches(epoch):
            moved = x.clone().requires_grad_()
            plan.loss(plan.model, (moved, y)).backward()
            optimizer.zero_grad()
            loss = plan.loss(plan.model, ((x + 0.1 * moved.grad.sign()).detach(), y))
            loss.backward()
            optimizer.step()
            watch.observe(optimizer, loss=loss.detach())


def _unfreezing(plan: Plan, watch: Watch) -> None:
    """The last layer first; the others join the optimizer later."""
    model = plan.model
    model.requires_grad_(False)
    model[-1].requires_grad_(True)
    optimizer = watch.wrap(torch.optim.Adam(model[-1].parameters(), lr=plan.lr), model, plan.max_norm)
    for epoch in range(plan.num_epochs):
        if epoch == 3:
            model[0].requires_grad_(True)
            optimizer.add_param_group({"params": list(model[0].parameters()), "lr": plan.lr / 3.0})
        for batch in plan.batches(epoch):
            optimizer.zero_grad()
            loss = plan.loss(model, batch)
            loss.backward()
            optimizer.step()
            watch.observe(optimizer, loss=loss.detach())


def _cycles(plan: Plan, watch: Watch) -> None:
    """A rate that swings, and the weights at its lowest averaged."""
    from torch.optim.swa_utils import AveragedModel

    optimizer = _started(plan, watch)
    swing = torch.optim.lr_scheduler.CyclicLR(optimizer, 0.02 * plan.lr, plan.lr, 35)
    averaged, step = AveragedModel(plan.model), 0
    for epoch in range(plan.num_epochs):
        for batch in plan.batches(epoch):
            optimizer.zero_grad()
            loss = plan.loss(plan.model, batch)
            loss.backward()
            optimizer.step()
            swing.step()
            watch.observe(optimizer, loss=loss.detach())
            step += 1
            if step % 70 == 0 and step > 100:
                averaged.update_parameters(plan.model)
    plan.model.load_state_dict(averaged.module.state_dict())


def _folds(plan: Plan, watch: Watch) -> None:
    """A new model and a new optimizer for each of three folds."""
    x, y = plan.train
    former = plan.train
    fresh = copy.deepcopy(plan.model.state_dict())
    for fold in range(3):
        plan.model.load_state_dict(fresh)
        chosen = torch.arange(len(x)) % 3 != fold
        plan.train = x[chosen], y[chosen]
        model = copy.deepcopy(plan.model)
        optimizer = watch.wrap(plan.optimizer(model, plan.lr), model, plan.max_norm)
        for epoch in range(plan.num_epochs):
            for batch in plan.batches(epoch):
                optimizer.zero_grad()
                loss = plan.loss(model, batch)
                loss.backward()
                optimizer.step()
                watch.observe(optimizer, loss=loss.detach())
    plan.model.load_state_dict(model.state_dict())
    plan.train = former


def _best_kept(plan: Plan, watch: Watch) -> None:
    """Where validation has not gained for two epochs, the best weights come back and the rate is halved."""
    optimizer, best, kept, waited = _started(plan, watch), float("inf"), None, 0
    for epoch in range(plan.num_epochs):
        for batch in plan.batches(epoch):
            optimizer.zero_grad()
            loss = plan.loss(plan.model, batch)
            loss.backward()
            optimizer.step()
            watch.observe(optimizer, loss=loss.detach())
        val_loss = plan.validate()
        watch.observe(optimizer, val_loss=val_loss)
        waited += 1
        if val_loss < best:
            best, kept, waited = float(val_loss), copy.deepcopy(plan.model.state_dict()), 0
        elif waited == 2:
            plan.model.load_state_dict(kept)
            optimizer.param_groups[0]["lr"] *= 0.5
            waited = 0


_playing = {name: functools.partial(_digits, play=play, **words) for name, (play, words) in {
    "sharpness": (_sharpness, {}),
    "slow-weights": (_slow_weights, {}),
    "federated": (_federated, {"optimizer": o.SGD, "lr": 0.1, "num_epochs": 6}),
    "one-after-another": (_one_after_another, {"least": 0.8, "num_epochs": 3}),
    "private": (_privately, {"optimizer": o.SGD, "lr": 0.2, "least": 0.85}),
    "mean-teacher": (_mean_teacher, {"num_epochs": 8, "least": 0.85}),
    "adversarial": (_adversarial, {}),
    "unfreezing": (_unfreezing, {"lr": 5e-3, "least": 0.88}),
    "cycles": (_cycles, {"optimizer": o.MOMENTUM, "lr": 5e-2, "num_epochs": 8}),
    "folds": (_folds, {"num_epochs": 4}),
    "best-kept": (_best_kept, {"num_epochs": 9}),
}.items()}  # fmt: skip
_TITLES = {
    "sharpness": "the worst point near by", "slow-weights": "half-way back each fifth step",
    "federated": "four clients", "one-after-another": "two classes at a time", "private": "noise on the gradients",
    "mean-teacher": "as a lagging average answers", "adversarial": "batches moved first",
    "unfreezing": "layers join later", "cycles": "a rate that swings", "folds": "a model a fold",
    "best-kept": "the best weights come back",
}  # fmt: skip
CASES: tuple[Case, ...] = (
    *(case for name, make in _playing.items() for case in _sound(name, _TITLES[name], make)),
    *_faulty(
        "sharpness",
        _playing["sharpness"],
        ("stays-there", c.putting(play=functools.partial(_sharpness, goes_back=False)), c.OVERWRITTEN),
    ),
    *_faulty("adversarial", _playing["adversarial"], ("lr-100", c.times(100.0), c.HIGH)),
    *_faulty("cycles", _playing["cycles"], ("lr-thousandth", c.times(1e-3), c.LOW)),
    *_faulty("one-after-another", _playing["one-after-another"], ("lr-thousandth", c.times(1e-3), c.LOW)),
    *_sound("factors", "not negative", factors, adam={}, sgd={"optimizer": o.MOMENTUM, "lr": 5.0, "num_epochs": 400}),
)  # fmt: skip
