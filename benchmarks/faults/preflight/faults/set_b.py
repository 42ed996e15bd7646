"""DeepFD's seeding: learning rate, loss, optimizer, activation."""

from __future__ import annotations

import torch.nn.functional as F
from torch import nn

from ..tasks.planned import opt
from .planted import (
    HIGH,
    LOSS,
    LOW,
    OUTPUT,
    SETTINGS,
    another_end,
    binary_loss,
    changing,
    ending,
    fault,
    squares_of_probabilities,
)

fault("B", "lr-5", HIGH, "blobs-tanh-5 circles-logits digits-mlp digits-lenet", changing(optimizer=opt("SGD", lr=5.0)))
fault("B", "adam-lr-1", HIGH, "blobs-relu digits-mlp circles-sigmoid-bce", changing(optimizer=opt("Adam", lr=1.0)))
fault("B", "lr-1e-12", LOW, "blobs-tanh-5 circles-logits digits-mlp", changing(optimizer=opt("SGD", lr=1e-12)))
fault(
    "B",
    "adam-lr-1e-10",
    LOW,
    "digits-lenet circles-sigmoid-bce moons-adagrad",
    changing(optimizer=opt("Adam", lr=1e-10)),
)


fault("B", "mse-of-classes", LOSS, "blobs-relu digits-mlp digits-lenet", squares_of_probabilities(F.mse_loss))
fault("B", "mae-of-classes", LOSS, "blobs-tanh-5 digits-deep", squares_of_probabilities(F.l1_loss))
fault("B", "mse-of-yes-or-no", LOSS, "circles-sigmoid-bce", changing(loss_fn=nn.MSELoss()))
fault("B", "bce-of-classes", LOSS, "wine-adamw iris-raw", binary_loss)
fault(
    "B",
    "adadelta-at-1e-3",
    f"{LOW} {SETTINGS}",
    "blobs-tanh-5 digits-lenet",
    changing(optimizer=opt("Adadelta", lr=1e-3)),
)
fault("B", "adam-at-sgd-rate", HIGH, "digits-mlp circles-logits", changing(optimizer=opt("Adam", lr=0.1)))
fault("B", "adagrad-at-1e-4", LOW, "digits-deep", changing(optimizer=opt("Adagrad", lr=1e-5)))
fault("B", "last-softmax", OUTPUT, "blobs-tanh-5 digits-mlp digits-lenet", ending(lambda: nn.Softmax(1)))
fault("B", "last-sigmoid", OUTPUT, "blobs-relu digits-deep", ending(nn.Sigmoid))
fault("B", "last-tanh", OUTPUT, "blobs-relu digits-mlp", ending(nn.Tanh))
fault("B", "last-softsign", OUTPUT, "moons-adagrad digits-lenet", ending(nn.Softsign))
fault("B", "last-softplus", OUTPUT, "blobs-tanh-5 circles-logits", ending(nn.Softplus))
fault("B", "last-selu", OUTPUT, "digits-mlp", ending(nn.SELU))
fault("B", "last-elu", OUTPUT, "moons-adagrad", ending(nn.ELU))


fault("B", "no-sigmoid", OUTPUT, "circles-sigmoid-bce", another_end(None))
fault("B", "relu-for-sigmoid", OUTPUT, "circles-sigmoid-bce", another_end(nn.ReLU))
fault("B", "one-unit-softmax", OUTPUT, "circles-sigmoid-bce", another_end(lambda: nn.Softmax(1)))
