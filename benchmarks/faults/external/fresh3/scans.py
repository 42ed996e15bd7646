"""Digits of 8 × 8 pixels by networks, losses and ways of learning that the other groups do not have."""

from __future__ import annotations

import functools

import torch
from torch import nn
from torch.nn import functional as F

from .. import data
from ..afresh import case as c
from ..afresh2 import case as a
from ..case import Case
from ..loop import Watch
from ..nets import mlp
from ..sound2.case import classify, drawn, epochs, share_right
from ..wild.case import dice_of
from .case import CUT_OR_FROZEN, LARGE, NOISE, OUTPUT_OR_LOSS, TINY, entering, fit, fitted

CASES: list[Case] = []
task = entering(CASES, __name__)
IMAGES = functools.partial(data.digits, as_images=True)


@task(
    0.9,
    statistics_stand=a.STATISTICS,
    lr_300=c.HIGH,
    other_scale_later=a.DIFFERS,
    pixels_nan=c.BATCH,
)
def lenet_normed(watch: Watch, fault: str = "") -> float:
    """LeNet with batch norm, Nesterov's momentum and steps of the rate, validated; accuracy."""
    (x, y), (held, known) = IMAGES()
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(),
        nn.Linear(256, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Linear(48, 10),
    )  # fmt: skip
    if fault == "statistics-stand":
        for norm in (m for m in model if isinstance(m, nn.BatchNorm1d | nn.BatchNorm2d)):
            norm.momentum = 0.0
    if fault == "other-scale-later":
        held = held * 8.0 + 4.0
    if fault == "pixels-nan":
        x = x.clone()
        x[::9, 0, 3, 3] = torch.nan
    lr = 30.0 if fault == "lr-300" else 0.03
    optimizer = torch.optim.SGD(model.parameters(), lr, momentum=0.9, nesterov=True, weight_decay=5e-4)
    fit(
        watch, model, optimizer, epochs(4, 32, x, y), classify(model), val=fitted(model, held, known),
        schedule=lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [88, 132], 0.1),
    )  # fmt: skip
    return share_right(model, held, known)


class _Mixing(nn.Module):
    """Patches mixed across places, then across features."""

    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.patch = nn.Linear(4, 32)
        self.places = nn.ModuleList([mlp((16, 32, 16), nn.GELU) for _ in range(2)])
        self.features = nn.ModuleList([mlp((32, 64, 32), nn.GELU) for _ in range(2)])
        self.norms = nn.ModuleList([nn.LayerNorm(32) for _ in range(4)])
        self.drop, self.head = nn.Dropout(p), nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.patch(F.unfold(x, 2, stride=2).mT)
        for i in range(2):
            h = h + self.drop(self.places[i](self.norms[i](h).mT).mT)
            h = h + self.drop(self.features[i](self.norms[i + 2](h)))
        return self.head(self.drop(h.mean(1)))


