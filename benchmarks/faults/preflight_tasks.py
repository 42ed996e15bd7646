"""Sound set-ups for `fastguard.preflight`: data, model, optimizer and loss of many kinds, before the first step."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NUM_BATCHES = 3


@dataclass
class Planned:
    """A training that has not begun. A fault changes fields of it, or replaces them."""

    model: nn.Module
    inputs: Any
    targets: Any
    loss_fn: Callable[..., Any]
    optimizer: Callable[[Any], Any] = field(default=functools.partial(torch.optim.Adam, lr=1e-3))
    batch_size: int = 32
    batches: list[Any] | None = None
    made: Any = None  # an optimizer that is there already
    prepare: Callable[[Planned], None] | None = None  # what is done last, as making a scheduler

    def arguments(self) -> tuple[Any, Any, Any, Any]:
        """What `preflight` takes."""
        optimizer = self.made if self.made is not None else self.optimizer(self.model.parameters())
        self.made = optimizer
        if self.prepare is not None:
            self.prepare(self)
        if self.batches is None:
            n = self.batch_size
            parts = [slice(i * n, (i + 1) * n) for i in range(NUM_BATCHES)]
            self.batches = [(self.inputs[s], self.targets[s]) for s in parts if len(self.inputs[s])]
        return self.model, optimizer, self.loss_fn, self.batches


TASKS: dict[str, Callable[[], Planned]] = {}


def task(function: Callable[[], Planned]) -> Callable[[], Planned]:
    """Registers a sound set-up; it is called after the random generators were seeded."""
    TASKS[function.__name__.strip("_").replace("_", "-")] = function
    return function


def opt(name: str, **settings: Any) -> Callable[[Any], Any]:
    """An optimizer of torch's, to be made."""
    return functools.partial(getattr(torch.optim, name), **settings)


@functools.cache
def load(name: str) -> tuple[Tensor, Tensor]:
    """A set of scikit-learn, shuffled, as tensors: features as they are, targets int64 or float32."""
    from sklearn import datasets

    made = {
        "blobs": lambda: datasets.make_blobs(1000, centers=3, n_features=2, cluster_std=2, random_state=2),
        "circles": lambda: datasets.make_circles(1000, noise=0.1, random_state=1),
        "moons": lambda: datasets.make_moons(1000, noise=0.1, random_state=1),
        "swiss-roll": lambda: datasets.make_swiss_roll(1000, noise=0.1, random_state=1),
        "friedman": lambda: datasets.make_friedman1(1000, random_state=1),
        "multilabel": lambda: datasets.make_multilabel_classification(1000, random_state=1),
    }
    if name in made:
        x, y = made[name]()
    else:
        x, y = getattr(datasets, f"load_{name.replace('-', '_')}")(return_X_y=True)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(7))
    x, y = torch.as_tensor(x, dtype=torch.float32)[order], torch.as_tensor(y)[order]
    return x, (y.float() if name in ("diabetes", "swiss-roll", "friedman", "multilabel") else y.long())


def standard(x: Tensor) -> Tensor:
    """Each feature with mean 0 and standard deviation 1."""
    return (x - x.mean(0)) / x.std(0).clamp_min(1e-6)


@functools.cache
def text() -> Tensor:
    """Characters of some of torch's docstrings, as numbers below 64."""
    source = torch.__doc__ or ""
    source += "".join(str(f.__doc__) for f in (nn.Linear, nn.LSTM, nn.Conv2d, nn.Transformer, F.cross_entropy, nn.GRU))
    return torch.tensor([ord(c) % 64 for c in source])


def mlp(*widths: int, act: Callable[[], nn.Module] = nn.ReLU, last: nn.Module | None = None) -> nn.Sequential:
    """Linear layers with an activation between them."""
    layers: list[nn.Module] = []
    for i, (a, b) in enumerate(itertools.pairwise(widths)):
        layers += [nn.Linear(a, b)] + ([act()] if i < len(widths) - 2 else [])
    return nn.Sequential(*layers, *([] if last is None else [last]))


