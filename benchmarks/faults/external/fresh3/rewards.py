"""Rewards and games: grids, slippery ice, falling fruit, stocks, Nim, auctions, and models of a world."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.nn import functional as F

from ..afresh import case as c
from ..afresh2 import case as a
from ..case import Case
from ..loop import Watch
from ..nets import mlp
from ..sound2.case import drawn, r_squared
from ..wild.case import dice_of
from .case import ASCENT, CUT_OR_FROZEN, either, entering, fit

CASES: list[Case] = []
task = entering(CASES, __name__)
SIDE = 5
_MOVES = torch.tensor([[0, 1], [1, 0], [0, -1], [-1, 0]])


def _walk(place: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
    return (place + _MOVES[action]).clamp(0, SIDE - 1)


def _cell(place: torch.Tensor) -> torch.Tensor:
    return F.one_hot(place[:, 0] * SIDE + place[:, 1], SIDE * SIDE).float()


def _episodes(policy: nn.Module, count: int, limit: int = 16):
    """Walks from the corner: logits, actions, rewards [T, B], whether the walk was still on."""
    place, on = torch.zeros(count, 2, dtype=torch.long), torch.ones(count, dtype=torch.bool)
    rows = []
    for _ in range(limit):
        seen = _cell(place)
        logits = policy(seen)
        action = torch.distributions.Categorical(logits=logits).sample()
        place = torch.where(on[:, None], _walk(place, action), place)
        there = (place == SIDE - 1).all(1)
        rows.append((seen, logits, action, torch.where(there & on, 1.0, -0.05) * on, on.float()))
        on = on & ~there
    return [torch.stack(r) for r in zip(*rows)]


def _discounted(rewards: torch.Tensor, rate: float) -> torch.Tensor:
    total, rows = torch.zeros_like(rewards[0]), []
    for reward in reversed(rewards):
        total = reward + rate * total
        rows.append(total)
    return torch.stack(rows[::-1])


@task(0.4, ascent=ASCENT, lr_30=c.HIGH, no_gradient=CUT_OR_FROZEN)
def grid_with_baseline(watch: Watch, fault: str = "") -> float:
    """REINFORCE on a grid with a learnt baseline and entropy; return of an episode, at most 0.65, chance -0.6."""
    policy, value = mlp((25, 32, 4), nn.Tanh), mlp((25, 32, 1), nn.Tanh)
    model = nn.ModuleDict({"policy": policy, "value": value})
    optimizer = watch.wrap(torch.optim.Adam(model.parameters(), 0.5 if fault == "lr-30" else 1e-2), model)
    for _ in range(120):
        seen, logits, action, reward, on = _episodes(policy, 16)
        gain, said = _discounted(reward, 0.97), value(seen)[..., 0]
        choice = torch.distributions.Categorical(logits=logits.detach() if fault == "no-gradient" else logits)
        advantage = (gain - said).detach()
        actor = -(choice.log_prob(action) * advantage * on).sum() / on.sum()
        if fault == "ascent":
            actor = -actor
        critic = ((gain - said).square() * on).sum() / on.sum()
        loss = actor + 0.5 * critic - 0.01 * (choice.entropy() * on).sum() / on.sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        watch.observe(optimizer, loss=loss)
    with torch.no_grad():
        return float(_episodes(policy, 64)[3].sum(0).mean())


@task(0.5, never_refreshed=either(c.LABELS, c.CANNOT, c.LOSS), rewards_1000=c.TARGETS, lr_1e_6=c.LOW)
def slippery_ice(watch: Watch, fault: str = "") -> float:
    """Deep Q-learning with replay, a target network and Huber's loss on a grid that slips; return, chance -0.6."""
    scale = 1000.0 if fault == "rewards-1000" else 1.0
    model = mlp((25, 48, 4), nn.ReLU)
    target = copy.deepcopy(model)
    optimizer = watch.wrap(torch.optim.Adam(model.parameters(), 1e-6 if fault == "lr-1e-6" else 3e-3), model, 10.0)
    place = torch.randint(0, SIDE, (8, 2))
    kept: list[tuple[torch.Tensor, ...]] = []
    for step in range(450):
        greedy = model(_cell(place)).argmax(1)
        noise = torch.rand(8) < max(0.1, 1.0 - step / 250)
        action = torch.where(noise, torch.randint(0, 4, (8,)), greedy)
        slipped = torch.where(torch.rand(8) < 0.1, torch.randint(0, 4, (8,)), action)
        after = _walk(place, slipped)
        there = (after == SIDE - 1).all(1)
        kept.append((_cell(place), action, torch.where(there, 1.0, -0.05), _cell(after), there.float()))
        place = torch.where((there | (torch.rand(8) < 0.03))[:, None], torch.randint(0, SIDE, (8, 2)), after)
        if step < 10:
            continue
        s, act, r, s2, end = (torch.cat(t) for t in zip(*(kept[i] for i in torch.randint(len(kept), (8,)).tolist())))
        with torch.no_grad():
            goal = scale * r + 0.95 * (1.0 - end) * target(s2).max(1).values
        loss = F.smooth_l1_loss(model(s).gather(1, act[:, None])[:, 0], goal)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        watch.observe(optimizer, loss=loss)
        if step % 25 == 0 and fault != "never-refreshed":
            target.load_state_dict(model.state_dict())
    place, on, total = torch.zeros(32, 2, dtype=torch.long), torch.ones(32), torch.zeros(32)
    with torch.no_grad():
        for _ in range(16):
            place = torch.where(on[:, None] > 0, _walk(place, model(_cell(place)).argmax(1)), place)
            there = (place == SIDE - 1).all(1).float()
            total += on * torch.where(there > 0, 1.0, -0.05)
            on = on * (1.0 - there)
    return float(total.mean())


