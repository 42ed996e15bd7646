"""Ways of training: seasons, rehearsal, a new head, chosen samples, ramps, whole sets, half precision."""

from __future__ import annotations

import functools
import math

import torch
from torch import nn
from torch.nn import functional as F

from .. import data
from ..afresh import case as c
from ..afresh2 import case as a
from ..case import Case
from ..loop import Watch
from ..nets import cnn, mlp
from ..sound2.case import classify, drawn, epochs, r_squared, share_right, whole
from ..wild.case import dice_of
from .case import CUT_OR_FROZEN, either, entering, fit, fitted

CASES: list[Case] = []
task = entering(CASES, __name__)


@task(0.85, lr_gone=either(c.SCHEDULE, c.LOW))
def seasons(watch: Watch, fault: str = "") -> float:
    """A stream whose boundary turns, eight rows at a time, each seen once; share told right before it is learnt."""
    dice = dice_of(980)
    model = mlp((6, 32, 2), nn.ReLU)
    optimizer = watch.wrap(torch.optim.SGD(model.parameters(), 0.05, momentum=0.5), model)
    rates = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9 if fault == "lr-gone" else 1.0)
    right = []
    for step in range(600):
        turn = 2.0 * math.pi * step / 300
        x = torch.randn(8, 6, generator=dice)
        y = (x[:, 0] * math.cos(turn) + x[:, 1] * math.sin(turn) > 0).long()
        out = model(x)
        right.append(float((out.argmax(1) == y).float().mean()))
        loss = F.cross_entropy(out, y)
        loss.backward()
        optimizer.step()
        rates.step()
        optimizer.zero_grad()
        watch.observe(optimizer, loss=loss)
    return sum(right[100:]) / 500


@task(0.75)
def rehearsed(watch: Watch) -> float:
    """Three tasks of permuted pixels one after another, each with some of those before; mean accuracy."""
    (x, y), (held, known) = data.digits()
    orders = [torch.arange(64), *(torch.randperm(64, generator=dice_of(seed)) for seed in (981, 982))]
    model = mlp((64, 96, 10), nn.ReLU)

    def batches():
        for number, order in enumerate(orders):
            for bx, by in epochs(4, 48, x, y):
                at = torch.randint(400, (24,))
                past = [(x[at][:, old], y[at]) for old in orders[:number]]
                yield torch.cat([bx[:, order], *(p[0] for p in past)]), torch.cat([by, *(p[1] for p in past)])

    fit(watch, model, torch.optim.Adam(model.parameters(), 2e-3), batches(), classify(model))
    return sum(share_right(model, held[:, order], known) for order in orders) / 3


@task(0.85, body_stays=CUT_OR_FROZEN, rate_of_before=c.HIGH)
def new_digits_new_head(watch: Watch, fault: str = "") -> float:
    """Trained on zeros to fours, then a new head for the others: first the head, then all, each with an optimizer."""
    (x, y), (held, known) = data.digits()
    body, head = mlp((64, 48, 24), nn.ReLU), nn.Linear(24, 5)
    model = nn.Sequential(body, nn.ReLU(), head)
    few = y < 5
    if fault == "body-stays":
        body.requires_grad_(False)
    phase = lambda params, lr: torch.optim.SGD([p for p in params if p.requires_grad], lr, momentum=0.9)  # noqa: E731
    fit(watch, model, phase(model.parameters(), 0.05), epochs(5, 32, x[few], y[few]), classify(model))
    model[2] = nn.Linear(24, 5)
    body.requires_grad_(False)
    fit(watch, model, phase(model[2].parameters(), 0.05), epochs(2, 32, x[~few], y[~few] - 5), classify(model))
    body.requires_grad_(fault != "body-stays")
    lr = 5.0 if fault == "rate-of-before" else 5e-3
    val = fitted(model, held[known >= 5], known[known >= 5] - 5)
    fit(watch, model, phase(model.parameters(), lr), epochs(4, 32, x[~few], y[~few] - 5), classify(model), val=val)
    return share_right(model, held[known >= 5], known[known >= 5] - 5)


