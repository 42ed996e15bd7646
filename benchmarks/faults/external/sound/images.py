"""Digits of 8 × 8 pixels: classified, compared, masked, rebuilt."""

from __future__ import annotations

import copy
import functools

import torch
from torch import nn
from torch.nn import functional as F

from .. import data, nets
from .. import optimizers as o
from ..case import Case, sound_cases
from ..loop import Loss, Plan, Tensors
from ..qualities import accuracy, reconstruction
from .tabular import class_loss

_cases = functools.partial(sound_cases, __name__)


def _plan(model: nn.Module, seed: int, loss: Loss = class_loss, *, as_images: bool = False, **options) -> Plan:
    train, held_out = data.digits(as_images=as_images)
    settings = {"lr": 3e-3, "num_epochs": 6, "batch_size": 32, "least": 0.92, "quality": accuracy, **options}
    return Plan(model=model, loss=loss, train=train, held_out=held_out, seed=seed, **settings)


def mlp(seed: int) -> Plan:
    torch.manual_seed(seed)
    return _plan(nets.mlp((64, 64, 10)), seed)


def dropout_mlp(seed: int) -> Plan:
    """Dropout: the training loss lies above the validation loss, as it should."""
    torch.manual_seed(seed)
    model = nets.mlp((64, 96, 96, 10), nn.ReLU)
    model.insert(2, nn.Dropout(0.4))
    return _plan(model, seed)


def mixup(seed: int) -> Plan:
    """Blended pairs of samples in training, plain ones in validation: another loss."""
    torch.manual_seed(seed)

    def loss(model: nn.Module, batch: Tensors) -> torch.Tensor:
        share = float(torch.distributions.Beta(0.4, 0.4).sample())
        order = torch.randperm(len(batch[0]))
        out = model(share * batch[0] + (1 - share) * batch[0][order])
        return share * F.cross_entropy(out, batch[1]) + (1 - share) * F.cross_entropy(out, batch[1][order])

    return _plan(nets.mlp((64, 96, 10)), seed, loss, val_loss=class_loss, num_epochs=8)


def smoothing(seed: int) -> Plan:
    """Label smoothing in training and not in validation."""
    torch.manual_seed(seed)

    def loss(model: nn.Module, batch: Tensors) -> torch.Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], label_smoothing=0.2)

    return _plan(nets.mlp((64, 64, 10), nn.GELU), seed, loss, val_loss=class_loss)


def cnn(seed: int) -> Plan:
    torch.manual_seed(seed)
    return _plan(nets.cnn(), seed, as_images=True, num_epochs=4)


def cnn_batch_norm(seed: int) -> Plan:
    torch.manual_seed(seed)
    return _plan(nets.cnn(batch_norm=True), seed, as_images=True, num_epochs=4)


class Residual(nn.Module):
    """Eight residual blocks behind LayerNorms."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.first = nn.Linear(64, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
            for _ in range(8)
        )
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def residual(seed: int) -> Plan:
    torch.manual_seed(seed)
    return _plan(Residual(), seed, lr=1e-3, num_epochs=5)


class Patches(nn.Module):
    """A small vision transformer over sixteen patches of 2 × 2."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nets.Attending(4, 10, 16, is_symbolic=False, pooled=True)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.body(F.unfold(images, 2, stride=2).transpose(1, 2))


def vision_transformer(seed: int) -> Plan:
    torch.manual_seed(seed)
    return _plan(Patches(), seed, as_images=True, num_epochs=8, lr=3e-3, least=0.88)