class _Fruit:
    """Fruit falls six rows through five columns to a basket that moves."""

    def __init__(self, count: int) -> None:
        self.fruit, self.row = torch.randint(0, 5, (count,)), torch.zeros(count, dtype=torch.long)
        self.basket = torch.randint(0, 5, (count,))

    def seen(self) -> torch.Tensor:
        return torch.cat([F.one_hot(self.fruit, 5), F.one_hot(self.basket, 5), F.one_hot(self.row, 7)], 1).float()

    def step(self, action: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.basket = (self.basket + action - 1).clamp(0, 4)
        self.row = self.row + 1
        down = self.row == 6
        reward = torch.where(down, torch.where(self.basket == self.fruit, 1.0, -1.0), 0.0)
        self.fruit = torch.where(down, torch.randint(0, 5, self.fruit.shape), self.fruit)
        self.row = torch.where(down, 0, self.row)
        return reward, down.float()


def _caught(policy: nn.Module) -> float:
    game, total = _Fruit(64), 0.0
    with torch.no_grad():
        for _ in range(24):
            total += float(game.step(policy(game.seen()).argmax(1))[0].sum())
    return total / 64 / 4


@task(0.5, entropy_only=c.LOSS, lr_100=c.HIGH)
def falling_fruit(watch: Watch, fault: str = "") -> float:
    """Advantage actor-critic, six steps at a time, 32 games, RMSprop clipped at 0.5; reward a fruit, chance -0.6."""
    body, act, value = nn.Sequential(nn.Linear(17, 64), nn.ReLU()), nn.Linear(64, 3), nn.Linear(64, 1)
    model = nn.Sequential(body, nn.ModuleList([act, value]))
    lr = 0.3 if fault == "lr-100" else 3e-3
    optimizer = watch.wrap(torch.optim.RMSprop(model.parameters(), lr, alpha=0.99, eps=1e-5), model, 0.5)
    game = _Fruit(32)
    for _ in range(250):
        logs, values, rewards, ends, spread = [], [], [], [], []
        for _ in range(6):
            h = body(game.seen())
            choice = torch.distributions.Categorical(logits=act(h))
            action = choice.sample()
            reward, down = game.step(action)
            for rows, one in zip(
                (logs, values, rewards, ends, spread),
                (choice.log_prob(action), value(h)[:, 0], reward, down, choice.entropy()),
            ):
                rows.append(one)
        with torch.no_grad():
            total, gains = value(body(game.seen()))[:, 0], []
        for reward, end in zip(reversed(rewards), reversed(ends)):
            total = reward + 0.95 * total * (1.0 - end)
            gains.append(total)
        advantage = torch.stack(gains[::-1]) - torch.stack(values)
        loss = -(torch.stack(logs) * advantage.detach()).mean() + 0.5 * advantage.square().mean()
        loss = loss - (5.0 if fault == "entropy-only" else 0.01) * torch.stack(spread).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        watch.observe(optimizer, loss=loss)
    return _caught(nn.Sequential(body, act))


@task(0.25, many_passes=either(c.HIGH, c.CLIPPED))
def stocks_proximal(watch: Watch, fault: str = "") -> float:
    """What to order for a store, by PPO, four passes over each batch; reward gained a day over orders by chance."""
    policy, value = mlp((2, 32, 5), nn.Tanh), mlp((2, 32, 1), nn.Tanh)
    model = nn.ModuleList([policy, value])
    lr = 0.3 if fault == "many-passes" else 5e-3
    optimizer = watch.wrap(torch.optim.Adam(model.parameters(), lr, eps=1e-5), model, 0.5)

    def day(stock, order, weekday):
        stock = (stock + order).clamp(max=10.0)
        wanted = torch.poisson(1.0 + 2.0 * (weekday >= 5).float())
        sold = torch.minimum(stock, wanted)
        return stock - sold, sold - 0.15 * stock - 0.5 * (wanted - sold), (weekday + 1) % 7

    def seen(stock, weekday):
        return torch.stack([stock / 5.0 - 1.0, (weekday >= 4).float()], 1)

    def average(choose, days=56):
        torch.manual_seed(0)
        stock, weekday, total = torch.zeros(64), torch.randint(0, 7, (64,)), 0.0
        for _ in range(days):
            stock, reward, weekday = day(stock, choose(seen(stock, weekday)).float(), weekday)
            total += float(reward.mean())
        return total / days

    stock, weekday = torch.zeros(32), torch.randint(0, 7, (32,))
    for _ in range(25):
        rows = []
        with torch.no_grad():
            for _ in range(12):
                s = seen(stock, weekday)
                choice = torch.distributions.Categorical(logits=policy(s))
                action = choice.sample()
                stock, reward, weekday = day(stock, action.float(), weekday)
                rows.append((s, action, choice.log_prob(action), reward, value(s)[:, 0]))
            s, action, old, reward, said = (torch.stack(t) for t in zip(*rows))
            gain = _discounted(torch.cat([reward, value(seen(stock, weekday)).T]), 0.9)[:-1]
        batch = [t.flatten(0, 1) for t in (s, action, old, gain, gain - said)]
        for s, action, old, gain, advantage in drawn(8, 192, *batch):
            choice = torch.distributions.Categorical(logits=policy(s))
            ratio = (choice.log_prob(action) - old).exp()
            advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
            actor = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
            loss = actor + 0.5 * (value(s)[:, 0] - gain).square().mean() - 0.01 * choice.entropy().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            watch.observe(optimizer, loss=loss)
    with torch.no_grad():
        return average(lambda s: policy(s).argmax(1)) - average(lambda s: torch.randint(0, 5, (len(s),)))


@task(0.8)
def nim_against_itself(watch: Watch) -> float:
    """Values of heaps of Nim by playing against itself; share of the heaps where the best move is found."""
    value = mlp((22, 64, 1), nn.ReLU).append(nn.Tanh())
    optimizer = watch.wrap(torch.optim.Adam(value.parameters(), 1e-2), value)

    def best(heap):
        options = torch.stack([(heap - take).clamp(min=0) for take in (1, 2, 3)], 1)
        said = value(F.one_hot(options, 22).float())[..., 0]
        said = torch.where(options == 0, -1.0, said)  # who must move from nothing has lost
        return torch.where(torch.tensor([1, 2, 3]) <= heap[:, None], said, 2.0)

    for _ in range(300):
        heap = torch.randint(1, 22, (48,))
        with torch.no_grad():
            goal = -best(heap).min(1).values
        loss = F.mse_loss(value(F.one_hot(heap, 22).float())[:, 0], goal)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        watch.observe(optimizer, loss=loss)
    heaps = torch.tensor([h for h in range(1, 22) if h % 4])
    with torch.no_grad():
        return float((best(heaps).argmin(1) + 1 == heaps % 4).float().mean())


@task(0.8)
def stone_paper_well(watch: Watch) -> float:
    """Two strategies that learn against each other, held back by entropy; 1 - what a best answer wins."""
    game = torch.tensor([[0.0, -1.0, 2.0], [1.0, 0.0, -1.0], [-2.0, 1.0, 0.0]])
    model = nn.ParameterList([torch.randn(3), torch.randn(3)])
    optimizer = watch.wrap(torch.optim.SGD(model.parameters(), 0.3), model)
    mean = torch.zeros(2, 3)
    for _ in range(400):
        p, q = model[0].softmax(0), model[1].softmax(0)
        gain = p @ game @ q.detach() - p.detach() @ game @ q
        spread = -(p * p.log()).sum() - (q * q.log()).sum()
        loss = -gain - 0.1 * spread
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        watch.observe(optimizer, loss=loss)
        mean += torch.stack([p, q]).detach() / 400
    return 1.0 - float(torch.maximum((game @ mean[1]).max(), (-(mean[0] @ game)).max()))


@task(0.75)
def arms_that_drift(watch: Watch) -> float:
    """Ten arms whose worth wanders, a preference each, a baseline of means; share of the best pay, by chance 0.5."""
    dice = dice_of(920)
    worth = torch.rand(10, generator=dice)
    model = nn.ParameterList([torch.zeros(10)])
    optimizer = watch.wrap(torch.optim.SGD(model.parameters(), 2.0), model)
    mean, got, most = 0.5, 0.0, 0.0
    for step in range(600):
        worth = (worth + 0.01 * torch.randn(10, generator=dice)).clamp(0.0, 1.0)
        choice = torch.distributions.Categorical(logits=model[0])
        arm = choice.sample((8,))
        reward = (torch.rand(8) < worth[arm]).float()
        loss = -(choice.log_prob(arm) * (reward - mean)).mean()
        mean += 0.05 * (float(reward.mean()) - mean)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        watch.observe(optimizer, loss=loss)
        if step >= 200:
            got, most = got + float(worth[arm].mean()), most + float(worth.max())
    return got / most


@task(0.75)
def several_opinions(watch: Watch) -> float:
    """Which advertisement to show: five small networks, one chosen by chance each time, trained on what was seen."""
    dice = dice_of(921)
    taste = torch.randn(6, 8, generator=dice)
    model = nn.ModuleList([mlp((8, 24, 6), nn.ReLU) for _ in range(5)])
    optimizer = watch.wrap(torch.optim.AdamW(model.parameters(), 5e-3), model)
    right = 0.0
    rows: list[tuple[torch.Tensor, ...]] = []
    for step in range(250):
        x = torch.randn(4, 8, generator=dice)
        with torch.no_grad():
            arm = model[int(torch.randint(5, ()))](x).argmax(1)
        click = (torch.rand(4) < torch.sigmoid(2.0 * (x * taste[arm]).sum(1))).float()
        rows.append((x, arm, click))
        right += float((torch.sigmoid(2.0 * (x * taste[arm]).sum(1)) > 0.8).float().mean()) * (step >= 150) / 100
        x, arm, click = (torch.cat(t) for t in zip(*(rows[i] for i in torch.randint(len(rows), (16,)).tolist())))
        said = torch.stack([one(x).gather(1, arm[:, None])[:, 0] for one in model])
        weight = torch.rand(5, len(x)).round() * 2.0
        loss = (F.binary_cross_entropy_with_logits(said, click.expand(5, -1), reduction="none") * weight).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        watch.observe(optimizer, loss=loss)
    return right


@task(0.85, swapped_rows=either(c.LABELS, c.CANNOT), outliers=a.OUTLIERS, unscaled_speed=c.BOTH)
def model_of_a_lift(watch: Watch, fault: str = "") -> float:
    """How a lift answers to its motor, learnt from random drives, validated; R² of the change of its state."""
    dice = dice_of(922)
    state = torch.rand(2400, 2, generator=dice) * torch.tensor([4.0, 2.0]) - torch.tensor([2.0, 1.0])
    push = torch.rand(2400, 1, generator=dice) * 2.0 - 1.0
    turn = -state[:, :1].sin() * 3.0 + 2.0 * push - 0.3 * state[:, 1:] * state[:, 1:].abs()
    change = torch.cat([state[:, 1:], turn], 1) + 0.05 * torch.randn(2400, 2, generator=dice)
    x, y = torch.cat([state, push], 1), change / change.std(0)
    if fault == "unscaled-speed":
        x, y = x * torch.tensor([1.0, 5e3, 1.0]), y * torch.tensor([1.0, 1e4])
    train, held = (x[:1800], y[:1800].clone()), (x[1800:], y[1800:])
    if fault == "swapped-rows":
        train = (train[0], train[1].flip(0))
    if fault == "outliers":
        train[1][::30] *= 1e3
    model = mlp((3, 48, 48, 2), nn.Tanh)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    loss = lambda x, y: F.mse_loss(model(x), y)  # noqa: E731
    fit(watch, model, optimizer, drawn(400, 48, *train), loss, val=lambda: loss(*held))
    with torch.no_grad():
        return min(r_squared(model(held[0])[:, i], held[1][:, i]) for i in range(2))


@task(0.4)
def own_best_walks(watch: Watch) -> float:
    """Imitates the best quarter of its own walks (cross-entropy method for policies): targets that change; return."""
    policy = mlp((25, 32, 4), nn.Tanh)
    optimizer = watch.wrap(torch.optim.Adam(policy.parameters(), 1e-2), policy)
    for _ in range(40):
        with torch.no_grad():
            seen, _, action, reward, on = _episodes(policy, 32)
            best = reward.sum(0).topk(8).indices
        for _ in range(4):
            logits = policy(seen[:, best])
            loss = F.cross_entropy(logits[on[:, best] > 0], action[:, best][on[:, best] > 0])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            watch.observe(optimizer, loss=loss)
    with torch.no_grad():
        return float(_episodes(policy, 64)[3].sum(0).mean())


@task(0.7)
def worth_of_places(watch: Watch) -> float:
    """Temporal differences of a random walk on a line, linear in tiles; R² against the true values."""
    value = nn.Linear(21, 1, bias=False)
    nn.init.zeros_(value.weight)
    optimizer = watch.wrap(torch.optim.SGD(value.parameters(), 4.0), value)
    place = torch.full((32,), 10)
    for _ in range(500):
        after = place + 2 * torch.randint(0, 2, (32,)) - 1
        out = (after < 0) | (after > 20)
        with torch.no_grad():
            goal = torch.where(out, (after > 20).float(), value(F.one_hot(after.clamp(0, 20), 21).float())[:, 0])
        loss = F.mse_loss(value(F.one_hot(place, 21).float())[:, 0], goal)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        watch.observe(optimizer, loss=loss)
        place = torch.where(out, torch.randint(0, 21, (32,)), after)
    return r_squared(value.weight.detach()[0], torch.arange(1.0, 22.0) / 22.0)


@task(0.85)
def soft_actor(watch: Watch) -> float:
    """A point is brought to the middle: two critics, a policy with noise, a temperature, each with an optimizer."""
    actor, critics = mlp((2, 32, 2), nn.ReLU), nn.ModuleList([mlp((3, 48, 1), nn.ReLU) for _ in range(2)])
    slow, heat = copy.deepcopy(critics), nn.ParameterList([torch.zeros(())])
    acts = watch.wrap(torch.optim.Adam(actor.parameters(), 3e-3), actor)
    judges = watch.wrap(torch.optim.Adam(critics.parameters(), 3e-3), critics)
    warms = watch.wrap(torch.optim.Adam(heat.parameters(), 3e-3), heat)

    def choose(s):
        mean, log = actor(s).unbind(1)
        noise = torch.distributions.Normal(mean, log.clamp(-4.0, 1.0).exp())
        raw = noise.rsample()
        return raw.tanh()[:, None], noise.log_prob(raw) - torch.log(1.0 - raw.tanh().square() + 1e-6)

    def move(s, push):
        speed = 0.9 * s[:, 1:] + 0.3 * push
        after = torch.cat([(s[:, :1] + 0.3 * speed).clamp(-2, 2), speed], 1)
        return after, -after[:, 0].square() - 0.1 * push[:, 0].square()

    def cost(choose):
        torch.manual_seed(0)
        s, total = torch.rand(64, 2) * 2.0 - 1.0, 0.0
        for _ in range(40):
            s, reward = move(s, choose(s))
            total += float(reward.mean())
        return total

    s = torch.rand(32, 2) * 2.0 - 1.0
    kept = []
    for _ in range(300):
        with torch.no_grad():
            push, _ = choose(s)
            after, reward = move(s, push)
        kept.append((s, push, reward, after))
        s = torch.where(torch.rand(32, 1) < 0.05, torch.rand(32, 2) * 2.0 - 1.0, after)
        b, push, reward, after = (
            torch.cat(t) for t in zip(*(kept[i] for i in torch.randint(len(kept), (3,)).tolist()))
        )
        with torch.no_grad():
            next_push, log = choose(after)
            best = torch.minimum(*(one(torch.cat([after, next_push], 1))[:, 0] for one in slow))
            goal = reward + 0.95 * (best - heat[0].exp() * log)
        loss = sum(F.mse_loss(one(torch.cat([b, push], 1))[:, 0], goal) for one in critics)
        judges.zero_grad()
        loss.backward()
        judges.step()
        watch.observe(judges, loss=loss)
        fresh, log = choose(b)
        loss = (
            heat[0].exp().detach() * log - torch.minimum(*(one(torch.cat([b, fresh], 1))[:, 0] for one in critics))
        ).mean()
        acts.zero_grad()
        loss.backward()
        acts.step()
        watch.observe(acts, loss=loss)
        loss = -(heat[0] * (log.detach() - 1.0)).mean()
        warms.zero_grad()
        loss.backward()
        warms.step()
        watch.observe(warms, loss=loss)
        with torch.no_grad():
            for old, new in zip(slow.parameters(), critics.parameters()):
                old.lerp_(new, 0.02)
    with torch.no_grad():
        return 1.0 - cost(lambda s: actor(s)[:, :1].tanh()) / cost(lambda s: torch.zeros(len(s), 1))


@task(0.8)
def auction_of_two(watch: Watch) -> float:
    """Sealed bids of two that learn from each other's: 1 - distance of their bids from half of what it is worth."""
    model = nn.ModuleList([mlp((1, 16, 1), nn.Tanh) for _ in range(2)])
    optimizer = watch.wrap(torch.optim.Adam(model.parameters(), 5e-3), model)
    for _ in range(400):
        worth = torch.rand(128, 2)
        bids = torch.cat([one(worth[:, i : i + 1]).sigmoid() for i, one in enumerate(model)], 1)
        other = bids.detach().flip(1)
        loss = -((worth - bids) * torch.sigmoid((bids - other) / 0.03)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        watch.observe(optimizer, loss=loss)
    with torch.no_grad():
        worth = torch.linspace(0.1, 0.9, 17)[:, None]
        return 1.0 - max(float((one(worth).sigmoid() - worth / 2.0).abs().mean()) for one in model) * 2.0
