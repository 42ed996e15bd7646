"""Rewards and games: what is told as a loss is no measure of how good things are."""

from __future__ import annotations

import copy
import functools

import torch
from torch import nn
from torch.nn import functional as F

from ..afresh import case as c
from ..afresh2 import case as a
from ..case import Case
from ..fresh3.case import ASCENT, CUT_OR_FROZEN, either
from ..loop import Watch
from ..nets import mlp
from ..wild.case import dice_of
from . import case as f

CASES: list[Case] = []
script = f.scripting(CASES, __name__)


def _stepped(watch: Watch, optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    watch.observe(optimizer, loss=loss)


def _hand(cards: torch.Tensor, dealer: torch.Tensor) -> torch.Tensor:
    return torch.stack([(cards - 14.0) / 5.0, (dealer - 5.5) / 3.0, (cards - 14.0) * (dealer - 5.5) / 15.0], 1)


@functools.cache
def _chances() -> torch.Tensor:
    """What standing at each sum against each open card wins on average, by many games [22, 11]."""
    dice = dice_of(1201)
    wins = torch.zeros(22, 11)
    for card in range(1, 11):
        total = torch.full((4000,), float(card))
        for _ in range(12):
            draws = total < 17
            total = total + draws * torch.randint(1, 14, (4000,), generator=dice).clamp(max=10)
        for cards in range(22):
            wins[cards, card] = ((total > 21) | (total < cards)).float().mean() - (
                (total <= 21) & (total > cards)
            ).float().mean()
    return wins


def _played(policy, count: int, dice: torch.Generator | None = None):
    """Games in parallel: what was seen, what was done, where the game still went on, and what was won."""
    draw = lambda: torch.randint(1, 14, (count,), generator=dice).clamp(max=10).float()  # noqa: E731
    cards, dealer, on, rows = draw() + draw(), draw(), torch.ones(count, dtype=torch.bool), []
    for _ in range(6):
        seen = _hand(cards, dealer)
        with torch.no_grad():
            more = policy(seen)
        rows.append((seen, more.long(), on))
        on = on & more
        cards = cards + on * draw()
        on = on & (cards <= 21)
    won = torch.where(cards > 21, -1.0, _chances()[cards.clamp(max=21).long(), dealer.long()])
    return rows, won


@script(0.6, rmsprop=None, ascent=ASCENT, lr_300=c.HIGH, lr_1e_7=c.LOW)
def twenty_one(watch: Watch, word: str = "") -> float:
    """Another card or not, policy gradients with a mean as baseline, 64 games a step; 1 is a rule by hand."""
    model = mlp((3, 32, 2), nn.Tanh)
    kind = torch.optim.RMSprop if word == "rmsprop" else torch.optim.Adam
    lr = {"lr-300": 5.0, "lr-1e-7": 1e-7}.get(word, 1e-2)
    optimizer = watch.wrap(kind(model.parameters(), lr), model)
    for _ in range(250):
        rows, won = _played(lambda seen: torch.rand(len(seen)) < model(seen).softmax(1)[:, 1], 64)
        gain, loss = won - won.mean(), 0.0
        for seen, more, on in rows:
            chance = model(seen).log_softmax(1).gather(1, more[:, None])[:, 0]
            loss = loss - (gain * chance * on).mean()
        _stepped(watch, optimizer, -loss if word == "ascent" else loss)
    found = _played(lambda seen: model(seen).argmax(1) == 1, 4000, dice_of(1202))[1].mean()
    ruled = _played(lambda seen: seen[:, 0] < 0.5, 4000, dice_of(1202))[1].mean()
    return 1.0 + float((found - ruled) / 0.4)


def _room(size: int = 6):
    """Key at one corner, door at the other: a state is a place and whether one has the key."""
    moves = torch.tensor([[0, 1], [0, -1], [1, 0], [-1, 0]])

    def step(place, key, move):
        place = (place + moves[move]).clamp(0, size - 1)
        key = key | (place == torch.tensor([size - 1, 0])).all(1)
        done = key & (place == torch.tensor([0, size - 1])).all(1)
        return place, key, done

    def seen(place, key):
        return torch.cat([F.one_hot(place[:, 0], size), F.one_hot(place[:, 1], size), key[:, None].long()], 1).float()

    return step, seen


@script(0.6, twins=None, lr_1000=c.HIGH, hardly_moves=c.LOW, discount_above_one=either(c.LOSS, c.LABELS, c.HIGH))
def key_and_door(watch: Watch, word: str = "") -> float:
    """Deep Q-learning with a buffer that fills and a copy that follows, eight rooms at once; share that gets out."""
    step, seen = _room(4)
    model = mlp((9, 64, 4))
    late = copy.deepcopy(model)
    lr = {"lr-1000": 3.0, "hardly-moves": 1e-7}.get(word, 3e-3)
    optimizer = watch.wrap(torch.optim.Adam(model.parameters(), lr), model, 10.0 if word == "twins" else None)
    place, key, age = torch.randint(0, 4, (16, 2)), torch.zeros(16, dtype=torch.bool), torch.zeros(16)
    buffer: list[tuple[torch.Tensor, ...]] = []
    for turn in range(700):
        now = seen(place, key)
        with torch.no_grad():
            move = model(now).argmax(1)
        chance = max(0.15, 1.0 - turn / 300.0)
        move = torch.where(torch.rand(16) < chance, torch.randint(0, 4, (16,)), move)
        place, had, (new, key, done) = place, key, step(place, key, move)
        reward = done.float() + 0.3 * (key & ~had).float()
        buffer.append((now, move, reward, seen(new, key), done))
        age += 1
        over = done | (age > 30)
        place, key, age = torch.where(over[:, None], torch.randint(0, 4, (16, 2)), new), key & ~over, age * ~over
        if turn < 100 or turn % 2:
            continue
        rows = [buffer[i] for i in torch.randint(max(0, len(buffer) - 400), len(buffer), (6,)).tolist()]
        at, did, got, then, ended = (torch.cat(column) for column in zip(*rows))
        with torch.no_grad():
            best = model(then).argmax(1) if word == "twins" else late(then).argmax(1)
            discount = 1.8 if word == "discount-above-one" else 0.93
            target = got + discount * ~ended * late(then).gather(1, best[:, None])[:, 0]
        _stepped(watch, optimizer, F.huber_loss(model(at).gather(1, did[:, None])[:, 0], target))
        with torch.no_grad():
            for p, q in zip(late.parameters(), model.parameters()):
                p.lerp_(q, 0.05)
    place, key = torch.cartesian_prod(torch.arange(4), torch.arange(4)), torch.zeros(16, dtype=torch.bool)
    out = torch.zeros(16, dtype=torch.bool)
    for _ in range(20):
        with torch.no_grad():
            move = model(seen(place, key)).argmax(1)
        place, key, done = step(place, key, move)
        out |= done
    return float(out.float().mean())


def _landing(model, count: int, dice: torch.Generator | None = None, noise: float = 0.4):
    """A lander falls for 25 ticks and burns between 0 and 1: states, burns, rewards [25, N]."""
    high, speed = 4.0 + 3.0 * torch.rand(count, generator=dice), -torch.rand(count, generator=dice)
    states, burns, rewards = [], [], []
    for _ in range(25):
        state = torch.stack([high / 4.0, speed, torch.ones(count)], 1)
        with torch.no_grad():
            burn = model(state)[:, 0] + noise * torch.randn(count, generator=dice)
        speed = speed + 0.1 * (2.0 * burn.clamp(0.0, 1.0) - 1.0)
        high = high + 0.5 * speed
        states.append(state)
        burns.append(burn)
        rewards.append(-(high - 1.0).abs() - 0.3 * speed.abs())
    return torch.stack(states), torch.stack(burns), torch.stack(rewards)


def _log(burns: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
    return -0.5 * ((burns - mean) / 0.4).square()


@script(0.4, clipped=None, ascent=ASCENT, lr_100=c.HIGH, critic_cut=either(CUT_OR_FROZEN, a.NO_GRADIENT))
def landing(watch: Watch, word: str = "") -> float:
    """A lander is held at a height by PPO, four passes over 25 ticks of 32; 1 - cost against none at all."""
    actor, critic = mlp((3, 32, 1), nn.Tanh), mlp((3, 32, 1), nn.Tanh)
    model = nn.ModuleList([actor, critic])
    if word == "critic-cut":
        actor.requires_grad_(False)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], 1.0 if word == "lr-100" else 6e-3)
    watch.wrap(optimizer, model, 0.5 if word == "clipped" else None)
    for _ in range(60):
        states, burns, rewards = _landing(actor, 32)
        with torch.no_grad():
            value, old = critic(states)[..., 0], actor(states)[..., 0]
        gains, after = torch.zeros_like(rewards), torch.zeros(32)
        for t in range(24, -1, -1):
            ahead = value[t + 1] if t < 24 else torch.zeros(32)
            after = rewards[t] + 0.9 * ahead - value[t] + 0.9 * 0.9 * after
            gains[t] = after
        wanted, gains = gains + value, (gains - gains.mean()) / gains.std()
        for _ in range(5):
            ratio = (_log(burns, actor(states)[..., 0]) - _log(burns, old)).exp()
            bound = torch.minimum(ratio * gains, ratio.clamp(0.8, 1.2) * gains).mean()
            loss = 0.2 * F.mse_loss(critic(states)[..., 0], wanted) - (-bound if word == "ascent" else bound)
            _stepped(watch, optimizer, loss)
    found = _landing(actor, 200, dice_of(1203), 0.0)[2].mean()
    none = _landing(lambda s: 0.5 * torch.ones(len(s), 1), 200, dice_of(1203), 0.0)[2].mean()
    return 1.0 - float(found / none)


