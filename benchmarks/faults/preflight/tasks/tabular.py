"""Numbers in, classes or numbers out; and models that give back their inputs."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .planned import Planned, column, images, load, mlp, opt, standard, task


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
