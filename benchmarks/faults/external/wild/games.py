"""Games and rewards: adversaries under several losses, policies, values, and a minimax over groups of samples."""

from __future__ import annotations

import functools
import itertools
import math

import torch
from torch import nn
from torch.nn import functional as F

from .. import nets
from .. import optimizers as o
from ..case import Case
from ..loop import Plan, Tensors, Watch
from ..qualities import explained
from .case import dice_of, wild_cases

_cases = functools.partial(wild_cases, __name__)
NOTHING = (torch.zeros(1, 1),)


def _no_loss(model: nn.Module, batch: Tensors) -> torch.Tensor:
    return torch.zeros(())


def _played(model: nn.Module, play, quality, least: float, seed: int, **options) -> Plan:
    """A plan whose loop is `play`, and whose loss need not fall."""
    held_out = options.pop("train", NOTHING)
    return Plan(
        model, _no_loss, held_out, held_out, quality, least, play=play, seed=seed, judged_by_loss=False, **options
    )


class Pair(nn.Module):
    """One makes points of the plane, the other judges them."""

    def __init__(self) -> None:
        super().__init__()
        self.maker = nets.mlp((3, 32, 32, 2))
        self.judge = nets.mlp((2, 32, 32, 1), functools.partial(nn.LeakyReLU, 0.2))


def _bent(count: int = 1024) -> torch.Tensor:
    """Points on a noisy arc."""
    dice = dice_of(40)
    angle = math.pi * torch.rand(count, 1, generator=dice)
    return torch.cat([angle.cos(), angle.sin()], 1) + 0.1 * torch.randn(count, 2, generator=dice)


@torch.no_grad()
def _is_bent(model: nn.Module, held_out: Tensors) -> float:
    """One minus how far the mean and the deviation of what is made lie from those of the arc."""
    torch.manual_seed(0)
    made, real = model.maker(torch.randn(1000, 3)), held_out[0]
    return 1.0 - float(torch.stack([made.mean(0) - real.mean(0), made.std(0) - real.std(0)]).abs().max())


_JUDGES = {  # of real and made points; then of made points alone
    "likelihood": lambda real, made: F.softplus(-real).mean() + F.softplus(made).mean(),
    "squares": lambda real, made: (real - 1.0).square().mean() + made.square().mean(),
    "hinge": lambda real, made: F.relu(1.0 - real).mean() + F.relu(1.0 + made).mean(),
    "plain": lambda real, made: made.mean() - real.mean(),
}
_MAKERS = {
    "likelihood": lambda made: F.softplus(-made).mean(),
    "squares": lambda made: (made - 1.0).square().mean(),
    "hinge": lambda made: -made.mean(),
    "plain": lambda made: -made.mean(),
}


def _duel(
    plan: Plan, watch: Watch, *, loss: str, rounds: int = 1, limit: float = 0.0, penalty: float = 0.0, **options
) -> None:
    """Two networks, each with its optimizer; `limit` clamps the judge's weights, `penalty` is on its slope."""
    maker, judge = plan.model.maker, plan.model.judge
    kind = options.pop("kind", torch.optim.Adam)
    of_maker = watch.wrap(kind(maker.parameters(), lr=plan.lr, **options), maker, plan.max_norm)
    of_judge = watch.wrap(kind(judge.parameters(), lr=plan.lr, **options), judge, plan.max_norm)
    for number, (real,) in enumerate(itertools.chain.from_iterable(map(plan.batches, range(plan.num_epochs)))):
        made = maker(torch.randn(len(real), 3))
        of_judge.zero_grad()
        value = _JUDGES[loss](judge(real), judge(made.detach()))
        if penalty:
            share = torch.rand(len(real), 1)
            between = (share * real + (1.0 - share) * made.detach()).requires_grad_(True)
            slope = torch.autograd.grad(judge(between).sum(), between, create_graph=True)[0]
            value = value + penalty * (slope.norm(dim=1) - 1.0).square().mean()
        value.backward()
        of_judge.step()
        watch.observe(of_judge, loss=value)
        if limit:
            with torch.no_grad():
                for p in judge.parameters():
                    p.clamp_(-limit, limit)
        if number % rounds:
            continue
        of_maker.zero_grad()
        value = _MAKERS[loss](judge(made))
        value.backward()
        of_maker.step()
        watch.observe(of_maker, loss=value)