@task(0.7)
def biases_alone(watch: Watch) -> float:
    """From other digits to these by biases and the head alone; accuracy."""
    (x, y), (held, known) = data.digits()
    model = mlp((64, 96, 48, 10), nn.ReLU)
    first = torch.optim.Adam(model.parameters(), 3e-3)
    for bx, by in epochs(4, 48, x.flip(1), y):  # the trained state it begins with
        F.cross_entropy(model(bx), by).backward()
        first.step()
        first.zero_grad()
    for name, p in model.named_parameters():
        p.requires_grad_(name.endswith("bias") or p.shape[0] == 10)
    trained = [p for p in model.parameters() if p.requires_grad]
    fit(watch, model, torch.optim.AdamW(trained, 1e-2), epochs(6, 48, x, y), classify(model))
    return share_right(model, held, known)


@task(0.8)
def chosen_by_doubt(watch: Watch) -> float:
    """Forty labels at first, twenty more of the least certain after each sixty steps: the loss jumps; accuracy."""
    (x, y), (held, known) = data.digits()
    model, own = mlp((64, 64, 10), nn.ReLU), torch.arange(40)

    def batches():
        nonlocal own
        for _ in range(7):
            for _ in range(60):
                at = own[torch.randint(len(own), (32,))]
                yield x[at], y[at]
            with torch.no_grad():
                doubt = 1.0 - model(x).softmax(1).amax(1)
            doubt[own] = -1.0
            own = torch.cat([own, doubt.topk(20).indices])

    fit(watch, model, torch.optim.Adam(model.parameters(), 2e-3), batches(), classify(model))
    return share_right(model, held, known)


@task(0.75)
def alike_when_disturbed(watch: Watch) -> float:
    """A hundred labels, and answers that are to stay alike under noise, with a weight that rises; accuracy."""
    (x, y), (held, known) = data.digits()
    model = mlp((64, 64, 10), nn.ReLU)
    few, labels, steps = x[:100], y[:100], iter(range(10_000))

    def loss(rows):
        at = torch.randint(100, (32,))
        one, other = (model(rows + 0.3 * torch.randn_like(rows)).softmax(1) for _ in range(2))
        weight = 20.0 * min(1.0, next(steps) / 150)
        return F.cross_entropy(model(few[at]), labels[at]) + weight * F.mse_loss(one, other)

    fit(
        watch,
        model,
        torch.optim.Adam(model.parameters(), 2e-3),
        drawn(250, 64, x),
        loss,
        val=fitted(model, held, known),
    )
    return share_right(model, held, known)


class _Lamb(torch.optim.Optimizer):
    """Adam whose step is as long as a share of each tensor."""

    def __init__(self, params, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state |= {"mean": torch.zeros_like(p), "square": torch.zeros_like(p), "count": 0}
                state["count"] += 1
                state["mean"].lerp_(p.grad, 0.1)
                state["square"].lerp_(p.grad.square(), 0.01)
                fade = 1.0 - 0.9 ** state["count"], 1.0 - 0.99 ** state["count"]
                step = state["mean"] / fade[0] / ((state["square"] / fade[1]).sqrt() + 1e-6) + 0.01 * p
                share = p.norm().clamp(min=0.1) / (step.norm() + 1e-9)
                p.sub_(group["lr"] * share * step)


@task(0.9)
def all_rows_by_layers(watch: Watch) -> float:
    """All digits in each step, rates a layer by its size (LAMB), accuracy."""
    (x, y), (held, known) = data.digits()
    model = mlp((64, 64, 10), nn.ReLU)
    ramp = lambda step: min(1.0, (step + 1) / 10) * (1.0 - step / 121)  # noqa: E731
    schedule = functools.partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=ramp)
    fit(watch, model, _Lamb(model.parameters(), 0.05), whole(120, x, y), classify(model), schedule=schedule)
    return share_right(model, held, known)


@task(0.9, threefold_drop=c.SCHEDULE)
def three_drops(watch: Watch, fault: str = "") -> float:
    """A tenth of the rate after each quarter, so that nearly nothing moves at the end; accuracy, validated."""
    (x, y), (held, known) = data.digits(as_images=True)
    model = cnn()
    marks = [2, 4, 6] if fault else [100, 170, 220]
    schedule = functools.partial(torch.optim.lr_scheduler.MultiStepLR, milestones=marks, gamma=0.1)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    fit(
        watch,
        model,
        optimizer,
        drawn(260, 32, x, y),
        classify(model),
        schedule=schedule,
        val=fitted(model, held, known),
    )
    return share_right(model, held, known)