def narrow(num_layers: int, act: Callable[[], nn.Module], num_in: int, num_out: int, last: Any = None) -> nn.Module:
    """AUTOTRAINER's nets: layers of five units, He-uniform."""
    model = mlp(num_in, *([5] * num_layers), num_out, act=act, last=last)
    for layer in model:
        if isinstance(layer, nn.Linear):
            nn.init.kaiming_uniform_(layer.weight, nonlinearity="relu")
            nn.init.zeros_(layer.bias)
    return model


class Lambda(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *given: Tensor) -> Tensor:
        """The function's value."""
        return self.function(*given)


def column(loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A loss for one unit: the output without its last dimension."""
    return lambda output, target: loss(output.squeeze(-1), target)


def windows(length: int, count: int = 200) -> tuple[Tensor, Tensor]:
    """Stretches of text, and the same shifted by one."""
    t = text()
    starts = torch.randint(len(t) - length - 1, (count,))
    return torch.stack([t[s : s + length] for s in starts]), torch.stack([t[s + 1 : s + length + 1] for s in starts])


# Sets A and B: AUTOTRAINER's healthy nets, and a larger one of each kind.


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


def images() -> tuple[Tensor, Tensor]:
    """The digits as images."""
    x, y = load("digits")
    return (x / 16).reshape(-1, 1, 8, 8), y


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


@task
def digits_group_norm_nadam() -> Planned:
    x, y = images()
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3), nn.GroupNorm(4, 16), nn.SiLU(), nn.Conv2d(16, 32, 3), nn.GroupNorm(4, 32), nn.SiLU(),
        nn.Flatten(), nn.Linear(512, 10),
    )  # fmt: skip
    return Planned(model, x, y, nn.CrossEntropyLoss(label_smoothing=0.1), opt("NAdam", lr=2e-3), 64)


@task
def wine_adamw() -> Planned:
    x, y = load("wine")
    return Planned(mlp(13, 32, 3), standard(x), y, nn.CrossEntropyLoss(), opt("AdamW", lr=1e-3, weight_decay=0.1))


@task
def breast_cancer_rmsprop() -> Planned:
    x, y = load("breast-cancer")
    loss = column(F.binary_cross_entropy_with_logits)
    return Planned(mlp(30, 16, 1), standard(x), y.float(), loss, opt("RMSprop", lr=1e-3))


@task
def iris_log_softmax() -> Planned:
    x, y = load("iris")
    model = mlp(4, 16, 3, last=nn.LogSoftmax(dim=1))
    return Planned(model, standard(x), y, nn.NLLLoss(), opt("Adam", lr=1e-2), 30)


@task
def iris_raw() -> Planned:
    x, y = load("iris")
    return Planned(mlp(4, 16, 16, 3), x, y, nn.CrossEntropyLoss(), opt("RAdam", lr=1e-2), 16)


@task
def logistic_regression() -> Planned:
    x, y = load("breast-cancer")
    loss = column(F.binary_cross_entropy_with_logits)
    return Planned(nn.Linear(30, 1), standard(x), y.float(), loss, opt("SGD", lr=0.1), 64)


@task
def diabetes_mlp() -> Planned:
    x, y = load("diabetes")
    return Planned(mlp(10, 32, 1), standard(x), standard(y), column(F.mse_loss), opt("Adam", lr=3e-3))


@task
def diabetes_linear_sgd() -> Planned:
    x, y = load("diabetes")
    return Planned(nn.Linear(10, 1), standard(x), standard(y), column(F.mse_loss), opt("SGD", lr=0.01), 64)


@task
def diabetes_lbfgs() -> Planned:
    x, y = load("diabetes")
    model = mlp(10, 8, 1, act=nn.Tanh)
    return Planned(model, standard(x), standard(y), column(F.mse_loss), opt("LBFGS", lr=0.5), len(x))  # no mini-batches


@task
def friedman_huber_adadelta() -> Planned:
    x, y = load("friedman")
    return Planned(mlp(10, 64, 64, 1), x, standard(y), column(F.huber_loss), opt("Adadelta", lr=1.0), 64)


@task
def swiss_roll_l1() -> Planned:
    x, y = load("swiss-roll")
    return Planned(mlp(3, 64, 64, 1), standard(x), standard(y), column(F.l1_loss), opt("Adamax", lr=2e-3), 64)


@task
def quantile_regression() -> Planned:
    x, y = load("friedman")

    def pinball(output: Tensor, target: Tensor) -> Tensor:
        error = target[:, None] - output
        levels = torch.tensor([0.1, 0.5, 0.9])
        return torch.maximum(levels * error, (levels - 1) * error).mean()

    return Planned(mlp(10, 64, 3), x, standard(y), pinball, opt("Adam", lr=3e-3), 64)


@task
def gaussian_likelihood() -> Planned:
    x, y = load("friedman")

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return F.gaussian_nll_loss(output[:, 0], target, F.softplus(output[:, 1]) + 1e-3)

    return Planned(mlp(10, 64, 2), x, standard(y), loss, opt("Adam", lr=1e-3), 64)


@task
def poisson_counts() -> Planned:
    x = torch.randn(400, 5)
    y = torch.poisson((x @ torch.tensor([0.5, -0.3, 0.2, 0.0, 0.4]) + 0.7).exp())
    return Planned(mlp(5, 32, 1), x, y, column(F.poisson_nll_loss), opt("Adam", lr=1e-3), 64)


@task
def autoencoder_sigmoid_mse() -> Planned:
    x, _ = load("digits")
    model = mlp(64, 32, 8, 32, 64, last=nn.Sigmoid())
    return Planned(model, x / 16, x / 16, nn.MSELoss(), opt("Adam", lr=1e-3), 64)


@task
def autoencoder_bce() -> Planned:
    x, _ = load("digits")
    return Planned(mlp(64, 32, 8, 32, 64), x / 16, x / 16, nn.BCEWithLogitsLoss(), opt("Adam", lr=1e-3), 64)


class Variational(nn.Module):
    """A variational autoencoder."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = mlp(64, 64, 16), mlp(8, 64, 64)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logits of the pixels; mean and log-variance of the code."""
        mean, log_var = self.encoder(x).chunk(2, dim=-1)
        return self.decoder(mean + torch.randn_like(mean) * (0.5 * log_var).exp()), mean, log_var


@task
def vae_summed() -> Planned:
    x, _ = load("digits")

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        logits, mean, log_var = model(batch)
        kl = -0.5 * (1 + log_var - mean.square() - log_var.exp()).sum()
        return F.binary_cross_entropy_with_logits(logits, batch, reduction="sum") + kl

    return Planned(Variational(), x, x, loss, opt("Adam", lr=1e-3), batches=x[:64] / 16)  # type: ignore[arg-type]


class Transformer(nn.Module):
    """A small language model."""

    def __init__(self, width: int = 64, num_layers: int = 2) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(64, width), nn.Embedding(64, width)
        nn.init.normal_(self.tokens.weight, std=0.02)
        nn.init.normal_(self.places.weight, std=0.02)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.1, "gelu", batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, num_layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 64)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of the next characters."""
        length = x.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        h = self.tokens(x) + self.places(torch.arange(length))
        return self.head(self.blocks(h, mask=mask, is_causal=True))


def next_character(output: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy over all places."""
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


