"""Data and aims that change while the run goes on: halves in turn, a drifting sensor, longer sums, thawing, pruning."""

from __future__ import annotations

import copy
import functools

import torch
from torch import nn
from torch.nn import functional as F

from .. import data
from ..afresh import case as c
from ..afresh2 import case as a
from ..case import Case
from ..fresh3.case import either
from ..fresh4 import case as f
from ..loop import Watch
from ..nets import Recurrent, cnn, mlp
from ..sound2.case import drawn, share_right
from ..wild.case import dice_of
from . import case as g

MADE: list[Case] = []
script = f.scripting(MADE, __name__)


@script(0.8, momentum=None, nothing_kept=c.SORTED, lr_1e_6=c.LOW, later_labels_moved=c.LABELS)
def halves_rehearsed(watch: Watch, word: str = "") -> float:
    """Lower digits, then upper ones with a few of the former beside them; accuracy on all."""
    (x, y), (held, known) = data.digits()
    model = mlp((64, 64, 10))
    kind = functools.partial(torch.optim.SGD, momentum=0.9) if word == "momentum" else torch.optim.Adam
    lr = {"momentum": 2e-2, "lr-1e-6": 1e-6}.get(word, 2e-3)
    optimizer = watch.wrap(kind(model.parameters(), lr), model)
    low, high = (x[y < 5], y[y < 5]), (x[y >= 5], y[y >= 5])
    for seen in drawn(160, 32, *low):
        g.stepped(watch, optimizer, F.cross_entropy(model(seen[0]), seen[1]))
    for seen, rest in zip(drawn(220, 32, *high), drawn(220, 10, *low)):
        labels = (seen[1] + 1) % 10 if word == "later-labels-moved" else seen[1]
        batch = (seen[0], labels)
        if word != "nothing-kept":
            batch = (torch.cat([seen[0], rest[0]]), torch.cat([labels, rest[1]]))
        g.stepped(watch, optimizer, F.cross_entropy(model(batch[0]), batch[1]))
    return share_right(model, held, known)


@script(0.6, adam=None, lr_3e_7=c.LOW, too_eager=c.HIGH, bursts_of_nan=c.BATCH, yesterdays_answers=c.LABELS)
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
        g.stepped(watch, optimizer, (out - wanted).square())
    return 1.0 - float((told - y)[450:].square().mean() / y[450:].var())


@functools.cache
def _sums(length: int, count: int = 300, seed: int = 1461) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randint(0, 5, (count, length), generator=dice_of(seed + length))
    return x, x.cumsum(1) % 5


