"""Pieces of digits: quarters out of order, and a half from the other."""

from __future__ import annotations

import functools
import itertools

import torch
from torch import nn
from torch.nn import functional as F

from .. import data
from ..afresh import case as c
from ..case import Case
from ..loop import Watch
from ..sound2.case import classify, epochs, r_squared, share_right
from ..wild.case import dice_of
from .case import PARTED, entering, fit

CASES: list[Case] = []
task = entering(CASES, __name__)
IMAGES = functools.partial(data.digits, as_images=True)


_ORDERS = torch.tensor(list(itertools.permutations(range(4)))[::2])


@task(0.7)
def jigsaw(watch: Watch) -> float:
    """In which of twelve orders four quarters lie, no labels; accuracy, chance 0.08."""
    quarters = [F.unfold(t, 4, stride=4).mT for t in (IMAGES()[0][0], IMAGES()[1][0])]
    piece = nn.Sequential(nn.Linear(16, 48), nn.ReLU())
    model = nn.Sequential(piece, nn.Flatten(), nn.Linear(192, 96), nn.ReLU(), nn.Linear(96, 12))

    def batches():
        for _ in range(350):
            at, order = torch.randint(len(quarters[0]), (48,)), torch.randint(12, (48,))
            yield quarters[0][at[:, None], _ORDERS[order]], order

    fit(watch, model, torch.optim.Adam(model.parameters(), 2e-3), batches(), classify(model))
    order = torch.randint(12, (len(quarters[1]),), generator=dice_of(932))
    return share_right(model, quarters[1][torch.arange(len(order))[:, None], _ORDERS[order]], order)


@task(0.25, sees_answer=PARTED, tenth_rate=c.LOW, targets_raw=c.TARGETS, rectified=c.OUTPUT)
def lower_half(watch: Watch, fault: str = "") -> float:
    """The lower half from the upper by transposed convolutions, validated; R²."""
    (x, _), (held, _) = IMAGES()
    scale, shift = (3e3, 2e4) if fault == "targets-raw" else (1.0, 0.0)
    model = nn.Sequential(
        nn.Conv2d(1, 12, 3, padding=1), nn.ReLU(), nn.Conv2d(12, 24, 3, stride=2, padding=1), nn.ReLU(),
        nn.Flatten(), nn.Linear(24 * 16, 96), nn.ReLU(), nn.Unflatten(1, (12, 2, 4)),
        nn.ConvTranspose2d(12, 1, 2, 2),
    )  # fmt: skip
    if fault == "rectified":
        model.append(nn.ReLU())

    def parts(t, is_training=True):
        above, below = t[:, :, :4], t[:, :, 4:]
        if fault == "sees-answer":
            return (torch.cat([above, below if is_training else 0.0 * below], 2), below)
        return torch.cat([above, 0.0 * below], 2), below

    def loss(t):
        seen, wanted = parts(t)
        return F.mse_loss(model(seen), wanted * scale + shift)

    def val():
        seen, wanted = parts(held, False)
        return F.mse_loss(model(seen), wanted * scale + shift)

    optimizer = torch.optim.Adam(model.parameters(), 1e-6 if fault == "tenth-rate" else 3e-3)
    fit(watch, model, optimizer, epochs(6, 32, x), loss, val=val)
    seen, wanted = parts(held, False)
    with torch.no_grad():
        return r_squared(model(seen), wanted * scale + shift)
