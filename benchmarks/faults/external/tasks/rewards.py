"""Rewards and games: a lift, prices, forged rings, a maze, words for reward."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.nn import functional as F

from .. import operators as f
from .. import truths as t
from ..case import Case
from ..data import dice_of
from ..loop import Watch
from ..nets import Recurrent, mlp

CASES: list[Case] = []
script = f.scripting(CASES, __name__)


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


@script(0.7, momentum=None, cost_instead_of_gain=t.ASCENT, lr_1e_7=t.LOW, lr_4=t.HIGH)
def prices(watch: Watch, word: str = "") -> float:
    """A price by season and stock, drawn around what a network says, demand that wanders; gain of the best, later."""
    dice = dice_of(1471)
    model = mlp((3, 32, 1), nn.Tanh)
    lr = {"lr-1e-7": 1e-7, "momentum": 0.2, "lr-4": 4.0}.get(word, 1e-2)
    kind = (lambda p, lr: torch.optim.SGD(p, lr, momentum=0.9)) if word == "momentum" else torch.optim.Adam
    optimizer = watch.wrap(kind(model.parameters(), lr), model, 1.0 if word == "momentum" else None)
    got = best = 0.0
    for turn in range(400):
        x = torch.randn(64, 3, generator=dice)
        right = 1.2 * torch.tanh(x[:, 0] + turn / 200.0 - 1.0) + 0.6 * x[:, 1]
        middle = model(x)[:, 0]
        price = (middle + 0.4 * torch.randn(64)).detach()
        gain = 2.0 - (price - right).square() + 0.3 * torch.randn(64)
        if turn >= 200:
            got += float((middle.detach() - right).square().mean())
            best += float(right.square().mean())
        likely = -0.5 * ((price - middle) / 0.4).square()
        loss = -((gain - gain.mean()) * likely).mean()
        f.stepped(watch, optimizer, -loss if word == "cost-instead-of-gain" else loss)
    return 1.0 - got / best


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


@script(
    0.5,
    clipped=None,
    reward_of_the_batch=t.either(t.LEAK, t.LABELS, t.LOSS, t.NO_GRADIENT),
    lr_3e_7=t.LOW,
    pulled_back_a_thousandfold=t.LOSS,
    ascent=t.ASCENT,
)
def words_for_reward(watch: Watch, word: str = "") -> float:
    """Eight symbols said one after another, paid for each that is one above the last, in groups; share of what pays."""
    model = Recurrent(nn.GRU, 9, 8, 32)
    before = copy.deepcopy(model).requires_grad_(False)
    optimizer = watch.wrap(
        torch.optim.Adam(model.parameters(), 3e-7 if word == "lr-3e-7" else 1e-2), model,
        0.03 if word == "clipped" else None,
    )  # fmt: skip
    paid = lambda said: ((said[:, 1:] - said[:, :-1]) % 8 == 1).float().mean(1)  # noqa: E731

    def spoken(count: int) -> torch.Tensor:
        said = torch.full((count, 1), 8)
        with torch.no_grad():
            for _ in range(8):
                said = torch.cat([said, torch.multinomial(model(said)[:, -1].softmax(1), 1)], 1)
        return said

    for _ in range(170):
        said = spoken(64)
        pay = paid(said[:, 1:])
        if word == "reward-of-the-batch":
            pay = pay.mean().expand(64)
        gain = (pay - pay.mean()) / (pay.std() + 1e-4)
        logs, old = (m(said[:, :-1]).log_softmax(2) for m in (model, before))
        chosen = logs.gather(2, said[:, 1:, None])[..., 0]
        away = (logs.exp() * (logs - old)).sum(2).mean()
        loss = -(gain[:, None] * chosen).mean() + (100.0 if word == "pulled-back-a-thousandfold" else 0.01) * away
        f.stepped(watch, optimizer, -loss if word == "ascent" else loss)
    return float((paid(spoken(600)[:, 1:]).mean() - 0.125) / 0.875)