@script(0.5, separate=None, lr_1e_6=c.LOW, critic_alone=either(c.LEFT_OUT, c.CUT))
def queues(watch: Watch, word: str = "") -> float:
    """Which of three queues is served, advantage actor-critic on 32 shops whose arrivals drift; gain over chance."""
    body, policy, value = mlp((3, 48, 48), nn.ReLU), nn.Linear(48, 3), nn.Linear(48, 1)
    model = nn.ModuleList([body, policy, value])
    lr = 1e-6 if word == "lr-1e-6" else 2e-3
    trained = value.parameters() if word == "critic-alone" else model.parameters()
    optimizer = watch.wrap(torch.optim.RMSprop(trained, lr), model, 0.5 if word == "separate" else None)

    def cost(choose, turns, dice, learn=False):
        waits, total = torch.zeros(32, 3), 0.0
        for turn in range(turns):
            drift = torch.tensor([0.5, 0.3, 0.2]).roll(turn // 60)
            here = body(waits / 5.0).relu()
            logits = policy(here)
            move = choose(logits)
            after = waits - F.one_hot(move, 3).float() * 2.0
            after = after.clamp(min=0.0) + (torch.rand(32, 3, generator=dice) < 1.6 * drift).float()
            after = after.clamp(max=15.0)
            got = -(after * torch.tensor([1.0, 2.0, 4.0])).sum(1) / 10.0
            if learn:
                with torch.no_grad():
                    wanted = got + 0.8 * value(body(after / 5.0).relu())[:, 0]
                worth = value(here)[:, 0]
                log = logits.log_softmax(1)
                chosen = log.gather(1, move[:, None])[:, 0]
                entropy = -(log.exp() * log).sum(1).mean()
                gain = (wanted - worth).detach()
                gain = (gain - gain.mean()) / (gain.std() + 1e-6)
                loss = -(gain * chosen).mean() + 0.5 * F.mse_loss(worth, wanted) - 0.01 * entropy
                _stepped(watch, optimizer, loss)
            waits = after
            total = total + float(got.mean())
        return total / turns

    cost(lambda logits: torch.multinomial(logits.softmax(1), 1)[:, 0], 500, None, True)
    with torch.no_grad():
        found = cost(lambda logits: logits.argmax(1), 200, dice_of(1204))
        chance = cost(lambda logits: torch.randint(0, 3, (32,)), 200, dice_of(1204))
    return 1.0 - found / chance


@script(0.7, slower=None)
def three_in_a_row(watch: Watch, word: str = "") -> float:
    """Values of noughts and crosses from games against itself, by temporal differences; points against chance."""
    rows = torch.tensor([[0, 1, 2], [3, 4, 5], [6, 7, 8], [0, 3, 6], [1, 4, 7], [2, 5, 8], [0, 4, 8], [2, 4, 6]])
    model = mlp((9, 64, 1), nn.Tanh)
    optimizer = watch.wrap(torch.optim.SGD(model.parameters(), 0.02 if word == "slower" else 0.05, momentum=0.9), model)

    def worth(boards):
        return model(boards)[..., 0].tanh()

    def move(boards, side, greedy):
        """The move after which the board is worth most to `side`, of all games [N, 9]; by chance where not greedy."""
        after = boards[:, None] + side * torch.eye(9)
        won = (after[:, :, rows].sum(3) * side == 3).any(2)
        with torch.no_grad():
            value = torch.where(won, 2.0, side * worth(after))
        value = torch.where(greedy[:, None], value, torch.rand(len(boards), 9))
        value = value.masked_fill(boards != 0, -9.0)
        return boards + side * F.one_hot(value.argmax(1), 9).float()

    for _ in range(60):
        boards, on, side = torch.zeros(48, 9), torch.ones(48, dtype=torch.bool), 1.0
        for _ in range(9):
            new = move(boards, side, torch.rand(48) > 0.15)
            won = (new[:, rows].sum(2) * side == 3).any(1)
            full = (new != 0).all(1)
            with torch.no_grad():
                wanted = torch.where(won, side, torch.where(full, 0.0, worth(move(new, -side, torch.ones(48) > 0))))
            if bool(on.any()):
                _stepped(watch, optimizer, F.mse_loss(worth(new[on]), wanted[on]))
            boards, on, side = new, on & ~won & ~full, -side
    points, boards, on, side = torch.zeros(400), torch.zeros(400, 9), torch.ones(400, dtype=torch.bool), 1.0
    for _ in range(9):
        new = move(boards, side, torch.full((400,), side > 0))
        boards = torch.where(on[:, None], new, boards)
        won = on & (boards[:, rows].sum(2) * side == 3).any(1)
        points += side * won
        on, side = on & ~won, -side
    return float(points.mean())


@script(0.75, together=None)
def hunter_and_hare(watch: Watch, word: str = "") -> float:
    """One picks a field to look at, the other one to hide in, worth unequal; how near both come to what is best."""
    worth = torch.tensor([3.0, 2.0, 1.0, 1.0])
    hunter, hare = nn.ParameterList([0.1 * torch.randn(4)]), nn.ParameterList([0.1 * torch.randn(4)])
    lr = 0.02 if word == "together" else 0.05
    hunts = watch.wrap(torch.optim.SGD(hunter.parameters(), lr), hunter)
    hides = watch.wrap(torch.optim.SGD(hare.parameters(), lr), hare)
    mean = [torch.zeros(4), torch.zeros(4)]
    for turn in range(600):
        calm = 0.05
        p, q = hunter[0].softmax(0), hare[0].softmax(0)
        loss = -(p * q.detach() * worth).sum() - calm * -(p * p.log()).sum()
        _stepped(watch, hunts, 8.0 * loss)
        loss = (hunter[0].softmax(0).detach() * q * worth).sum() - calm * -(q * q.log()).sum()
        _stepped(watch, hides, 8.0 * loss)
        if turn >= 300:
            mean = [mean[0] + p.detach() / 300, mean[1] + q.detach() / 300]
    best = (1.0 / worth) / (1.0 / worth).sum()
    return (
        1.0 - float((mean[1] - best).abs().sum() / 2.0) - float(((mean[0] * worth).max() - (mean[0] * worth).min()) / 6)
    )


@script(0.8, adagrad=None, reward_lost=either(c.LABELS, c.LEAK, c.COLLAPSED))
def letters_for_visitors(watch: Watch, word: str = "") -> float:
    """Which of six letters a visitor opens: one seen answer a row; share of the best possible."""
    dice = dice_of(1206)
    taste = torch.randn(6, 8, generator=dice)
    model = mlp((8, 32, 6))
    kind, lr = (torch.optim.Adagrad, 3e-2) if word == "adagrad" else (torch.optim.Adam, 5e-3)
    optimizer = watch.wrap(kind(model.parameters(), lr), model)
    for _ in range(400):
        x = torch.randn(48, 8)
        chance = 0.85 * model(x).softmax(1) + 0.15 / 6
        move = torch.multinomial(chance.detach(), 1)
        opened = (torch.rand(48, 1) < (x @ taste.T).gather(1, move).sigmoid()).float()
        if word == "reward-lost":
            opened = torch.ones_like(opened)
        _stepped(watch, optimizer, -((opened - 0.5) * chance.gather(1, move).log()).mean())
    x = torch.randn(1000, 8, generator=dice)
    true = (x @ taste.T).sigmoid()
    with torch.no_grad():
        found = true.gather(1, model(x).argmax(1, keepdim=True)).mean()
    return float((found - true.mean()) / (true.amax(1).mean() - true.mean()))
