"""Data and aims that change while the run goes on: halves in turn, a drifting sensor, longer sums, gates, thawing."""

from __future__ import annotations

import functools

import torch
from torch import nn
from torch.nn import functional as F

from .. import data
from .. import operators as f
from .. import truths as t
from ..case import Case
from ..data import dice_of, drawn
from ..loop import Watch
from ..nets import Recurrent, mlp
from ..qualities import accuracy

CASES: list[Case] = []
script = f.scripting(CASES, __name__)


@script(0.8, momentum=None, nothing_kept=t.SORTED, lr_1e_6=t.LOW, later_labels_moved=t.LABELS)
def halves_rehearsed(watch: Watch, word: str = "") -> float:
    """Lower digits, then upper ones with a few of the former beside them; accuracy on all."""
    (x, y), (held, known) = data.digits()
    model = mlp((64, 64, 10))
    kind = functools.partial(torch.optim.SGD, momentum=0.9) if word == "momentum" else torch.optim.Adam
    lr = {"momentum": 2e-2, "lr-1e-6": 1e-6}.get(word, 2e-3)
    optimizer = watch.wrap(kind(model.parameters(), lr), model)
    low, high = (x[y < 5], y[y < 5]), (x[y >= 5], y[y >= 5])
    for seen in drawn(160, 32, *low):
        f.stepped(watch, optimizer, F.cross_entropy(model(seen[0]), seen[1]))
    for seen, rest in zip(drawn(220, 32, *high), drawn(220, 10, *low)):
        labels = (seen[1] + 1) % 10 if word == "later-labels-moved" else seen[1]
        batch = (seen[0], labels)
        if word != "nothing-kept":
            batch = (torch.cat([seen[0], rest[0]]), torch.cat([labels, rest[1]]))
        f.stepped(watch, optimizer, F.cross_entropy(model(batch[0]), batch[1]))
    return accuracy(model, (held, known))


@script(0.6, adam=None, lr_3e_7=t.LOW, too_eager=t.HIGH, bursts_of_nan=t.BATCH, yesterdays_answers=t.LABELS)
def drifting_sensor(watch: Watch, word: str = "") -> float:
    """One reading a step, and what it means turns slowly; what is told before each step, R² of the second half."""
    dice = dice_of(1460)
    at, other = torch.randn(2, 8, generator=dice)
    x = torch.randn(900, 8, generator=dice)
    turn = torch.arange(900) / 900.0
    y = ((1.0 - turn) * (x @ at) + turn * (x @ other)) / 2.0 + 0.1 * torch.randn(900, generator=dice)
    model = mlp((8, 24, 1), nn.Tanh)
    lr = {"lr-3e-7": 3e-7, "too-eager": 3.0, "adam": 8e-3}.get(word, 0.05)
    optimizer = watch.wrap((torch.optim.Adam if word == "adam" else torch.optim.SGD)(model.parameters(), lr), model)
    told = torch.zeros(900)
    for step in range(900):
        row = x[step : step + 1].clone()
        out = model(row)[0, 0]
        told[step] = out.detach()
        if word == "bursts-of-nan" and step % 60 in range(45):
            out = model(row * torch.nan)[0, 0]
        wanted = y[step - 1] if word == "yesterdays-answers" else y[step]
        f.stepped(watch, optimizer, (out - wanted).square())
    return 1.0 - float((told - y)[450:].square().mean() / y[450:].var())


@functools.cache
def _sums(length: int, count: int = 300, seed: int = 1461) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randint(0, 5, (count, length), generator=dice_of(seed + length))
    return x, x.cumsum(1) % 5


@script(
    0.8,
    rmsprop=None,
    never_cleared=t.KEPT,
    sums_of_others=t.LABELS,
    lr_1=t.HIGH,
    longest_left_out=t.either(t.DIFFERS, t.SHORT),
)
def sums_that_grow(watch: Watch, word: str = "") -> float:
    """Running sums by five of rows that get longer from 2 to 12, GRU; places right at length 12."""
    model = Recurrent(nn.GRU, 5, 5, 32)
    kind = torch.optim.RMSprop if word == "rmsprop" else torch.optim.Adam
    lr = {"lr-1": 1.0, "rmsprop": 5e-3}.get(word, 1e-2)
    optimizer = watch.wrap(kind(model.parameters(), lr), model, None if word == "never-cleared" else 1.0)
    for turn in range(330):
        length = 2 if word == "longest-left-out" else 2 + turn // 30
        x, y = _sums(length)
        at = torch.randint(0, 300, (48,))
        wanted = y[at.roll(1)] if word == "sums-of-others" else y[at]
        loss = F.cross_entropy(model(x[at]).flatten(0, 1), wanted.flatten())
        f.stepped(watch, optimizer, loss, word != "never-cleared")
    return accuracy(model, _sums(12, 300, 1490))


