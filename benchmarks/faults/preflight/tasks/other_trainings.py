"""Models that are trained already, several heads, rewards, other optimizers and dtypes."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .planned import Planned, column, images, load, mlp, opt, standard, task, windows


@task
def fine_tuning() -> Planned:
    x, y = load("digits")
    model = mlp(64, 64, 64, 10)
    trainer = torch.optim.Adam(model.parameters(), 3e-3)
    for _ in range(60):
        trainer.zero_grad()
        F.cross_entropy(model(x[:800] / 16), y[:800]).backward()
        trainer.step()
    return Planned(model, x[800:] / 16, y[800:], nn.CrossEntropyLoss(), opt("AdamW", lr=1e-4), 64)


@task
def frozen_trunk() -> Planned:
    planned = fine_tuning()
    for p in planned.model[:4].parameters():  # type: ignore[index]
        p.requires_grad_(False)
    planned.model[4] = nn.Linear(64, 10)  # type: ignore[operator]
    planned.made = torch.optim.Adam(planned.model[4].parameters(), 1e-3)  # type: ignore[index]
    return planned


class TwoHeads(nn.Module):
    """One trunk, a class and a number."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.classes, self.number = mlp(64, 64, 32), nn.Linear(32, 10), nn.Linear(32, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """Both."""
        h = F.relu(self.trunk(x))
        return {"class": self.classes(h), "number": self.number(h).squeeze(-1)}


@task
def two_heads() -> Planned:
    x, y = load("digits")
    ink = standard(x.sum(1))

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        out = model(batch["x"])
        return F.cross_entropy(out["class"], batch["y"]) + 0.5 * F.mse_loss(out["number"], batch["ink"])

    batch = {"x": x[:128] / 16, "y": y[:128], "ink": ink[:128]}
    return Planned(TwoHeads(), x, y, loss, opt("Adam", lr=1e-3), batches=batch)  # type: ignore[arg-type]


@task
def multi_margin() -> Planned:
    x, y = load("wine")
    return Planned(nn.Linear(13, 3), standard(x), y, nn.MultiMarginLoss(), opt("SGD", lr=0.1), 32)


@task
def policy_gradient() -> Planned:
    states = torch.randn(128, 6)
    actions = torch.randint(3, (128,))
    rewards = standard((states[:, 0] * (actions - 1)).float())

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        log_p = F.log_softmax(model(batch["states"]), 1)
        entropy = -(log_p.exp() * log_p).sum(1).mean()
        chosen = log_p.gather(1, batch["actions"][:, None]).squeeze(1)
        return -(chosen * batch["rewards"]).mean() - 0.01 * entropy

    batch = {"states": states, "actions": actions, "rewards": rewards}
    return Planned(mlp(6, 64, 3, act=nn.Tanh), states, actions, loss, opt("Adam", lr=1e-3), batches=batch)  # type: ignore[arg-type]


@task
def critic() -> Planned:
    states = torch.randn(256, 6)
    returns = standard(states[:, 0] * 2 + states[:, 1].abs())
    return Planned(mlp(6, 64, 64, 1, act=nn.Tanh), states, returns, column(F.smooth_l1_loss), opt("Adam", lr=5e-4), 64)


@task
def segmentation() -> Planned:
    x, _ = images()
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 2, 1)
    )
    return Planned(model, x, (x[:, 0] > 0.9).long(), nn.CrossEntropyLoss(), opt("Adam", lr=1e-3), 32)


class SignSGD(torch.optim.Optimizer):
    """Steps of one size along the gradient's sign, with momentum, as Lion."""

    def __init__(self, params: Any, lr: float = 1e-3, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    m = self.state[p].setdefault("m", torch.zeros_like(p))
                    m.lerp_(p.grad, 1 - group["beta"])
                    p.sub_(m.sign(), alpha=group["lr"])


@task
def sign_sgd() -> Planned:
    x, y = load("digits")
    return Planned(mlp(64, 64, 10), x / 16, y, nn.CrossEntropyLoss(), functools.partial(SignSGD, lr=1e-3), 64)


@task
def bfloat16_mlp() -> Planned:
    x, y = load("digits")
    model = mlp(64, 64, 10).to(torch.bfloat16)
    return Planned(model, (x / 16).bfloat16(), y, nn.CrossEntropyLoss(), opt("SGD", lr=0.1), 64)


@task
def self_normalising() -> Planned:
    x, y = load("breast-cancer")
    model = mlp(30, 32, 32, 32, 2, act=nn.SELU)
    for layer in model:
        if isinstance(layer, nn.Linear):
            nn.init.normal_(layer.weight, std=1 / math.sqrt(layer.in_features))
    return Planned(model, standard(x), y, nn.CrossEntropyLoss(), opt("SGD", lr=0.05, momentum=0.9), 64)


@task
def embedding_bag_dropout() -> Planned:
    x, _ = windows(24)
    y = ((x == 32).sum(1) > 3).float()
    model = nn.Sequential(nn.EmbeddingBag(64, 32), nn.Dropout(0.5), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))
    loss = column(F.binary_cross_entropy_with_logits)
    return Planned(model, x, y, loss, opt("Adam", lr=1e-2), 64)


@task
def million_parameters() -> Planned:
    x, y = load("digits")
    return Planned(mlp(64, 700, 700, 640, 10), x / 16, y, nn.CrossEntropyLoss(), opt("AdamW", lr=3e-4), 128)