@task
def transformer_language_model() -> Planned:
    x, y = windows(32)
    return Planned(Transformer(), x, y, next_character, opt("AdamW", lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1), 16)


@task
def transformer_warming_up() -> Planned:
    x, y = windows(32)

    def schedule(planned: Planned) -> None:
        torch.optim.lr_scheduler.LambdaLR(planned.made, lambda step: min(1.0, step / 1000))

    return Planned(Transformer(), x, y, next_character, opt("AdamW", lr=1e-3), 16, prepare=schedule)


class Recurrent(nn.Module):
    """Embedding, recurrent layer, linear layer."""

    def __init__(self, kind: type[nn.Module], num_out: int, *, last_only: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 32)
        self.recurrent = kind(32, 64, batch_first=True)
        self.head = nn.Linear(64, num_out)
        self.last_only = last_only

    def forward(self, x: Tensor) -> Tensor:
        """Logits at each place, or at the last."""
        h, _ = self.recurrent(self.embedding(x))
        return self.head(h[:, -1] if self.last_only else h)


@task
def gru_language_model() -> Planned:
    x, y = windows(32)
    return Planned(Recurrent(nn.GRU, 64), x, y, next_character, opt("Adam", lr=2e-3), 16)


@task
def lstm_classifier() -> Planned:
    x, _ = windows(16)
    y = (x == 32).sum(1).clamp(max=3)  # how many blanks
    return Planned(Recurrent(nn.LSTM, 4, last_only=True), x, y, nn.CrossEntropyLoss(), opt("Adam", lr=3e-3), 32)


