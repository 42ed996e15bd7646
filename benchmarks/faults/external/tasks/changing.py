"""Aims that change, rewards and games: halves in turn, a sensor, longer sums, thawing, a lift, a ring, a maze."""

from __future__ import annotations

import copy
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


def _ride(model: nn.Module, count: int, greedy: bool = False, dice: torch.Generator | None = None):
    """A lift of seven floors, a caller on one of them; 14 ticks: logits, what was done, values, rewards [14, N]."""
    here, wanted = (torch.randint(0, 7, (count,), generator=dice) for _ in range(2))
    rows = []
    for _ in range(14):
        out = model(torch.cat([F.one_hot(here, 7), F.one_hot(wanted, 7)], 1).float())
        move = out[:, :3].argmax(1) if greedy else torch.multinomial(out[:, :3].softmax(1), 1)[:, 0]
        here = (here + move - 1).clamp(0, 6)
        came = here == wanted
        rows.append((out[:, :3].log_softmax(1), move, out[:, 3], came.float() - 0.05))
        fresh = torch.randint(0, 7, (count,), generator=dice)
        wanted = torch.where(came, fresh, wanted)
    return (torch.stack(column) for column in zip(*rows))


@script(0.6, clipped=None, ascent=t.ASCENT, lr_3e_7=t.LOW, lr_1=t.HIGH, reward_of_others=t.LABELS)
def lift(watch: Watch, word: str = "") -> float:
    """A lift learns to fetch callers, actor and critic in one, Adam; callers fetched, of those that can be."""
    model = mlp((14, 64, 4), nn.Tanh)
    lr = {"lr-3e-7": 3e-7, "lr-1": 1.0, "clipped": 4e-3}.get(word, 1e-2)
    optimizer = watch.wrap(torch.optim.Adam(model.parameters(), lr), model, 0.5 if word == "clipped" else None)
    for _ in range(160):
        logs, moves, values, rewards = _ride(model, 48)
        if word == "reward-of-others":
            rewards = rewards[:, torch.randperm(48)]
        ahead, after = torch.zeros_like(rewards), torch.zeros(48)
        for tick in range(13, -1, -1):
            after = ahead[tick] = rewards[tick] + 0.85 * after
        gain = (ahead - values).detach()
        chosen = (logs.gather(2, moves[..., None])[..., 0] * gain).mean()
        spread = -(logs.exp() * logs).sum(2).mean()
        actor = chosen if word == "ascent" else -chosen
        f.stepped(watch, optimizer, actor + 0.5 * (values - ahead).square().mean() - 0.01 * spread)
    with torch.no_grad():
        *_, rewards = _ride(model, 500, True, dice_of(1470))
        *_, by_chance = _ride(lambda x: torch.zeros(len(x), 4), 500, False, dice_of(1470))
        best = 14.0 / 2.9
    return float(((rewards + 0.05).sum(0).mean() - (by_chance + 0.05).sum(0).mean()) / best)


def _far(found: torch.Tensor, real: torch.Tensor) -> float:
    """Energy distance, as a share of that of a point at nought."""
    gap = lambda p, q: torch.cdist(p, q).mean()  # noqa: E731
    distance = lambda p: 2.0 * gap(p, real) - gap(p, p) - gap(real, real)  # noqa: E731
    return float(distance(found) / distance(0.0 * found))


