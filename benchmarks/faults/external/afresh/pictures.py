"""Masks, boxes, turned and noisy pictures, codes of several kinds: what people learn from small images."""

from __future__ import annotations

import functools

import torch
from torch import nn
from torch.nn import functional as F

from .. import data, nets
from .. import optimizers as o
from ..case import Case
from ..loop import Plan, Tensors, Watch
from ..qualities import accuracy, explained, r_squared
from ..wild.case import dice_of
from . import case as c

_sound, _faulty = functools.partial(c.sound, __name__), functools.partial(c.faulty, __name__)


@functools.cache
def _rectangles() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Noisy pictures [B, 1, 16, 16] of a rectangle, its mask, and its middle and sizes [B, 4] as shares."""
    dice = dice_of(320)
    low = torch.randint(0, 9, (800, 2), generator=dice)
    high = low + torch.randint(3, 8, (800, 2), generator=dice)
    place = torch.arange(16)
    rows = (place >= low[:, :1]) & (place < high[:, :1])
    columns = (place >= low[:, 1:]) & (place < high[:, 1:])
    masks = (rows[:, :, None] & columns[:, None]).float()[:, None]
    boxes = torch.cat([(low + high) / 32.0, (high - low) / 16.0], 1)
    return masks + 0.5 * torch.randn(800, 1, 16, 16, generator=dice), masks, boxes


def _outlining() -> nn.Module:
    layers: list[nn.Module] = []
    for low, high in ((1, 10), (10, 10), (10, 10)):
        layers += [nn.Conv2d(low, high, 3, padding=1), nn.BatchNorm2d(high), nn.ReLU()]
    return nn.Sequential(*layers, nn.Conv2d(10, 1, 1))


def _overlap(shares: torch.Tensor, masks: torch.Tensor) -> torch.Tensor:
    return 1.0 - (2.0 * (shares * masks).sum() + 1.0) / (shares.sum() + masks.sum() + 1.0)


def masks(seed: int) -> Plan:
    """Which pixels belong to the rectangle: two losses together."""
    pictures, wanted, _ = _rectangles()
    torch.manual_seed(seed)

    def loss(model: nn.Module, batch: Tensors) -> torch.Tensor:
        out = model(batch[0])
        return F.binary_cross_entropy_with_logits(out, batch[1]) + _overlap(out.sigmoid(), batch[1])

    @torch.no_grad()
    def quality(model: nn.Module, held_out: Tensors) -> float:
        found, true = model(held_out[0]) > 0.0, held_out[1] > 0.5
        return float((found & true).sum() / (found | true).sum())

    split = data.parted(pictures, wanted)
    return c.planned(seed, _outlining(), loss, *split, quality, 0.75, lr=5e-3, num_epochs=8, batch_size=20)


def _transposed(plan: Plan) -> None:
    """Rows and columns are exchanged in the masks alone."""
    plan.train = (plan.train[0], plan.train[1].transpose(2, 3).contiguous())


def _lost_masks(plan: Plan) -> None:
    plan.train = (plan.train[0], torch.zeros_like(plan.train[1]))


def _locating() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.ReLU(),
        nn.Flatten(), nn.Linear(256, 48), nn.ReLU(), nn.Linear(48, 4),
    )  # fmt: skip


def boxes(seed: int) -> Plan:
    """Where the rectangle lies, and how large it is."""
    pictures, _, wanted = _rectangles()
    torch.manual_seed(seed)

    def loss(model: nn.Module, batch: Tensors) -> torch.Tensor:
        return F.smooth_l1_loss(model(batch[0]), batch[1])

    split = data.parted(pictures, wanted)
    return c.planned(seed, _locating(), loss, *split, r_squared, 0.7, lr=4e-3, num_epochs=14, batch_size=20)


def _rectified_end(plan: Plan) -> None:
    """A last ReLU that starts on its flat side for two of four."""
    plan.model = nn.Sequential(plan.model, nn.ReLU())
    plan.model[0][-1].bias.data[:2] = -3.0


def _turned(x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    return torch.stack([torch.rot90(picture, int(k), (1, 2)) for picture, k in zip(x, turns)])


def turns(seed: int, matching: bool = True) -> Plan:
    """How far a picture was turned: the labels are made on the way."""
    (x, _), (held, _) = data.digits(as_images=True)
    wanted = torch.randint(4, (len(held),), generator=dice_of(321))
    torch.manual_seed(seed)

    def change(epoch: int, place: int, batch: Tensors) -> Tensors:
        k = torch.randint(4, (len(batch[0]),))
        turned = _turned(batch[0], k)
        return turned, k if matching else torch.randint(4, k.shape)

    return c.planned(
        seed, nets.cnn(4, 10), c.cross_entropy, (x,), (_turned(held, wanted), wanted), accuracy, 0.8,
        lr=4e-3, num_epochs=8, change=change,
    )  # fmt: skip


def _drawn_again(plan: Plan) -> None:
    plan.change = turns(plan.seed, False).change


def noise_to_noise(seed: int) -> Plan:
    """Each noisy picture after another noisy one of the same: a loss that stays high."""
    (x, _), (held, _) = data.pixels()
    x, held = x.view(-1, 1, 8, 8), held.view(-1, 1, 8, 8)
    dice = dice_of(322)
    seen = held + 0.4 * torch.randn(held.shape, generator=dice)
    torch.manual_seed(seed)

    def change(epoch: int, place: int, batch: Tensors) -> Tensors:
        return tuple(batch[0] + 0.4 * torch.randn_like(batch[0]) for _ in range(2))

    model = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(),
        nn.Flatten(), nn.Dropout(0.0), nn.Linear(1024, 64), nn.Unflatten(1, (1, 8, 8)),
    )  # fmt: skip
    return c.planned(
        seed, model, c.squared_error, (x,), (seen, held), r_squared, 0.5, lr=2e-3, num_epochs=6, change=change
    )


def _mostly_dropped(plan: Plan) -> None:
    next(m for m in plan.model.modules() if isinstance(m, nn.Dropout)).p = 0.97


class Coder(nn.Module):
    """A variational autoencoder with convolutions in front."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Sequential(
            nn.Conv2d(1, 8, 3, stride=2, padding=1), nn.SiLU(), nn.Flatten(), nn.Linear(128, 16)
        )
        self.decode = nets.mlp((8, 64, 64), nn.SiLU)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        mean, log_var = self.encode(x).chunk(2, 1)
        code = mean + (0.5 * log_var).exp() * torch.randn_like(mean) * float(self.training)
        return self.decode(code), mean, log_var