@script(
    0.8,
    rmsprop=None,
    never_cleared=c.KEPT,
    sums_of_others=c.LABELS,
    lr_1=c.HIGH,
    longest_left_out=either(a.DIFFERS, a.SHORT),
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
        g.stepped(watch, optimizer, loss, word != "never-cleared")
    return share_right(model, *_sums(12, 300, 1490))


@script(
    0.75,
    mild=None,
    doubtful_ones_alone=either(c.LABELS, c.LOSS),
    own_labels_from_the_start=either(c.LABELS, a.OVERFITTED, c.REPEATED),
    lr_0_5=c.HIGH,
)
def labelled_by_itself(watch: Watch, word: str = "") -> float:
    """Sixty labelled digits, and from a third of the run on others whose label it is sure of; accuracy."""
    (x, y), (held, known) = data.digits()
    model = mlp((64, 64, 10))
    optimizer = watch.wrap(torch.optim.AdamW(model.parameters(), 0.5 if word == "lr-0-5" else 2e-3), model)
    early = word == "own-labels-from-the-start"
    for turn in range(300):
        at, rest = torch.randint(0, 60, (16,)), torch.randint(60, len(x), (48,))
        loss = F.cross_entropy(model(x[at]), y[at])
        if turn >= 100 or early:
            with torch.no_grad():
                sure, own = model(x[rest]).softmax(1).max(1)
            near = x[rest] + 0.5 * torch.randn(48, 64)
            each = F.cross_entropy(model(near), own, reduction="none")
            limit = 0.8 if word == "mild" else 0.95
            taken = sure < 0.5 if word == "doubtful-ones-alone" else sure > limit
            if early:
                loss = 0.02 * loss + each.mean()
            else:
                loss = loss + (20.0 if word == "doubtful-ones-alone" else 1.0) * (each * taken).mean()
        g.stepped(watch, optimizer, loss)
    return share_right(model, held, known)


@script(
    0.6, faster=None, pressure_of_other_sign=c.LOSS, lr_1e_6=c.LOW, pressure_100=either(c.DECAY, c.LOSS, c.COLLAPSED)
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
        g.stepped(watch, optimizer, F.mse_loss(model["body"](seen * gates), wanted) + price * logits.sigmoid().sum())
    with torch.no_grad():
        opened = (model["gates"].weight[0] > 0).float()
        left = F.mse_loss(model["body"](x[800:] * opened), y[800:]) / y[800:].var()
    return 1.0 - float(left) - 0.05 * float((opened != (torch.arange(20) < 3).float()).sum())


@script(
    0.85,
    cosine=None,
    never_thawed=g.FIXED,
    thawed_at_300_times=c.HIGH,
    new_ones_not_told=g.FIXED,
    labels_of_others=c.LABELS,
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
        g.stepped(watch, optimizer, F.cross_entropy(model(seen), wanted))
        if schedule is not None:
            schedule.step()
    return share_right(model, held, known)


@script(
    0.85,
    adamax=None,
    lr_20=c.HIGH,
    coarse_alone=either(a.DIFFERS, a.SHORT),
    weights_loaded_each_ninth_step=c.OVERWRITTEN,
    half_rate_each_fourth_step=c.SCHEDULE,
)
def coarse_to_fine(watch: Watch, word: str = "") -> float:
    """Digits seen coarse, then finer, then as they are, a CNN; accuracy."""
    (x, y), (held, known) = data.digits(as_images=True)
    model = cnn()
    start = copy.deepcopy(model.state_dict())
    if word == "adamax":
        optimizer = torch.optim.Adamax(model.parameters(), 6e-3)
    else:
        optimizer = torch.optim.SGD(model.parameters(), 20.0 if word == "lr-20" else 3e-2, momentum=0.9)
    watch.wrap(optimizer, model)
    for turn, (seen, wanted) in enumerate(drawn(270, 32, x, y)):
        stage = 0 if word == "coarse-alone" else turn // 90
        if word == "weights-loaded-each-ninth-step" and turn % 9 == 8:
            model.load_state_dict(start)
        if word == "half-rate-each-fourth-step" and turn % 4 == 3:
            optimizer.param_groups[0]["lr"] /= 2.0
        size = (2, 4, 8)[stage]
        seen = F.interpolate(F.adaptive_avg_pool2d(seen, size), size=8)
        g.stepped(watch, optimizer, F.cross_entropy(model(seen), wanted))
    return share_right(model, held, known)


@script(
    0.3,
    quicker=None,
    lr_1e_7=c.LOW,
    in_megawatts=either(f.INPUTS, c.TARGETS, c.BOTH),
    next_for_last=either(c.LEAK, c.LABELS),
)
def weather_in_turn(watch: Watch, word: str = "") -> float:
    """A stream whose law changes each 120 steps, GRU on its last 16 values; told before learnt, R² of the last half."""
    dice = dice_of(1467)
    laws = 0.25 + 0.5 * torch.rand(4, 2, generator=dice)
    model = Recurrent(nn.GRU, 1, 1, 24, is_symbolic=False, everywhere=False)
    lr = {"lr-1e-7": 1e-7, "quicker": 2e-2}.get(word, 8e-3)
    optimizer = watch.wrap(torch.optim.Adam(model.parameters(), lr), model, 1.0)
    size = 1e5 if word == "in-megawatts" else 1.0
    missed = spread = 0.0
    for turn in range(480):
        rate = laws[turn // 120 % 4, 0]
        place = 6.28 * torch.rand(24, 1, generator=dice) + rate * torch.arange(18.0)
        x = size * (place.sin() + 0.2 * torch.randn(24, 18, generator=dice))
        if word == "next-for-last":
            out, wanted = model(x[:, 1:17, None])[:, 0], x[:, 16]
            told = model(x[:, :16, None])[:, 0].detach()
        else:
            out, wanted = model(x[:, :16, None])[:, 0], x[:, 17]
            told = out.detach()
        if turn >= 240:
            missed += float(((told - x[:, 17]) / size).square().mean())
            spread += float((x[:, 17] / size).var())
        g.stepped(watch, optimizer, (out - wanted).square().mean())
    return 1.0 - missed / spread


CASES = g.renamed(MADE)
