"""Rewards: policies and values on a small environment of our own, whose losses need not fall."""

from __future__ import annotations

import functools

import torch
from torch import nn
from torch.nn import functional as F

from .. import nets
from .. import optimizers as o
from ..case import Case, sound_cases
from ..loop import Plan, Tensors, Watch

_cases = functools.partial(sound_cases, __name__)
PLACES, LENGTH, EPISODES = 9, 10, 32


class Corridor:
    """Walkers in a corridor of nine places, each with a goal; the reward is minus the distance to it, at each step.

    What a walker sees [B, 18] is where it stands and where its goal is. Actions: back, stay, forth.
    """

    def __init__(self, count: int, dice: torch.Generator | None = None) -> None:
        self.place = torch.randint(PLACES, (count,), generator=dice)
        self.goal = torch.randint(PLACES, (count,), generator=dice)

    def seen(self) -> torch.Tensor:
        return torch.cat([F.one_hot(self.place, PLACES), F.one_hot(self.goal, PLACES)], 1).float()

    def step(self, action: torch.Tensor) -> torch.Tensor:
        self.place = (self.place + action - 1).clamp(0, PLACES - 1)
        return -(self.place - self.goal).abs() / (PLACES - 1)


@torch.no_grad()
def _skill(model: nn.Module, held_out: Tensors) -> float:
    """Share of the way from doing nothing to the best walk: 1 is the best."""
    returns = []
    for act in ("best", "model", "stay"):
        walk, total = Corridor(500, torch.Generator().manual_seed(1)), torch.zeros(500)
        for _ in range(LENGTH):
            best = (walk.goal - walk.place).sign() + 1
            chosen = {"best": best, "stay": torch.ones_like(best)}.get(act)
            total += walk.step(model(walk.seen())[:, :3].argmax(1) if chosen is None else chosen)
        returns.append(float(total.mean()))
    return (returns[1] - returns[2]) / (returns[0] - returns[2])


def _walks(model: nn.Module) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probabilities, rewards [T, B] and outputs [T, B, C] of one walk each."""
    walk, logs, rewards, outs = Corridor(EPISODES), [], [], []
    for _ in range(LENGTH):
        out = model(walk.seen())
        policy = torch.distributions.Categorical(logits=out[:, :3], validate_args=False)
        action = policy.sample()
        logs.append(policy.log_prob(action))
        rewards.append(walk.step(action))
        outs.append(out)
    return torch.stack(logs), torch.stack(rewards), torch.stack(outs)


def _to_go(rewards: torch.Tensor) -> torch.Tensor:
    return rewards.flip(0).cumsum(0).flip(0)


def _reinforce(plan: Plan, watch: Watch) -> None:
    """Policy gradient with the batch's mean return as a baseline."""
    optimizer = watch.wrap(plan.optimizer(plan.model, plan.lr), plan.model, plan.max_norm)
    for _ in range(plan.num_epochs):
        logs, rewards, _ = _walks(plan.model)
        returns = _to_go(rewards)
        loss = -(logs * (returns - returns.mean(1, keepdim=True))).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        watch.observe(optimizer, loss=loss.detach())


def _actor_critic(plan: Plan, watch: Watch) -> None:
    """The same with a learnt value as baseline, and a little entropy."""
    optimizer = watch.wrap(plan.optimizer(plan.model, plan.lr), plan.model, plan.max_norm)
    for _ in range(plan.num_epochs):
        logs, rewards, outs = _walks(plan.model)
        returns, values = _to_go(rewards), outs[..., 3]
        policy = torch.distributions.Categorical(logits=outs[..., :3], validate_args=False)
        gain = -(logs * (returns - values).detach()).mean()
        loss = gain + 0.5 * F.mse_loss(values, returns) - 0.01 * policy.entropy().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        watch.observe(optimizer, loss=loss.detach())