def coded(seed: int, weight: float = 0.1) -> Plan:
    """Pixels by their likelihood, and a divergence, both means over the batch."""
    (x, _), (held, _) = data.pixels()
    torch.manual_seed(seed)

    def loss(model: nn.Module, batch: Tensors) -> torch.Tensor:
        out, mean, log_var = model(batch[0])
        divergence = -0.5 * (1.0 + log_var - mean.square() - log_var.exp()).sum(1).mean()
        likely = F.binary_cross_entropy_with_logits(out, batch[0].flatten(1), reduction="none").sum(1).mean()
        return likely + weight * divergence

    @torch.no_grad()
    def quality(model: nn.Module, held_out: Tensors) -> float:
        return explained(model(held_out[0])[0].sigmoid(), held_out[0].flatten(1))

    split = (x.view(-1, 1, 8, 8),), (held.view(-1, 1, 8, 8),)
    return c.planned(seed, Coder(), loss, *split, quality, 0.75, lr=3e-3, num_epochs=9)


def _weighing(weight: float) -> c.Change:
    def change(plan: Plan) -> None:
        plan.loss = coded(plan.seed, weight).loss

    return change


class Quantised(nn.Module):
    """Codes out of a book of 32, and the gradient passed by."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.book, self.decode = nets.mlp((64, 48, 8)), nn.Embedding(32, 8), nets.mlp((8, 48, 64))
        self.passes = True

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        code = self.encode(x)
        near = self.book(torch.cdist(code, self.book.weight).argmin(1))
        cost = F.mse_loss(near, code.detach()) + (0.25 * F.mse_loss(code, near.detach()) if self.passes else 0.0)
        return self.decode(code + (near - code).detach() if self.passes else near), cost


def quantised(seed: int) -> Plan:
    """A book of codes."""
    (x, _), (held, _) = data.digits()
    torch.manual_seed(seed)

    def loss(model: nn.Module, batch: Tensors) -> torch.Tensor:
        out, cost = model(batch[0])
        return F.mse_loss(out, batch[0]) + cost

    @torch.no_grad()
    def quality(model: nn.Module, held_out: Tensors) -> float:
        return explained(model(held_out[0])[0], held_out[0])

    return c.planned(seed, Quantised(), loss, (x,), (held,), quality, 0.3, lr=4e-3, num_epochs=10)


def _stopped(plan: Plan) -> None:
    plan.model.passes = False


class Ordered(nn.Module):
    """Each pixel after those before it, by masks on the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 128), nn.Linear(128, 64)
        place = torch.arange(128) % 63
        self.register_buffer("into", (place[:, None] >= torch.arange(64)[None]).float())
        self.register_buffer("out", (torch.arange(64)[:, None] > place[None]).float())
        self.masked = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        into, out = (self.into, self.out) if self.masked else (1.0, 1.0)
        h = F.relu(F.linear(x, self.first.weight * into, self.first.bias))
        return F.linear(h, self.second.weight * out, self.second.bias)


