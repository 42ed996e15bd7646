"""What else an expert looks for: the graph, the modules, numbers and settings."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..tasks.planned import Lambda, Planned, opt
from .planted import (
    INIT,
    LOW,
    SETTINGS,
    changing,
    fault,
    weights,
)


def _argmax(planned: Planned) -> None:
    planned.loss_fn = lambda output, target: (output.argmax(1) != target).float().mean()


fault("D", "loss-of-argmax", "parameters-cut-off", "digits-mlp", _argmax)
fault(
    "D",
    "unused-layer",
    "parameters-cut-off",
    "digits-lenet",
    lambda p: p.model.__setattr__("spare", nn.Linear(9, 9)) or (setattr(p, "model", _Without(p.model))),
)


class _Without(nn.Module):
    """Calls all but the last child."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        """The output of all children but the last."""
        for child in list(self.inner.children())[:-1]:
            x = child(x)
        return x


class _Centered(nn.Module):
    """Subtracts the mean over the batch."""

    def forward(self, x: Tensor) -> Tensor:
        """x - mean over samples."""
        return x - x.mean(0, keepdim=True)


fault(
    "D",
    "mean-over-batch",
    "samples-mixed",
    "digits-mlp wine-adamw",
    lambda p: setattr(p, "model", nn.Sequential(p.model[0], _Centered(), *p.model[1:])),
)


def _batch_last(planned: Planned) -> None:
    for module in planned.model.modules():
        if isinstance(module, nn.MultiheadAttention):
            module.batch_first = False


fault("D", "attention-over-samples", "samples-mixed", "rows-as-tokens", _batch_last)
fault(
    "D",
    "log-of-zero",
    "singular-operation",
    "digits-mlp",
    lambda p: setattr(
        p, "loss_fn", (lambda o, t: -(F.relu(o).div(F.relu(o).sum(1, keepdim=True)).log().gather(1, t[:, None])).mean())
    ),
)
fault(
    "D",
    "root-of-zero",
    "singular-operation",
    "diabetes-mlp",
    lambda p: setattr(
        p, "model", nn.Sequential(p.model, Lambda(lambda x: x + (0 * x).square().sum(1, keepdim=True).sqrt()))
    ),
)
fault(
    "D",
    "float16",
    "half-precision-overflow",
    "digits-mlp",
    lambda p: (p.model.half(), setattr(p, "inputs", p.inputs.half()))[1],
)
fault(
    "D",
    "evaluation-mode",
    "normalisation-statistics",
    "digits-batch-norm digits-resnet",
    lambda p: p.model.eval() and None,
)


def _momentum(planned: Planned) -> None:
    for module in planned.model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 0.999


fault("D", "batch-norm-momentum", "normalisation-statistics", "digits-batch-norm", _momentum)


def _first_norm(planned: Planned) -> None:
    planned.model = nn.Sequential(planned.model[0], nn.BatchNorm1d(64), *planned.model[1:])  # type: ignore[index]
    planned.batch_size = 2


fault("D", "batch-norm-of-two", "normalisation-statistics batch-size", "digits-mlp", _first_norm)
fault("D", "eps-of-1", SETTINGS, "digits-mlp gru-language-model", changing(optimizer=opt("Adam", lr=1e-3, eps=1.0)))
fault(
    "D",
    "betas-swapped",
    SETTINGS,
    "digits-mlp wine-adamw",
    changing(optimizer=opt("Adam", lr=1e-3, betas=(0.999, 0.9))),
)
fault("D", "momentum-999", SETTINGS, "digits-mlp", changing(optimizer=opt("SGD", lr=0.1, momentum=0.999)))
fault("D", "lr-zero", LOW, "digits-mlp", changing(optimizer=opt("SGD", lr=0.0)))
fault(
    "D",
    "inputs-divided-twice",
    "unnormalised-inputs",
    "digits-mlp digits-lenet",
    lambda p: setattr(p, "inputs", p.inputs / 255),
)
fault(
    "D",
    "one-feature-large",
    "unnormalised-inputs",
    "wine-adamw diabetes-mlp",
    lambda p: setattr(p, "inputs", torch.cat([p.inputs[:, :-1], 5000 * p.inputs[:, -1:]], 1)),
)
fault(
    "D",
    "embedding-scale-language-model",
    f"{INIT}",
    "transformer-language-model",
    weights(lambda p: nn.init.normal_(p, std=1.0)),
)
