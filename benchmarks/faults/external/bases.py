"""The models that faults are planted in, as recipes of a few words, as others' fault seeders have them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from . import data, nets
from . import optimizers as o
from .case import Make
from .damage import DAMAGES
from .loop import Loss, MakeOptimizer, Plan, Tensors
from .qualities import accuracy, r_squared, sign_accuracy


class Exponential(nn.Module):
    """exp of each element."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.exp()


ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "tanh": nn.Tanh,
    "sigmoid": nn.Sigmoid,
    "exp": Exponential,
    "softmax": functools.partial(nn.Softmax, dim=-1),
    "softmax-over-batch": functools.partial(nn.Softmax, dim=0),
    "softplus": nn.Softplus,
    "softsign": nn.Softsign,
    "linear": nn.Identity,
}
OPTIMIZERS: dict[str, MakeOptimizer] = {
    "sgd": o.SGD,
    "momentum": o.MOMENTUM,
    "adam": o.ADAM,
    "adagrad": o.ADAGRAD,
    "adadelta": o.ADADELTA,
}
SPLITS: dict[str, Callable[[], data.Split]] = {
    "blob": data.blob,
    "circle": data.circle,
    "moons": data.moons,
    "wine": functools.partial(data.table, "wine"),
    "cancer": functools.partial(data.table, "breast_cancer"),
    "digits": data.digits,
    "digit-images": functools.partial(data.digits, as_images=True),
    "friedman": functools.partial(data.friedman, 0.2),
    "waves": data.waves,
    "copy-short": functools.partial(data.copy_task, 4, 2, 4),
}
# inputs, classes (0: a number is wanted, 1: one output for two classes)
SHAPES = {
    "blob": (2, 3),
    "circle": (2, 1),
    "moons": (2, 2),
    "wine": (13, 3),
    "cancer": (30, 1),
    "digits": (64, 10),
    "digit-images": (1, 10),
    "friedman": (10, 0),
    "waves": (1, 0),
    "copy-short": (8, 8),
}