@task
def rnn_copy_task() -> Planned:
    x = torch.randint(1, 9, (200, 12))
    y = torch.cat([torch.zeros(200, 4, dtype=torch.long), x[:, :-4]], 1)
    return Planned(Recurrent(nn.RNN, 64), x, y, next_character, opt("RMSprop", lr=1e-3), 32)


@task
def time_major_rnn() -> Planned:
    x, y = windows(24)
    model = Recurrent(nn.GRU, 64)
    model.recurrent.batch_first = False  # type: ignore[assignment]
    return Planned(model, x, y, next_character, batches=[(x[:16].t(), y[:16].t())], optimizer=opt("Adam", lr=2e-3))


class Attention(nn.Module):
    """Classifies a set of vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 32)
        self.block = nn.TransformerEncoderLayer(32, 4, 64, 0.1, batch_first=True)
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        return self.head(self.block(self.embed(x)).mean(1))


@task
def rows_as_tokens() -> Planned:
    x, y = load("digits")
    return Planned(Attention(), (x / 16).reshape(-1, 8, 8), y, nn.CrossEntropyLoss(), opt("Adam", lr=1e-3), 64)


@task
def multilabel() -> Planned:
    x, y = load("multilabel")
    return Planned(mlp(20, 64, 5), standard(x), y, nn.BCEWithLogitsLoss(), opt("Adam", lr=1e-3), 64)


@task
def triplets() -> Planned:
    x, y = load("digits")
    same = [x[y == c] for c in range(10)]
    anchors = torch.stack([same[i % 10][i // 10] for i in range(90)]) / 16
    positives = torch.stack([same[i % 10][i // 10 + 30] for i in range(90)]) / 16
    negatives = torch.stack([same[(i + 3) % 10][i // 10] for i in range(90)]) / 16

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return F.triplet_margin_loss(model(batch["a"]), model(batch["p"]), model(batch["n"]))

    batch = {"a": anchors, "p": positives, "n": negatives}
    return Planned(mlp(64, 64, 16), x, y, loss, opt("Adam", lr=1e-3), batches=batch)  # type: ignore[arg-type]


@task
def contrastive() -> Planned:
    x, y = load("digits")

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        a, b = (F.normalize(model(part + 0.05 * torch.randn_like(part)), dim=1) for part in batch)
        return F.cross_entropy(a @ b.t() / 0.2, torch.arange(len(a)))

    return Planned(mlp(64, 64, 32), x, y, loss, opt("Adam", lr=1e-3), batches=[(x[:64] / 16, x[:64] / 16)])


class Factors(nn.Module):
    """Matrix factorisation."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(50, 8), nn.Embedding(80, 8)
        self.bias = nn.Parameter(torch.tensor(3.0))
        for table in (self.users, self.items):
            nn.init.normal_(table.weight, std=0.1)

    def forward(self, pairs: Tensor) -> Tensor:
        """Ratings."""
        return (self.users(pairs[:, 0]) * self.items(pairs[:, 1])).sum(1) + self.bias


