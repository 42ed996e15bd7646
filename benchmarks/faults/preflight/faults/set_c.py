"""The mutation operators of DeepCrime and DEFault."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from ..tasks.planned import Planned, opt
from .planted import (
    HIGH,
    INIT,
    LOSS,
    LOW,
    changing,
    fault,
    replaced,
    squares_of_probabilities,
    weights,
)


def _unbalanced(planned: Planned) -> None:
    y = planned.targets
    rest = (y != 0).nonzero().flatten()
    keep = torch.cat([(y == 0).nonzero().flatten(), rest[: max(2, int(0.04 * len(rest)))]])
    keep = keep[torch.randperm(len(keep))]
    planned.inputs, planned.targets = planned.inputs[keep], y[keep]


def _noise(planned: Planned) -> None:
    changed = torch.rand(len(planned.targets)) < 0.5
    planned.targets = torch.where(changed, planned.targets[torch.randperm(len(planned.targets))], planned.targets)


fault(
    "C",
    "unbalanced",
    "imbalanced-targets",
    "blobs-relu circles-logits moons-adagrad breast-cancer-rmsprop",
    _unbalanced,
)
fault("C", "labels-changed", "wrong-targets trivial-targets", "digits-mlp", _noise)
fault("C", "batch-of-one", "batch-size", "circles-logits digits-deep", changing(batch_size=1))
fault("C", "lr-near-zero", LOW, "digits-mlp wine-adamw diabetes-mlp", changing(optimizer=opt("Adam", lr=1e-7)))
fault(
    "C",
    "without-activations",
    "model-cannot-fit",
    "circles-logits circles-sigmoid-bce",
    lambda p: replaced(p.model, (nn.Tanh, nn.ReLU), nn.Identity),
)  # type: ignore[arg-type]
fault("C", "weights-zero", INIT, "digits-mlp blobs-relu diabetes-mlp", weights(nn.init.zeros_))
fault("C", "weights-one", INIT, "digits-mlp circles-logits wine-adamw", weights(nn.init.ones_))
fault(
    "C",
    "weights-normal",
    INIT,
    "digits-mlp blobs-relu breast-cancer-rmsprop",
    weights(lambda p: nn.init.normal_(p, std=5.0)),
)
fault(
    "C",
    "weights-tiny",
    f"{INIT} vanishing-gradients",
    "digits-deep digits-lenet",
    weights(lambda p: nn.init.normal_(p, std=1e-4)),
)
fault("C", "weights-uniform-one", INIT, "digits-deep", weights(lambda p: nn.init.uniform_(p, 0.0, 2.0)))


def _dropped(planned: Planned) -> None:
    planned.model = nn.Sequential(planned.model[0], planned.model[1], nn.Dropout(0.95), *planned.model[2:])  # type: ignore[index]


fault("C", "dropout-95", "dropout-too-high", "digits-mlp blobs-relu breast-cancer-rmsprop", _dropped)
fault("C", "l2-of-1", "weight-decay-too-high", "digits-mlp", changing(optimizer=opt("SGD", lr=0.1, weight_decay=1.0)))
fault(
    "C",
    "l2-of-1",
    "weight-decay-too-high",
    "blobs-relu wine-adamw",
    changing(optimizer=opt("Adam", lr=1e-3, weight_decay=1.0)),
)
fault("C", "loss-mse", LOSS, "iris-raw", squares_of_probabilities(F.mse_loss))
fault("C", "loss-kl", LOSS, "digits-mlp", squares_of_probabilities(lambda o, t: F.kl_div(o, t, reduction="batchmean")))
fault("C", "rmsprop-at-1", HIGH, "digits-mlp", changing(optimizer=opt("RMSprop", lr=1.0)))
fault("C", "sigmoid-inside", "vanishing-gradients", "digits-deep", lambda p: replaced(p.model, nn.ReLU, nn.Sigmoid))