class Experts(nn.Module):
    """Four experts, two of them for each sample, chosen by a router; `balance` is how unevenly."""

    def __init__(self, num_experts: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(64, num_experts)
        self.experts = nn.ModuleList(nets.mlp((64, 32, 10)) for _ in range(num_experts))
        self.balance = torch.zeros(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shares = self.router(x).softmax(-1)
        best = shares.topk(2, -1)
        gates = torch.zeros_like(shares).scatter(1, best.indices, best.values)
        used = (gates > 0).float().mean(0)
        self.balance = len(self.experts) * (used * shares.mean(0)).sum()
        out = torch.zeros(len(x), 10)
        for number, expert in enumerate(self.experts):
            chosen = gates[:, number].nonzero().flatten()
            if len(chosen):
                out = out.index_add(0, chosen, gates[chosen, number, None] * expert(x[chosen]))
        return out


def experts(seed: int) -> Plan:
    """A routed model: a batch of few samples does not reach every expert."""
    torch.manual_seed(seed)

    def loss(model: nn.Module, batch: Tensors) -> torch.Tensor:
        return class_loss(model, batch) + 0.02 * model.balance

    return _plan(Experts(), seed, loss, num_epochs=6)


def triplets(seed: int) -> Plan:
    """Metric learning: a triplet loss with a margin, whose gradient ends where all triplets are apart."""
    torch.manual_seed(seed)
    model = nets.mlp((64, 64, 16))

    def loss(model: nn.Module, batch: Tensors) -> torch.Tensor:
        places = F.normalize(model(batch[0]), dim=1)
        distance = torch.cdist(places, places)
        same = batch[1][:, None] == batch[1]
        positive = (distance * same).amax(1)
        negative = distance.masked_fill(same, 9.0).amin(1)
        return F.relu(positive - negative + 0.3).mean()

    @torch.no_grad()
    def neighbours(model: nn.Module, held_out: Tensors) -> float:
        places, train = F.normalize(model(held_out[0]), dim=1), data.digits()[0]
        nearest = torch.cdist(places, F.normalize(model(train[0]), dim=1)).argmin(1)
        return float((train[1][nearest] == held_out[1]).float().mean())

    return _plan(model, seed, loss, quality=neighbours, least=0.9, num_epochs=6, batch_size=64)


def contrastive(seed: int) -> Plan:
    """Two noisy views of each image against all others of the batch, without labels."""
    torch.manual_seed(seed)
    model = nets.mlp((64, 96, 24))

    def loss(model: nn.Module, batch: Tensors) -> torch.Tensor:
        views = [F.normalize(model(batch[0] + 0.4 * torch.randn_like(batch[0])), dim=1) for _ in range(2)]
        likeness = views[0] @ views[1].T / 0.2
        return F.cross_entropy(likeness, torch.arange(len(likeness)))

    @torch.no_grad()
    def neighbours(model: nn.Module, held_out: Tensors) -> float:
        places, train = F.normalize(model(held_out[0]), dim=1), data.digits()[0]
        nearest = (places @ F.normalize(model(train[0]), dim=1).T).argmax(1)
        return float((train[1][nearest] == held_out[1]).float().mean())

    return _plan(model, seed, loss, quality=neighbours, least=0.85, num_epochs=6, batch_size=64)


@functools.cache
def _teacher() -> nn.Module:
    torch.manual_seed(100)
    model, train = nets.mlp((64, 128, 10)), data.digits()[0]
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(60):
        optimizer.zero_grad()
        F.cross_entropy(model(train[0]), train[1]).backward()
        optimizer.step()
    return model.eval().requires_grad_(False)


def distillation(seed: int) -> Plan:
    """A small model after a large one's softened outputs."""
    torch.manual_seed(seed)
    teacher = _teacher()

    def loss(model: nn.Module, batch: Tensors) -> torch.Tensor:
        wanted = (teacher(batch[0]) / 2.0).softmax(1)
        return 4.0 * F.kl_div((model(batch[0]) / 2.0).log_softmax(1), wanted, reduction="batchmean")

    return _plan(nets.mlp((64, 24, 10)), seed, loss, least=0.88)


def fine_tuning(seed: int) -> Plan:
    """A trained model goes on with a small learning rate: the loss is low, and hardly moves."""
    torch.manual_seed(seed)
    return _plan(copy.deepcopy(_teacher()).requires_grad_(True), seed, lr=1e-4)


def new_head(seed: int) -> Plan:
    """A trained trunk, frozen on purpose, under a new head; the optimizer has the head alone."""
    torch.manual_seed(seed)
    model = copy.deepcopy(_teacher())
    model[-1] = nn.Linear(128, 10)
    return _plan(model, seed, lr=1e-2, optimizer=o.of_trainable(torch.optim.Adam))


def augmented(seed: int) -> Plan:
    """Images shifted by a pixel and covered in part in training, whole in validation."""
    torch.manual_seed(seed)

    def change(epoch: int, place: int, batch: Tensors) -> Tensors:
        images = torch.roll(batch[0], int(torch.randint(-1, 2, ())), 3).clone()
        row = int(torch.randint(0, 6, ()))
        images[:, :, row : row + 2, row : row + 2] = 0.0
        return images, *batch[1:]

    return _plan(nets.cnn(), seed, as_images=True, num_epochs=6, change=change)


def adversarial(seed: int) -> Plan:
    """Trained on inputs moved along the sign of their own gradient; validated on plain ones."""
    torch.manual_seed(seed)

    def loss(model: nn.Module, batch: Tensors) -> torch.Tensor:
        moved = batch[0].clone().requires_grad_(True)
        gradient = torch.autograd.grad(F.cross_entropy(model(moved), batch[1]), moved)[0]
        return F.cross_entropy(model((moved + 0.15 * gradient.sign()).detach()), batch[1])

    return _plan(nets.mlp((64, 96, 10)), seed, loss, val_loss=class_loss)


class Masked(nn.Module):
    """Rebuilds all pixels from those that are left."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nets.mlp((64, 128, 64), nn.GELU)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def masked_pixels(seed: int) -> Plan:
    """A third of the pixels is hidden in training, and has to be guessed."""
    torch.manual_seed(seed)

    def loss(model: nn.Module, batch: Tensors) -> torch.Tensor:
        hidden = torch.rand_like(batch[0]) < 0.33
        return (model(batch[0].masked_fill(hidden, 0.0)) - batch[0])[hidden].square().mean()

    return _plan(Masked(), seed, loss, quality=reconstruction, least=0.4, num_epochs=8)


_CLIPPED = {"max_norm": 1.0}
CASES: tuple[Case, ...] = (
    *_cases(
        "digits-mlp",
        "digits, one hidden layer",
        mlp,
        adadelta={"optimizer": o.ADADELTA, "lr": 1.0},
        adagrad={"optimizer": o.ADAGRAD, "lr": 2e-2},
        sign_clipped={"optimizer": o.SIGN, "lr": 5e-4, "max_norm": 0.01},
        sgd={"optimizer": o.SGD, "lr": 0.1},
        batch_4={"batch_size": 4, "num_epochs": 2, "lr": 1e-3},
        adamax={"optimizer": o.ADAMAX},
    ),
    *_cases(
        "digits-dropout",
        "dropout 0.4",
        dropout_mlp,
        adam={},
        adamw_groups={"optimizer": o.two_groups},
        momentum={"optimizer": o.MOMENTUM, "lr": 0.05},
    ),
    *_cases("digits-mixup", "mixup", mixup, adam={}, adamw_cosine={"optimizer": o.ADAMW, "schedule": o.cosine}),
    *_cases("digits-smoothing", "label smoothing", smoothing, adam={}, nesterov={"optimizer": o.NESTEROV, "lr": 0.05}),
    *_cases(
        "digits-cnn",
        "two convolutions",
        cnn,
        adam={},
        momentum_clipped={"optimizer": o.MOMENTUM, "lr": 0.05, **_CLIPPED},
        rmsprop={"optimizer": o.RMSPROP, "lr": 1e-3},
    ),
    *_cases(
        "digits-cnn-batch-norm",
        "convolutions with BatchNorm",
        cnn_batch_norm,
        adam={},
        nadam={"optimizer": o.NADAM},
        momentum={"optimizer": o.MOMENTUM, "lr": 0.05},
    ),
    *_cases(
        "digits-residual",
        "eight residual blocks",
        residual,
        adam={},
        adamw_warm={"optimizer": o.ADAMW, "schedule": o.warm_cosine, "lr": 2e-3, **_CLIPPED},
    ),
    *_cases(
        "digits-patches",
        "a vision transformer",
        vision_transformer,
        adamw={"optimizer": o.ADAMW},
        warm_clipped={"schedule": o.warm_cosine, **_CLIPPED},
    ),
    *_cases(
        "digits-experts", "four experts, two a sample", experts, adam={}, momentum={"optimizer": o.MOMENTUM, "lr": 0.05}
    ),
    *_cases(
        "digits-triplets",
        "triplet loss",
        triplets,
        adam={"lr": 1e-3},
        adamw_clipped={"optimizer": o.ADAMW, "lr": 1e-3, **_CLIPPED},
    ),
    *_cases("digits-contrastive", "two views, no labels", contrastive, adam={}, cosine={"schedule": o.cosine}),
    *_cases("digits-distillation", "after a larger model", distillation, adam={}, radam={"optimizer": o.RADAM}),
    *_cases("digits-fine-tuning", "from a trained state", fine_tuning, adam={}, sgd={"optimizer": o.SGD, "lr": 1e-3}),
    *_cases("digits-new-head", "a new head on a frozen trunk", new_head, adam={}, clipped={**_CLIPPED}),
    *_cases(
        "digits-augmented",
        "shifted and covered images",
        augmented,
        adam={},
        one_cycle={"schedule": o.one_cycle, "lr": 6e-3},
    ),
    *_cases(
        "digits-adversarial",
        "adversarial training",
        adversarial,
        adam={},
        momentum={"optimizer": o.MOMENTUM, "lr": 0.05},
    ),
    *_cases("digits-masked", "masked pixels", masked_pixels, adam={}, adamw_clipped={"optimizer": o.ADAMW, **_CLIPPED}),
)
