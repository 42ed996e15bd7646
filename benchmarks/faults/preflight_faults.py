"""Set-ups with a fault in them that is there before the first step: a sound one of `preflight_tasks`, changed.

Sets A (AUTOTRAINER's kinds of model), B (DeepFD's seeding: lr, loss, opt, act) and C (the mutation operators of
DeepCrime and DEFault) follow their publications as far as a fault exists before training: the number of epochs does
not, nor does the patience of an early stop. Set D is our own: what else an expert looks for.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .preflight_tasks import TASKS, Lambda, Planned, column, load, mlp, narrow, opt


@dataclass(frozen=True)
class Planted:
    """A fault in a set-up.

    Attributes:
        name: "fault@task".
        source: "A", "B", "C" or "D".
        causes: the names that are right.
        make: the set-up; called after the random generators were seeded.
    """

    name: str
    source: str
    causes: tuple[str, ...]
    make: Callable[[], Planned]

    @property
    def kind(self) -> str:
        """The fault, without the task."""
        return self.name.partition("@")[0]


FAULTS: list[Planted] = []
OUTPUT, LOSS, INIT = "wrong-output-layer", "wrong-loss", "poor-initialisation"
HIGH, LOW, SETTINGS = "learning-rate-too-high", "learning-rate-too-low", "wrong-optimizer-settings"


def fault(source: str, name: str, causes: str, tasks: str, change: Callable[[Planned], Any]) -> None:
    """Enters a fault, once for each of `tasks` (names with blanks between them)."""
    for task in tasks.split():

        def make(task: str = task) -> Planned:
            planned = TASKS[task]()
            return change(planned) or planned

        FAULTS.append(Planted(f"{name}@{task}", source, tuple(causes.split()), make))


def made(source: str, name: str, causes: str, make: Callable[[], Planned]) -> None:
    """Enters a fault with a set-up of its own."""
    FAULTS.append(Planted(name, source, tuple(causes.split()), make))


def replaced(model: nn.Module, old: type[nn.Module], new: Callable[[], nn.Module]) -> None:
    """Puts `new()` in the place of every module of the class `old`."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, old):
                setattr(parent, name, new())


def changing(**fields: Any) -> Callable[[Planned], None]:
    """A change of fields."""

    def change(planned: Planned) -> None:
        for name, value in fields.items():
            setattr(planned, name, value)

    return change


def ending(module: Callable[[], nn.Module]) -> Callable[[Planned], None]:
    """One more module at the end of the model."""

    def change(planned: Planned) -> None:
        planned.model = nn.Sequential(*planned.model, module())  # type: ignore[misc]

    return change


def weights(init: Callable[[Tensor], Any]) -> Callable[[Planned], None]:
    """All weight matrices initialised anew."""

    def change(planned: Planned) -> None:
        for p in planned.model.parameters():
            if p.dim() >= 2:
                init(p)

    return change


def exponential() -> nn.Module:
    """exp."""
    return Lambda(torch.exp)


def deep(act: Callable[[], nn.Module], num: int, data: str, init: Callable[[Tensor], Any] | None = None) -> Planned:
    """One of AUTOTRAINER's deep narrow nets."""
    x, y = load(data)
    if data == "blobs":
        planned = Planned(narrow(num, act, 2, 3), x, y, nn.CrossEntropyLoss(), opt("Adam", lr=1e-3), 32)
    else:
        loss = column(F.binary_cross_entropy_with_logits)
        planned = Planned(narrow(num, act, 2, 1), x, y.float(), loss, opt("Adam", lr=1e-3), 32)
    if init is not None:
        weights(init)(planned)
    return planned


def dead(num: int, data: str) -> Planned:
    """A net whose units are dead from the start, as it comes about in one initialisation out of two."""
    for _ in range(200):
        planned = deep(nn.ReLU, num, data)
        if not bool(planned.model[:-1](planned.inputs[:96]).any()):  # type: ignore[index]
            return planned
    raise RuntimeError("no initialisation with dead units was found")


# --- A: AUTOTRAINER --------------------------------------------------------------------------------------------------

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


def _binary_loss(planned: Planned) -> None:
    planned.loss_fn = nn.BCELoss()
    planned.model = nn.Sequential(planned.model, nn.Softmax(1))
    planned.targets = F.one_hot(planned.targets).float()


fault("A", "binary-loss", LOSS, "blobs-relu digits-mlp", _binary_loss)


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

# --- B: DeepFD -------------------------------------------------------------------------------------------------------

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


def _squares(loss: Callable[..., Tensor]) -> Callable[[Planned], None]:
    def change(planned: Planned) -> None:
        planned.model = nn.Sequential(planned.model, nn.Softmax(1))
        planned.targets = F.one_hot(planned.targets).float()
        planned.loss_fn = loss

    return change


fault("B", "mse-of-classes", LOSS, "blobs-relu digits-mlp digits-lenet", _squares(F.mse_loss))
fault("B", "mae-of-classes", LOSS, "blobs-tanh-5 digits-deep", _squares(F.l1_loss))
fault("B", "mse-of-yes-or-no", LOSS, "circles-sigmoid-bce", changing(loss_fn=nn.MSELoss()))
fault("B", "bce-of-classes", LOSS, "wine-adamw iris-raw", _binary_loss)
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


def _last(module: Callable[[], nn.Module] | None) -> Callable[[Planned], None]:
    def change(planned: Planned) -> None:
        rest = list(planned.model)[:-1]  # type: ignore[arg-type]
        planned.model = nn.Sequential(*rest, *([] if module is None else [module()]))

    return change


fault("B", "no-sigmoid", OUTPUT, "circles-sigmoid-bce", _last(None))
fault("B", "relu-for-sigmoid", OUTPUT, "circles-sigmoid-bce", _last(nn.ReLU))
fault("B", "one-unit-softmax", OUTPUT, "circles-sigmoid-bce", _last(lambda: nn.Softmax(1)))

# --- C: DeepCrime, DEFault -------------------------------------------------------------------------------------------


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
fault("C", "loss-mse", LOSS, "iris-raw", _squares(F.mse_loss))
fault("C", "loss-kl", LOSS, "digits-mlp", _squares(lambda o, t: F.kl_div(o, t, reduction="batchmean")))
fault("C", "rmsprop-at-1", HIGH, "digits-mlp", changing(optimizer=opt("RMSprop", lr=1.0)))
fault("C", "sigmoid-inside", "vanishing-gradients", "digits-deep", lambda p: replaced(p.model, nn.ReLU, nn.Sigmoid))

# --- D: what else an expert looks for --------------------------------------------------------------------------------


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
fault("D", "softmax-over-batch", OUTPUT, "iris-log-softmax", _last(lambda: nn.LogSoftmax(dim=0)))
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
fault("D", "too-few-units", OUTPUT, "digits-mlp", _last(lambda: nn.Linear(64, 9)))
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
