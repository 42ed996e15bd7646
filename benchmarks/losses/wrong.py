"""Losses that are wrong. Beside each kind: a thread in which one like it was reported, where one was found."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .case import CLASSES, LENGTH, TOKENS, add


def wrong(kind, thread, task, *losses):
    """Adds wrong losses of a kind."""
    add(True, kind, thread, task, *losses)


def one_hot(t, classes=CLASSES):
    """Targets as rows of floats."""
    return F.one_hot(t, classes).float()


def dice(p, t):
    """The coefficient of each sample."""
    p, t = p.flatten(1), t.flatten(1)
    return (2 * (p * t).sum(1) + 1) / (p.sum(1) + t.sum(1) + 1)


def dice_of_all(p, t):
    """That of the batch as a whole."""
    return (2 * (p * t).sum() + 1) / (p.sum() + t.sum() + 1)


def bce(o, t, **options):
    """On logits."""
    return F.binary_cross_entropy_with_logits(o, t, **options)


def by_token(o, t, **options):
    """Cross-entropy of logits [B, T, V]."""
    return F.cross_entropy(o.reshape(-1, TOKENS), t.reshape(-1), **options)


# fmt: off
wrong("sign", "escalante-bio/mosaic#29", "classes", lambda o, t: -F.cross_entropy(o, t),
    lambda o, t: F.log_softmax(o, 1)[torch.arange(len(t)), t].mean())
wrong("sign", "facebookresearch/simsiam#44", "numbers", lambda o, t: F.cosine_similarity(o, t).mean(),
    lambda o, t: -(o - t).abs().mean())
wrong("sign", "", "labels", lambda o, t: (t * F.logsigmoid(o) + (1 - t) * F.logsigmoid(-o)).mean())
wrong("sign", "", "tokens", lambda o, t: -by_token(o, t))
wrong("focal sign", "pytorch/vision#8519", "binary",
    lambda o, t: (0.25 * (1 - torch.exp(-bce(o, t, reduction="none"))) ** 2 * -bce(o, t, reduction="none")).mean())
wrong("focal sign", "yqyao/SSD_Pytorch#32", "labels",
    lambda o, t: ((t - o.sigmoid()).abs().neg().add(1).pow(2) * bce(o, t, reduction="none")).mean())
wrong("focal sign", "", "classes",
    lambda o, t: (o.softmax(1).gather(1, t[:, None])[:, 0] ** 2 * F.cross_entropy(o, t, reduction="none")).mean())
wrong("softmax twice", "Lightning-Universe/lightning-bolts#654", "classes",
    lambda o, t: F.cross_entropy(o.softmax(1), t),
    lambda o, t: F.cross_entropy(torch.sigmoid(o), t))
wrong("softmax twice", "gitabcworld/MatchingNetworks#5", "tokens", lambda o, t: by_token(o.softmax(-1), t),
    lambda o, t: F.nll_loss(o.softmax(-1).log_softmax(-1).transpose(1, 2), t))
wrong("softmax twice", "mlelarge/graph_neural_net#37", "pictures", lambda o, t: F.cross_entropy(o.softmax(1), t))
wrong("sigmoid twice", "cvg/glue-factory#89", "binary", lambda o, t: bce(torch.sigmoid(o), t))
wrong("sigmoid twice", "itakurah/focal-loss-pytorch#5", "labels", lambda o, t: bce(o.sigmoid(), t),
    lambda o, t: F.binary_cross_entropy(torch.sigmoid(o.sigmoid()), t))
wrong("sigmoid twice", "Turoad/lanedet#32", "pixels", lambda o, t: bce(o.sigmoid(), t),
    lambda o, t: 1 - dice(torch.sigmoid(o.sigmoid()), t).mean())
wrong("softmax over batch", "ikostrikov/pytorch-meta-optimizer#10", "classes",
    lambda o, t: F.nll_loss(o.log_softmax(0), t),
    lambda o, t: -(one_hot(t) * o.softmax(0).log()).sum(1).mean())
wrong("softmax over batch", "ctallec/world-models#10", "tokens",
    lambda o, t: F.nll_loss(o.log_softmax(1).transpose(1, 2), t))
wrong("softmax over batch", "", "pictures", lambda o, t: F.nll_loss(o.log_softmax(2), t))
wrong("no log", "AnubhavGupta3377/Text-Classification-Models-Pytorch#9", "classes",
    lambda o, t: F.nll_loss(o.softmax(1), t),
    lambda o, t: F.nll_loss(o, t))
wrong("no log", "clvrai/ACGAN-PyTorch#4", "tokens", lambda o, t: F.nll_loss(o.transpose(1, 2), t))
wrong("no log", "", "binary", lambda o, t: -(t * o + (1 - t) * (1 - o)).mean())
wrong("labels off by one", "hx173149/C3D-tensorflow#74", "classes",
    lambda o, t: F.cross_entropy(o, (t + 1) % CLASSES),
    lambda o, t: F.cross_entropy(o, (t - 1).clamp(min=0)))
wrong("labels off by one", "anheidelonghu/ACNet#14", "pictures",
    lambda o, t: F.cross_entropy(o, (t - 1).clamp(min=0)))
wrong("another sample's target", "", "classes", lambda o, t: F.cross_entropy(o, t.roll(1)),
    lambda o, t: F.cross_entropy(o, t.flip(0)))
wrong("another sample's target", "", "numbers", lambda o, t: F.mse_loss(o, t.roll(1, 0)),
    lambda o, t: F.l1_loss(o[:-1], t[1:]))
wrong("broadcast", "pytorch/pytorch#16045", "column-and-row", F.mse_loss, F.l1_loss, F.smooth_l1_loss,
    lambda o, t: (o - t).pow(2).sum(1).mean())
wrong("broadcast", "IntelLabs/matsciml#347", "column-and-row", lambda o, t: torch.log(torch.cosh(o - t)).mean(),
    lambda o, t: torch.maximum(0.9 * (t - o), -0.1 * (t - o)).mean())
wrong("means compared", "", "numbers", lambda o, t: (o.mean(0) - t.mean(0)).square().sum(),
    lambda o, t: (o.mean() - t.mean()).abs())
wrong("means compared", "", "number", lambda o, t: F.mse_loss(o, t.mean().expand_as(o)),
    lambda o, t: F.mse_loss(o.mean(0, keepdim=True).expand_as(t), t))
wrong("means compared", "", "pixels", lambda o, t: (o.sigmoid().mean((2, 3)) - t.mean((2, 3))).square().mean())
wrong("part of the batch", "lucidrains/med-seg-diff-pytorch#17", "classes",
    lambda o, t: [F.cross_entropy(a[None], b[None]) for a, b in zip(o, t)][-1],
    lambda o, t: F.cross_entropy(o[: len(o) // 2], t[: len(t) // 2]))
wrong("part of the batch", "", "numbers", lambda o, t: F.mse_loss(o[0], t[0]),
    lambda o, t: F.mse_loss(o[:, 0], t[:, 0]))
wrong("part of the batch", "", "steps-of-ten", lambda o, t: F.mse_loss(o[:, -1], t[:, -1]),
    lambda o, t: F.mse_loss(o[..., :1], t[..., :1]))
wrong("detached", "bboylyg/NAD#8", "classes", lambda o, t: F.cross_entropy(torch.cat([o[:24].detach(), o[24:]]), t),
    lambda o, t: torch.tensor(F.cross_entropy(o, t).item(), requires_grad=True))
wrong("detached", "guopengf/FL-MRCM#10", "two-tasks",
    lambda o, t: F.cross_entropy(o["class"], t["class"]) + F.mse_loss(o["value"].detach(), t["value"]),
    lambda o, t: F.cross_entropy(o["class"], t["class"]) + F.mse_loss(o["value"], t["value"]).item())
wrong("detached", "wtl52656/Diff-RNTraj#9", "numbers", lambda o, t: (o.data - t).square().mean() + 0.0 * o.sum(),
    lambda o, t: F.mse_loss(torch.where(t > 0, o, o.detach()), t))
wrong("argmax inside", "Ugenteraan/Deep_Hierarchical_Classification#6", "classes",
    lambda o, t: (o.argmax(1) - t).float().square().mean() + 0 * o.sum())
wrong("argmax inside", "tensorlayer/TensorLayer#891", "pixels",
    lambda o, t: 1 - dice((o > 0).float(), t).mean() + 0 * o.mean())
wrong("argmax inside", "", "numbers", lambda o, t: F.mse_loss(o.round() + 0 * o, t.round()),
    lambda o, t: ((o - t).abs() > 0.1).float().mean() + 0 * o.sum())
wrong("clamped", "spragunr/deep_q_rl#46", "numbers", lambda o, t: (o - t).clamp(-0.2, 0.2).square().mean(),
    lambda o, t: (o - t).square().clamp(max=0.05).mean())
wrong("clamped", "ArthurBernard/Fynance#206", "classes",
    lambda o, t: F.cross_entropy(o, t, reduction="none").clamp(max=0.5).mean(),
    lambda o, t: -o.softmax(1).clamp(0.4, 0.6).log()[torch.arange(len(t)), t].mean())
wrong("range", "", "numbers", lambda o, t: F.mse_loss(torch.sigmoid(o), t),
    lambda o, t: F.mse_loss(F.relu(o), t))
wrong("root at zero", "", "numbers", lambda o, t: torch.sqrt(((o - t) * 0).sum(1)).mean() + F.mse_loss(o, t),
    lambda o, t: (o - o.detach()).square().sum(1).sqrt().mean() + F.mse_loss(o, t))
wrong("weights", "open-mmlab/mmdetection#5776", "classes",
    lambda o, t: F.cross_entropy(o, t, torch.tensor([1.0, 0.0, 1.0, 0.0])),
    lambda o, t: F.cross_entropy(o, t, torch.tensor([1.0, -1.0, 1.0, 1.0])))
wrong("weights", "automl/Auto-PyTorch#263", "binary", lambda o, t: bce(o, t, pos_weight=torch.tensor(0.0)),
    lambda o, t: bce(o, t, weight=t))
wrong("weights", "", "numbers", lambda o, t: ((t - t.mean()) * (o - t).square()).mean(),
    lambda o, t: ((o - t).square() * torch.tensor([1.0, 0.0, 0.0])).mean())
wrong("ignored class", "huggingface/transformers#2759", "classes", lambda o, t: F.cross_entropy(o, t, ignore_index=0))
wrong("ignored class", "microsoft/CodeXGLUE#122", "padded-tokens", lambda o, t: by_token(o, t, ignore_index=1),
    lambda o, t: by_token(o, t, ignore_index=-100))
wrong("mask inverted", "InseeFrLab/torchTextClassifiers#92", "padded-tokens",
    lambda o, t: (F.cross_entropy(o.transpose(1, 2), t, reduction="none") * (t == 0)).sum() / (t == 0).sum(),
    lambda o, t: F.cross_entropy(o[t == 0], t[t == 0]))
wrong("mask inverted", "", "masked-words",
    lambda o, t: (F.cross_entropy(o.transpose(1, 2), t.clamp(min=0), reduction="none") * (t < 0)).mean())
wrong("mask inverted", "", "language",
    lambda model, b: by_token(model(b["ids"])[:, :-1], b["ids"][:, 1:].masked_fill(b["mask"][:, 1:], -100)))
wrong("padding counted", "FlagAI-Open/FlagAI#522", "padded-tokens", by_token,
    lambda o, t: F.cross_entropy(o.transpose(1, 2), t, reduction="none").sum(1).mean())
wrong("padding counted", "arcee-ai/DAM#16", "language",
    lambda model, b: F.cross_entropy(model(b["ids"])[:, :-1].transpose(1, 2), b["ids"][:, 1:]))
wrong("padding counted", "", "tokens", lambda o, t: by_token(o, t.clamp(min=0)))
wrong("shifted", "huggingface/transformers#47395", "next-tokens", lambda o, t: by_token(o[:, :-1], t[:, 1:]),
    lambda o, t: by_token(o[:, 1:], t[:, :-1]))
wrong("shifted", "huggingface/transformers#37830", "language",
    lambda model, b: by_token(model(b["ids"])[:, :-2], b["labels"][:, 2:]),
    lambda model, b: by_token(model(b["ids"]), b["labels"]))
wrong("shifted", "", "steps-of-ten", lambda o, t: F.mse_loss(o[:, 1:], t[:, :-1]),
    lambda o, t: F.l1_loss(o, t.roll(1, 1)))
wrong("view for transpose", "weirme/FCSN#32", "tokens",
    lambda o, t: F.cross_entropy(o.reshape(len(t), TOKENS, LENGTH), t),
    lambda o, t: by_token(o.transpose(1, 2), t))
wrong("view for transpose", "irfanICMLL/structure_knowledge_distillation#11", "pictures",
    lambda o, t: F.cross_entropy(o.reshape(-1, 3), t.reshape(-1)))
wrong("view for transpose", "stelzner/monet#1", "denoising", lambda o, t: F.mse_loss(o.transpose(2, 3), t))
wrong("one-hot", "", "classes", lambda o, t: bce(o, one_hot((t + 1) % CLASSES)),
    lambda o, t: F.mse_loss(o, 1 - one_hot(t)))
wrong("smoothing", "harvardnlp/annotated-transformer#39", "classes",
    lambda o, t: F.cross_entropy(o, t, label_smoothing=0.95),
    lambda o, t: F.cross_entropy(o, 0.1 * one_hot(t) + 0.9 * (1 - one_hot(t)) / 3))
wrong("smoothing", "TimDettmers/ConvE#55", "labels", lambda o, t: bce(o, 0.1 * t + 0.45),
    lambda o, t: bce(o, 0.05 + 0.1 * (1 - t)))
wrong("divergence", "microsoft/ProDA#20", "teacher",
    lambda o, t: F.kl_div(o.softmax(1), t.softmax(1), reduction="batchmean"),
    lambda o, t: -F.kl_div(o.log_softmax(1), t.softmax(1), reduction="batchmean"))
wrong("divergence", "paiml/aprender#2153", "teacher", lambda o, t: F.kl_div(o.log_softmax(1), t.log_softmax(1)),
    lambda o, t: F.kl_div(o.log_softmax(0), t.softmax(0), reduction="batchmean"))
wrong("dice", "sraashis/easytorch#38", "pixels", lambda o, t: dice(o.sigmoid(), t).mean(),
    lambda o, t: 1 - dice(o.sigmoid(), 1 - t).mean())
wrong("dice", "akirasosa/mobile-semantic-segmentation#24", "labels", lambda o, t: dice_of_all(o.sigmoid(), t),
    lambda o, t: 1 - dice_of_all(o, t))
wrong("quantile", "scikit-learn/scikit-learn#6429", "number",
    lambda o, t: torch.minimum(0.9 * (t - o), -0.1 * (t - o)).mean(),
    lambda o, t: (0.9 * (t - o)).mean())
wrong("variance", "unit8co/darts#1162", "mean-and-variance",
    lambda o, t: (0.5 * o[1] + 0.5 * (o[0] - t).square() * o[1].exp()).mean(),
    lambda o, t: ((o[0] - t).square() * (-o[1]).exp()).mean())
wrong("targets not used", "labmlai/annotated_deep_learning_paper_implementations#66", "teacher",
    lambda o, t: -(o.softmax(1) * o.log_softmax(1)).sum(1).mean(),
    lambda o, t: F.mse_loss(o, o.detach().roll(1, 0)))
wrong("targets not used", "liuruijin17/LSTR#50", "classes", lambda o, t: F.cross_entropy(o, torch.zeros_like(t)),
    lambda o, t: F.cross_entropy(o, o.argmax(1)))
wrong("targets not used", "", "numbers", lambda o, t: o.square().mean(),
    lambda o, t: F.mse_loss(o, torch.randn_like(t)))
wrong("arguments swapped", "pytorch/pytorch#57459", "counts", lambda o, t: F.poisson_nll_loss(t, o),
    lambda o, t: F.poisson_nll_loss(o, t).neg())
wrong("logarithm of outputs", "pytorch/pytorch#184030", "binary",
    lambda o, t: -(t * o.log() + (1 - t) * (1 - o).log()).mean())
wrong("logarithm of outputs", "deepchem/deepchem#5100", "counts",
    lambda o, t: F.poisson_nll_loss(o, t, log_input=False))
wrong("margin", "", "binary", lambda o, t: F.relu(1 - t * o).mean(),
    lambda o, t: F.relu(1 + (2 * t - 1) * o).mean())
wrong("margin", "", "classes", lambda o, t: F.multi_margin_loss(-o, t),
    lambda o, t: F.relu(o.gather(1, t[:, None]) - o + 1).mean())
wrong("latent", "hhb072/IntroVAE#5", "autoencoder",
    lambda o, x: F.mse_loss(o[0], x) + 0.5 * (1 + o[2] - o[1].square() - o[2].exp()).sum(1).mean(),
    lambda o, x: F.mse_loss(o[0].detach(), x) - 0.5 * (1 + o[2] - o[1].square() - o[2].exp()).mean())
wrong("one task of two", "", "two-tasks", lambda o, t: F.cross_entropy(o["class"], t["class"]),
    lambda o, t: F.cross_entropy(o["class"], t["class"]) - F.mse_loss(o["value"], t["value"]))
wrong("boxes", "", "boxes", lambda o, t: F.smooth_l1_loss(o[:, [2, 3, 0, 1]], t),
    lambda o, t: F.l1_loss(o[:, :2], t[:, :2]))
wrong("cosine", "Kim-Minseon/RoCL#3", "teacher", lambda o, t: 1 + F.cosine_similarity(o, t).mean(),
    lambda o, t: F.cosine_embedding_loss(o, t, -torch.ones(len(t))))
wrong("ranking", "", "ranking", lambda o, t: -(t.softmax(0) * o.log_softmax(0)).sum(0).mean().neg(),
    lambda o, t: F.relu(1 + (o[:, :, None] - o[:, None]) * (t[:, :, None] > t[:, None])).mean())
wrong("survival", "", "survival",
    lambda o, t: (o[t[:, 0].argsort()] - o[t[:, 0].argsort()].exp().cumsum(0).log()).mean())
wrong("scale of logits", "ustcllm/RecStudio#21", "classes", lambda o, t: F.cross_entropy(o / 1e5, t),
    lambda o, t: F.cross_entropy(torch.tanh(o) * 0.3, t))
wrong("classes merged", "", "classes", lambda o, t: F.cross_entropy(o, t.clamp(max=1)),
    lambda o, t: F.cross_entropy(o, (t > 0).long()))
wrong("classes merged", "", "pictures", lambda o, t: F.cross_entropy(o[:, :2], t.clamp(max=1)))
wrong("random", "", "classes", lambda o, t: F.cross_entropy(o[torch.randperm(len(o))], t),
    lambda o, t: F.cross_entropy(F.dropout(o, 0.9), t))
wrong("not squared", "", "numbers", lambda o, t: (o - t).mean(),
    lambda o, t: (o - t).pow(3).mean())
wrong("absolute values", "", "numbers", lambda o, t: F.mse_loss(o.abs(), t.abs()),
    lambda o, t: F.mse_loss(o, t.abs()))
wrong("expected class", "", "classes", lambda o, t: F.mse_loss(o.mean(1), t.float()),
    lambda o, t: F.mse_loss(o.max(1).values, t.float()))
wrong("policy", "jvmncs/safe-grid-agents#28", "policy",
    lambda model, b: (model(b["states"]).log_softmax(1)[torch.arange(48), b["actions"]] * b["advantages"]).mean())
wrong("contrast", "RElbers/info-nce-pytorch#17", "embeddings",
    lambda o, t: F.cross_entropy(-F.normalize(o) @ F.normalize(o).t(), torch.arange(len(o))),
    lambda o, t: F.cosine_similarity(o, o.roll(1, 0)).mean())
# fmt: on