def in_turn(seed: int) -> Plan:
    """A density of black and white digits, pixel by pixel."""
    split = tuple(((x > 0.5).float(),) for x, _ in data.pixels())
    torch.manual_seed(seed)

    def loss(model: nn.Module, batch: Tensors) -> torch.Tensor:
        return F.binary_cross_entropy_with_logits(model(batch[0]), batch[0])

    @torch.no_grad()
    def quality(model: nn.Module, held_out: Tensors) -> float:
        model.masked = True
        return 1.0 - float(loss(model, held_out)) / 0.6931

    return c.planned(seed, Ordered(), loss, *split, quality, 0.45, lr=5e-3, num_epochs=9)


def _sees_itself(plan: Plan) -> None:
    plan.model.masked = False


def sparse_codes(seed: int, weight: float = 0.02) -> Plan:
    """More features than pixels, of which few are to answer."""
    (x, _), (held, _) = data.digits()
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))

    def loss(model: nn.Module, batch: Tensors) -> torch.Tensor:
        codes = model[1](model[0](batch[0]))
        return F.mse_loss(model[2](codes), batch[0]) + weight * codes.abs().mean()

    @torch.no_grad()
    def quality(model: nn.Module, held_out: Tensors) -> float:
        return explained(model(held_out[0]), held_out[0])

    return c.planned(seed, model, loss, (x,), (held,), quality, 0.5, lr=2e-3, num_epochs=8)


def _too_sparse(plan: Plan) -> None:
    plan.loss = sparse_codes(plan.seed, 200.0).loss


class Rounded(nn.Linear):
    """Weights of sixteen levels in the forward pass; the gradient goes past the rounding."""

    passes = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        step = self.weight.detach().abs().max() / 7.0
        low = (self.weight / step).round() * step
        return F.linear(x, self.weight + (low - self.weight).detach() if self.passes else low, self.bias)


def rounded(seed: int) -> Plan:
    """Training for four bits."""
    torch.manual_seed(seed)
    model = nn.Sequential(Rounded(64, 64), nn.ReLU(), Rounded(64, 10))
    return c.planned(seed, model, c.cross_entropy, *data.digits(), accuracy, 0.9, lr=3e-3, num_epochs=7)


def _really_rounded(plan: Plan) -> None:
    for m in plan.model:
        if isinstance(m, Rounded):
            m.passes = False