def _in_turns(plan: Plan, watch: Watch) -> None:
    """One optimizer, and one guard, for both networks, which step in turns."""
    maker, judge = plan.model.maker, plan.model.judge
    optimizer = watch.wrap(torch.optim.Adam(plan.model.parameters(), lr=plan.lr, betas=(0.5, 0.99)), plan.model)
    for (real,) in itertools.chain.from_iterable(map(plan.batches, range(plan.num_epochs))):
        for is_judge in (True, False):
            made = maker(torch.randn(len(real), 3))
            value = _JUDGES["likelihood"](judge(real), judge(made.detach())) if is_judge else None
            value = _MAKERS["likelihood"](judge(made)) if value is None else value
            optimizer.zero_grad()
            value.backward()
            for p in (maker if is_judge else judge).parameters():
                p.grad = None
            optimizer.step()
            watch.observe(optimizer, loss=value.detach())


_LIKELIHOOD = functools.partial(_duel, loss="likelihood", betas=(0.5, 0.99))


def duel(seed: int, play=_LIKELIHOOD, **options) -> Plan:
    """Adversaries on an arc."""
    torch.manual_seed(seed)
    words = {"lr": 2e-3, "num_epochs": 25, "batch_size": 64, "train": (_bent(),), **options}
    return _played(Pair(), play, _is_bent, 0.5, seed, **words)


def wasserstein(seed: int) -> Plan:
    """Adversaries without a logarithm; the judge's weights are clamped after each of its steps."""
    play = functools.partial(_duel, loss="plain", rounds=3, limit=0.1, kind=torch.optim.RMSprop)
    return duel(seed, play, lr=2e-3, num_epochs=40)


def penalised(seed: int) -> Plan:
    """The same, with the judge's slope held near one instead."""
    return duel(
        seed, functools.partial(_duel, loss="plain", penalty=1.0, rounds=3, betas=(0.5, 0.9)), lr=3e-3, num_epochs=36
    )


def squares(seed: int) -> Plan:
    """Adversaries under squared errors."""
    return duel(seed, functools.partial(_duel, loss="squares", betas=(0.5, 0.999)), lr=1e-3, num_epochs=18)


def hinge(seed: int) -> Plan:
    """Adversaries under a hinge: the maker's loss is of either sign."""
    return duel(seed, functools.partial(_duel, loss="hinge", betas=(0.5, 0.99)), lr=5e-3)


def in_turns(seed: int) -> Plan:
    """Adversaries under one guard: losses of two kinds, one after the other."""
    return duel(seed, _in_turns)


# Rewards.

ARMS, SIGHT = 5, 6


def _arms() -> torch.Tensor:
    return torch.randn(SIGHT, ARMS, generator=dice_of(41))


@torch.no_grad()
def _chooses_well(model: nn.Module, held_out: Tensors) -> float:
    """The mean reward as a share of the best one, less that of chance."""
    seen = torch.randn(2000, SIGHT, generator=dice_of(42))
    values = seen @ _arms()
    chosen = values.gather(1, model(seen)[:, :ARMS].argmax(1, keepdim=True)).mean()
    return float((chosen - values.mean()) / (values.amax(1).mean() - values.mean()))