@script(
    0.6, faster=None, pressure_of_other_sign=t.LOSS, lr_1e_6=t.LOW, pressure_100=t.either(t.DECAY, t.LOSS, t.COLLAPSED)
)
def columns_picked(watch: Watch, word: str = "") -> float:
    """Three of twenty columns matter; gates drawn by chance, and a growing price on open ones; R² less wrong gates."""
    dice = dice_of(1464)
    x = torch.randn(1200, 20, generator=dice)
    y = (x[:, 0] * x[:, 1] + x[:, 2] + 0.1 * torch.randn(1200, generator=dice))[:, None]
    model = nn.ModuleDict({"body": mlp((20, 48, 1), nn.SiLU), "gates": nn.Embedding(1, 20)})
    nn.init.constant_(model["gates"].weight, 1.5)
    slow, quick = (1e-6, 1e-6) if word == "lr-1e-6" else (5e-3, 4e-2)
    optimizer = torch.optim.Adam(
        [{"params": model["body"].parameters(), "lr": slow}, {"params": model["gates"].parameters(), "lr": quick}]
    )
    watch.wrap(optimizer, model)
    sign = {"pressure-of-other-sign": -1.0, "pressure-100": 100.0, "faster": 1.5}.get(word, 1.0)
    for turn, (seen, wanted) in enumerate(drawn(500, 64, x[:800], y[:800])):
        logits = model["gates"].weight[0]
        u = torch.rand(len(seen), 20).clamp(1e-4, 1.0 - 1e-4)
        gates = ((logits + u.log() - (1.0 - u).log()) / 0.5).sigmoid()
        price = sign * 0.05 * max(0.0, turn - 100.0) / 400.0
        f.stepped(watch, optimizer, F.mse_loss(model["body"](seen * gates), wanted) + price * logits.sigmoid().sum())
    with torch.no_grad():
        opened = (model["gates"].weight[0] > 0).float()
        left = F.mse_loss(model["body"](x[800:] * opened), y[800:]) / y[800:].var()
    return 1.0 - float(left) - 0.05 * float((opened != (torch.arange(20) < 3).float()).sum())


@script(
    0.85,
    cosine=None,
    never_thawed=t.FIXED,
    thawed_at_300_times=t.HIGH,
    new_ones_not_told=t.FIXED,
    labels_of_others=t.LABELS,
)
def thawed(watch: Watch, word: str = "") -> float:
    """Layers that learnt to fill in pixels are thawed from the end on, to tell digits turned over; accuracy."""
    (x, y), (held, known) = data.digits()
    model = mlp((64, 64, 48, 10))
    before = mlp((64, 64, 64))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(31)
        first = torch.optim.Adam(before.parameters(), 2e-3)
        for (rows,) in drawn(120, 48, x):
            first.zero_grad()
            F.mse_loss(before(rows * (torch.rand(rows.shape) < 0.7)), rows).backward()
            first.step()
    model[0].load_state_dict(before[0].state_dict())
    model.requires_grad_(False)
    model[4].requires_grad_(True)
    rows, held = x.flip(1), held.flip(1)
    labels = y[torch.randperm(len(y))] if word == "labels-of-others" else y
    parameters = model[4].parameters() if word == "new-ones-not-told" else model.parameters()
    optimizer = watch.wrap(torch.optim.AdamW(parameters, 3e-3), model)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 360) if word == "cosine" else None
    for turn, (seen, wanted) in enumerate(drawn(360, 40, rows, labels)):
        if turn in (100, 200) and word != "never-thawed":
            model[2 if turn == 100 else 0].requires_grad_(True)
            for group in optimizer.param_groups:
                group["lr"] *= 300.0 if word == "thawed-at-300-times" else 0.7
        f.stepped(watch, optimizer, F.cross_entropy(model(seen), wanted))
        if schedule is not None:
            schedule.step()
    return accuracy(model, (held, known))