def _pruning(plan: Plan, watch: Watch) -> None:
    """Half of the weights taken away in three goes, and trained on."""
    from torch.nn.utils import prune

    optimizer = watch.wrap(plan.optimizer(plan.model, plan.lr), plan.model, plan.max_norm)
    for epoch in range(plan.num_epochs):
        if epoch in (3, 5, 7):
            for module in (plan.model[0], plan.model[2]):
                prune.l1_unstructured(module, "weight", amount=0.3)
        for batch in plan.batches(epoch):
            optimizer.zero_grad()
            loss = plan.loss(plan.model, batch)
            loss.backward()
            optimizer.step()
            watch.observe(optimizer, loss=loss.detach())


def pruned(seed: int) -> Plan:
    """Pruned on the way."""
    torch.manual_seed(seed)
    return c.planned(
        seed,
        nets.mlp((64, 64, 10)),
        c.cross_entropy,
        *data.digits(),
        accuracy,
        0.9,
        lr=3e-3,
        num_epochs=9,
        play=_pruning,
    )


CASES: tuple[Case, ...] = (
    *_sound("masks", "which pixels", masks, adam={}, momentum={"optimizer": o.MOMENTUM, "lr": 0.1}),
    *_faulty(
        "masks",
        masks,
        ("transposed", _transposed, c.Truth((*c.CANNOT.families, "data"), ("wrong-targets", "model-cannot-fit"))),
        ("lost", _lost_masks, c.Truth(("data", "loss", "vanishing"), ("trivial-targets", "imbalanced-targets"))),
        ("lr-100000", c.times(1e5), c.HIGH),
    ),
    *_sound("boxes", "where it lies", boxes, adam={}, adamw={"optimizer": o.two_groups}),
    *_faulty(
        "boxes",
        boxes,
        ("pixels", c.scaled_targets(640.0), c.TARGETS),
        ("shuffled", c.shuffled, c.LABELS),
        ("relu-at-end", _rectified_end, c.OUTPUT),
        ("dead", lambda plan: nn.init.constant_(plan.model[5].bias, -40.0), c.DEAD),
    ),
    *_sound("turns", "how far it was turned", turns, adam={}, nadam={"optimizer": o.NADAM}),
    *_faulty("turns", turns, ("drawn-again", _drawn_again, c.LABELS), ("lr-thousandth", c.times(1e-3), c.LOW)),
    *_sound("noise-to-noise", "noisy after noisy", noise_to_noise, adam={}),
    *_faulty("noise-to-noise", noise_to_noise, ("dropped", _mostly_dropped, c.DROPPED)),
    *_sound("coded", "variational, convolutions", coded, adam={}, clipped={"max_norm": 5.0}),
    *_faulty(
        "coded",
        coded,
        ("divergence-sign", _weighing(-0.1), c.LOSS),
        ("divergence-outweighs", _weighing(40.0), c.COLLAPSED),
    ),
    *_sound("quantised", "a book of codes", quantised, adam={}),
    *_faulty("quantised", quantised, ("stopped", _stopped, c.CUT), ("lr-100", c.times(100.0), c.HIGH)),
    *_sound("in-turn", "pixel after pixel", in_turn, adam={}),
    *_faulty("in-turn", in_turn, ("sees-itself", _sees_itself, c.LEAK)),
    *_sound("sparse-codes", "few features answer", sparse_codes, adam={}, adagrad={"optimizer": o.ADAGRAD, "lr": 2e-2}),
    *_faulty(
        "sparse-codes",
        sparse_codes,
        ("too-sparse", _too_sparse, c.Truth(("loss", "units", "vanishing", "setup", "data", "output"),
         ("collapsed-representation", "wrong-loss", "dead-units"))),
        ("bright", c.scaled_inputs(500.0, 1000.0), c.INPUTS),
    ),
    *_sound("rounded", "four bits", rounded, adam={}),
    *_faulty("rounded", rounded, ("rounding-stops", _really_rounded, c.CUT)),
    *_sound("pruned", "pruned on the way", pruned, adam={}, momentum={"optimizer": o.MOMENTUM, "lr": 3e-2}),
)  # fmt: skip
