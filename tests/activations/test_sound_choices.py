"""Sound models with attention and experts, of four kinds: no rule on their choices may speak."""

from __future__ import annotations

import pytest
import torch
from choosing_models import Block, Experts, Heads, Language, StackedMoe
from torch import nn
from torch.nn import functional as F

import fastguard
from fastguard.diagnosis import RULES

pytestmark = pytest.mark.slow
ASKED = ("attention-logits-large", "attention-collapse", "unused-experts", "router-collapse")


class Mlp(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))


def counting(generator):
    """Each token is the one before plus a step that the sequence keeps."""
    first, step = torch.randint(11, (16, 1), generator=generator), torch.randint(1, 4, (16, 1), generator=generator)
    return (first + step * torch.arange(17)) % 11


def copying(generator):
    """The second half repeats the first: attention to one place is what the task asks."""
    half = torch.randint(11, (16, 9), generator=generator)
    return torch.cat([half, half[:, :8]], 1)


def chain(generator):
    """A Markov chain of eleven states."""
    moves = torch.rand(11, 11, generator=torch.Generator().manual_seed(7)).pow(4)
    x = [torch.randint(11, (16,), generator=generator)]
    for _ in range(16):
        x.append(torch.multinomial(moves[x[-1]], 1, generator=generator)[:, 0])
    return torch.stack(x, 1)


KINDS = {
    "causal, copying": (lambda: Language(*(Block(Heads(), Mlp()) for _ in range(2))), copying),
    "grouped queries, dropout": (lambda: Language(Block(Heads(num_keys=2, dropout=0.1), Mlp())), chain),
    "two of eight experts, balanced": (lambda: Language(Block(Heads(), Experts())), counting),
    "stacked experts, from their own": (lambda: Language(Block(Heads(), StackedMoe(num=4))), chain),
}


@pytest.mark.parametrize("kind", KINDS)
def test_is_silent(kind):
    make, draw = KINDS[kind]
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    fastguard.wrap(optimizer, model, max_norm=1.0, activations={"every": 10, "overhead_budget": None})
    seen = set()
    for _ in range(120):
        x = draw(generator)
        loss = F.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())
        balance = sum(m.imbalance() for m in model.modules() if isinstance(m, Experts))
        (loss + 0.01 * balance).backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.guard.observe(loss=loss)
        seen.update(r.family for r in optimizer.guard.activations.activities)
    optimizer.guard.flush()
    history = optimizer.guard.history
    assert "attention_weights" in seen and ("router" in seen) == ("experts" in kind)
    assert history.loss_trend.mean < 0.95 * history.loss_trend.first, "it learns nothing"
    found = [finding for name in ASKED if (finding := RULES[name](history)) is not None]
    assert found == []
    optimizer.guard.close()
