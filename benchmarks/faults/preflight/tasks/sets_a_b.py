"""AUTOTRAINER's healthy nets, larger ones of each kind, and nets of images."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from .planned import Planned, column, images, load, mlp, narrow, opt, task


@task
def blobs_tanh_5() -> Planned:
    x, y = load("blobs")
    return Planned(narrow(5, nn.Tanh, 2, 3), x, y, nn.CrossEntropyLoss(), opt("Adam", lr=1e-3))


@task
def blobs_tanh_8_ones() -> Planned:
    x, y = load("blobs")
    model = narrow(8, nn.Tanh, 2, 3)
    nn.init.ones_(model[-1].weight)  # type: ignore[index]
    return Planned(model, x, y, nn.CrossEntropyLoss(), opt("Adam", lr=1e-2), 64)


@task
def circles_tanh_11_zeros() -> Planned:
    x, y = load("circles")
    model = narrow(11, nn.Tanh, 2, 1)
    nn.init.zeros_(model[-1].weight)  # type: ignore[index]
    return Planned(model, x, y.float(), column(F.binary_cross_entropy_with_logits), opt("Adam", lr=1e-3), 128)


@task
def blobs_relu() -> Planned:
    x, y = load("blobs")
    return Planned(mlp(2, 32, 32, 3), x, y, nn.CrossEntropyLoss(), opt("SGD", lr=0.01, momentum=0.9))


@task
def circles_sigmoid_bce() -> Planned:
    x, y = load("circles")
    return Planned(mlp(2, 32, 32, 1, last=nn.Sigmoid()), x, y.float()[:, None], nn.BCELoss(), opt("Adam", lr=1e-2))


@task
def circles_logits() -> Planned:
    x, y = load("circles")
    model = mlp(2, 64, 64, 1, act=nn.Tanh)
    return Planned(model, x, y.float(), column(F.binary_cross_entropy_with_logits), opt("SGD", lr=0.1, momentum=0.9))


@task
def moons_adagrad() -> Planned:
    x, y = load("moons")
    return Planned(mlp(2, 32, 32, 2), x, y, nn.CrossEntropyLoss(), opt("Adagrad", lr=1e-2))


@task
def digits_mlp() -> Planned:
    x, y = load("digits")
    return Planned(mlp(64, 64, 64, 10), x / 16, y, nn.CrossEntropyLoss(), opt("SGD", lr=0.1, momentum=0.9), 64)


@task
def digits_raw() -> Planned:
    x, y = load("digits")
    return Planned(mlp(64, 128, 10), x, y, nn.CrossEntropyLoss(), opt("Adam", lr=1e-3), 64)


@task
def digits_deep() -> Planned:
    x, y = load("digits")
    return Planned(mlp(64, 84, 84, 84, 84, 84, 10), x / 16, y, nn.CrossEntropyLoss(), opt("AdamW", lr=1e-3), 64)


@task
def digits_lenet() -> Planned:
    x, y = images()
    features = [nn.Conv2d(1, 6, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 3, padding=1), nn.ReLU()]
    model = nn.Sequential(*features, nn.MaxPool2d(2), nn.Flatten(), mlp(64, 120, 84, 10))
    return Planned(model, x, y, nn.CrossEntropyLoss(), opt("Adam", lr=1e-3), 64)


@task
def digits_batch_norm() -> Planned:
    x, y = images()
    model = nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1, bias=False), nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveAvgPool2d(1)),
        *(nn.Flatten(), nn.Dropout(0.25), nn.Linear(32, 10)),
    )
    return Planned(model, x, y, nn.CrossEntropyLoss(), opt("SGD", lr=0.05, momentum=0.9, nesterov=True), 64)


class Residual(nn.Module):
    """A block whose branch begins at zero."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.a = nn.Conv2d(width, width, 3, padding=1)
        self.norm_a = nn.BatchNorm2d(width)
        self.b = nn.Conv2d(width, width, 3, padding=1)
        self.norm_b = nn.BatchNorm2d(width)
        nn.init.zeros_(self.norm_b.weight)

    def forward(self, x: Tensor) -> Tensor:
        """x + branch(x)."""
        return F.relu(x + self.norm_b(self.b(F.relu(self.norm_a(self.a(x))))))


@task
def digits_resnet() -> Planned:
    x, y = images()
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), Residual(16), Residual(16), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
        nn.Linear(64, 10),
    )  # fmt: skip
    return Planned(model, x, y, nn.CrossEntropyLoss(), opt("SGD", lr=0.1, momentum=0.9, weight_decay=5e-4), 64)
