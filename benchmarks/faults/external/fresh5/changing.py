"""Rewards, games, and data or aims that change while the run goes on."""

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
from ..fresh3.case import ASCENT, CUT_OR_FROZEN, either, fit
from ..loop import Watch
from ..nets import mlp
from ..sound2.case import classify, drawn, epochs, r_squared, share_right
from ..wild.case import dice_of
from . import case as g

CASES: list[Case] = []
script = g.scripting(CASES, __name__)


def _stepped(watch: Watch, optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    watch.observe(optimizer, loss=loss)


@script(0.6, greedier=None, lr_1e_7=c.LOW, clicks_of_others=c.LABELS)
def adverts(watch: Watch, word: str = "") -> float:
    """Which of five adverts is shown, by squared error of clicks, while taste turns; share of the best, second half."""
    dice = dice_of(1350)
    taste, other = torch.randn(2, 6, 5, generator=dice)
    model = mlp((6, 32, 5))
    optimizer = watch.wrap(torch.optim.Adam(model.parameters(), 1e-7 if word == "lr-1e-7" else 5e-3), model)
    got = best = by_chance = 0.0
    for turn in range(500):
        x = torch.randn(48, 6)
        now = torch.lerp(taste, other, turn / 500.0)
        true = (2.0 * x @ now).sigmoid()
        shown = model(x).argmax(1)
        chance = 0.05 if word == "greedier" else 0.15
        shown = torch.where(torch.rand(48) < chance, torch.randint(0, 5, (48,)), shown)
        clicked = (torch.rand(48) < true.gather(1, shown[:, None])[:, 0]).float()
        if turn >= 250:
            got += float(true.gather(1, shown[:, None]).mean())
            best, by_chance = best + float(true.amax(1).mean()), by_chance + float(true.mean())
        if word == "clicks-of-others":
            clicked = clicked[torch.randperm(48)]
        _stepped(watch, optimizer, F.mse_loss(model(x).gather(1, shown[:, None])[:, 0], clicked))
    return (got - by_chance) / (best - by_chance)


@script(0.6, squares=None, helps_the_judge=either(c.LOSS, a.WON), no_noise=either(c.COLLAPSED, a.WON))
def three_peaks(watch: Watch, word: str = "") -> float:
    """Numbers forged after three peaks, a judge with a smooth loss; 1 - distance of quantiles."""
    forge, judge = mlp((4, 48, 48, 1)), mlp((1, 48, 48, 1), nn.LeakyReLU)
    makes = watch.wrap(torch.optim.Adam(forge.parameters(), 1e-3, betas=(0.0, 0.9)), forge)
    judges = watch.wrap(torch.optim.Adam(judge.parameters(), 4e-3, betas=(0.0, 0.9)), judge)
    real = lambda n: torch.randint(-1, 2, (n, 1)) * 1.5 + 0.2 * torch.randn(n, 1)  # noqa: E731
    noise = lambda n: torch.zeros(n, 4) if word == "no-noise" else torch.randn(n, 4)  # noqa: E731
    true = (lambda t: (t - 1.0).square().mean()) if word == "squares" else lambda t: F.softplus(-t).mean()
    false = (lambda t: t.square().mean()) if word == "squares" else lambda t: F.softplus(t).mean()
    for _ in range(500):
        _stepped(watch, judges, true(judge(real(128))) + false(judge(forge(noise(128)).detach())))
        _stepped(watch, makes, (false if word == "helps-the-judge" else true)(judge(forge(noise(128)))))
    with torch.no_grad():
        found, wanted = forge(noise(3000))[:, 0].sort().values, real(3000)[:, 0].sort().values
    return 1.0 - float((found - wanted).abs().mean())


@script(0.4, momentum=None, ascent=ASCENT, lr_1e_7=c.LOW)
def thermostat(watch: Watch, word: str = "") -> float:
    """Heating of 48 houses for 20 hours by policy gradients, weather that gets colder from step to step; cost saved."""
    model = mlp((3, 24, 3), nn.Tanh)
    lr = {"momentum": 3e-2, "lr-1e-7": 1e-7}.get(word, 1e-2)
    kind = functools.partial(torch.optim.SGD, momentum=0.9) if word == "momentum" else torch.optim.Adam
    optimizer = watch.wrap(kind(model.parameters(), lr), model, 1.0 if word == "momentum" else None)

    def lived(choose, cold, count, dice=None):
        warm, out = 18.0 + 3.0 * torch.randn(count, generator=dice), cold + 3.0 * torch.randn(count, generator=dice)
        logs, costs = [], []
        for hour in range(20):
            logits = model(torch.stack([(warm - 20.0) / 4.0, out / 8.0, torch.full((count,), hour / 10.0 - 1.0)], 1))
            heat = choose(logits)
            logs.append(logits.log_softmax(1).gather(1, heat[:, None])[:, 0])
            warm = warm + 0.1 * (out - warm) + 1.5 * heat
            costs.append(-((warm - 20.0).abs() / 4.0).clamp(max=3.0) - 0.05 * heat)
        return torch.stack(logs), torch.stack(costs)

    for turn in range(220):
        chosen = lambda logits: torch.multinomial(logits.softmax(1), 1)[:, 0]  # noqa: E731
        logs, costs = lived(chosen, 10.0 - turn / 22.0, 48)
        ahead = torch.zeros_like(costs)
        for hour in range(19, -1, -1):
            ahead[hour] = costs[hour] + (0.8 * ahead[hour + 1] if hour < 19 else 0.0)
        gain = (ahead - ahead.mean(1, keepdim=True)) / (ahead.std(1, keepdim=True) + 1e-6)
        loss = -(gain.detach() * logs).mean()
        _stepped(watch, optimizer, -loss if word == "ascent" else loss)
    with torch.no_grad():
        found = lived(lambda logits: logits.argmax(1), 0.0, 400, dice_of(1351))[1].mean()
        by_chance = lived(lambda logits: torch.randint(0, 3, (len(logits),)), 0.0, 400, dice_of(1351))[1].mean()
    return 1.0 - float(found / by_chance)


@script(0.6, huber=None, reward_times_1000=c.TARGETS, target_with_graph_alone=either(c.LOSS, CUT_OR_FROZEN, c.LABELS))
def fetch_and_carry(watch: Watch, word: str = "") -> float:
    """A parcel on a line is fetched and carried to the other end, Q-learning on its own walks; share brought."""
    model = mlp((14, 64, 3))
    late = copy.deepcopy(model)
    optimizer = watch.wrap(torch.optim.Adam(model.parameters(), 3e-3), model, 10.0)
    size, kept = 6, []
    seen = lambda at, has: torch.cat([F.one_hot(at, 7), F.one_hot(at, 7) * has[:, None]], 1).float()  # noqa: E731

    def moved(at, has, move):
        at = (at + move - 1).clamp(0, size)
        has = has | (at == size)
        return at, has, has & (at == 0)

    at, has = torch.randint(0, 7, (24,)), torch.zeros(24, dtype=torch.bool)
    for turn in range(700):
        now = seen(at, has)
        with torch.no_grad():
            move = model(now).argmax(1)
        move = torch.where(torch.rand(24) < max(0.2, 1.0 - turn / 250.0), torch.randint(0, 3, (24,)), move)
        new, holds, done = moved(at, has, move)
        kept.append((now, move, done.float() + 0.3 * (holds & ~has).float(), seen(new, holds), done))
        over = done | (torch.rand(24) < 0.03)
        at, has = torch.where(over, torch.randint(0, 7, (24,)), new), holds & ~over
        if turn < 50:
            continue
        rows = [kept[i] for i in torch.randint(max(0, turn - 300), turn, (3,)).tolist()]
        before, did, got, then, ended = (torch.cat(column) for column in zip(*rows))
        ahead = (model if word == "target-with-graph-alone" else late)(then).amax(1)
        wanted = (1000.0 * got if word == "reward-times-1000" else got) + 0.9 * ~ended * ahead.detach()
        said = model(before).gather(1, did[:, None])[:, 0]
        if word == "target-with-graph-alone":
            said, wanted = said.detach(), got + 0.9 * ~ended * ahead
        error = F.huber_loss if word == "huber" else F.mse_loss
        _stepped(watch, optimizer, error(said, wanted))
        with torch.no_grad():
            for p, new in zip(late.parameters(), model.parameters()):
                p.lerp_(new, 0.05)
    at, has, brought = torch.arange(7), torch.zeros(7, dtype=torch.bool), torch.zeros(7, dtype=torch.bool)
    for _ in range(14):
        with torch.no_grad():
            at, has, done = moved(at, has, model(seen(at, has)).argmax(1))
        brought |= done
    return float(brought.float().mean())


@script(0.6, adamw=None, without_what_was=c.SORTED)
def digits_that_turn(watch: Watch, word: str = "") -> float:
    """Digits turned by a right angle more each quarter, half of a batch as they were before; accuracy on all."""
    (x, y), (held, known) = data.digits(as_images=True)
    model = mlp((64, 96, 10))
    kind = torch.optim.AdamW if word == "adamw" else torch.optim.RMSprop
    turned = lambda t, k: t.rot90(k, (2, 3)).flatten(1)  # noqa: E731

    def batches():
        for quarter in range(4):
            for _ in range(110):
                at = torch.randint(len(x), (32,))
                rows = [turned(x[at], quarter)]
                if quarter and word != "without-what-was":
                    rows = [rows[0][:16], turned(x[at[16:]], int(torch.randint(quarter, (1,))))]
                yield torch.cat(rows), y[at]

    fit(watch, model, kind(model.parameters(), 1.5e-3), batches(), classify(model))
    return sum(share_right(model, turned(held, k), known) for k in range(4)) / 4.0


@script(0.35, nadam=None, whole_shown=g.MASKLESS)
def more_and_more_hidden(watch: Watch, word: str = "") -> float:
    """Pixels from those around, of which more and more are hidden, so that the loss rises; R² where half is hidden."""
    (x, _), (held, _) = data.digits()
    model = mlp((128, 128, 64))
    kind, step = (torch.optim.NAdam if word == "nadam" else torch.optim.Adam), [0]

    def loss(t):
        step[0] += 1
        shown = (torch.rand_like(t) > 0.1 + 0.6 * step[0] / 500.0).float()
        if word == "whole-shown":
            shown = torch.ones_like(t)
        hidden = 1.0 - shown if word != "whole-shown" else shown
        return ((model(torch.cat([shown * t, shown], 1)) - t).square() * hidden).sum() / hidden.sum()

    fit(watch, model, kind(model.parameters(), 3e-3), drawn(500, 48, x), loss)
    shown = (torch.rand(held.shape, generator=dice_of(1353)) > 0.5).float()
    with torch.no_grad():
        found = model(torch.cat([shown * held, shown], 1))
    return r_squared(found[shown == 0], held[shown == 0])


@script(0.75, adagrad=None, rate_gone=c.SCHEDULE, lr_300=c.HIGH)
def meanings_that_jump(watch: Watch, word: str = "") -> float:
    """A stream in which what decides changes at once, three times; accuracy foretold, between the changes."""
    model = mlp((8, 32, 1))
    lr = {"lr-300": 6.0, "adagrad": 5e-2}.get(word, 1e-2)
    kind = torch.optim.Adagrad if word == "adagrad" else torch.optim.RMSprop
    right, dice = [], dice_of(1354)

    def batches():
        for _ in range(4):
            true = torch.randn(8, generator=dice)
            for step in range(130):
                x = torch.randn(32, 8, generator=dice)
                y = (x @ true + 0.5 * x[:, 0] * x[:, 1] > 0.0).float()
                if step >= 60:
                    with torch.no_grad():
                        right.append(((model(x)[:, 0] > 0.0) == (y > 0.5)).float().mean())
                yield x, y

    decay = (lambda t: torch.optim.lr_scheduler.ExponentialLR(t, 0.95)) if word == "rate-gone" else None
    fit(
        watch, model, kind(model.parameters(), lr), batches(),
        lambda x, y: F.binary_cross_entropy_with_logits(model(x)[:, 0], y), schedule=decay,
    )  # fmt: skip
    return float(torch.stack(right).mean())


@script(0.8, adam=None)
def two_sellers(watch: Watch, word: str = "") -> float:
    """Two prices for each of many days, each after its own gain, given the day's demand; nearness to the balance."""
    first, second = mlp((1, 16, 1), nn.Tanh), mlp((1, 16, 1), nn.Tanh)
    kind = (
        functools.partial(torch.optim.Adam, lr=1e-2) if word == "adam" else functools.partial(torch.optim.SGD, lr=0.1)
    )
    sells, rivals = watch.wrap(kind(first.parameters()), first), watch.wrap(kind(second.parameters()), second)
    gain = lambda own, other, demand: own * (demand - 2.0 * own + other)  # noqa: E731
    for _ in range(350):
        demand = 1.0 + 2.0 * torch.rand(48, 1)
        one, two = first(demand - 2.0), second(demand - 2.0)
        _stepped(watch, sells, -gain(one, two.detach(), demand).mean())
        _stepped(watch, rivals, -gain(two, one.detach(), demand).mean())
    demand = torch.linspace(1.0, 3.0, 50)[:, None]
    with torch.no_grad():
        return 0.5 * sum(r_squared(m(demand - 2.0), demand / 3.0) for m in (first, second))


@script(0.4, slower=None, divergence_times_1000=either(c.COLLAPSED, c.LOSS))
def codes_under_growing_pressure(watch: Watch, word: str = "") -> float:
    """Digits in eight noisy numbers, whose divergence counts for more and more; R² of what comes back."""
    (x, _), (held, _) = data.digits()
    enter, leave = mlp((64, 64, 16)), mlp((8, 64, 64))
    model, step = nn.ModuleList([enter, leave]), [0]

    def loss(t):
        step[0] += 1
        weight = 500.0 if word == "divergence-times-1000" else min(1.0, step[0] / 300.0) * 0.5
        mean, log = enter(t).chunk(2, 1)
        back = leave(mean + (0.5 * log).exp() * torch.randn_like(mean))
        divergence = 0.5 * (mean.square() + log.exp() - 1.0 - log).sum(1).mean()
        return (back - t).square().sum(1).mean() + weight * divergence

    rate = 1e-3 if word == "slower" else 2e-3
    fit(watch, model, torch.optim.Adamax(model.parameters(), rate), epochs(12, 32, x), loss)
    with torch.no_grad():
        return r_squared(leave(enter(held)[:, :8]), held)