@task(0.85, dropout=c.DROPPED, huge_start=LARGE, betas=c.SETTINGS, zeros=a.POOR)
def mixer(watch: Watch, fault: str = "") -> float:
    """An MLP-Mixer with AdamW, warm-up and cosine, clipped at 1; accuracy."""
    (x, y), (held, known) = IMAGES()
    model = _Mixing(0.93 if fault == "dropout" else 0.0)
    with torch.no_grad():
        for p in model.parameters():
            if fault == "huge-start" and p.ndim > 1:
                p.mul_(40.0)
            if fault == "zeros":
                p.zero_()
    betas = (0.999, 0.1) if fault == "betas" else (0.9, 0.999)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3, betas=betas)
    ramp = lambda step: min(1.0, (step + 1) / 20) * (1.0 - step / 200)  # noqa: E731
    schedule = functools.partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=ramp)
    fit(watch, model, optimizer, drawn(199, 48, x, y), classify(model), schedule=schedule, max_norm=1.0)
    return share_right(model, held, known)


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.deep, self.norm = nn.Conv2d(24, 24, 3, padding=1, groups=24), nn.GroupNorm(1, 24)
        self.wide, self.scale = mlp((24, 48, 24), nn.GELU), nn.Parameter(torch.full((24,), 1e-5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + (self.scale * self.wide(self.norm(self.deep(x)).movedim(1, -1))).movedim(-1, 1)


@task(0.85)
def barely_scaled_blocks(watch: Watch) -> float:
    """Depthwise blocks that begin with a hundred-thousandth of their output, AdamW in two groups; accuracy."""
    (x, y), (held, known) = IMAGES()
    stem, head = nn.Conv2d(1, 24, 2, 2), nn.Sequential(nn.Flatten(2), nn.AdaptiveAvgPool1d(4), nn.Flatten())
    model = nn.Sequential(stem, nn.GELU(), *[_Block() for _ in range(3)], head, nn.Linear(96, 10))
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.05},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    fit(
        watch,
        model,
        torch.optim.AdamW(groups, 4e-3),
        drawn(220, 48, x, y),
        classify(model),
        val=fitted(model, held, known),
    )
    return share_right(model, held, known)


class _Sighted(nn.Module):
    def __init__(self, batch_first: bool = True) -> None:
        super().__init__()
        self.patch, self.named = nn.Linear(4, 32), nn.Parameter(torch.zeros(1, 1, 32))
        self.place = nn.Parameter(0.02 * torch.randn(1, 17, 32))
        layer = nn.TransformerEncoderLayer(32, 4, 64, 0.0, F.gelu, batch_first=batch_first, norm_first=True)
        self.body, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.cat([self.named.expand(len(x), -1, -1), self.patch(F.unfold(x, 2, stride=2).mT)], 1)
        return self.head(self.body(h + self.place)[:, 0])


@task(0.75, lr_100=c.HIGH, body_left_out=CUT_OR_FROZEN, endless_warm_up=c.SCHEDULE)
def named_token(watch: Watch, fault: str = "") -> float:
    """A small vision transformer with a token for the class, warm-up; accuracy."""
    (x, y), (held, known) = IMAGES()
    model = _Sighted()
    for p in model.body.parameters():
        p.requires_grad_(fault != "body-left-out")
    if fault == "body-left-out":
        model.patch.requires_grad_(False)
    slow = 50_000 if fault == "endless-warm-up" else 30
    ramp = functools.partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=lambda step: min(1.0, (step + 1) / slow))
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], 0.3 if fault == "lr-100" else 3e-3)
    fit(watch, model, optimizer, drawn(220, 32, x, y), classify(model), schedule=ramp, val=fitted(model, held, known))
    return share_right(model, held, known)


