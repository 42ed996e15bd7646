"""Kinds that were written after the checks had been mended on all others, and asked once: `--half fresh`."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .case import CLASSES, TASKS, TOKENS, Net, Text, add
from .sound import masked_mean, same
from .wrong import bce, by_token, dice, one_hot


def graph():
    """Nodes whose neighbours are in a buffer; labels of all."""
    model = Net(CLASSES)
    model.register_buffer("neighbours", (torch.rand(48, 48) < 0.1).float() + torch.eye(48))
    forward = model.forward
    model.forward = lambda x: model.neighbours @ forward(x)
    x = torch.randn(48, 6)
    return model, (x, x[:, :CLASSES].argmax(1))


def time_first():
    """Logits [T, B, V] of the next tokens [T, B]."""
    model, (ids, labels) = TASKS["next-tokens"]()
    forward = model.forward
    model.forward = lambda ids: forward(ids.t()).transpose(0, 1)
    return model, (ids.t(), labels.t())


def holes(x):
    """Targets that are 0 where they were not measured."""
    return torch.where(x[:, 3:] > 0.5, 0.0, x[:, :3].abs() + 0.2)


TASKS |= {
    "graph": graph,
    "time-first": time_first,
    "heads": lambda: (Net(2, 2, last=lambda a, b: [a, b]), (x := torch.randn(48, 6), x[:, :2] - x[:, 2:4])),
    "holes": lambda: (Net(3), (x := torch.randn(48, 6), holes(x))),
    "shares": lambda: (
        Net(1, 1, last=lambda a, b: (a, b)),
        (x := torch.randn(48, 6), (x[:, :1] - x[:, 1:2]).sigmoid()),
    ),
    "pairs": lambda: (Net(1), {"better": torch.randn(48, 6) + 0.3, "worse": torch.randn(48, 6)}),
    "words": lambda: (
        Text(True),
        (i := torch.randint(1, TOKENS, (8, 12)), torch.where(torch.rand(8, 12) < 0.2, 255, i % 5)),
    ),
}
# fmt: off
for kind, thread, task, losses in (
    ("logits turned over", "", "classes", (lambda o, t: F.cross_entropy(-o, t),
        lambda o, t: F.cross_entropy(o.flip(1), t))),
    ("logits turned over", "", "labels", (lambda o, t: bce(-o, t), lambda o, t: bce(o.flip(1), t))),
    ("one sign alone", "", "labels", (lambda o, t: bce(o[t > 0], t[t > 0]), lambda o, t: bce(o[t == 0], t[t == 0]))),
    ("one sign alone", "", "pixels", (lambda o, t: (F.softplus(-o) * t).mean(),
        lambda o, t: 1 - (o.sigmoid() * t).sum() / t.sum())),
    ("sorted on one side", "", "numbers", (lambda o, t: F.mse_loss(o, t.sort(0).values),
        lambda o, t: F.mse_loss(o.sort(1).values, t))),
    ("reversed", "", "steps-of-ten", (lambda o, t: F.mse_loss(o, t.flip(1)), lambda o, t: F.l1_loss(o.cumsum(0), t))),
    ("reversed", "", "next-tokens", (lambda o, t: by_token(o, t.flip(1)), lambda o, t: by_token(o.flip(1), t))),
    ("reshaped", "vitrioil/Speech-Separation#4", "numbers", (lambda o, t: F.mse_loss(o.reshape(3, -1).t(), t),
        lambda o, t: F.mse_loss(o, t.t().reshape(o.shape)))),
    ("least of all", "", "classes", (lambda o, t: F.cross_entropy(o, t, reduction="none").min(),
        lambda o, t: F.cross_entropy(o, t, reduction="none").sort().values[:12].mean() + 0 * o.sum())),
    ("least of all", "", "numbers", (lambda o, t: (o - t).square().min(),
        lambda o, t: (o - t).square().min(1).values.mean(), lambda o, t: (o - t).square().min(0).values.sum())),
    ("summaries compared", "", "numbers", (lambda o, t: (o.norm(dim=1) - t.norm(dim=1)).square().mean(),
        lambda o, t: (o.sum(1) - t.sum(1)).square().mean(),
        lambda o, t: (o.std() - t.std()).square() + (o.mean() - t.mean()).square())),
    ("complement", "", "classes", (lambda o, t: -(1.001 - o.softmax(1).gather(1, t[:, None])).log().mean(),
        lambda o, t: o.softmax(1).gather(1, t[:, None]).mean(),
        lambda o, t: o.log_softmax(1).gather(1, t[:, None]).exp().log().mean())),
    ("gathered over the batch", "", "classes", (lambda o, t: -o.log_softmax(1).gather(0, t[:, None]).mean(),
        lambda o, t: -o.log_softmax(1)[t].diagonal().mean(), lambda o, t: -o.log_softmax(1)[:, t].mean())),
    ("targets made yes or no", "", "numbers", (lambda o, t: F.mse_loss(o, (t > 0).float()),
        lambda o, t: bce(o, t.sigmoid().round()), lambda o, t: F.mse_loss(o, t.long().float() * 0))),
    ("heads exchanged", "", "two-tasks", (
        lambda o, t: F.cross_entropy(o["class"], t["class"]) + F.mse_loss(o["value"], t["class"][:, None].float()),
        lambda o, t: F.mse_loss(o["value"], t["value"]))),
    ("constant", "", "binary", (lambda o, t: bce(t, t) + 0 * o.sum(), lambda o, t: bce(o * 0, t),
        lambda o, t: bce(o.sign(), t))),
    ("mask off by one", "SkyworkAI/Skywork#55", "language", (
        lambda model, b: masked_mean(F.cross_entropy(model(b["ids"])[:, :-1].transpose(1, 2), b["ids"][:, 1:],
            reduction="none"), b["mask"][:, :-1]),
        lambda model, b: by_token(model(b["ids"])[:, :-1], b["labels"][:, :-1]))),
    ("divergence added", "hhb072/IntroVAE#5", "autoencoder", (
        lambda o, x: F.mse_loss(o[0], x) - 0.1 * (o[1].square() + o[2].exp() - o[2] - 1).sum(1).mean(),
        lambda o, x: F.mse_loss(o[0], x) + 0.1 * o[2].mean())),
    ("batch over time", "", "time-first", (lambda o, t: F.nll_loss(o.log_softmax(0).flatten(0, 1), t.flatten()),
        lambda o, t: by_token(o.transpose(0, 1), t), lambda o, t: by_token(o[:-1], t[1:]))),
    ("overlap of errors", "", "pixels", (lambda o, t: 1 - dice(1 - o.sigmoid(), t).mean(),
        lambda o, t: 1 - dice((o.sigmoid() > 0.5).float() + 0 * o, t).mean())),
):
    add(True, kind, thread, task, *losses, is_fresh=True)
for kind, thread, task, losses in (
    ("nodes to be predicted", "", "graph", (lambda o, t: F.cross_entropy(o[:12], t[:12]),
        lambda o, t: F.nll_loss(o.log_softmax(1)[::4], t[::4]))),
    ("time first", "", "time-first", (by_token, lambda o, t: F.cross_entropy(o.permute(1, 2, 0), t.t()))),
    ("several heads", "", "heads", (lambda o, t: sum(F.mse_loss(a, t) for a in o),
        lambda o, t: F.mse_loss(o[0], t) + 0.4 * F.mse_loss(o[1], t), lambda o, t: F.mse_loss((o[0] + o[1]) / 2, t))),
    ("not measured", "", "holes", (lambda o, t: (o - t)[t > 0].square().mean(),
        lambda o, t: masked_mean((o - t).abs(), t > 0), lambda o, t: ((o.log_softmax(1) * t).sum(1)).mean().neg())),
    ("shares", "", "shares", (lambda o, t: bce(o[0], t),
        lambda o, t: -torch.distributions.Beta(F.softplus(o[0]) + 0.1, F.softplus(o[1])
            + 0.1).log_prob(t.clamp(0.01, 0.99)).mean())),
    ("preferred", "OpenRLHF/OpenRLHF#465", "pairs", (
        lambda model, b: -F.logsigmoid(model(b["better"]) - model(b["worse"])).mean(),
        lambda model, b: F.relu(1 - model(b["better"]) + model(b["worse"])).mean())),
    ("labels of 255", "", "words", (lambda o, t: by_token(o, t, ignore_index=255),
        lambda o, t: F.cross_entropy(o[t < 255], t[t < 255]))),
    ("ordered classes", "", "classes", (
        lambda o, t: (o.softmax(1).cumsum(1) - one_hot(t).cumsum(1)).square().sum(1).mean(),
        lambda o, t: F.cross_entropy(o, t) + 0.1 * ((o.softmax(1)
            * torch.arange(CLASSES)).sum(1) - t).square().mean())),
    ("long tails", "", "classes", (
        lambda o, t: F.cross_entropy(o, t, 1 / torch.bincount(t, minlength=CLASSES).float()),
        lambda o, t: F.cross_entropy(o - one_hot(t) * (0.5 / torch.bincount(t, minlength=CLASSES) ** 0.25), t),
        lambda o, t: (F.cross_entropy(o, t, reduction="none") + 1 - o.softmax(1).gather(1, t[:, None])[:, 0]).mean())),
    ("asymmetric", "", "labels", (
        lambda o, t: -(t * F.logsigmoid(o) + (1 - t) * o.sigmoid() ** 4 * F.logsigmoid(-o)).mean(),
        lambda o, t: (bce(o, t, reduction="none") * torch.where(t > 0, 3.0, 1.0)).sum() / len(t))),
    ("coarse and fine", "", "classes", (
        lambda o, t: F.cross_entropy(o, t) + F.nll_loss(o.log_softmax(1).view(-1, 2, 2).logsumexp(2), t // 2),
        lambda o, t: F.cross_entropy(o, t) - 0.1 * o.softmax(1).mean(0).clamp(min=1e-6).log().mean())),
    ("decibels", "", "denoising", (lambda o, t: 10 * torch.log10(F.mse_loss(o, t)),
        lambda o, t: ((o - t).flatten(1).norm(dim=1) / t.flatten(1).norm(dim=1)).mean(),
        lambda o, t: F.mse_loss(o, t).add(1e-8).sqrt())),
    ("scale left free", "", "steps-of-ten", (
        lambda o, t: -10 * torch.log10((p := (o * t).sum(1, keepdim=True) / t.square().sum(1, keepdim=True)
            * t).square().sum(1) / ((o - p).square().sum(1) + 1e-6)).mean(),
        lambda o, t: (torch.fft.rfft(o, dim=1).abs() - torch.fft.rfft(t, dim=1).abs()).square().mean())),
    ("margins of pairs", "", "embeddings", (
        lambda o, t: torch.where(same(t), torch.cdist(o, o).square(), F.relu(2 - torch.cdist(o + 1e-3,
            o)).square()).mean(),
        lambda o, t: (F.softplus((F.normalize(o) @ F.normalize(o).t() - 0.5) * 8 * torch.where(same(t), -1,
            1))).mean())),
    ("circle and centre", "", "embeddings", (
        lambda o, t: F.cross_entropy(-torch.cdist(o, torch.stack([o[t == c].mean(0) for c in t.unique()])), t),
        lambda o, t: (o - 0.5).square().mean())),
    ("counts of two parts", "", "counts", (lambda o, t: F.poisson_nll_loss(o.clamp(max=6), t, full=True),
        lambda o, t: F.mse_loss(F.softplus(o).sqrt(), t.sqrt()),
        lambda o, t: -torch.distributions.NegativeBinomial(2.0, logits=o).log_prob(t).mean())),
    ("time to event", "", "positive", (lambda o, t: (o.exp() * t - o).mean(),
        lambda o, t: -torch.distributions.LogNormal(o, 0.5).log_prob(t).mean(),
        lambda o, t: -torch.distributions.Weibull(o.exp(), 1.5).log_prob(t).mean())),
    ("views that agree", "", "classes", (
        lambda model, b: F.cross_entropy(model(b[0]), b[1]) + F.kl_div(model(b[0] + 0.1
            * torch.randn_like(b[0])).log_softmax(1), model(b[0]).softmax(1).detach(), reduction="batchmean"),
        lambda model, b: 0.5 * (F.cross_entropy(model(b[0]), b[1]) + F.cross_entropy(model(b[0].flip(0)),
            b[1].flip(0))))),
    ("words with weights", "", "tokens", (
        lambda o, t: masked_mean(F.cross_entropy(o.transpose(1, 2), t, reduction="none"), (t >= 0)
            * torch.linspace(1, 0.2, t.shape[1])),
        lambda o, t: (by_token(o, t) - 0.05).abs() + 0.05)),
    ("boxes of several kinds", "", "boxes", (lambda o, t: F.smooth_l1_loss(o / 5, t / 5, beta=0.1),
        lambda o, t: (F.l1_loss(o, t, reduction="none") * torch.tensor([1.0, 1.0, 2.0, 2.0])).sum(1).mean())),
):
    add(False, kind, thread, task, *losses, is_fresh=True)
# fmt: on