def _bandit(plan: Plan, watch: Watch, *, clipped: bool, value: bool) -> None:
    """Choices whose reward is noisy; the gain over the batch's mean, or over a learnt value."""
    optimizer = watch.wrap(plan.optimizer(plan.model, plan.lr), plan.model, plan.max_norm)
    for _ in range(plan.num_epochs):
        seen = torch.randn(plan.batch_size, SIGHT)
        with torch.no_grad():
            policy = torch.distributions.Categorical(logits=plan.model(seen)[:, :ARMS], validate_args=False)
            chosen = policy.sample()
            before = policy.log_prob(chosen)
            reward = (seen @ _arms()).gather(1, chosen[:, None])[:, 0] + torch.randn(len(seen))
        for _ in range(3 if clipped else 1):
            out = plan.model(seen)
            policy = torch.distributions.Categorical(logits=out[:, :ARMS], validate_args=False)
            baseline = out[:, ARMS] if value else reward.mean()
            gain = (reward - baseline).detach()
            if clipped:
                ratio = (policy.log_prob(chosen) - before).exp()
                loss = -torch.minimum(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()
            else:
                loss = -(policy.log_prob(chosen) * gain).mean()
            if value:
                loss = loss + 0.5 * (reward - baseline).square().mean() - 0.01 * policy.entropy().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            watch.observe(optimizer, loss=loss.detach())


def _bandit_plan(seed: int, least: float, **words) -> Plan:
    torch.manual_seed(seed)
    play = functools.partial(_bandit, **words)
    model = nets.mlp((SIGHT, 32, ARMS + 1), nn.Tanh)
    return _played(model, play, _chooses_well, least, seed, lr=1e-2, num_epochs=300, batch_size=64)


def bandit(seed: int) -> Plan:
    """Policy gradient with the batch's mean as a baseline."""
    return _bandit_plan(seed, 0.7, clipped=False, value=False)


def bandit_with_value(seed: int) -> Plan:
    """The same with a learnt value in the same network."""
    return _bandit_plan(seed, 0.7, clipped=False, value=True)


def proximal_bandit(seed: int) -> Plan:
    """Three steps on each batch, with the ratio of probabilities clipped, and a value."""
    return _bandit_plan(seed, 0.7, clipped=True, value=True)


class ActorAndCritic(nn.Module):
    """What to do, and what that is worth."""

    def __init__(self) -> None:
        super().__init__()
        self.actor = nn.Sequential(nets.mlp((2, 32, 1), nn.Tanh), nn.Tanh())
        self.critic = nets.mlp((3, 48, 48, 1))


@torch.no_grad()
def _steers(model: nn.Module, held_out: Tensors) -> float:
    """One minus the cost of ten steps, as a share of that of doing nothing."""
    costs = []
    for is_steered in (True, False):
        state, cost = torch.randn(500, 2, generator=dice_of(43)), 0.0
        for _ in range(10):
            push = model.actor(state) if is_steered else torch.zeros(500, 1)
            state = torch.cat([state[:, :1] + 0.3 * state[:, 1:], state[:, 1:] + 0.8 * push], 1)
            cost += float(state.square().sum(1).mean())
        costs.append(cost)
    return 1.0 - costs[0] / costs[1]


def _steering(plan: Plan, watch: Watch) -> None:
    """Deterministic policy gradient: the critic learns the cost after a lagging copy, the actor climbs on it."""
    actor, critic = plan.model.actor, plan.model.critic
    of_actor = watch.wrap(torch.optim.Adam(actor.parameters(), lr=plan.lr), actor, plan.max_norm)
    of_critic = watch.wrap(torch.optim.Adam(critic.parameters(), lr=3.0 * plan.lr), critic, plan.max_norm)
    lagging = ActorAndCritic()
    lagging.load_state_dict(plan.model.state_dict())
    for _ in range(plan.num_epochs):
        state = 1.5 * torch.randn(plan.batch_size, 2)
        with torch.no_grad():
            push = (actor(state) + 0.3 * torch.randn(len(state), 1)).clamp(-1.0, 1.0)
            after = torch.cat([state[:, :1] + 0.3 * state[:, 1:], state[:, 1:] + 0.8 * push], 1)
            worth = -after.square().sum(1, keepdim=True)
            worth = worth + 0.9 * lagging.critic(torch.cat([after, lagging.actor(after)], 1))
        loss = F.mse_loss(critic(torch.cat([state, push], 1)), worth)
        of_critic.zero_grad()
        loss.backward()
        of_critic.step()
        watch.observe(of_critic, loss=loss)
        gain = -critic(torch.cat([state, actor(state)], 1)).mean()
        of_actor.zero_grad()
        gain.backward()
        of_actor.step()
        watch.observe(of_actor, loss=gain)
        with torch.no_grad():
            for old, new in zip(lagging.parameters(), plan.model.parameters()):
                old.lerp_(new, 0.05)


def steering(seed: int) -> Plan:
    """An actor and a critic, each under its guard."""
    torch.manual_seed(seed)
    return _played(ActorAndCritic(), _steering, _steers, 0.3, seed, lr=1e-3, num_epochs=600, batch_size=64)


STATES = 8


@torch.no_grad()
def _goes_right(model: nn.Module, held_out: Tensors) -> float:
    """Share of the states of the chain in which it goes to the reward."""
    return float((model(torch.eye(STATES)).argmax(1) == 1).float().mean())


def _chain(plan: Plan, watch: Watch) -> None:
    """Values of left and right in a chain with a reward at its end, after a copy that is renewed now and then."""
    optimizer = watch.wrap(plan.optimizer(plan.model, plan.lr), plan.model, plan.max_norm)
    lagging = nets.mlp((STATES, 32, 2))
    for number in range(plan.num_epochs):
        if number % 25 == 0:
            lagging.load_state_dict(plan.model.state_dict())
        place, action = torch.randint(STATES, (plan.batch_size,)), torch.randint(2, (plan.batch_size, 1))
        after = (place + 2 * action[:, 0] - 1).clamp(0, STATES - 1)
        reward = (after == STATES - 1).float()
        with torch.no_grad():
            wanted = reward + 0.8 * lagging(F.one_hot(after, STATES).float()).amax(1)
        loss = F.smooth_l1_loss(plan.model(F.one_hot(place, STATES).float()).gather(1, action)[:, 0], wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        watch.observe(optimizer, loss=loss.detach())


def chain(seed: int) -> Plan:
    """Deep Q-learning with a target network: a loss that rises whenever the copy is renewed."""
    torch.manual_seed(seed)
    model = nets.mlp((STATES, 32, 2))
    return _played(model, _chain, _goes_right, 0.99, seed, lr=3e-3, num_epochs=500, batch_size=32)


def _worst_group(plan: Plan, watch: Watch) -> None:
    """Descent in the model, ascent in the weights of four groups of samples."""
    x, y, group = plan.train
    optimizer = watch.wrap(plan.optimizer(plan.model, plan.lr), plan.model, plan.max_norm)
    shares = torch.full((4,), 0.25)
    for _ in range(plan.num_epochs):
        at = torch.randint(len(x), (plan.batch_size,))
        errors = (plan.model(x[at]) - y[at]).square()[:, 0]
        each = torch.stack([errors[group[at] == g].mean().nan_to_num() for g in range(4)])
        shares = shares * (0.05 * each.detach()).exp()
        shares = shares / shares.sum()
        loss = (shares * each).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        watch.observe(optimizer, loss=loss.detach())


def worst_group(seed: int) -> Plan:
    """The group that is worst off weighs most: a distributionally robust regression."""
    dice = dice_of(44)
    x, group = torch.randn(1600, 5, generator=dice), torch.randint(4, (1600,), generator=dice)
    y = x[:, :1].sin() + 0.5 * x[:, 1:2] * (group[:, None] - 1.5) + 0.1 * torch.randn(1600, 1, generator=dice)
    x = torch.cat([x, F.one_hot(group, 4).float()], 1)
    torch.manual_seed(seed)

    @torch.no_grad()
    def quality(model: nn.Module, held_out: Tensors) -> float:
        return explained(model(held_out[0]), held_out[1])

    options = {"lr": 5e-3, "num_epochs": 500, "batch_size": 64, "train": (x, y, group)}
    return _played(nets.mlp((9, 48, 1)), _worst_group, quality, 0.8, seed, **options)


_CLIPPED = {"max_norm": 1.0}
CASES: tuple[Case, ...] = (
    *_cases("arc-gan", "adversaries, likelihood", duel, adam={}, clipped={**_CLIPPED}),
    *_cases("arc-gan-wasserstein", "adversaries, clamped", wasserstein, rmsprop={}, again={}),
    *_cases("arc-gan-penalty", "adversaries, slope held near one", penalised, adam={}, clipped={**_CLIPPED}),
    *_cases("arc-gan-squares", "adversaries, squared errors", squares, adam={}, slow={"lr": 7e-4}),
    *_cases("arc-gan-hinge", "adversaries, hinge", hinge, adam={}, clipped={**_CLIPPED}),
    *_cases("arc-gan-in-turns", "adversaries under one guard", in_turns, adam={}, again={}),
    *_cases("arms-reinforce", "policy gradient", bandit, adam={}, sgd={"optimizer": o.MOMENTUM, "lr": 0.2}),
    *_cases("arms-value", "policy gradient with a value", bandit_with_value, adam={}, clipped={"max_norm": 0.5}),
    *_cases(
        "arms-proximal",
        "proximal policy",
        proximal_bandit,
        adam={"lr": 3e-3},
        rmsprop={"optimizer": o.RMSPROP, "lr": 2e-3},
    ),
    *_cases("mass-steering", "actor and critic, two guards", steering, adam={}, clipped={**_CLIPPED}),
    *_cases(
        "chain-q-learning", "values with a lagging copy", chain, adam={}, rmsprop={"optimizer": o.RMSPROP, "lr": 2e-3}
    ),
    *_cases("worst-group", "minimax over groups", worst_group, adam={}, sgd={"optimizer": o.MOMENTUM, "lr": 1e-2}),
)
