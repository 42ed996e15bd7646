"""Whether near inputs have near targets: against what chance makes of it, and where nothing can be said."""

from __future__ import annotations

import math
from array import array

import pytest
import torch
from guard_helpers import needs_extension
from torch.nn import functional as F

from fastguard.observers.dependence import Dependence, how_it_follows, how_near, sample_inputs
from fastguard.observers.loss_gradient import LossGradient
from fastguard.records.failures import Failures

pytestmark = needs_extension


def flat(y: torch.Tensor) -> array[float]:
    return array("d", y.flatten().tolist())


def near(x: torch.Tensor, y: torch.Tensor) -> float:
    return how_near(x, flat(y), y.shape[1], y.is_floating_point())


def draw(kind: str, num: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets that go with them."""
    x = torch.randn(num, 2)
    if kind == "classes":
        return x, (x[:, :1] > 0.0).long()
    if kind == "ring":
        return x, (x.norm(dim=1, keepdim=True) > 1.2).long()
    if kind == "numbers":
        return x, torch.sin(3.0 * x[:, :1]) * x[:, 1:] + 0.1 * torch.randn(num, 1)
    if kind == "rows":
        return x, torch.stack([x[:, 0], x[:, 0] * x[:, 1], x[:, 1]], 1)
    if kind == "category":
        found = torch.randint(0, 5, (num,))
        return found, (found[:, None] % 3).float() + 0.3 * torch.randn(num, 1)
    tokens = torch.randint(0, 3, (num, 12))
    return tokens, tokens.mode(1, keepdim=True).values


KINDS = ("classes", "ring", "numbers", "rows", "tokens", "category")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("is_shuffled", [False, True])
def test_targets_that_follow_from_inputs_and_those_of_others(kind: str, is_shuffled: bool) -> None:
    torch.manual_seed(1)
    found, value = Dependence(), None
    for _ in range(8):
        x, y = draw(kind)
        y = y[torch.randperm(len(y))] if is_shuffled else y
        value = found.add(sample_inputs([x]), flat(y), y.shape, y.is_floating_point())
    assert value is not None
    assert value < 2.0 if is_shuffled else value > 4.0


@pytest.mark.parametrize(
    ("given", "targets", "output"),
    [
        ([torch.randn(7, 2)], 7, (7, 4)),  # too few
        ([torch.arange(64).view(32, 2)], 32, (32, 4)),  # names
        ([torch.randn(32, 2), torch.arange(32)], 32, (32, 4)),  # and a name beside numbers
        ([torch.randint(0, 9, (32, 12))], 32 * 12, (32, 12, 9)),  # a symbol a place, as of a language
        ([torch.randn(32, 2)], 24, (32, 4)),  # of some samples
        ([torch.randn(32, 2)], 64, (32, 16)),  # cut off
        ([torch.randn(12, 32, 2)], 32, (32, 4)),  # samples in another dimension
        ([], 32, (32, 4)),
        ([torch.full((32, 2), math.nan)], 32, (32, 4)),
        ([torch.ones(32, 2)], 32, (32, 4)),
    ],
)
def test_where_nothing_can_be_said(given: list[torch.Tensor], targets: int, output: tuple[int, ...]) -> None:
    found = Dependence()
    assert [found.add(sample_inputs(given), flat(torch.arange(targets) % 3), output) for _ in range(8)] == [None] * 8


@pytest.mark.parametrize("is_shuffled", [False, True])
@pytest.mark.parametrize("loss", ["classes", "numbers", "images"])
def test_targets_are_those_that_the_gradient_of_the_output_shows(loss: str, is_shuffled: bool) -> None:
    torch.manual_seed(4)
    looker = LossGradient(Failures())
    for _ in range(8):
        x = torch.randn(32, 5)
        order = torch.randperm(32) if is_shuffled else torch.arange(32)
        if loss == "images":  # with the classes second, a class a pixel
            output = (0.1 * torch.randn(32, 3, 4, 4)).requires_grad_()
            targets = (x[:, :1, None] > torch.zeros(1, 4, 4)).long()
        else:
            output = (0.1 * torch.randn(32, 3 if loss == "classes" else 1)).requires_grad_()
            targets = x[:, 0].argsort().argsort() // 11 if loss == "classes" else x[:, :1]
        looker.watch(given := output * 1.0, [x])
        (F.mse_loss if loss == "numbers" else F.cross_entropy)(given, targets[order]).backward()
    assert (looker.facts["target_dependence"] < 2.0) == is_shuffled


def test_how_near_is_the_distance_correlation_without_bias() -> None:
    def centred(d: torch.Tensor) -> torch.Tensor:
        rows = d.sum(0) / (len(d) - 2)
        return (d - rows - rows[:, None] + rows.sum() / (len(d) - 1)).fill_diagonal_(0.0)

    torch.manual_seed(5)
    for kind in ("numbers", "rows", "classes"):
        x, y = draw(kind)
        distances = torch.cdist(*(2 * [x.double() / x.double().std(0)]))
        a = centred((-torch.exp(-2.0 * (distances / distances.median()))).fill_diagonal_(0.0))
        b = centred(torch.cdist(y.double(), y.double(), p=2.0 if y.is_floating_point() else 0.0))
        expected = float((a * b).sum() / (a.norm() * b.norm())) * math.sqrt(len(x) * (len(x) - 3) / 2)
        assert near(x, y) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64])
def test_how_it_follows_is_a_correlation_or_the_share_that_is_equal(dtype: torch.dtype) -> None:
    torch.manual_seed(6)
    x, y = (4.0 * torch.randn(33, 5)).to(dtype), torch.randn(33, 1)
    expected = torch.corrcoef(torch.cat([x, y], 1).T.double())[-1, :-1].abs()
    assert list(how_it_follows(x, flat(y))) == pytest.approx(expected.tolist(), rel=1e-6)
    tokens = torch.randint(0, 3, (33, 4))
    found = how_it_follows(tokens, flat(tokens.roll(1, 0)))
    share = float((tokens == tokens.roll(1, 0)).double().mean())
    assert list(found) == pytest.approx([share] * 2) and not how_it_follows(tokens.float(), flat(tokens.roll(1, 0)))