@task(0.85)
def autocast_to_bfloat16(watch: Watch) -> float:
    """Forward passes in bfloat16 where autocast has them so, no scaler; accuracy."""
    (x, y), (held, known) = data.digits()
    model = mlp((64, 96, 96, 10), nn.GELU)

    def loss(x, y):
        with torch.autocast("cpu", torch.bfloat16):
            return F.cross_entropy(model(x), y)

    fit(watch, model, torch.optim.AdamW(model.parameters(), 2e-3), epochs(6, 64, x, y), loss, max_norm=1.0)
    return share_right(model, held, known)


@task(0.95)
def out_of_a_saddle(watch: Watch) -> float:
    """Three linear layers that begin close to nothing: a long plain, a fall, and then the goal; R²."""
    dice = dice_of(983)
    x = torch.randn(600, 10, generator=dice)
    y = x @ torch.randn(10, 3, generator=dice) / 3.0
    (x, y), (held, known) = data.parted(x, y)
    model = nn.Sequential(*(nn.Linear(i, o, bias=False) for i, o in ((10, 16), (16, 16), (16, 3))))
    for p in model.parameters():
        nn.init.normal_(p, std=0.03)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.5)
    fit(watch, model, optimizer, whole(500, x, y), lambda x, y: F.mse_loss(model(x), y))
    with torch.no_grad():
        return r_squared(model(held), known)


@task(0.8)
def half_is_decay(watch: Watch) -> float:
    """A decay of a half and a dropout of 0.6: training looks worse than validation; accuracy."""
    (x, y), (held, known) = data.digits()
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.6), nn.Linear(128, 10))
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3, weight_decay=0.5)
    fit(watch, model, optimizer, epochs(8, 32, x, y), classify(model), val=fitted(model, held, known))
    return share_right(model, held, known)


@task(0.85)
def each_batch_twice(watch: Watch) -> float:
    """Each batch is trained on twice in a row, the sum over its rows as loss; accuracy."""
    (x, y), (held, known) = data.digits()
    model = mlp((64, 64, 10), nn.ReLU)
    loss = lambda x, y: F.cross_entropy(model(x), y, reduction="sum")  # noqa: E731
    batches = (batch for batch in epochs(4, 24, x, y) for _ in range(2))
    fit(watch, model, torch.optim.SGD(model.parameters(), 2e-3), batches, loss)
    return share_right(model, held, known)


@task(0.85)
def signs_with_memory(watch: Watch) -> float:
    """Gradients are sent as signs, and what is lost is added the next time; accuracy."""
    (x, y), (held, known) = data.digits()
    model = mlp((64, 64, 10), nn.Tanh)
    optimizer = watch.wrap(torch.optim.SGD(model.parameters(), 0.2), model)
    lost = [torch.zeros_like(p) for p in model.parameters()]
    for bx, by in epochs(6, 48, x, y):
        loss = F.cross_entropy(model(bx), by)
        optimizer.zero_grad()
        loss.backward()
        for p, rest in zip(model.parameters(), lost):
            whole_ = p.grad + rest
            p.grad = whole_.sign() * whole_.abs().mean()
            rest.copy_(whole_ - p.grad)
        optimizer.step()
        watch.observe(optimizer, loss=loss)
    return share_right(model, held, known)


@task(0.9, wrong_sign=either(c.LOSS, c.HIGH, c.CUT), half_without_scaler=a.HALF)
def by_hand(watch: Watch, fault: str = "") -> float:
    """Gradients written by hand into `.grad`, two layers, momentum; accuracy."""
    (x, y), (held, known) = data.digits()
    model = mlp((64, 64, 10), nn.Tanh)
    first, last = model[0], model[2]
    optimizer = watch.wrap(torch.optim.SGD(model.parameters(), 0.05, momentum=0.9), model)
    for bx, by in epochs(6, 32, x, y):
        with torch.no_grad():
            h = first(bx).tanh()
            p = last(h).softmax(1)
            loss = F.nll_loss(p.log(), by)
            off = (p - F.one_hot(by, 10)) / len(by)
            if fault == "half-without-scaler":
                off = (off * 2e-7).half().float()
            back = (off @ last.weight) * (1.0 - h.square())
            if fault == "wrong-sign":
                back, off = -back, -off
            first.weight.grad, first.bias.grad = back.T @ bx, back.sum(0)
            last.weight.grad, last.bias.grad = off.T @ h, off.sum(0)
        optimizer.step()
        watch.observe(optimizer, loss=loss)
    return share_right(model, held, known)