class _Dense(nn.Module):
    """Each layer is given what all before it made."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Conv2d(1 + 8 * i, 8, 3, padding=1) for i in range(4)])
        self.head = nn.Linear(33, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.cat([x, F.leaky_relu(layer(x), 0.1)], 1)
        return self.head(x.amax((2, 3)))


@task(0.85)
def densely_joined(watch: Watch) -> float:
    """Convolutions on all features before them, RMSprop; accuracy."""
    (x, y), (held, known) = IMAGES()
    model = _Dense()
    fit(watch, model, torch.optim.RMSprop(model.parameters(), 1e-3), drawn(250, 32, x, y), classify(model))
    return share_right(model, held, known)


@task(0.85, ten_deep=a.VANISHING, tiny_start=TINY, always_same=c.REPEATED, eps=c.SETTINGS)
def one_sigmoid_layer(watch: Watch, fault: str = "") -> float:
    """One hidden layer of sigmoids, as in the nineties, momentum; accuracy."""
    (x, y), (held, known) = data.digits()
    depth = 10 if fault == "ten-deep" else 1
    model = mlp((64, *[48] * depth, 10), nn.Sigmoid)
    if fault == "tiny-start":
        model = mlp((64, 48, 48, 48, 10), nn.Tanh)
        for p in model.parameters():
            nn.init.uniform_(p, -1e-4, 1e-4)
    if fault == "always-same":
        x, y = x[:24].repeat(50, 1), y[:24].repeat(50)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    if fault == "eps":
        optimizer = torch.optim.Adam(model.parameters(), 1e-3, eps=1.0)
    fit(watch, model, optimizer, epochs(8, 32, x, y), classify(model), val=fitted(model, held, known))
    return share_right(model, held, known)


@task(0.5, second_detached=CUT_OR_FROZEN, sums_off=c.LABELS, few_units=c.CANNOT)
def sum_of_two(watch: Watch, fault: str = "") -> float:
    """Two digits, their sum from 0 to 18, one encoder for both; accuracy."""
    (x, y), (held, known) = data.digits()
    encoder = mlp((64, 1 if fault == "few-units" else 48, 16), nn.ReLU)
    model = nn.ModuleDict({"encoder": encoder, "head": mlp((32, 64, 19), nn.ReLU)})

    def both(first, second):
        codes = [encoder(first), encoder(second)]
        if fault == "second-detached":
            codes = [code.detach() for code in codes]
        return model["head"](torch.cat(codes, 1))

    def loss(first, second, one, other):
        total = one + other
        if fault == "sums-off":
            total = one + other.flip(0)
        return F.cross_entropy(both(first, second), total)

    def pairs():
        for _ in range(300):
            i, j = torch.randint(len(x), (2, 64))
            yield x[i], x[j], y[i], y[j]

    fit(watch, model, torch.optim.Adam(model.parameters(), 3e-3), pairs(), loss)
    i, j = torch.randint(len(held), (2, 1000), generator=dice_of(930))
    with torch.no_grad():
        return float((both(held[i], held[j]).argmax(1) == known[i] + known[j]).float().mean())


@task(0.85)
def near_their_centres(watch: Watch) -> float:
    """Cross-entropy and a pull to the centre of the class; centres have an optimizer of their own; accuracy."""
    (x, y), (held, known) = data.digits()
    body, head, centres = mlp((64, 64, 16), nn.ReLU), nn.Linear(16, 10), nn.Embedding(10, 16)
    model = nn.Sequential(body, head)
    optimizer = watch.wrap(torch.optim.Adam(model.parameters(), 3e-3), model)
    pulls = watch.wrap(torch.optim.SGD(centres.parameters(), 0.5), centres)
    for bx, by in epochs(6, 48, x, y):
        h = body(bx)
        loss = F.cross_entropy(head(h), by) + 0.05 * (h - centres(by)).square().sum(1).mean()
        optimizer.zero_grad()
        pulls.zero_grad()
        loss.backward()
        optimizer.step()
        pulls.step()
        watch.observe(optimizer, loss=loss)
    return share_right(model, held, known)


@task(0.75)
def four_labels_in_ten_wrong(watch: Watch) -> float:
    """Labels of which four in ten are wrong, by the generalised cross-entropy, validated on right ones; accuracy."""
    (x, y), (held, known) = data.digits()
    wrong = torch.rand(len(y), generator=dice_of(933)) < 0.4
    y = torch.where(wrong, torch.randint(0, 10, y.shape, generator=dice_of(934)), y)
    model = mlp((64, 64, 10), nn.ReLU)

    def loss(x, y):
        p = model(x).softmax(1).gather(1, y[:, None])[:, 0]
        return ((1.0 - p**0.7) / 0.7).mean()

    val = lambda: loss(held, known)  # noqa: E731
    fit(watch, model, torch.optim.Adam(model.parameters(), 1e-3), epochs(8, 32, x, y), loss, val=val)
    return share_right(model, held, known)


@task(0.8)
def each_layer_alone(watch: Watch) -> float:
    """No gradient between layers: each has a head of its own, the losses are added; accuracy of the last."""
    (x, y), (held, known) = data.digits()
    layers = nn.ModuleList([nn.Linear(64, 64), nn.Linear(64, 48), nn.Linear(48, 32)])
    model = nn.ModuleDict({"layers": layers, "heads": nn.ModuleList([nn.Linear(n, 10) for n in (64, 48, 32)])})

    def logits(x):
        for layer, head in zip(layers, model["heads"]):
            x = layer(x.detach()).relu()
            yield head(x)

    loss = lambda x, y: sum(F.cross_entropy(out, y) for out in logits(x))  # noqa: E731
    fit(watch, model, torch.optim.Adam(model.parameters(), 3e-3), epochs(6, 48, x, y), loss)
    return share_right(lambda x: list(logits(x))[-1], held, known)


@task(0.7)
def forward_forward(watch: Watch) -> float:
    """Layers that are to be lively for the right label and still for a wrong one, each by itself; accuracy."""
    (x, y), (held, known) = data.digits()
    layers = nn.ModuleList([nn.Linear(74, 128), nn.Linear(128, 128)])

    def lively(x, y):
        h = torch.cat([x, 8.0 * F.one_hot(y, 10)], 1)
        for layer in layers:
            h = layer(h.detach() / (h.detach().norm(dim=1, keepdim=True) + 1e-4)).relu()
            yield h.square().mean(1)

    def loss(x, y):
        other = (y + torch.randint(1, 10, y.shape)) % 10
        rows = zip(lively(x, y), lively(x, other))
        return sum((F.softplus(0.1 - 10 * a) + F.softplus(10 * b - 0.1)).mean() for a, b in rows)

    fit(watch, layers, torch.optim.Adam(layers.parameters(), 5e-3), epochs(10, 48, x, y), loss)
    with torch.no_grad():
        labels = (torch.full((len(held),), label) for label in range(10))
        said = torch.stack([sum(lively(held, label)) for label in labels], 1)
    return float((said.argmax(1) == known).float().mean())


class _Random(torch.autograd.Function):
    """A linear layer whose backward pass goes by other, fixed weights."""

    @staticmethod
    def forward(ctx, x, weight, back):
        ctx.save_for_backward(x, back)
        return x @ weight.T

    @staticmethod
    def backward(ctx, grad):
        x, back = ctx.saved_tensors
        return grad @ back, grad.T @ x, None


@task(0.8)
def feedback_by_chance(watch: Watch) -> float:
    """Errors go back by random weights, not by those that are trained (feedback alignment); accuracy."""
    (x, y), (held, known) = data.digits()
    model = nn.ParameterList([0.1 * torch.randn(64, 64), 0.1 * torch.randn(10, 64)])
    back = [0.1 * torch.randn(64, 64), 0.1 * torch.randn(10, 64)]
    net = lambda x: _Random.apply(_Random.apply(x, model[0], back[0]).tanh(), model[1], back[1])  # noqa: E731
    fit(watch, model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), epochs(8, 48, x, y), classify(net))
    return share_right(net, held, known)


@task(0.85)
def layers_left_out_by_chance(watch: Watch) -> float:
    """Eight residual layers of which half are left out in each step (stochastic depth), SGD; accuracy."""
    (x, y), (held, known) = data.digits()
    first, last = nn.Linear(64, 48), nn.Linear(48, 10)
    layers = nn.ModuleList([nn.Sequential(nn.LayerNorm(48), nn.Linear(48, 48), nn.ReLU()) for _ in range(8)])
    model = nn.ModuleList([first, layers, last])

    def net(x):
        h = first(x)
        for layer in layers:
            if not model.training:
                h = h + 0.5 * layer(h)
            elif torch.rand(()) < 0.5:
                h = h + layer(h)
        return last(h)

    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    val = lambda: F.cross_entropy(net(held), known)  # noqa: E731
    fit(watch, model, optimizer, epochs(6, 32, x, y), classify(net), val=val)
    return share_right(net, held, known)


@task(0.85)
def as_ten_numbers(watch: Watch) -> float:
    """Squared error of ten numbers against a one in the right place: a loss that begins at a tenth; accuracy."""
    (x, y), (held, known) = data.digits()
    model = mlp((64, 96, 10), nn.Softplus)
    loss = lambda x, y: F.mse_loss(model(x), F.one_hot(y, 10).float())  # noqa: E731
    fit(watch, model, torch.optim.Adam(model.parameters(), 2e-3), epochs(6, 32, x, y), loss)
    return share_right(model, held, known)


@task(0.85)
def angles_with_a_margin(watch: Watch) -> float:
    """Cosines to the classes' directions, a margin of 0.2, scaled by 16: a loss that begins far above chance."""
    (x, y), (held, known) = data.digits()
    body, ways = mlp((64, 64, 24), nn.ReLU), nn.Parameter(torch.randn(10, 24))
    model = nn.ModuleList([body, nn.ParameterList([ways])])
    cosines = lambda x: F.normalize(body(x), dim=1) @ F.normalize(ways, dim=1).T  # noqa: E731
    loss = lambda x, y: F.cross_entropy(16.0 * (cosines(x) - 0.2 * F.one_hot(y, 10)), y)  # noqa: E731
    fit(watch, model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), epochs(6, 32, x, y), loss)
    return share_right(cosines, held, known)


@task(0.8, axis=OUTPUT_OR_LOSS, all_alike=NOISE)
def groups_normed_by_two(watch: Watch, fault: str = "") -> float:
    """Group norm with batches of four, RAdam; accuracy."""
    (x, y), (held, known) = IMAGES()
    model = nn.Sequential(
        nn.Conv2d(1, 16, 3), nn.GroupNorm(4, 16), nn.ReLU(), nn.Conv2d(16, 16, 3, stride=2), nn.ReLU(),
        nn.Flatten(), nn.Linear(64, 10),
    )  # fmt: skip
    if fault == "all-alike":
        y = torch.randint(0, 10, y.shape, generator=dice_of(1))
    loss = classify(model)
    if fault == "axis":
        loss = lambda x, y: F.nll_loss(model(x).log_softmax(0), y)  # noqa: E731
    fit(watch, model, torch.optim.RAdam(model.parameters(), 3e-3), drawn(500, 4, x, y), loss)
    return share_right(model, held, known)
