"""Trainings as scripts have them, which do not mention fastguard, and an AutoGuard that keeps the records."""

import contextlib

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from fastguard.experiments.auto import AutoGuard
from fastguard.sinks import MemorySink

TRAININGS = []


def training(function):
    TRAININGS.append(function)
    return function


def net(num_out=3):
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, num_out))


def batch(size=32):
    x = torch.randn(size, 8)
    return x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long(), x[:, :1] * 2


def _classified(model, x, y, i):
    return F.cross_entropy(model(x), y)


def _trained(make, num_steps=12, loss_of=_classified):
    model = net()
    optimizer = make(model.parameters())
    for i in range(num_steps):
        x, y, _ = batch()
        optimizer.zero_grad()
        loss_of(model, x, y, i).backward()
        optimizer.step()
    return [model]


@training
def plain():
    return _trained(lambda params: torch.optim.AdamW(params, lr=1e-2))


@training
def nan_at_step_6():
    def loss_of(model, x, y, i):
        return _classified(model, x, y, i) * (float("nan") if i == 6 else 1.0)

    return _trained(lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True), 12, loss_of)


def _scaled(optimizer_of, dtype):
    model = net()
    optimizer = optimizer_of(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**18)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
    for i in range(16):
        x, y, _ = batch()
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss * (float("inf") if i == 9 else 1.0)).backward()
        if i % 2:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        if scaler.get_scale() < 2.0**17:
            scheduler.step()
    return [model]


@training
def float16_with_a_scaler():
    return _scaled(lambda model: torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9), torch.float16)


@training
def fused_with_a_scaler():
    return _scaled(lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True), torch.bfloat16)


@training
def bfloat16_clipped_and_accumulated():
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(8):
        for _ in range(3):
            x, y, _ = batch()
            with torch.autocast("cpu", torch.bfloat16):
                loss = F.cross_entropy(model(x), y) / 3
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return [model]


@training
def gan():
    generator = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8))
    critic = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    of_generator = torch.optim.Adam(generator.parameters(), lr=1e-3)
    of_critic = torch.optim.Adam(critic.parameters(), lr=1e-3)
    loss, ones, zeros = nn.BCEWithLogitsLoss(), torch.ones(32, 1), torch.zeros(32, 1)
    for _ in range(10):
        fake = generator(torch.randn(32, 4))
        of_critic.zero_grad()
        loss(critic(batch()[0]), ones).backward()
        loss(critic(fake.detach()), zeros).backward()
        of_critic.step()
        of_generator.zero_grad()
        loss(critic(fake), ones).backward()
        of_generator.step()
    return [generator, critic]


@training
def lbfgs():
    model = nn.Linear(8, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4)
    x, _, z = batch()

    def closure():
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), z)
        loss.backward()
        return loss

    for _ in range(4):
        optimizer.step(closure)
    return [model]


@training
def checkpointed_and_evaluated():
    def loss_of(model, x, y, i):
        if i % 4 == 3:
            model.eval()
            with torch.no_grad():
                F.cross_entropy(model(x), y)
        model.train()
        return F.cross_entropy(checkpoint(model, x.requires_grad_(), use_reentrant=True), y)

    return _trained(lambda params: torch.optim.SGD(params, lr=1e-2), 12, loss_of)


class Lookahead(torch.optim.Optimizer):
    """Steps an inner optimizer, and now and then half the way back."""

    def __init__(self, inner):
        super().__init__(inner.param_groups, {})
        self.inner, self.num_steps = inner, 0
        self.slow = [p.detach().clone() for group in self.param_groups for p in group["params"]]

    def step(self, closure=None):
        self.inner.step()
        self.num_steps += 1
        if self.num_steps % 3 == 0:
            params = [p for group in self.param_groups for p in group["params"]]
            for slow, p in zip(self.slow, params):
                slow.add_(p.detach() - slow, alpha=0.5)
                p.data.copy_(slow)


@training
def around_another():
    return _trained(lambda params: Lookahead(torch.optim.Adam(params, lr=1e-2)), 8)


class Watched(AutoGuard):
    """An AutoGuard with a MemorySink for each guard."""

    def __init__(self, **settings):
        self.sinks = []
        protects = settings.pop("protects", False)
        super().__init__(lambda index: {"sinks": [self._sink()], **settings}, protects=protects)

    def _sink(self):
        self.sinks.append(MemorySink())
        return self.sinks[-1]

    def records(self, index=0):
        """The records of one guard."""
        return list(self.sinks[index].records)

    def seen(self, name, index=0):
        """`loss` or `val_loss` of each record of one guard."""
        return [getattr(record, name) for record in self.records(index)]


@contextlib.contextmanager
def watching(**settings):
    """Guards what is trained in the block."""
    auto = Watched(**settings)
    auto.start()
    try:
        yield auto
    finally:
        auto.finish(has_ended=True)