def _proximal(plan: Plan, watch: Watch) -> None:
    """Several steps on each set of walks, with the ratio of probabilities clipped."""
    optimizer = watch.wrap(plan.optimizer(plan.model, plan.lr), plan.model, plan.max_norm)
    for _ in range(plan.num_epochs):
        walk, seen, actions, before, rewards = Corridor(EPISODES), [], [], [], []
        with torch.no_grad():
            for _ in range(LENGTH):
                seen.append(walk.seen())
                policy = torch.distributions.Categorical(logits=plan.model(seen[-1])[:, :3], validate_args=False)
                actions.append(policy.sample())
                before.append(policy.log_prob(actions[-1]))
                rewards.append(walk.step(actions[-1]))
        returns = _to_go(torch.stack(rewards))
        gains = (returns - returns.mean(1, keepdim=True)) / (returns.std() + 1e-6)
        for _ in range(4):
            out = plan.model(torch.stack(seen))
            policy = torch.distributions.Categorical(logits=out[..., :3], validate_args=False)
            ratio = (policy.log_prob(torch.stack(actions)) - torch.stack(before)).exp()
            loss = -torch.minimum(ratio * gains, ratio.clamp(0.8, 1.2) * gains).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            watch.observe(optimizer, loss=loss.detach())


def _q_learning(plan: Plan, watch: Watch) -> None:
    """Values of actions from remembered steps, after a copy of the model that lags behind."""
    optimizer = watch.wrap(plan.optimizer(plan.model, plan.lr), plan.model, plan.max_norm)
    lagging, memory = nets.mlp((2 * PLACES, 48, 3)), []
    for number in range(plan.num_epochs):
        if number % 20 == 0:
            lagging.load_state_dict(plan.model.state_dict())
        if number % 10 == 0:
            walk = Corridor(EPISODES)
        with torch.no_grad():
            seen = walk.seen()
            greedy = plan.model(seen).argmax(1)
            random = torch.randint(3, greedy.shape)
            action = torch.where(torch.rand(greedy.shape) < max(0.1, 1 - number / 100), random, greedy)
            memory.append((seen, action, walk.step(action), walk.seen()))
        chosen = [memory[int(place)] for place in torch.randint(len(memory), (4,))]
        seen, action, reward, after = (torch.cat(parts) for parts in zip(*chosen))
        with torch.no_grad():
            wanted = reward + 0.9 * lagging(after).amax(1)
        loss = F.smooth_l1_loss(plan.model(seen).gather(1, action[:, None]).flatten(), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        watch.observe(optimizer, loss=loss.detach())


def _plan(seed: int, play, num_out: int, **options) -> Plan:
    torch.manual_seed(seed)
    nothing = (torch.zeros(1, 1),)
    return Plan(
        nets.mlp((2 * PLACES, 48, num_out), nn.Tanh if num_out == 4 else nn.ReLU),
        lambda *_: torch.zeros(()),
        nothing,
        nothing,
        _skill,
        0.75,
        play=play,
        seed=seed,
        judged_by_loss=False,
        **options,
    )


def reinforce(seed: int) -> Plan:
    return _plan(seed, _reinforce, 3, lr=2e-2, num_epochs=100)


def actor_critic(seed: int) -> Plan:
    return _plan(seed, _actor_critic, 4, lr=2e-2, num_epochs=100)


def proximal(seed: int) -> Plan:
    return _plan(seed, _proximal, 3, lr=5e-3, num_epochs=40, max_norm=0.5)


def q_learning(seed: int) -> Plan:
    return _plan(seed, _q_learning, 3, lr=3e-3, num_epochs=500)


CASES: tuple[Case, ...] = (
    *_cases(
        "corridor-reinforce",
        "policy gradient",
        reinforce,
        adam={},
        clipped={"max_norm": 0.5},
        rmsprop={"optimizer": o.RMSPROP, "lr": 5e-3},
    ),
    *_cases("corridor-actor-critic", "actor and critic", actor_critic, adam={}, clipped={"max_norm": 0.5}),
    *_cases("corridor-proximal", "proximal policy optimization", proximal, adam={}, adamw={"optimizer": o.ADAMW}),
    *_cases("corridor-q-learning", "deep Q-learning", q_learning, adam={}, clipped={"max_norm": 10.0}),
)