@script(
    0.75,
    smooth=None,
    maker_detached=t.either(t.NO_GRADIENT, t.FIXED),
    judge_a_thousandfold=t.either(t.HIGH, t.WON),
    ring_of_another_size=t.DIFFERS,
    maker_lr_1e_7=t.either(t.LOW, t.WON),
)
def ring_forged(watch: Watch, word: str = "") -> float:
    """Points on a ring forged against a judge with hinges; 1 - energy distance."""
    maker, judge = mlp((6, 64, 64, 2), nn.LeakyReLU), mlp((2, 64, 64, 1), nn.LeakyReLU)
    mean = copy.deepcopy(maker)
    betas = (0.0, 0.9)
    makes = watch.wrap(torch.optim.Adam(maker.parameters(), 1e-7 if word == "maker-lr-1e-7" else 1e-3, betas), maker)
    judges = watch.wrap(
        torch.optim.Adam(judge.parameters(), 3.0 if word == "judge-a-thousandfold" else 3e-3, betas), judge
    )

    def real(count: int, size: float = 1.0) -> torch.Tensor:
        angle = 6.28 * torch.rand(count)
        return size * torch.stack([angle.cos(), angle.sin()], 1) + 0.05 * torch.randn(count, 2)

    size = 4.0 if word == "ring-of-another-size" else 1.0
    blurred = lambda x: judge(x + 0.15 * torch.randn(x.shape))  # noqa: E731
    for _ in range(330):
        made = maker(torch.randn(96, 6))
        true, false = blurred(real(96, size)), blurred(made.detach())
        if word == "smooth":
            f.stepped(watch, judges, F.softplus(-true).mean() + F.softplus(false).mean())
        else:
            f.stepped(watch, judges, (1.0 - true).relu().mean() + (1.0 + false).relu().mean())
        said = blurred(made.detach() + 0.0 * maker[0].weight.sum() if word == "maker-detached" else made)
        f.stepped(watch, makes, F.softplus(-said).mean() if word == "smooth" else -said.mean())
        with torch.no_grad():
            for p, q in zip(mean.parameters(), maker.parameters()):
                p.lerp_(q, 0.03)
    with torch.no_grad():
        return 1.0 - _far(mean(torch.randn(800, 6)), real(800))


_WALLS = torch.tensor([[0, 0, 0, 1, 0], [1, 1, 0, 1, 0], [0, 0, 0, 0, 0], [0, 1, 1, 1, 1], [0, 0, 0, 0, 0]]).bool()


def _go(at: torch.Tensor, move: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    step = torch.tensor([[0, 1], [1, 0], [0, -1], [-1, 0]])[move]
    new = (at + step).clamp(0, 4)
    new = torch.where(_WALLS[new[:, 0], new[:, 1]][:, None], at, new)
    return new, (new == 4).all(1)


def _open(count: int) -> torch.Tensor:
    cells = (~_WALLS).nonzero()
    return cells[torch.randint(0, len(cells), (count,))]


@script(
    0.8,
    twins=None,
    lr_1e_7=t.LOW,
    prize_of_a_million=t.TARGETS,
    discount_above_one=t.either(t.LOSS, t.LABELS, t.TARGETS),
    moves_of_others=t.LABELS,
)
def maze(watch: Watch, word: str = "") -> float:
    """The way out of a small maze by Q-learning on remembered moves; share of cells it gets out from."""
    model = mlp((25, 64, 4))
    late = copy.deepcopy(model)
    optimizer = watch.wrap(torch.optim.Adam(model.parameters(), 1e-7 if word == "lr-1e-7" else 3e-3), model, 10.0)
    seen = lambda at: F.one_hot(at[:, 0] * 5 + at[:, 1], 25).float()  # noqa: E731
    at, age, kept = _open(32), torch.zeros(32), []
    prize = 1e6 if word == "prize-of-a-million" else 1.0
    for turn in range(450):
        with torch.no_grad():
            move = torch.where(torch.rand(32) < 0.5, torch.randint(0, 4, (32,)), model(seen(at)).argmax(1))
        new, out = _go(at, move)
        did = move[torch.randperm(32)] if word == "moves-of-others" else move
        kept.append((at, did, prize * out.float(), new, out))
        age += 1
        over = out | (age > 20)
        at, age = torch.where(over[:, None], _open(32), new), age * ~over
        rows = [kept[k] for k in torch.randint(max(0, len(kept) - 150), len(kept), (3,)).tolist()]
        was, did, won, then, ended = (torch.cat(column) for column in zip(*rows))
        with torch.no_grad():
            best = (model if word == "twins" else late)(seen(then)).argmax(1)
            goes_on = 1.4 if word == "discount-above-one" else 0.9 * ~ended
            target = won + goes_on * late(seen(then)).gather(1, best[:, None])[:, 0]
        found = model(seen(was)).gather(1, did[:, None])[:, 0]
        f.stepped(watch, optimizer, F.mse_loss(found, target) if prize > 1.0 else F.huber_loss(found, target))
        if turn % 15 == 14:
            late.load_state_dict(model.state_dict())
    at = (~_WALLS).nonzero()
    done = torch.zeros(len(at), dtype=torch.bool)
    with torch.no_grad():
        for _ in range(14):
            at, out = _go(at, model(seen(at)).argmax(1))
            done |= out
    return float(done.float().mean())
