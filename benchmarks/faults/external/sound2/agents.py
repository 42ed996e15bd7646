"""Rewards and games: a cart with a pole, bandits, duels, imitation, preferences."""

from __future__ import annotations

import copy
import functools
from collections import deque

import torch
from torch import nn
from torch.nn import functional as F

from ..case import Case
from ..loop import Watch
from ..nets import mlp
from ..wild.case import dice_of
from . import case as c

CASES: list[Case] = []
setup = functools.partial(c.setup, CASES, __name__)


class Carts:
    """Several carts with poles side by side, after Barto, Sutton and Anderson; one that falls begins anew."""

    def __init__(self, count: int, dice: torch.Generator | None = None) -> None:
        self.dice, self.state, self.age = dice, torch.zeros(count, 4), torch.zeros(count)
        self._renew(torch.ones(count, dtype=torch.bool))

    def _renew(self, which: torch.Tensor) -> None:
        fresh = 0.1 * torch.rand(self.state.shape, generator=self.dice) - 0.05
        self.state = torch.where(which[:, None], fresh, self.state)
        self.age = self.age.masked_fill(which, 0.0)

    def step(self, action: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The state that follows before anything begins anew, where a pole has fallen, and where time is up."""
        x, dx, angle, turn = self.state.unbind(1)
        force = 10.0 * (2.0 * action - 1.0)
        sin, cos = angle.sin(), angle.cos()
        push = (force + 0.05 * turn.square() * sin) / 1.1
        bend = (9.8 * sin - cos * push) / (0.5 * (4.0 / 3.0 - 0.1 * cos.square() / 1.1))
        speed = push - 0.05 * bend * cos / 1.1
        after = torch.stack([x + 0.02 * dx, dx + 0.02 * speed, angle + 0.02 * turn, turn + 0.02 * bend], 1)
        self.state, self.age = after, self.age + 1
        fallen = (after[:, 0].abs() > 2.4) | (after[:, 2].abs() > 0.2095)
        late = (self.age >= 200) & ~fallen
        self._renew(fallen | late)
        return after, fallen, late


@torch.no_grad()
def _endurance(choose, limit: int = 200) -> float:
    """Mean number of steps that a pole stays up, of `limit`, over 32 carts."""
    carts = Carts(32, dice_of(530))
    alive, total = torch.ones(32, dtype=torch.bool), 0.0
    for _ in range(limit):
        _, fallen, late = carts.step(choose(torch.where(alive[:, None], carts.state, 0.0)).float())
        total += float(alive.sum())
        alive &= ~(fallen | late)
    return total / 32


def _returns(rewards: list[torch.Tensor], ends: list[torch.Tensor], last: torch.Tensor) -> torch.Tensor:
    total, rows = last, []
    for reward, end in zip(reversed(rewards), reversed(ends)):
        total = reward + 0.99 * total * (1.0 - end)
        rows.append(total)
    return torch.stack(rows[::-1])


@setup(60.0)
def pole_reinforce(watch: Watch) -> float:
    """REINFORCE with normalised returns, an episode a step, as in the best known example; steps upright, chance 22."""
    policy = nn.Sequential(nn.Linear(4, 64), nn.Dropout(0.2), nn.ReLU(), nn.Linear(64, 2))
    optimizer = watch.wrap(torch.optim.Adam(policy.parameters(), lr=1e-2), policy)
    for _ in range(60):
        carts, logs, rewards = Carts(1), [], []
        while True:
            choice = torch.distributions.Categorical(logits=policy(carts.state))
            action = choice.sample()
            logs.append(choice.log_prob(action))
            _, fallen, late = carts.step(action.float())
            rewards.append(torch.ones(1))
            if fallen.any() or late.any():
                break
        gains = _returns(rewards, [torch.zeros(1)] * len(rewards), torch.zeros(1))
        gains = (gains - gains.mean()) / (gains.std() + 1e-6)
        loss = -(torch.stack(logs) * gains).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        watch.observe(optimizer, loss=loss)
    policy.eval()
    return _endurance(lambda state: policy(state).argmax(1))


@setup(80.0)
def pole_advantages(watch: Watch) -> float:
    """Advantage actor-critic on sixteen carts: policy, value and entropy in one loss, one optimizer, clipped at 0.5."""
    body, act, value = mlp((4, 64, 64), nn.Tanh).append(nn.Tanh()), nn.Linear(64, 2), nn.Linear(64, 1)
    model = nn.ModuleList([body, act, value])
    optimizer = watch.wrap(torch.optim.RMSprop(model.parameters(), lr=2e-3, alpha=0.99, eps=1e-5), model, 0.5)
    carts = Carts(16)
    for _ in range(200):
        logs, values, rewards, ends, spread = [], [], [], [], []
        for _ in range(8):
            inner = body(carts.state)
            choice = torch.distributions.Categorical(logits=act(inner))
            action = choice.sample()
            _, fallen, late = carts.step(action.float())
            logs.append(choice.log_prob(action))
            spread.append(choice.entropy())
            values.append(value(inner)[:, 0])
            rewards.append(torch.ones(16))
            ends.append((fallen | late).float())
        with torch.no_grad():
            last = value(body(carts.state))[:, 0]
        gains, said = _returns(rewards, ends, last), torch.stack(values)
        advantage = gains - said
        loss = -(torch.stack(logs) * advantage.detach()).mean() + 0.5 * advantage.square().mean()
        loss = loss - 0.01 * torch.stack(spread).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        watch.observe(optimizer, loss=loss)
    return _endurance(lambda state: act(body(state)).argmax(1))


@setup(80.0)
def pole_proximal(watch: Watch) -> float:
    """Proximal policy optimisation: four passes over each piece of experience, the rate falls along a line."""
    actor, critic = mlp((4, 64, 2), nn.Tanh), mlp((4, 64, 1), nn.Tanh)
    model = nn.ModuleDict({"actor": actor, "critic": critic})
    optimizer = watch.wrap(torch.optim.Adam(model.parameters(), lr=3e-3, eps=1e-5), model, 0.5)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 12)
    carts = Carts(8)
    for _ in range(12):
        states, actions, logs, rewards, ends = [], [], [], [], []
        with torch.no_grad():
            for _ in range(64):
                choice = torch.distributions.Categorical(logits=actor(carts.state))
                states.append(carts.state)
                actions.append(choice.sample())
                logs.append(choice.log_prob(actions[-1]))
                _, fallen, late = carts.step(actions[-1].float())
                rewards.append(torch.ones(8))
                ends.append((fallen | late).float())
            gains = _returns(rewards, ends, critic(carts.state)[:, 0]).flatten()
        held = [torch.stack(rows).flatten(0, 1) for rows in (states, actions, logs)]
        for s, a, old, g in c.epochs(4, 128, *held, gains):
            said = critic(s)[:, 0]
            ahead = g - said.detach()
            ahead = (ahead - ahead.mean()) / (ahead.std() + 1e-8)
            choice = torch.distributions.Categorical(logits=actor(s))
            ratio = (choice.log_prob(a) - old).exp()
            loss = -torch.minimum(ratio * ahead, ratio.clamp(0.8, 1.2) * ahead).mean()
            loss = loss + 0.5 * F.mse_loss(said, g) - 0.01 * choice.entropy().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            watch.observe(optimizer, loss=loss)
        scheduler.step()
    return _endurance(lambda state: actor(state).argmax(1))


@setup(40.0)
def pole_double_q(watch: Watch) -> float:
    """Double Q-learning from memory with a second network that follows slowly, Huber's loss, values clipped at 100."""
    model = mlp((4, 64, 64, 2))
    slow, memory = copy.deepcopy(model), deque(maxlen=5000)
    optimizer = watch.wrap(torch.optim.AdamW(model.parameters(), lr=2e-3, amsgrad=True), model, 100.0)
    carts = Carts(4)
    for step in range(700):
        with torch.no_grad():
            action = model(carts.state).argmax(1)
            dare = torch.rand(4) < max(0.05, 1.0 - step / 300)
            action = torch.where(dare, torch.randint(2, (4,)), action)
            before = carts.state
            after, fallen, _ = carts.step(action.float())
            memory.extend(zip(before, action, after, fallen.float()))
        if step < 32:
            continue
        rows = [memory[i] for i in torch.randint(len(memory), (64,)).tolist()]
        s, a, n, end = (torch.stack(column) for column in zip(*rows))
        with torch.no_grad():
            best = model(n).argmax(1, keepdim=True)
            wanted = 1.0 + 0.98 * (1.0 - end) * slow(n).gather(1, best)[:, 0]
        loss = F.smooth_l1_loss(model(s).gather(1, a[:, None])[:, 0], wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        watch.observe(optimizer, loss=loss)
        with torch.no_grad():
            for p, q in zip(slow.parameters(), model.parameters()):
                p.lerp_(q, 0.02)
    return _endurance(lambda state: model(state).argmax(1))


@setup(100.0)
def pole_cloned(watch: Watch) -> float:
    """A controller by rule is imitated on states that it visited."""
    gain = torch.tensor([0.1, 0.5, 8.0, 2.0])
    carts, states = Carts(16, dice_of(531)), []
    for _ in range(120):
        states.append(carts.state)
        wished = (carts.state @ gain > 0).float()
        carts.step(torch.where(torch.rand(16, generator=carts.dice) < 0.2, 1.0 - wished, wished))
    x = torch.cat(states)
    y = (x @ gain > 0).float()
    model = mlp((4, 32, 1))
    c.train(
        watch,
        model,
        torch.optim.Adam(model.parameters(), lr=3e-3),
        c.epochs(6, 32, x, y),
        lambda a, b: F.binary_cross_entropy_with_logits(model(a)[:, 0], b),
    )
    return _endurance(lambda state: model(state)[:, 0] > 0)


@setup(60.0)
def pole_evolved(watch: Watch) -> float:
    """Evolution strategies: the gradient is a mean of tried directions, written into `.grad` by hand."""
    model = mlp((4, 16, 2), nn.Tanh)
    optimizer = watch.wrap(torch.optim.Adam(model.parameters(), lr=0.05), model)
    shape = nn.utils.parameters_to_vector(model.parameters()).detach()
    for _ in range(12):
        noise = torch.randn(4, len(shape))
        scores = []
        at = nn.utils.parameters_to_vector(model.parameters()).detach()
        for direction in torch.cat([noise, -noise]):
            nn.utils.vector_to_parameters(at + 0.2 * direction, model.parameters())
            scores.append(_endurance(lambda state: model(state).argmax(1), 80))
        nn.utils.vector_to_parameters(at, model.parameters())
        ranks = torch.tensor(scores).argsort().argsort().float() / 7 - 0.5
        gradient = -(ranks[:, None] * torch.cat([noise, -noise])).mean(0) / 0.2
        first = 0
        for p in model.parameters():
            p.grad = gradient[first : first + p.numel()].view_as(p).clone()
            first += p.numel()
        optimizer.step()
        watch.observe(optimizer, loss=-sum(scores) / len(scores))
    return _endurance(lambda state: model(state).argmax(1))


class Push:
    """A point on a line is to be brought to the middle by pushes from -1 to 1."""

    @staticmethod
    def step(state: torch.Tensor, push: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        place, speed = state.unbind(1)
        speed = 0.95 * speed + 0.1 * push
        place = place + 0.2 * speed
        return torch.stack([place, speed], 1), -(place.square() + 0.1 * speed.square() + 0.01 * push.square())


def _pushed(policy) -> float:
    """1 - what it costs over 60 steps / what doing nothing costs."""
    dice = dice_of(532)
    with torch.no_grad():
        totals = []
        for choose in (policy, lambda s: torch.zeros(len(s))):
            state, total = torch.rand(64, 2, generator=dice.manual_seed(1)) * 2 - 1, 0.0
            for _ in range(60):
                state, reward = Push.step(state, choose(state))
                total -= float(reward.mean())
            totals.append(total)
    return 1.0 - totals[0] / totals[1]


@setup(0.4)
def pushed_by_gradient(watch: Watch) -> float:
    """Deterministic policy gradients: an actor climbs a critic that follows its own slow copy."""
    actor, critic = mlp((2, 48, 1)).append(nn.Tanh()), mlp((3, 64, 1))
    slow = copy.deepcopy(nn.ModuleList([actor, critic]))
    acts = watch.wrap(torch.optim.Adam(actor.parameters(), lr=1e-3), actor)
    rates = watch.wrap(torch.optim.Adam(critic.parameters(), lr=3e-3), critic)
    state, held = torch.rand(16, 2) * 2 - 1, []
    for step in range(450):
        with torch.no_grad():
            push = (actor(state)[:, 0] + 0.4 * torch.randn(16)).clamp(-1, 1)
            after, reward = Push.step(state, push)
        held.append((state, push[:, None], reward[:, None], after))
        state = torch.rand(16, 2) * 2 - 1 if step % 40 == 39 else after
        s, a, r, n = (torch.cat(rows) for rows in zip(*(held[i] for i in torch.randint(len(held), (6,)).tolist())))
        with torch.no_grad():
            wanted = r + 0.95 * slow[1](torch.cat([n, slow[0](n)], 1))
        error = F.mse_loss(critic(torch.cat([s, a], 1)), wanted)
        rates.zero_grad()
        error.backward()
        rates.step()
        watch.observe(rates, loss=error)
        worth = -critic(torch.cat([s, actor(s)], 1)).mean()
        acts.zero_grad()
        worth.backward()
        acts.step()
        watch.observe(acts, loss=worth)
        with torch.no_grad():
            for p, q in zip(slow.parameters(), [*actor.parameters(), *critic.parameters()]):
                p.lerp_(q, 0.02)
    return _pushed(lambda s: actor(s)[:, 0])


@setup(0.4)
def pushed_through_a_model(watch: Watch) -> float:
    """A controller is trained through forty steps of the known mechanics: gradients pass all of them."""
    policy = mlp((2, 32, 1), nn.Tanh).append(nn.Tanh())
    optimizer = watch.wrap(torch.optim.Adam(policy.parameters(), lr=5e-3), policy, 1.0)
    for _ in range(120):
        state, cost = torch.rand(32, 2) * 2 - 1, 0.0
        for _ in range(40):
            state, reward = Push.step(state, policy(state)[:, 0])
            cost = cost - reward.mean()
        optimizer.zero_grad()
        cost.backward()
        optimizer.step()
        watch.observe(optimizer, loss=cost)
    return _pushed(lambda s: policy(s)[:, 0])


@setup(0.75)
def contextual_arms(watch: Watch) -> float:
    """Eight arms whose worth hangs on what is seen: one reward a round, and a gradient through the chosen arm alone."""
    dice = dice_of(533)
    worth = torch.randn(10, 8, generator=dice)
    model = mlp((10, 32, 8))
    optimizer = watch.wrap(torch.optim.SGD(model.parameters(), lr=0.05), model)
    for step in range(600):
        seen = torch.randn(4, 10)
        said = model(seen)
        arm = torch.where(torch.rand(4) < max(0.1, 1 - step / 300), torch.randint(8, (4,)), said.argmax(1))
        reward = (seen @ worth).gather(1, arm[:, None]) / 3 + 0.3 * torch.randn(4, 1)
        loss = F.mse_loss(said.gather(1, arm[:, None]), reward)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        watch.observe(optimizer, loss=loss)
    seen = torch.randn(400, 10, generator=dice)
    true = seen @ worth
    with torch.no_grad():
        won = true.gather(1, model(seen).argmax(1)[:, None]).mean()
    return float(won / true.max(1).values.mean())


@setup(0.8)
def matching_pennies(watch: Watch) -> float:
    """Two logits play stone, paper, scissors against each other; quality: 1 - what can be won against their mean."""
    pay = torch.tensor([[0.0, -1, 2], [1, 0, -1], [-2, 1, 0]])
    sides = [nn.ParameterList([torch.randn(3)]) for _ in range(2)]
    both = [watch.wrap(torch.optim.SGD(side.parameters(), lr=0.3), side) for side in sides]
    sums = torch.zeros(2, 3)
    for _ in range(300):
        left, right = sides[0][0].softmax(0), sides[1][0].softmax(0)
        for optimizer, loss in zip(both, (-(left @ pay @ right.detach()), left.detach() @ pay @ right)):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            watch.observe(optimizer, loss=loss)
        sums += torch.stack([left, right]).detach()
    left, right = sums / 300
    return 1.0 - float((pay @ right).max() - (left @ pay).min()) / 2


@setup(0.75)
def groups_of_answers(watch: Watch) -> float:
    """A policy from its own samples, each against the mean of its group, held near where it began."""
    dice = dice_of(534)
    right = torch.randint(0, 5, (12, 4), generator=dice)
    ask, rnn, head = nn.Embedding(12, 48), nn.GRUCell(5, 48), nn.Linear(48, 5)
    model = nn.ModuleList([ask, rnn, head])
    first = copy.deepcopy(model)
    optimizer = watch.wrap(torch.optim.AdamW(model.parameters(), lr=8e-3), model, 1.0)

    def spoken(parts: nn.ModuleList, asked: torch.Tensor, said: torch.Tensor | None = None, greedy: bool = False):
        state, before, logs, out = parts[0](asked), torch.zeros(len(asked), 5), [], []
        for t in range(4):
            state = parts[1](before, state)
            log = parts[2](state).log_softmax(1)
            if said is not None:
                token = said[:, t]
            else:
                token = log.argmax(1) if greedy else torch.multinomial(log.detach().exp(), 1)[:, 0]
            logs.append(log.gather(1, token[:, None])[:, 0])
            out.append(token)
            before = F.one_hot(token, 5).float()
        return torch.stack(out, 1), torch.stack(logs, 1)

    for _ in range(200):
        asked = torch.randint(0, 12, (8,)).repeat_interleave(8)
        said, logs = spoken(model, asked)
        reward = (said == right[asked]).float().mean(1).view(8, 8)
        ahead = ((reward - reward.mean(1, keepdim=True)) / (reward.std(1, keepdim=True) + 1e-4)).flatten()
        with torch.no_grad():
            old = spoken(first, asked, said)[1]
        far = (old - logs).exp() - (old - logs) - 1
        loss = -(((logs - logs.detach()).exp() * ahead[:, None]) - 0.01 * far).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        watch.observe(optimizer, loss=loss)
    with torch.no_grad():
        return float((spoken(model, torch.arange(12), greedy=True)[0] == right).float().mean())


@setup(0.8)
def direct_preferences(watch: Watch) -> float:
    """Direct preference optimisation from a trained reference: the loss begins at ln 2; share of pairs put right."""
    dice = dice_of(535)
    wish = torch.randn(12, generator=dice)
    pairs = torch.randint(0, 12, (900, 2, 6), generator=dice)
    better = wish[pairs].sum(2)
    pairs = pairs.gather(1, better.argsort(1, descending=True)[..., None].expand(-1, -1, 6))
    model = nn.Sequential(nn.Embedding(12, 24), nn.Linear(24, 24), nn.Tanh(), nn.Linear(24, 12))
    reference = copy.deepcopy(model)

    def logs(net: nn.Module, rows: torch.Tensor) -> torch.Tensor:
        out = net(rows[..., :-1]).log_softmax(-1)
        return out.gather(-1, rows[..., 1:, None])[..., 0].sum(-1)

    def apart(rows: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            held = logs(reference, rows)
        won = logs(model, rows) - held
        return won[:, 0] - won[:, 1]

    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
    c.train(watch, model, optimizer, c.epochs(8, 32, pairs[:700]), lambda rows: -F.logsigmoid(0.3 * apart(rows)).mean())
    with torch.no_grad():
        return float((apart(pairs[700:]) > 0).float().mean())


@setup(0.75)
def rewards_by_comparison(watch: Watch) -> float:
    """A reward model after Bradley and Terry from noisy comparisons; share of unseen pairs ordered right."""
    dice = dice_of(536)
    x = torch.randn(1000, 2, 8, generator=dice)
    true = (x[..., 0] + x[..., 1] * x[..., 2]).mul(1.5)
    swapped = torch.rand(1000, generator=dice) > torch.sigmoid(true[:, 0] - true[:, 1])
    seen = torch.where(swapped[:, None, None], x.flip(1), x)
    model = mlp((8, 48, 1), nn.SiLU)
    c.train(
        watch,
        model,
        torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1),
        c.epochs(10, 40, seen[:750]),
        lambda rows: F.softplus(model(rows[:, 1]) - model(rows[:, 0])).mean(),
        max_norm=1.0,
    )
    with torch.no_grad():
        found = model(x[750:])[..., 0]
    return float(((found[:, 0] > found[:, 1]) == (true[750:, 0] > true[750:, 1])).float().mean())


@setup(0.8)
def against_a_discriminator(watch: Watch) -> float:
    """A generator of numbers from 4 ± 1.25 against a small discriminator, by real and fake labels; two optimizers."""
    makes, tells = mlp((2, 16, 1), nn.ELU), mlp((1, 24, 1), nn.LeakyReLU)
    first = watch.wrap(torch.optim.Adam(makes.parameters(), lr=2e-3, betas=(0.5, 0.99)), makes)
    second = watch.wrap(torch.optim.Adam(tells.parameters(), lr=2e-3, betas=(0.5, 0.99)), tells)
    ones, zeros = torch.ones(64, 1), torch.zeros(64, 1)
    for _ in range(700):
        real, made = 4.0 + 1.25 * torch.randn(64, 1), makes(torch.randn(64, 2))
        loss = F.binary_cross_entropy_with_logits(tells(real), ones)
        loss = loss + F.binary_cross_entropy_with_logits(tells(made.detach()), zeros)
        second.zero_grad()
        loss.backward()
        second.step()
        watch.observe(second, loss=loss)
        fooled = F.binary_cross_entropy_with_logits(tells(makes(torch.randn(64, 2))), ones)
        first.zero_grad()
        fooled.backward()
        first.step()
        watch.observe(first, loss=fooled)
    with torch.no_grad():
        made = makes(torch.randn(2000, 2))
    return 1.0 - abs(float(made.mean()) - 4.0) / 4.0 - 0.1 * abs(float(made.std()) - 1.25)


@setup(0.7)
def clipped_critic(watch: Watch) -> float:
    """A Wasserstein critic with clamped weights, five of its steps for each of the generator's, RMSprop for both."""
    turns = 6.28 * torch.arange(8) / 8
    middles = torch.stack([turns.cos(), turns.sin()], 1)
    makes, tells = mlp((4, 48, 48, 2)), mlp((2, 48, 48, 1))
    first = watch.wrap(torch.optim.RMSprop(makes.parameters(), lr=2e-3), makes)
    second = watch.wrap(torch.optim.RMSprop(tells.parameters(), lr=2e-3), tells)

    def real() -> torch.Tensor:
        return middles[torch.randint(8, (64,))] + 0.1 * torch.randn(64, 2)

    for step in range(900):
        if step % 6:
            second.zero_grad()
            with torch.no_grad():
                made = makes(torch.randn(64, 4))
            loss = tells(made).mean() - tells(real()).mean()
            loss.backward()
            second.step()
            with torch.no_grad():
                for p in tells.parameters():
                    p.clamp_(-0.2, 0.2)
            watch.observe(second, loss=loss)
        else:
            first.zero_grad()
            loss = -tells(makes(torch.randn(64, 4))).mean()
            loss.backward()
            first.step()
            watch.observe(first, loss=loss)
    with torch.no_grad():
        radius = makes(torch.randn(1000, 4)).norm(dim=1)
    return 1.0 - abs(float(radius.mean()) - 1.0)


@setup(0.85)
def domains_mixed_up(watch: Watch) -> float:
    """A gradient is turned round between trunk and domain head, so that domains look alike: one loss, one optimizer."""
    dice = dice_of(537)
    x = torch.randn(1600, 6, generator=dice)
    y = (x[:, 0] + x[:, 1] > 0).long()
    domain = torch.arange(2).repeat(800)
    x = x + domain[:, None] * torch.tensor([0.0, 0, 2, -2, 1, 0])

    class Turned(torch.autograd.Function):
        @staticmethod
        def forward(ctx, a):
            return a.view_as(a)

        @staticmethod
        def backward(ctx, grad):
            return -0.1 * grad

    trunk, label, side = mlp((6, 32, 16)).append(nn.ReLU()), nn.Linear(16, 2), nn.Linear(16, 2)
    model = nn.ModuleList([trunk, label, side])

    def loss(a: torch.Tensor, b: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
        codes = trunk(a)
        return F.cross_entropy(label(codes)[d == 0], b[d == 0]) + F.cross_entropy(side(Turned.apply(codes)), d)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    c.train(watch, model, optimizer, c.epochs(8, 64, x[:1200], y[:1200], domain[:1200]), loss)
    other = domain[1200:] == 1
    return c.share_right(lambda a: label(trunk(a)), x[1200:][other], y[1200:][other])


@setup(0.8)
def gradients_projected(watch: Watch) -> float:
    """Two tasks that pull apart: where their gradients disagree each is freed of the other's direction, by hand."""
    dice = dice_of(538)
    x = torch.randn(1000, 8, generator=dice)
    targets = torch.stack([x[:, 0] * 2 + x[:, 1].sin(), x[:, 0] - 2 * x[:, 2].tanh()], 1)
    model = mlp((8, 32, 2), nn.Tanh)
    optimizer = watch.wrap(torch.optim.Adam(model.parameters(), lr=5e-3), model)
    for a, b in c.epochs(15, 50, x[:800], targets[:800]):
        losses = (model(a) - b).square().mean(0)
        rows = [torch.autograd.grad(one, list(model.parameters()), retain_graph=True) for one in losses]
        flat = [torch.cat([g.flatten() for g in row]) for row in rows]
        inner = flat[0] @ flat[1]
        if inner < 0:
            flat = [
                flat[0] - inner / flat[1].square().sum() * flat[1],
                flat[1] - inner / flat[0].square().sum() * flat[0],
            ]
        total, first = flat[0] + flat[1], 0
        for p in model.parameters():
            p.grad = total[first : first + p.numel()].view_as(p)
            first += p.numel()
        optimizer.step()
        watch.observe(optimizer, loss=losses.sum())
    return c.r_squared(model(x[800:]), targets[800:])


@setup(0.7)
def trusted_experts(watch: Watch) -> float:
    """Weights over eight forecasters, one round a step, by exponentiated gradients; won over the mean of all."""
    dice = dice_of(539)
    truth = torch.randn(400, generator=dice)
    skill = torch.tensor([0.2, 0.5, 1.0, 1.5, 2.0, 2.0, 2.5, 3.0])
    said = truth[:, None] + skill * torch.randn(400, 8, generator=dice)
    model = nn.ParameterList([torch.zeros(8)])
    c.train(
        watch,
        model,
        torch.optim.SGD(model.parameters(), lr=0.3),
        zip(said, truth),
        lambda row, value: (model[0].softmax(0) @ row - value).square(),
    )
    with torch.no_grad():
        ours = ((said @ model[0].softmax(0)) - truth)[200:].square().mean()
        even = (said.mean(1) - truth)[200:].square().mean()
    return float((even / ours).log())