@task
def ratings() -> Planned:
    pairs = torch.stack([torch.randint(50, (600,)), torch.randint(80, (600,))], 1)
    a, b = torch.randn(50, 3), torch.randn(80, 3)
    y = ((a[pairs[:, 0]] * b[pairs[:, 1]]).sum(1) * 0.6 + 3).clamp(1, 5)
    return Planned(Factors(), pairs, y, nn.MSELoss(), opt("Adam", lr=1e-2), 128)


class Graph(nn.Module):
    """Two graph convolutions over a ring."""

    def __init__(self, num_nodes: int) -> None:
        super().__init__()
        a = torch.eye(num_nodes) + torch.roll(torch.eye(num_nodes), 1, 0) + torch.roll(torch.eye(num_nodes), -1, 0)
        self.register_buffer("adjacency", a / 3)
        self.a, self.b = nn.Linear(8, 32), nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of each node."""
        return self.b(self.adjacency @ F.relu(self.a(self.adjacency @ x)))


@task
def graph_nodes() -> Planned:
    x = torch.randn(60, 8)
    y = (x[:, 0] + torch.roll(x[:, 0], 1)).mul(1.5).round().clamp(-1, 2).long() + 1
    return Planned(Graph(60), x, y, nn.CrossEntropyLoss(), opt("Adam", lr=1e-2), batches=[(x, y)])


class Denoiser(nn.Module):
    """Predicts the noise that was added, given how much."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(3, 64, 64, 2, act=nn.SiLU)

    def forward(self, x: Tensor, level: Tensor) -> Tensor:
        """The noise."""
        return self.net(torch.cat([x, level], 1))


@task
def denoiser() -> Planned:
    x, _ = load("moons")

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        level = torch.rand(len(batch), 1)
        noise = torch.randn_like(batch)
        return F.mse_loss(model((1 - level).sqrt() * batch + level.sqrt() * noise, level), noise)

    return Planned(Denoiser(), x, x, loss, opt("Adam", lr=1e-3), batches=standard(x)[:128])  # type: ignore[arg-type]


@task
def distillation() -> Planned:
    x, y = load("digits")
    teacher = F.softmax(4 * F.one_hot(y, 10) + 0.5 * torch.randn(len(y), 10), 1)

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return F.kl_div(F.log_softmax(output, 1), target, reduction="batchmean")

    return Planned(mlp(64, 32, 10), x / 16, teacher, loss, opt("Adam", lr=2e-3), 64)


@task
def mixup() -> Planned:
    x, y = load("digits")
    other = torch.randperm(len(x))
    share = torch.rand(len(x), 1)
    targets = share * F.one_hot(y, 10) + (1 - share) * F.one_hot(y[other], 10)
    inputs = (share * x + (1 - share) * x[other]) / 16
    return Planned(mlp(64, 64, 10), inputs, targets, nn.CrossEntropyLoss(), opt("SGD", lr=0.1, momentum=0.9), 64)


class Experts(nn.Module):
    """Routes each sample to one of four experts."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(64, 4)
        self.experts = nn.ModuleList([mlp(64, 32, 10) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        """The chosen expert's logits, times its share."""
        weight, chosen = self.router(x).softmax(1).max(1)
        out = x.new_zeros(len(x), 10)
        for i, expert in enumerate(self.experts):
            mask = chosen == i
            if mask.any():
                out[mask] = expert(x[mask])
        return out * weight[:, None]


@task
def mixture_of_experts() -> Planned:
    x, y = load("digits")
    return Planned(Experts(), x / 16, y, nn.CrossEntropyLoss(), opt("Adam", lr=2e-3), 128)


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