def _rows(out: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs [N, C] or [N], and labels as numbers of that shape: one-hot where there are several outputs."""
    out = out.flatten(0, -2)
    if out.shape[-1] == 1:
        return out.squeeze(-1), labels.flatten().float()
    return out, F.one_hot(labels.flatten(), out.shape[-1]).float()


def _of_numbers(compare: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Loss:
    def loss(model: nn.Module, batch: Tensors) -> torch.Tensor:
        out, labels = model(batch[0]), batch[1]
        if labels.is_floating_point():
            return compare(out.flatten(), labels.flatten())
        return compare(*_rows(out, labels))

    return loss


def _of_classes(compare: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Loss:
    return lambda model, batch: compare(model(batch[0]).flatten(0, -2), batch[1].flatten())


def _percentage(out: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
    return 100.0 * ((wanted - out).abs() / wanted.abs().clamp(min=1e-7)).mean()


def _broadcast(model: nn.Module, batch: Tensors) -> torch.Tensor:
    """Outputs [B, 1] against targets [B]: each with every other, which is what broadcasting makes of it."""
    return (model(batch[0]) - batch[1].flatten().float()).square().mean()


LOSSES: dict[str, Loss] = {
    "ce": _of_classes(F.cross_entropy),
    "nll": _of_classes(F.nll_loss),
    "minus-ce": _of_classes(lambda out, labels: -F.cross_entropy(out, labels)),
    "bce-logits": _of_numbers(F.binary_cross_entropy_with_logits),
    "mse": _of_numbers(F.mse_loss),
    "minus-mse": _of_numbers(lambda out, wanted: -F.mse_loss(out, wanted)),
    "mae": _of_numbers(F.l1_loss),
    "mape": _of_numbers(_percentage),
    "broadcast-mse": _broadcast,
}


@dataclass(frozen=True)
class Recipe:
    """A training in words; a fault replaces some of them.

    Attributes:
        data: a key of `SPLITS`.
        net: "mlp", "cnn", "gru" or "lstm".
        hidden: widths of the hidden layers; of others than "mlp" the first is the width.
        activation, output: keys of `ACTIVATIONS`; what stands after each hidden layer, and after the last one.
        init: of the weights: "", or a key of `INITS`; `init_of`: "all", "last" or "first".
        loss, optimizer: keys of `LOSSES` and `OPTIMIZERS`.
        decay, l1: weight decay of the optimizer, and a penalty on |w| in the loss.
        damage: what is done to the training data: a key of `damage.DAMAGES`.
        least: quality that the sound recipe has to reach.
    """

    data: str
    net: str = "mlp"
    hidden: tuple[int, ...] = (32,)
    activation: str = "relu"
    output: str = "linear"
    init: str = ""
    init_of: str = "all"
    bias: bool = True
    dropout: float = 0.0
    loss: str = "ce"
    optimizer: str = "adam"
    lr: float = 1e-2
    betas: tuple[float, float] | None = None
    eps: float | None = None
    decay: float = 0.0
    l1: float = 0.0
    max_norm: float | None = None
    batch_size: int = 32
    num_epochs: int = 15
    damage: str = ""
    least: float = 0.7

    def but(self, **changes: Any) -> Recipe:
        """The recipe with other words."""
        return dataclasses.replace(self, **changes)


def _each(weight: Callable[[torch.Tensor], Any]) -> Callable[[nn.Linear | nn.Conv2d], Any]:
    return lambda layer: weight(layer.weight)


INITS: dict[str, Callable[[Any], Any]] = {
    "he-uniform": _each(nn.init.kaiming_uniform_),
    "zeros": _each(nn.init.zeros_),
    "ones": _each(nn.init.ones_),
    "large-normal": _each(lambda weight: nn.init.normal_(weight, 0.0, 3.0)),
    "uniform": _each(lambda weight: nn.init.uniform_(weight, -0.05, 0.05)),
    "tiny": _each(lambda weight: nn.init.normal_(weight, 0.0, 1e-4)),
}


def build(recipe: Recipe) -> nn.Module:
    """The model of a recipe."""
    num_in, num_classes = SHAPES[recipe.data]
    num_out = max(1, num_classes)
    width = recipe.hidden[0] if recipe.hidden else num_in
    activation = ACTIVATIONS[recipe.activation]
    if recipe.net in ("gru", "lstm"):
        kind = {"gru": nn.GRU, "lstm": nn.LSTM}[recipe.net]
        is_symbolic = recipe.data == "copy-short"
        return nets.Recurrent(kind, num_in, num_out, width, is_symbolic=is_symbolic, everywhere=is_symbolic)
    layers: list[nn.Module]
    if recipe.net == "cnn":
        layers = [*nets.cnn(num_out, width, activation)]
        if recipe.dropout:
            layers.insert(-1, nn.Dropout(recipe.dropout))
    else:
        layers = []
        for size in recipe.hidden:
            layers.append(nn.Linear(num_in, size, bias=recipe.bias))
            layers.append(activation())
            layers += [nn.Dropout(recipe.dropout)] if recipe.dropout else []
            num_in = size
        layers.append(nn.Linear(num_in, num_out, bias=recipe.bias))
    if recipe.output != "linear":
        layers.append(ACTIVATIONS[recipe.output]())
    model = nn.Sequential(*layers)
    if recipe.init:
        weighted = [layer for layer in model if isinstance(layer, (nn.Linear, nn.Conv2d))]
        chosen = {"all": weighted, "last": weighted[-1:], "first": weighted[:1]}[recipe.init_of]
        for layer in chosen:
            INITS[recipe.init](layer)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
    return model


def head_of(recipe: Recipe) -> tuple[str, ...]:
    """Names of the last weighted layer, and of the activation after it if there is one."""
    if recipe.net in ("gru", "lstm"):
        return ("head",)
    names = [name for name, layer in build(recipe).named_children() if isinstance(layer, (nn.Linear, nn.Conv2d))]
    return (names[-1],) if recipe.output == "linear" else (names[-1], str(int(names[-1]) + 1))


def optimizer_of(recipe: Recipe) -> MakeOptimizer:
    """The recipe's optimizer with the settings that it names."""
    options: dict[str, Any] = {}
    for name in ("betas", "eps"):
        if getattr(recipe, name) is not None:
            options[name] = getattr(recipe, name)
    if recipe.decay:
        options["weight_decay"] = recipe.decay
    make = OPTIMIZERS[recipe.optimizer]

    def optimizer(model: nn.Module, lr: float) -> torch.optim.Optimizer:
        made = make(model, lr)
        for group in made.param_groups:
            group.update(options)
        return made

    return optimizer


def quality_of(recipe: Recipe) -> Callable[[nn.Module, Tensors], float]:
    """What the recipe's data are measured by, whatever is done to its model and loss."""
    num_classes = SHAPES[recipe.data][1]
    if num_classes == 1:
        is_probability = recipe.output in ("sigmoid", "softmax") or recipe.loss in ("mae", "mape")
        return sign_accuracy(0.5 if is_probability else 0.0)
    return r_squared if num_classes == 0 else accuracy


@functools.cache
def maker(recipe: Recipe) -> Make:
    """What makes the recipe's plan by seed: the same function for the same recipe."""

    def make(seed: int) -> Plan:
        torch.manual_seed(seed)
        train, held_out = SPLITS[recipe.data]()
        loss = LOSSES[recipe.loss]
        if recipe.l1:
            loss = _with_l1(loss, recipe.l1)
        plan = Plan(
            build(recipe),
            loss,
            train,
            held_out,
            quality_of(recipe),
            recipe.least,
            lr=recipe.lr,
            optimizer=optimizer_of(recipe),
            max_norm=recipe.max_norm,
            batch_size=recipe.batch_size,
            num_epochs=recipe.num_epochs,
            val_loss=LOSSES[recipe.loss],
            seed=seed,
        )
        if recipe.damage:
            DAMAGES[recipe.damage](plan, torch.Generator().manual_seed(14))
        return plan

    return make


def _with_l1(loss: Loss, weight: float) -> Loss:
    def penalised(model: nn.Module, batch: Tensors) -> torch.Tensor:
        return loss(model, batch) + weight * sum(p.abs().sum() for p in model.parameters())

    return penalised
