"""Data that change while the run goes on: tasks in turn, drift, curricula, buffers, the model's own targets."""

from __future__ import annotations

import copy
import functools
import math

import torch
from torch import nn
from torch.nn import functional as F

from .. import data
from ..afresh import case as c
from ..afresh2 import case as a
from ..case import Case
from ..fresh3.case import either, fit
from ..loop import Watch
from ..nets import Recurrent, cnn, mlp
from ..optimizers import SignDescent
from ..sound2.case import classify, drawn, epochs, r_squared, share_right
from ..wild.case import dice_of
from . import case as f

CASES: list[Case] = []
script = f.scripting(CASES, __name__)


@script(0.6, adamw=None, only_the_newest=c.SORTED, lr_1e_6=c.LOW)
def classes_in_turn(watch: Watch, word: str = "") -> float:
    """Digits two classes at a time, half of each batch from what was kept of the earlier ones; accuracy on all."""
    (x, y), (held, known) = data.digits()
    model = mlp((64, 64, 10))
    kind = torch.optim.AdamW if word == "adamw" else torch.optim.Adam

    def batches():
        kept = torch.empty(0, dtype=torch.long)
        for pair in range(5):
            new = torch.nonzero((y // 2) == pair)[:, 0]
            for _ in range(70):
                at = new[torch.randint(len(new), (32,))]
                if len(kept) and word != "only-the-newest":
                    at = torch.cat([at, kept[torch.randint(len(kept), (32,))]])
                yield x[at], y[at]
            kept = torch.cat([kept, new[torch.randperm(len(new))[:40]]])

    fit(watch, model, kind(model.parameters(), 1e-6 if word == "lr-1e-6" else 2e-3), batches(), classify(model))
    return share_right(model, held, known)


@script(0.7, sign=None)
def sines_one_after_another(watch: Watch, word: str = "") -> float:
    """Four functions of the same numbers one after another, one network without memory; R² of the last."""
    model = mlp((1, 48, 48, 1), nn.Tanh)

    def batches():
        for rate in (1.0, 3.0, 2.0, 4.0):
            for _ in range(130):
                x = 2.0 * torch.rand(64, 1) - 1.0
                yield x, (rate * x + rate).sin()

    kind = functools.partial(SignDescent, lr=1e-3) if word == "sign" else functools.partial(torch.optim.Adam, lr=5e-3)
    fit(watch, model, kind(model.parameters()), batches(), lambda x, y: F.mse_loss(model(x), y))
    x = torch.linspace(-1.0, 1.0, 200)[:, None]
    with torch.no_grad():
        return r_squared(model(x), (4.0 * x + 4.0).sin())


@script(0.75, momentum=None, rate_gone=c.SCHEDULE, lr_300=c.HIGH)
def prices_that_wander(watch: Watch, word: str = "") -> float:
    """A stream of sixteen rows a step whose coefficients walk about; R² of the last hundred steps, foretold."""
    model = nn.Linear(10, 1)
    lr = {"lr-300": 30.0, "momentum": 0.01}.get(word, 0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr, momentum=0.9 if word == "momentum" else 0.0)
    true, dice, errors, wanted = torch.randn(10, 1, generator=dice_of(1180)), dice_of(1181), [], []

    def batches():
        nonlocal true
        for step in range(500):
            true = true + 0.04 * torch.randn(10, 1, generator=dice)
            x = torch.randn(16, 10, generator=dice)
            y = x @ true + 0.3 * torch.randn(16, 1, generator=dice)
            if step >= 400:
                with torch.no_grad():
                    errors.append((model(x) - y).square().mean())
                    wanted.append(y.square().mean())
            yield x, y

    decay = (lambda t: torch.optim.lr_scheduler.ExponentialLR(t, 0.9)) if word == "rate-gone" else None
    fit(watch, model, optimizer, batches(), lambda x, y: F.mse_loss(model(x), y), schedule=decay)
    return 1.0 - float(torch.stack(errors).mean() / torch.stack(wanted).mean())


@script(0.8, sgd=None)
def noise_that_grows(watch: Watch, word: str = "") -> float:
    """A curriculum: inputs get noisier epoch by epoch, so that the loss rises; accuracy under much noise."""
    (x, y), (held, known) = data.digits()
    model = mlp((64, 96, 10))
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    if word == "sgd":
        optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)

    def batches():
        for epoch in range(10):
            for rows, labels in epochs(1, 32, x, y):
                yield rows + 0.1 * epoch * torch.randn_like(rows), labels

    fit(watch, model, optimizer, batches(), classify(model))
    return share_right(model, held + 0.7 * torch.randn(held.shape, generator=dice_of(1182)), known)


@script(0.8, lstm=None)
def longer_sums(watch: Watch, word: str = "") -> float:
    """Sums of digits modulo five over strings that grow from two to six; accuracy at the last length."""
    model = Recurrent(nn.LSTM if word == "lstm" else nn.GRU, 5, 5, 64, everywhere=False)

    def batches():
        for length in (1, 2, 2, 3, 3):
            for _ in range(100):
                x = torch.randint(0, 5, (96, length))
                yield x, x.sum(1) % 5

    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    fit(watch, model, optimizer, batches(), classify(model), max_norm=1.0)
    x = torch.randint(0, 5, (600, 3), generator=dice_of(1183))
    return share_right(model, x, x.sum(1) % 5)


@script(0.85, soft=None, always_sure=either(c.LABELS, c.COLLAPSED, c.LEAK))
def students_of_students(watch: Watch, word: str = "") -> float:
    """Sixty labels, then targets that the model makes itself, by rounds, each from noisy inputs; accuracy."""
    (x, y), (held, known) = data.digits()
    model = mlp((64, 96, 10), nn.ReLU)
    optimizer = watch.wrap(torch.optim.AdamW(model.parameters(), 2e-3), model)
    few = 200

    def step(rows, targets):
        loss = F.cross_entropy(model(rows), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        watch.observe(optimizer, loss=loss)

    for rows, labels in epochs(20, 20, x[:few], y[:few]):
        if word == "always-sure":
            labels = torch.zeros_like(labels)
        step(rows, labels)
    for _ in range(3):
        teacher = copy.deepcopy(model)
        with torch.no_grad():
            said = teacher(x)
        targets = (said / 0.7).softmax(1) if word == "soft" else said.argmax(1)
        for rows, labels in epochs(2, 32, x, targets):
            step(rows + 0.3 * torch.randn_like(rows), labels)
    return share_right(model, held, known)


@script(0.75, huber=None)
def values_from_a_fixed_log(watch: Watch, word: str = "") -> float:
    """Fitted Q iteration on logged moves along a ring: targets are made anew every forty steps; share of best moves."""
    dice, size = dice_of(1184), 16
    at, move = torch.randint(0, size, (3000,), generator=dice), torch.randint(0, 2, (3000,), generator=dice)
    then = (at + 2 * move - 1) % size
    reward = (then == 3).float()
    seen = torch.stack([(math.tau * k * torch.arange(size) / size).cos() for k in (1, 2, 3)], 1)
    seen = torch.cat([seen, torch.stack([(math.tau * k * torch.arange(size) / size).sin() for k in (1, 2, 3)], 1)], 1)
    model = mlp((6, 48, 48, 2))
    compare = F.huber_loss if word == "huber" else F.mse_loss
    old = [copy.deepcopy(model)]

    def batches():
        for step, batch in enumerate(drawn(600, 64, at, move, then, reward)):
            if step % 25 == 0:
                old[0] = copy.deepcopy(model)
            yield batch

    def loss(at, move, then, reward):
        with torch.no_grad():
            target = reward + 0.85 * (1.0 - reward) * old[0](seen[then]).amax(1)
        return compare(model(seen[at]).gather(1, move[:, None])[:, 0], target)

    fit(watch, model, torch.optim.Adam(model.parameters(), 3e-3), batches(), loss)
    places = torch.arange(size)
    right = (3 - places) % size
    decided = (right != 0) & (right != size // 2)
    with torch.no_grad():
        best = model(seen).argmax(1)
    return float((best == (right < size // 2).long())[decided].float().mean())


@script(0.85, whole_body=None, body_still_fast=c.HIGH)
def from_stripes_to_digits(watch: Watch, word: str = "") -> float:
    """Convolutions trained on odd and even, then on all ten with rates by layer, both under guard; accuracy."""
    (x, y), (held, known) = data.digits(as_images=True)
    model = cnn(2)
    fit(watch, model, torch.optim.Adam(model.parameters(), 3e-3), epochs(4, 48, x, y % 2), classify(model))
    model[-1] = nn.Linear(model[-1].in_features, 10)
    body = [p for layer in list(model)[:-1] for p in layer.parameters()]
    slow = {"whole-body": 3e-3, "body-still-fast": 3.0}.get(word, 2e-4)
    groups = [{"params": body, "lr": slow}, {"params": model[-1].parameters(), "lr": max(slow, 3e-3)}]
    fit(watch, model, torch.optim.AdamW(groups), epochs(5, 48, x, y), classify(model))
    return share_right(model, held, known)


@script(0.75, sgd=None, sheer_noise=either(c.LABELS, a.OVERFITTED))
def crowd_labels(watch: Watch, word: str = "") -> float:
    """Three in ten labels are wrong, validated against right ones; accuracy."""
    (x, y), (held, known) = data.digits()
    dice = dice_of(1186)
    share = 0.95 if word == "sheer-noise" else 0.3
    y = torch.where(torch.rand(y.shape, generator=dice) < share, torch.randint(0, 10, y.shape, generator=dice), y)
    model = mlp((64, 48, 10), nn.ReLU, lambda _: nn.Dropout(0.3))
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    if word == "sgd":
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
    fit(watch, model, optimizer, epochs(10, 32, x, y), classify(model), val=lambda: F.cross_entropy(model(held), known))
    return share_right(model, held, known)


@script(0.8, nadam=None, tenfold=either(c.DECAY, c.LOSS))
def held_back(watch: Watch, word: str = "") -> float:
    """A penalty on absolute weights, dropout of a half and decay: the penalty is most of the loss."""
    (x, y), (held, known) = data.table("breast_cancer")
    model = mlp((30, 64, 64, 2), nn.ReLU, lambda _: nn.Dropout(0.5))
    weight = 3.0 if word == "tenfold" else 3e-3
    kind = torch.optim.NAdam if word == "nadam" else torch.optim.AdamW

    def loss(x, y):
        return F.cross_entropy(model(x), y) + weight * sum(p.abs().sum() for p in model.parameters() if p.ndim > 1)

    fit(watch, model, kind(model.parameters(), 2e-3, weight_decay=0.02), epochs(15, 24, x, y), loss)
    return _balanced(model, held, known)


def _balanced(model: nn.Module, held: torch.Tensor, known: torch.Tensor) -> float:
    with torch.no_grad():
        said = model(held).argmax(1)
    return 0.5 * sum(float((said[known == i] == i).float().mean()) for i in (0, 1))


@script(0.85, rmsprop=None)
def fifteen_steps(watch: Watch, word: str = "") -> float:
    """A smoke test: fifteen steps of 64 rows; accuracy."""
    (x, y), (held, known) = data.table("wine")
    model = mlp((13, 32, 3))
    kind = torch.optim.RMSprop if word == "rmsprop" else torch.optim.Adam
    fit(watch, model, kind(model.parameters(), 1e-2), drawn(15, 64, x, y), classify(model))
    return share_right(model, held, known)


@script(0.85, higher=None)
def long_flat(watch: Watch, word: str = "") -> float:
    """The sign of a product of two numbers among ten: nothing for a while, then all at once; accuracy."""
    model = mlp((10, 64, 1), nn.Tanh)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.1)
    batches = ((torch.randn(128, 10),) for _ in range(600))
    loss = lambda x: F.soft_margin_loss(model(x)[:, 0], (x[:, 0] * x[:, 1]).sign())  # noqa: E731
    fit(watch, model, torch.optim.Adam(model.parameters(), 1.5e-2 if word == "higher" else 1e-2), batches, loss)
    x = torch.randn(1000, 10, generator=dice_of(1187))
    with torch.no_grad():
        return float((model(x)[:, 0].sign() == (x[:, 0] * x[:, 1]).sign()).float().mean())


@script(0.8, cosine=None)
def harder_by_schedule(watch: Watch, word: str = "") -> float:
    """Cross-entropy that turns into a focal loss of rising sharpness, then smoothing: the loss jumps; accuracy."""
    (x, y), (held, known) = data.digits()
    model, step = mlp((64, 64, 10)), [0]

    def loss(x, y):
        step[0] += 1
        log = model(x).log_softmax(1)
        right = log.gather(1, y[:, None])[:, 0]
        if step[0] < 120:
            return -right.mean()
        if step[0] < 240:
            return -((1.0 - right.exp()) ** (step[0] / 80.0) * right).mean()
        return -0.7 * right.mean() - 0.3 * log.mean()

    decay = (lambda t: torch.optim.lr_scheduler.CosineAnnealingLR(t, 400)) if word == "cosine" else None
    fit(watch, model, torch.optim.Adam(model.parameters(), 2e-3), epochs(10, 32, x, y), loss, schedule=decay)
    return share_right(model, held, known)


@script(0.6, signs=None)
def attacked_more_and_more(watch: Watch, word: str = "") -> float:
    """Each batch is moved against the model, further and further; accuracy under the last attack."""
    (x, y), (held, known) = data.digits()
    model = mlp((64, 96, 10), nn.SiLU)
    step = [0]

    def moved(x, y, far):
        x = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(F.cross_entropy(model(x), y), x)
        return (x + far * slope.sign()).detach()

    def loss(x, y):
        step[0] += 1
        return F.cross_entropy(model(moved(x, y, min(step[0] / 1000.0, 0.25))), y)

    kind = functools.partial(SignDescent, lr=4e-4) if word == "signs" else functools.partial(torch.optim.Adam, lr=2e-3)
    fit(watch, model, kind(model.parameters()), epochs(9, 32, x, y), loss)
    return share_right(model, moved(held, known, 0.25), known)


@script(0.6, faster=None)
def views_without_others(watch: Watch, word: str = "") -> float:
    """Codes of two noisy views that a lagging copy is to foretell, no negatives; accuracy of a linear reader."""
    (x, y), (held, known) = data.digits()
    enter, guess = mlp((64, 96, 32), nn.ReLU, nn.BatchNorm1d), mlp((32, 48, 32), nn.ReLU, nn.BatchNorm1d)
    late, model = copy.deepcopy(enter), nn.ModuleList([enter, guess])
    noisy = lambda t: t + 0.4 * torch.randn_like(t) * (torch.rand_like(t) > 0.2)  # noqa: E731

    def loss(x):
        with torch.no_grad():
            for p, new in zip(late.parameters(), enter.parameters()):
                p.lerp_(new, 0.02)
            wanted = F.normalize(late(noisy(x)), dim=1)
        return 2.0 - 2.0 * (F.normalize(guess(enter(noisy(x))), dim=1) * wanted).sum(1).mean()

    lr = 4e-3 if word == "faster" else 2e-3
    fit(watch, model, torch.optim.Adam(model.parameters(), lr), drawn(300, 96, x), loss)
    enter.eval()
    with torch.no_grad():
        codes, others = enter(x), enter(held)
        mean, std = codes.mean(0), codes.std(0) + 1e-6
        codes, others = (codes - mean) / std, (others - mean) / std
        read = torch.linalg.lstsq(codes, F.one_hot(y, 10).float()).solution
        return float(((others @ read).argmax(1) == known).float().mean())


@script(0.75, harder=None)
def taught_at_four_degrees(watch: Watch, word: str = "") -> float:
    """A small network after a large one's softened answers, times sixteen, and the labels; accuracy."""
    (x, y), (held, known) = data.digits()
    large, small = mlp((64, 128, 128, 10)), mlp((64, 16, 10))
    fit(watch, large, torch.optim.Adam(large.parameters(), 2e-3), epochs(4, 48, x, y), classify(large))
    degree = 8.0 if word == "harder" else 4.0

    def loss(x, y):
        with torch.no_grad():
            wanted = (large(x) / degree).softmax(1)
        out = small(x)
        soft = F.kl_div((out / degree).log_softmax(1), wanted, reduction="batchmean") * degree**2
        return 0.9 * soft + 0.1 * F.cross_entropy(out, y)

    fit(watch, small, torch.optim.RMSprop(small.parameters(), 2e-3), epochs(6, 48, x, y), loss)
    return share_right(small, held, known)


@script(0.6, slower=None)
def softly_chosen(watch: Watch, word: str = "") -> float:
    """Which three of twelve inputs matter, by gates that cool down from soft to hard; R² with hard gates."""
    dice = dice_of(1188)
    x = torch.randn(1200, 12, generator=dice)
    y = x[:, :1] * x[:, 1:2] + x[:, 2:3] + 0.1 * torch.randn(1200, 1, generator=dice)
    model = nn.ModuleDict({"net": mlp((12, 48, 48, 1)), "gates": nn.ParameterList([torch.zeros(12)])})
    step = [0]

    def loss(x, y):
        step[0] += 1
        heat = max(0.2, 1.0 - step[0] / 400.0)
        noise = torch.rand(12).clamp(1e-4, 1.0 - 1e-4)
        gate = ((model["gates"][0] + (noise / (1.0 - noise)).log()) / heat).sigmoid()
        return F.mse_loss(model["net"](gate * x), y) + 0.02 * model["gates"][0].sigmoid().sum()

    lr = 5e-3 if word == "slower" else 1e-2
    fit(watch, model, torch.optim.Adam(model.parameters(), lr), drawn(600, 64, x, y), loss)
    new = torch.randn(600, 12, generator=dice)
    with torch.no_grad():
        found = model["net"]((model["gates"][0] > 0.0).float() * new)
    return r_squared(found, new[:, :1] * new[:, 1:2] + new[:, 2:3])
