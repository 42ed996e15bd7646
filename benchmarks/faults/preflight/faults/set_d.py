"""What else an expert looks for: losses, data, targets and what is trained."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from ..tasks.planned import Lambda, Planned, column, load, opt
from .planted import (
    LOSS,
    OUTPUT,
    another_end,
    changing,
    ending,
    fault,
)


def _minus(planned: Planned) -> None:
    loss = planned.loss_fn
    planned.loss_fn = lambda output, target: -loss(output, target)


fault("D", "minus-sign", LOSS, "digits-mlp diabetes-mlp", _minus)
fault(
    "D",
    "own-loss-minus-sign",
    LOSS,
    "diabetes-mlp",
    lambda p: (setattr(p, "targets", p.targets[:, None]), setattr(p, "loss_fn", lambda o, t: -((o - t) ** 2).mean()))[
        1
    ],
)
fault("D", "maximize", LOSS, "digits-mlp", changing(optimizer=opt("SGD", lr=0.1, maximize=True)))
fault("D", "broadcast", LOSS, "diabetes-mlp friedman-huber-adadelta", changing(loss_fn=nn.MSELoss()))
fault("D", "own-loss-broadcast", LOSS, "diabetes-linear-sgd", changing(loss_fn=lambda o, t: ((o - t) ** 2).mean()))
fault(
    "D",
    "summed",
    LOSS,
    "digits-mlp circles-logits",
    lambda p: setattr(
        p,
        "loss_fn",
        (
            nn.CrossEntropyLoss(reduction="sum")
            if p.targets.dtype == torch.long
            else column(lambda o, t: F.binary_cross_entropy_with_logits(o, t, reduction="sum"))
        ),
    ),
)
fault("D", "not-reduced", LOSS, "blobs-relu", changing(loss_fn=nn.CrossEntropyLoss(reduction="none")))
fault("D", "nll-of-logits", OUTPUT, "digits-mlp", changing(loss_fn=nn.NLLLoss()))
fault(
    "D",
    "nll-of-probabilities",
    OUTPUT,
    "iris-raw",
    lambda p: (ending(lambda: nn.Softmax(1))(p), setattr(p, "loss_fn", nn.NLLLoss()))[1],
)
fault("D", "softmax-over-batch", OUTPUT, "iris-log-softmax", another_end(lambda: nn.LogSoftmax(dim=0)))
fault("D", "sigmoid-twice", OUTPUT, "circles-sigmoid-bce", changing(loss_fn=nn.BCEWithLogitsLoss()))
fault(
    "D",
    "relu-on-regression",
    OUTPUT,
    "diabetes-mlp diabetes-linear-sgd",
    lambda p: setattr(p, "model", nn.Sequential(p.model, nn.ReLU())),
)
fault(
    "D",
    "tanh-on-regression",
    OUTPUT,
    "swiss-roll-l1 friedman-huber-adadelta",
    lambda p: setattr(p, "model", nn.Sequential(p.model, nn.Tanh())),
)
fault("D", "too-few-units", OUTPUT, "digits-mlp", another_end(lambda: nn.Linear(64, 9)))
fault("D", "one-hot-integers", LOSS, "digits-mlp", lambda p: setattr(p, "targets", F.one_hot(p.targets)))
fault("D", "labels-as-floats", LOSS, "wine-adamw", lambda p: setattr(p, "targets", p.targets.float()))
fault("D", "labels-plus-minus-one", LOSS, "circles-logits", lambda p: setattr(p, "targets", 2 * p.targets - 1))
fault("D", "several-classes-in-softmax", LOSS, "multilabel", changing(loss_fn=nn.CrossEntropyLoss()))
fault(
    "D",
    "nan-input",
    "bad-batch",
    "digits-mlp diabetes-mlp",
    lambda p: p.inputs.__setitem__((3, 2), math.nan) if (setattr(p, "inputs", p.inputs.clone()) is None) else None,
)
fault(
    "D",
    "raw-targets",
    "unnormalised-targets",
    "diabetes-mlp diabetes-linear-sgd",
    lambda p: setattr(p, "targets", load("diabetes")[1]),
)
fault(
    "D",
    "same-target",
    "trivial-targets",
    "digits-mlp diabetes-mlp",
    lambda p: setattr(p, "targets", torch.ones_like(p.targets)),
)


def _leak(planned: Planned) -> None:
    planned.inputs = planned.inputs.clone()
    planned.inputs[:, 3] = 0.5 * planned.targets.float() - 1.0


fault("D", "leak", "trivial-targets", "wine-adamw diabetes-mlp breast-cancer-rmsprop", _leak)


def _sorted(planned: Planned) -> None:
    y = planned.targets
    planned.batches = [(planned.inputs[y == c][:32], y[y == c][:32]) for c in range(3)]


fault("D", "sorted-by-class", "unshuffled-data", "digits-mlp blobs-relu", _sorted)
fault(
    "D",
    "one-sample-repeated",
    "repeated-data",
    "digits-mlp wine-adamw",
    lambda p: setattr(p, "batches", [(p.inputs[:1].repeat(32, *([1] * (p.inputs.dim() - 1))), p.targets[:32])]),
)
fault(
    "D",
    "few-samples-repeated",
    "repeated-data",
    "digits-mlp",
    lambda p: setattr(p, "batches", [(p.inputs[torch.arange(32) % 5], p.targets[torch.arange(32) % 5])]),
)


def _head_only(planned: Planned) -> None:
    planned.made = torch.optim.Adam(list(planned.model.parameters())[:2], 1e-3)


fault("D", "optimizer-of-a-part", "parameters-missing-from-optimizer", "digits-mlp digits-lenet", _head_only)


def _stale(planned: Planned) -> None:
    import copy

    planned.made = torch.optim.Adam(planned.model.parameters(), 1e-3)
    planned.model = copy.deepcopy(planned.model)


fault("D", "optimizer-of-before", "parameters-missing-from-optimizer", "digits-mlp gru-language-model", _stale)


def _frozen(planned: Planned) -> None:
    for p in list(planned.model.parameters())[:4]:
        p.requires_grad_(False)


fault("D", "frozen", "frozen-parameters", "digits-mlp digits-resnet", _frozen)
fault(
    "D",
    "detached",
    "parameters-cut-off",
    "digits-mlp wine-adamw",
    lambda p: setattr(p, "model", nn.Sequential(p.model[0], Lambda(torch.detach), *p.model[1:])),
)
