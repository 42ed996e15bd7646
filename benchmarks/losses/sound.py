"""Losses that are sound, many of them unusual: what preflight says of these is a false alarm."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from .case import CLASSES, add
from .wrong import bce, by_token, dice, dice_of_all, one_hot


def sound(kind, thread, task, *losses):
    """Adds sound losses of a kind."""
    add(False, kind, thread, task, *losses)


def same(t):
    """Which pairs of samples have the same label, but for each with itself."""
    return (t[:, None] == t) & ~torch.eye(len(t), dtype=torch.bool)


def supervised_contrast(o, t, temperature=0.2):
    """Pairs of the same label against all others."""
    z = F.normalize(o)
    logits = (z @ z.t() / temperature).masked_fill(torch.eye(len(z), dtype=torch.bool), -1e9)
    return -(logits.log_softmax(1) * same(t)).sum(1).div(same(t).sum(1).clamp(min=1)).mean()


def triplet(o, t, margin=0.5):
    """The farthest of the same label against the nearest of another."""
    d = (F.normalize(o)[:, None] - F.normalize(o)).square().sum(2)
    far, near = d.masked_fill(~same(t), -1).max(1).values, d.masked_fill(t[:, None] == t, 9).min(1).values
    return F.relu(far - near + margin).mean()


def lovasz(o, t):
    """Of a binary hinge, sorted by its errors."""
    o, t = o.flatten(), t.flatten()
    errors, order = F.relu(1 - (2 * t - 1) * o).sort(descending=True)
    t = t[order]
    union = t.sum() + (1 - t).cumsum(0)
    jaccard = 1 - (t.sum() - t.cumsum(0)) / union
    return errors @ torch.cat([jaccard[:1], jaccard[1:] - jaccard[:-1]])


def mixture(o, t):
    """Three normal distributions."""
    logits, mean, log_std = o.chunk(3, 1)
    log_p = -0.5 * ((t[:, None] - mean) / log_std.clamp(-3, 3).exp()).square() - log_std.clamp(-3, 3)
    return -torch.logsumexp(logits.log_softmax(1) + log_p, 1).mean()


def cox(o, t):
    """Partial likelihood of those whose event was seen."""
    order = t[:, 0].argsort(descending=True)
    risk, seen = o[order, 0], t[order, 1]
    return -((risk - torch.logcumsumexp(risk, 0)) * seen).sum() / seen.sum()


def barlow(o):
    """Cross-correlation of two views towards the identity."""
    a, b = ((z - z.mean(0)) / (z.std(0) + 1e-4) for z in o)
    c = a.t() @ b / len(a)
    return (c - torch.eye(len(c))).square().mean()


def clip(a, b):
    """Each of two views finds the other."""
    logits = F.normalize(a) @ F.normalize(b).t() / 0.1
    return (F.cross_entropy(logits, torch.arange(len(a))) + F.cross_entropy(logits.t(), torch.arange(len(a)))) / 2


def overlap(o, t):
    """Of boxes, as a share of their union."""
    size = (torch.minimum(o[:, 2:], t[:, 2:]) - torch.maximum(o[:, :2], t[:, :2])).clamp(min=0).prod(1)
    return size / ((o[:, 2:] - o[:, :2]).clamp(min=0).prod(1) + (t[:, 2:] - t[:, :2]).prod(1) - size + 1e-6)


def chosen(model, b):
    """Log-probabilities of the actions."""
    return model(b["states"]).log_softmax(1).gather(1, b["actions"][:, None])[:, 0]


def clipped_ratio(model, b):
    """Proximal policy optimisation."""
    ratio = (chosen(model, b) - b["old"]).exp()
    return -torch.minimum(ratio * b["advantages"], ratio.clamp(0.8, 1.2) * b["advantages"]).mean()


def slopes(model, b):
    """The residual of u' = u by gradients of the output, with u(0) = 1."""
    x = b[0].clone().requires_grad_()
    u = model(x)
    (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
    return (slope[:, :1] - u).square().mean() + (model(torch.zeros_like(x[:1])) - 1).square().mean()


def adversarial(model, b):
    """On inputs that were moved up the loss."""
    x = b[0].clone().requires_grad_()
    (slope,) = torch.autograd.grad(F.cross_entropy(model(x), b[1]), x)
    return F.cross_entropy(model(b[0] + 0.05 * slope.sign()), b[1])


def mixed_up(model, b):
    """Inputs and targets of two samples mixed."""
    order = torch.randperm(len(b[1]))
    o = model(0.7 * b[0] + 0.3 * b[0][order])
    return 0.7 * F.cross_entropy(o, b[1]) + 0.3 * F.cross_entropy(o, b[1][order])


def noise_of(model, b):
    """Diffusion: the noise that was added."""
    noise = torch.randn_like(b[0])
    return F.mse_loss(model(0.8 * b[0] + 0.6 * noise), noise[:, :3])


def masked_mean(losses, mask):
    """Over what the mask leaves."""
    return (losses * mask).sum() / mask.sum()


# fmt: off
sound("cross entropy", "", "classes", F.cross_entropy, torch.nn.CrossEntropyLoss(label_smoothing=0.1),
    lambda o, t: F.cross_entropy(o, t, torch.tensor([1.0, 5.0, 0.5, 1.0])),
    lambda o, t: -(one_hot(t) * o.log_softmax(1)).sum(1).mean())
sound("cross entropy", "dev-chauhan/PQG-pytorch#7", "log-probabilities", F.nll_loss, F.cross_entropy)
sound("cross entropy", "", "pictures", F.cross_entropy,
    lambda o, t: F.cross_entropy(o.permute(0, 2, 3, 1).reshape(-1, 3), t.reshape(-1)))
sound("focal", "open-mmlab/OpenPCDet#1653", "classes",
    lambda o, t: ((1 - torch.exp(-F.cross_entropy(o, t, reduction="none"))) ** 2
        * F.cross_entropy(o, t, reduction="none")).mean())
sound("focal", "", "binary",
    lambda o, t: ((1 - torch.exp(-bce(o, t, reduction="none"))) ** 2 * bce(o, t, reduction="none") * (0.25 * t
        + 0.75 * (1 - t))).mean())
sound("focal", "", "labels",
    lambda o, t: ((t - o.sigmoid()).abs().pow(1.5) * bce(o, t, reduction="none")).sum(1).mean())
sound("robust to noise", "vfdev-5/BootstrappingLoss#1", "classes",
    lambda o, t: ((1 - o.softmax(1).gather(1, t[:, None]) ** 0.5) / 0.5).mean(),
    lambda o, t: F.cross_entropy(o, t) + 0.3 * (1 - o.softmax(1).gather(1, t[:, None])).mean(),
    lambda o, t: F.cross_entropy(o, 0.9 * one_hot(t) + 0.1 * o.softmax(1).detach()))
sound("regularised", "", "classes", lambda o, t: F.cross_entropy(o, t) + 1e-3 * o.logsumexp(1).square().mean(),
    lambda o, t: F.cross_entropy(o, t) + 0.05 * (o.softmax(1) * o.log_softmax(1)).sum(1).mean(),
    lambda o, t: F.cross_entropy(o, t) + 1e-3 * o.square().mean())
sound("margin of classes", "", "classes", F.multi_margin_loss,
    lambda o, t: F.cross_entropy(o - 2.0 * one_hot(t), t),
    lambda o, t: F.cross_entropy(20 * (F.normalize(o) - 0.2 * one_hot(t)), t))
sound("one by one", "", "classes", lambda o, t: bce(o, one_hot(t)),
    lambda o, t: F.mse_loss(o.softmax(1), one_hot(t)),
    lambda o, t: F.mse_loss(o, one_hot(t)))
sound("prior", "", "classes", lambda o, t: F.cross_entropy(o + torch.tensor([0.4, 0.3, 0.2, 0.1]).log(), t),
    lambda o, t: F.cross_entropy(o / 2.0, t))
sound("hard samples", "bhanML/Co-teaching#4", "classes",
    lambda o, t: F.cross_entropy(o, t, reduction="none").topk(len(t) // 2).values.mean(),
    lambda o, t: F.cross_entropy(o, t, reduction="none").topk(40, largest=False).values.mean())
sound("hard samples", "", "pictures",
    lambda o, t: F.cross_entropy(o, t, reduction="none").flatten().topk(96).values.mean())
sound("ignored samples", "", "classes",
    lambda o, t: F.cross_entropy(o, t, reduction="none")[torch.rand(len(t)) < 0.7].mean(),
    lambda o, t: (F.cross_entropy(o, t, reduction="none") * (o.softmax(1).gather(1, t[:, None])[:, 0] < 0.9)).mean())
sound("evidence", "", "classes",
    lambda o, t: (one_hot(t) * ((F.softplus(o) + 1).sum(1, keepdim=True).log() - (F.softplus(o)
        + 1).log())).sum(1).mean())
sound("binary", "pytorch/pytorch#24933", "binary", bce,
    lambda o, t: bce(o, t, pos_weight=torch.tensor(3.0)),
    lambda o, t: F.softplus(-(2 * t - 1) * o).mean(),
    lambda o, t: F.soft_margin_loss(o, 2 * t - 1))
sound("binary", "", "binary-flat", bce,
    lambda o, t: F.relu(1 - (2 * t - 1) * o).square().mean())
sound("binary", "", "probability", F.binary_cross_entropy,
    lambda o, t: -(t * o.clamp(min=1e-6).log() + (1 - t) * (1 - o).clamp(min=1e-6).log()).mean())
sound("many labels", "", "labels", bce, F.multilabel_soft_margin_loss,
    lambda o, t: torch.log1p((o.masked_fill(t > 0, -1e9)).exp().sum(1)).mean()
        + torch.log1p((-o).masked_fill(t == 0, -1e9).exp().sum(1)).mean())
sound("overlap", "qubvel-org/segmentation_models.pytorch#1148", "pixels",
    lambda o, t: 1 - dice(o.sigmoid(), t).mean(),
    lambda o, t: 1 - dice_of_all(o.sigmoid(), t),
    lambda o, t: bce(o, t) + 1 - dice(o.sigmoid(), t).mean(), lovasz)
sound("overlap", "JunMa11/SegLossOdyssey#22", "pixels", lambda o, t: -dice_of_all(o.sigmoid(), t),
    lambda o, t: 1 - (o.sigmoid() * t).sum() / (0.7 * t.sum() + 0.3 * o.sigmoid().sum()))
sound("overlap", "keras-team/keras#19637", "pictures",
    lambda o, t: 1 - dice(o.softmax(1), F.one_hot(t, 3).movedim(3, 1).float()).mean())
sound("squares", "", "numbers", F.mse_loss, F.l1_loss, F.smooth_l1_loss,
    lambda o, t: torch.log(torch.cosh(o - t)).mean(),
    lambda o, t: ((o - t).square() + 1e-6).sqrt().mean(),
    lambda o, t: (o - t).norm(dim=1).mean())
sound("squares", "", "number", lambda o, t: F.mse_loss(o.squeeze(1), t.squeeze(1)), F.huber_loss)
sound("weighted squares", "", "numbers", lambda o, t: ((o - t).square() * torch.tensor([1.0, 0.2, 3.0])).mean(),
    lambda o, t: ((o - t).square() * (1 + t.abs())).mean(),
    lambda o, t: (F.mse_loss(o, t) / t.var()))
sound("redescending", "", "numbers", lambda o, t: torch.log1p((o - t).square()).mean(),
    lambda o, t: (1 - torch.exp(-(o - t).square() / 18)).mean())
sound("quantiles", "ml-stat-Sustech/TorchCP#27", "quantiles",
    lambda o, t: torch.maximum(torch.tensor([0.1, 0.5, 0.9]) * (t[:, None] - o), torch.tensor([-0.9, -0.5, -0.1])
        * (t[:, None] - o)).mean())
sound("quantiles", "mattsherar/Temporal_Fusion_Transform#2", "number",
    lambda o, t: torch.maximum(0.9 * (t - o), -0.1 * (t - o)).mean(),
    lambda o, t: (torch.where(t > o, 0.8, 0.2) * (t - o).square()).mean())
sound("relative", "", "positive", lambda o, t: ((o - t).abs() / t).mean(),
    lambda o, t: (F.softplus(o).log1p() - t.log1p()).square().mean(),
    lambda o, t: (o.exp().log() - t.log()).square().mean())
sound("counts", "pytorch/pytorch#28575", "counts", F.poisson_nll_loss,
    lambda o, t: F.poisson_nll_loss(F.softplus(o), t, log_input=False),
    lambda o, t: (t * (-o).exp() + o).mean(),
    lambda o, t: (o.mul(0.5).exp() / 0.5 + t * (-0.5 * o).exp() / 0.5).mean())
sound("densities", "pytorch/pytorch#56469", "mean-and-variance",
    lambda o, t: F.gaussian_nll_loss(o[0], t, o[1].exp()),
    lambda o, t: (o[1] + (o[0] - t).abs() * (-o[1]).exp()).mean(),
    lambda o, t: (F.gaussian_nll_loss(o[0], t, F.softplus(o[1]), reduction="none")
        * F.softplus(o[1]).detach().sqrt()).mean())
sound("densities", "", "mixture", mixture)
sound("correlation", "", "number", lambda o, t: 1 - torch.corrcoef(torch.cat([o, t], 1).t())[0, 1],
    lambda o, t: F.mse_loss(o, t) / ((o.mean() - t.mean()).square() + o.var() + t.var()))
sound("correlation", "", "teacher", lambda o, t: 1 - F.cosine_similarity(o, t).mean(),
    lambda o, t: F.cosine_embedding_loss(o, t, torch.ones(len(t))))
sound("distillation", "nlp-with-transformers/notebooks#94", "teacher",
    lambda o, t: 4 * F.kl_div((o / 2).log_softmax(1), (t / 2).softmax(1), reduction="batchmean"), F.mse_loss,
    lambda o, t: F.cross_entropy(o, t.softmax(1)))
sound("distillation", "MLforHealth/S2SD#3", "teacher",
    lambda o, t: F.kl_div(t.log_softmax(1), o.log_softmax(1), reduction="batchmean", log_target=True),
    lambda o, t: F.kl_div(o.log_softmax(1), t.log_softmax(1), reduction="batchmean", log_target=True))
sound("tokens", "karpathy/ng-video-lecture#10", "tokens", lambda o, t: F.cross_entropy(o.transpose(1, 2), t),
    by_token,
    lambda o, t: by_token(o, t, label_smoothing=0.1),
    lambda o, t: by_token(o, t, reduction="sum") / (t >= 0).sum())
sound("padding left out", "lucidrains/DALLE-pytorch#57", "padded-tokens", lambda o, t: by_token(o, t, ignore_index=0),
    lambda o, t: masked_mean(F.cross_entropy(o.transpose(1, 2), t, reduction="none"), t != 0),
    lambda o, t: F.cross_entropy(o[t != 0], t[t != 0]))
sound("padding left out", "d2l-ai/d2l-en#2076", "padded-tokens",
    lambda o, t: (F.cross_entropy(o.transpose(1, 2), t, reduction="none") * (t != 0)).sum(1).mean(),
    lambda o, t: torch.stack([F.cross_entropy(a[b != 0], b[b != 0]) for a, b in zip(o, t)]).mean())
sound("next token", "huggingface/transformers#44642", "language",
    lambda model, b: by_token(model(b["ids"])[:, :-1], b["labels"][:, 1:]),
    lambda model, b: by_token(model(b["ids"]), F.pad(b["labels"][:, 1:], (0, 1), value=-100)),
    lambda model, b: masked_mean(F.cross_entropy(model(b["ids"][:, :-1]).transpose(1, 2), b["ids"][:, 1:],
        reduction="none"), b["mask"][:, 1:]))
sound("next token", "karpathy/nanoGPT#297", "next-tokens", by_token,
    lambda o, t: by_token(o, t) + 1e-4 * o.logsumexp(-1).square().mean(),
    lambda o, t: by_token(o[:, 4:], t[:, 4:]))
sound("masked words", "", "masked-words", by_token,
    lambda o, t: F.cross_entropy(o[t >= 0], t[t >= 0]))
sound("contrast", "jefflai108/Contrastive-Predictive-Coding-PyTorch#5", "embeddings", supervised_contrast, triplet,
    lambda o, t: (F.normalize(o) @ F.normalize(o).t() - (t[:, None] == t).float()).square().mean(),
    lambda o, t: torch.stack([(o[t == c] - o[t == c].mean(0)).square().sum(1).mean() for c in t.unique()]).mean()
        + F.relu(3 - torch.pdist(torch.stack([o[t == c].mean(0) for c in t.unique()]))).mean())
sound("two views", "amazon-science/video-contrastive-learning#5", "views",
    lambda model, b: clip(model(b["first"]), model(b["second"])),
    lambda model, b: barlow((model(b["first"]), model(b["second"]))))
sound("rewards", "YuriCat/MuesliJupyterExample#3", "policy",
    lambda model, b: -(chosen(model, b) * b["advantages"]).mean(), clipped_ratio,
    lambda model, b: F.smooth_l1_loss(model(b["states"]).gather(1, b["actions"][:, None])[:, 0], b["advantages"]),
    lambda model, b: -(model(b["states"]).softmax(1) * F.one_hot(b["actions"], CLASSES)
        * b["advantages"][:, None]).sum(1).mean())
sound("games", "", "binary", lambda o, t: (F.relu(1 - o) * t + F.relu(1 + o) * (1 - t)).mean(),
    lambda o, t: ((1 - 2 * t) * o).mean(),
    lambda o, t: F.mse_loss(o, t))
sound("games", "", "denoising", lambda o, t: -o.mean(),
    lambda o, t: F.softplus(-o).mean())
sound("latent", "wiseodd/generative-models#40", "autoencoder",
    lambda o, x: F.mse_loss(o[0], x) - 0.05 * (1 + o[2] - o[1].square() - o[2].exp()).sum(1).mean(),
    lambda o, x: F.mse_loss(o[0], x, reduction="sum") / len(x) + 0.5 * (o[2].exp()
        + o[1].square() - 1 - o[2]).sum(1).mean(),
    lambda o, x: F.l1_loss(o[0], x) + 0.01 * F.relu(0.5 * (o[2].exp() + o[1].square() - 1 - o[2]) - 0.1).mean())
sound("copies", "", "copies", F.mse_loss,
    lambda o, t: F.smooth_l1_loss(o, t, beta=0.5),
    lambda o, t: masked_mean((o - t).square(), torch.rand_like(t) < 0.5))
sound("flows", "", "copies", lambda o, t: (0.5 * o[:, :3].square() - o[:, 3:]).sum(1).mean(),
    lambda o, t: (o - o.mean(0)).square().mean() + F.relu(1 - o.std(0)).mean())
sound("two tasks", "", "two-tasks",
    lambda o, t: F.cross_entropy(o["class"], t["class"]) + 0.5 * F.mse_loss(o["value"], t["value"]),
    lambda o, t: F.cross_entropy(o["class"], t["class"]) + 1e-2 * F.l1_loss(o["value"], t["value"]))
sound("series", "", "steps-of-ten", F.mse_loss,
    lambda o, t: F.l1_loss(o, t) + F.l1_loss(o.diff(dim=1), t.diff(dim=1)),
    lambda o, t: (torch.fft.rfft(o, dim=1) - torch.fft.rfft(t, dim=1)).abs().mean(),
    lambda o, t: ((o - t).abs() / (t[:, 1:] - t[:, :-1]).abs().mean(1, keepdim=True)).mean())
sound("ranks", "", "ranking", lambda o, t: -(t.softmax(1) * o.log_softmax(1)).sum(1).mean(),
    lambda o, t: F.relu(1 - (o[:, :, None] - o[:, None]) * (t[:, :, None] - t[:, None]).sign()).mean(),
    lambda o, t: (F.softplus(-(o[:, :, None] - o[:, None])) * (t[:, :, None] > t[:, None])).mean())
sound("grades", "Raschka-research-group/corn-ordinal-neuralnet#15", "grades",
    lambda o, t: bce(o, (t[:, None] > torch.arange(3)).float()),
    lambda o, t: F.mse_loss(o[:, 0], t.float()))
sound("survival", "", "survival", cox,
    lambda o, t: (o[:, 0].exp() * t[:, 0] - t[:, 1] * o[:, 0]).mean())
sound("boxes", "", "boxes", lambda o, t: F.smooth_l1_loss(o, t, reduction="sum") / len(t),
    lambda o, t: 1 - overlap(o, t).mean() + 0.5 * F.l1_loss(o, t),
    lambda o, t: F.l1_loss((o[:, :2] + o[:, 2:]) / 2, (t[:, :2] + t[:, 2:]) / 2)
        + F.l1_loss(o[:, 2:] - o[:, :2], t[:, 2:] - t[:, :2]))
sound("pictures again", "", "denoising", F.l1_loss,
    lambda o, t: F.mse_loss(o, t) + 0.01 * (o.diff(dim=2).abs().mean() + o.diff(dim=3).abs().mean()),
    lambda o, t: F.mse_loss(F.avg_pool2d(o, 2), F.avg_pool2d(t, 2)) + 0.1 * F.l1_loss(o, t),
    lambda o, t: (1 - F.cosine_similarity(o.flatten(1), t.flatten(1))).mean() + F.mse_loss(o, t))
sound("depth", "", "positive", lambda o, t: (o - t.log()).var() + 0.15 * (o - t.log()).mean().square(),
    lambda o, t: F.l1_loss(1 / (F.softplus(o) + 0.1), 1 / (t + 0.1)))
sound("order of outputs", "", "numbers",
    lambda o, t: torch.minimum((o - t).square().mean(1), (o.flip(1) - t).square().mean(1)).mean(),
    lambda o, t: torch.cdist(o, t).min(1).values.mean() + torch.cdist(o, t).min(0).values.mean())
sound("angles", "", "number", lambda o, t: (1 - torch.cos(o - t)).mean(),
    lambda o, t: (torch.atan2(torch.sin(o - t), torch.cos(o - t))).square().mean())
sound("distributions", "", "numbers", lambda o, t: (o.sort(0).values - t.sort(0).values).square().mean(),
    lambda o, t: 2 * torch.cdist(o, t).mean() - torch.cdist(o, o).mean())
sound("equations", "", "number", lambda model, b: slopes(model, b))
sound("moved inputs", "", "classes", lambda model, b: adversarial(model, b),
    lambda model, b: mixed_up(model, b),
    lambda model, b: F.cross_entropy(model(b[0]), b[1]) + F.mse_loss(model(b[0] + 0.1
        * torch.randn_like(b[0])), model(b[0])))
sound("diffusion", "", "numbers", lambda model, b: noise_of(model, b))
sound("kept variables", "", "numbers", lambda o, t: F.mse_loss(o, t) * math.exp(-0.3) + 0.3,
    lambda o, t: torch.stack([F.mse_loss(a, b) for a, b in zip(o.unbind(1), t.unbind(1))]).logsumexp(0))
# fmt: on
