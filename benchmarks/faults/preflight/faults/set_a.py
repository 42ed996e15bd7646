"""AUTOTRAINER's kinds of model."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from ..tasks.planned import Planned, load, mlp, opt
from .planted import (
    HIGH,
    INIT,
    LOSS,
    LOW,
    OUTPUT,
    binary_loss,
    changing,
    dead,
    deep,
    ending,
    exponential,
    fault,
    made,
)

for n, data in ((8, "blobs"), (11, "blobs"), (8, "circles"), (11, "circles")):
    made("A", f"explode-exp-{n}@{data}", "exploding-gradients", lambda n=n, d=data: deep(exponential, n, d))
for n, data in ((15, "blobs"), (17, "circles")):
    made("A", f"dying-relu-{n}@{data}", "dead-units poor-initialisation", lambda n=n, d=data: dead(n, d))
for n, data in ((11, "blobs"), (13, "circles"), (12, "blobs")):
    made("A", f"vanish-sigmoid-{n}@{data}", "vanishing-gradients", lambda n=n, d=data: deep(nn.Sigmoid, n, d))
for n, data in ((9, "blobs"), (8, "circles")):
    made(
        "A",
        f"vanish-by-initialisation-{n}@{data}",
        f"{INIT} vanishing-gradients",
        lambda n=n, d=data: deep(nn.ReLU, n, d, lambda p: nn.init.uniform_(p, -0.05, 0.05)),
    )
made(
    "A",
    "vanish-sigmoid-8@digits",
    "vanishing-gradients",
    lambda: Planned(
        mlp(64, *([84] * 8), 10, act=nn.Sigmoid), load("digits")[0] / 16, load("digits")[1], nn.CrossEntropyLoss()
    ),
)
fault("A", "batch-of-one", f"batch-size {HIGH}", "blobs-tanh-5 blobs-relu digits-mlp", changing(batch_size=1))
fault("A", "slow", LOW, "blobs-tanh-5 digits-lenet", changing(optimizer=opt("Adam", lr=1e-6)))
fault("A", "relu-before-softmax", OUTPUT, "blobs-tanh-5 digits-lenet", ending(nn.ReLU))


fault("A", "binary-loss", LOSS, "blobs-relu digits-mlp", binary_loss)


def _raw(name: str) -> Callable[[Planned], None]:
    def change(planned: Planned) -> None:
        planned.inputs = load(name)[0]

    return change


fault("A", "abnormal-data", "unnormalised-inputs", "wine-adamw", _raw("wine"))
fault("A", "abnormal-data", "unnormalised-inputs", "breast-cancer-rmsprop logistic-regression", _raw("breast-cancer"))
fault(
    "A",
    "pixels-to-255",
    "unnormalised-inputs",
    "digits-lenet digits-deep",
    lambda p: setattr(p, "inputs", p.inputs * 255),
)
