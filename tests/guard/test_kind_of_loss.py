"""Which kind of loss a gradient of the output is of, its targets, and whether near inputs have near targets."""

import math
from array import array
from collections.abc import Callable

import pytest
import torch
from guard_helpers import classes, needs_extension, numbers
from torch.nn import functional as F

from fastguard.observers.batch_sample import Dependence, sample_inputs
from fastguard.observers.loss_gradient import CLASSIFYING, LossGradient, OutputSample
from fastguard.records.failures import Failures

pytestmark = needs_extension
CROSS_ENTROPY, NLL = "cross-entropy", "negative log-likelihood"
WITH_LOGITS, BINARY = "binary cross-entropy with logits", "binary cross-entropy"
SQUARED = "squared error"
Loss = Callable[[torch.Tensor], torch.Tensor]


def kind_of_loss(output, gradient):
    kind, targets, *_ = OutputSample(output).loss_of(gradient)
    found = None if targets is None else torch.tensor(targets, dtype=torch.float64)
    return kind, found.long() if found is not None and kind in CLASSIFYING else found


def told(loss, output):
    """The kind and the targets of `loss`, of what it does to `output`."""
    leaf = output.detach().clone().requires_grad_()
    loss(leaf).backward()
    assert leaf.grad is not None
    return kind_of_loss(leaf.detach(), leaf.grad)


CLASSES = classes(16)
WEIGHT = torch.tensor([0.1, 3.0, 1.0, 0.5, 7.0])


PADDED = classes(4, 6)
PADDED[:, 4:] = -100
ANSWERS = classes(32, 1, num=2).float()
LOGITS = numbers(16, 5)
CROSS = {
    "mean": lambda y: F.cross_entropy(y, CLASSES),
    "sum": lambda y: F.cross_entropy(y, CLASSES, reduction="sum"),
    "small": lambda y: 1e-2 * F.cross_entropy(y, CLASSES),
    "scaled": lambda y: 65536.0 * F.cross_entropy(y, CLASSES),
    "weighted": lambda y: F.cross_entropy(y, CLASSES, weight=WEIGHT.to(y.dtype)),
    "weighted sum": lambda y: F.cross_entropy(y, CLASSES, weight=WEIGHT.to(y.dtype), reduction="sum"),
    "each weighted": lambda y: (F.cross_entropy(y, CLASSES, reduction="none") * torch.linspace(0.1, 2.0, 16)).mean(),
    "nll": lambda y: F.nll_loss(y.log_softmax(1), CLASSES),
    "log of softmax": lambda y: F.nll_loss(y.softmax(1).log(), CLASSES),
}
OTHERS = {
    "classes second": (lambda y: F.cross_entropy(y, classes(4, 3, 3)), numbers(4, 5, 3, 3), "", classes(4, 3, 3)),
    "places": (lambda y: F.cross_entropy(y, classes(4, 7)), numbers(4, 5, 7), "", classes(4, 7)),
    "as many places": (lambda y: F.cross_entropy(y, classes(4, 5)), numbers(4, 5, 5), "", classes(4, 5)),
    "padding": (lambda y: F.cross_entropy(y.flatten(0, 1), PADDED.flatten()), numbers(4, 6, 5), "", PADDED[:, :4]),
    "a softmax before": (lambda y: F.cross_entropy(y, CLASSES), LOGITS.softmax(1), "", CLASSES),  # of what comes out
    "logarithms": (lambda y: F.nll_loss(y, CLASSES), LOGITS.log_softmax(1), NLL, CLASSES),
    "probabilities": (lambda y: F.nll_loss(y, CLASSES, reduction="sum"), LOGITS.softmax(1), NLL, CLASSES),
    "their log": (lambda y: F.nll_loss(y.log(), CLASSES), LOGITS.softmax(1), "log of the output", CLASSES),
    "answers": (lambda y: F.binary_cross_entropy_with_logits(y, ANSWERS), numbers(32, 1), WITH_LOGITS, ANSWERS),
    "tiny": (lambda y: 1e-5 * F.binary_cross_entropy_with_logits(y, ANSWERS), numbers(32, 1), WITH_LOGITS, ANSWERS),
    "binary": (lambda y: F.binary_cross_entropy(y, ANSWERS), numbers(32, 1).sigmoid(), BINARY, ANSWERS),
    "squares": (lambda y: F.mse_loss(y, 3 + 2 * numbers(8, 3)), numbers(8, 3, seed=2), SQUARED, 3 + 2 * numbers(8, 3)),
    "one column": (lambda y: F.mse_loss(y, numbers(32, 1)), numbers(32, 1, seed=2), SQUARED, numbers(32, 1)),
    "deep": (lambda y: F.mse_loss(y, numbers(2, 3, 4)), numbers(2, 3, 4, seed=2), SQUARED, numbers(2, 3, 4)),
}


@pytest.mark.parametrize("loss", CROSS.values(), ids=CROSS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16], ids=str)
def test_cross_entropy(loss, dtype):
    def of_floats(y):  # as autocast has it
        return loss(y.float() if dtype is torch.float16 else y)

    kind, found = told(of_floats, LOGITS.to(dtype))
    assert kind == CROSS_ENTROPY
    assert found is not None and torch.equal(found, CLASSES)


@pytest.mark.parametrize("name", OTHERS)
def test_kinds_and_targets(name):
    loss, output, expected, targets = OTHERS[name]
    kind, found = told(loss, output)
    assert kind == (expected or CROSS_ENTROPY) and found is not None
    torch.testing.assert_close(found.double(), targets.double().flatten(), rtol=0.0, atol=1e-5)


def test_a_softmax_before_it_gives_another_gradient_to_what_went_into_it():
    assert told(lambda y: F.cross_entropy(y.softmax(1), CLASSES), LOGITS)[0] != CROSS_ENTROPY


@pytest.mark.parametrize("smoothing", [0.05, 0.1, 0.3])
@pytest.mark.parametrize("scale", [0.3, 1.0, 3.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_smoothed_labels(smoothing, scale, dtype):
    y = (scale * LOGITS).to(dtype)
    kind, found = told(lambda y: F.cross_entropy(y.float(), CLASSES, label_smoothing=smoothing), y)
    assert kind == "cross-entropy with smoothed labels"
    assert found is not None and torch.equal(found, CLASSES)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_labels_that_are_not_smoothed(dtype):
    for scale in (0.0, 1e-3, 0.1, 1.0, 5.0):
        y = (scale * LOGITS).to(dtype)
        assert told(lambda y: F.cross_entropy(y.float(), CLASSES), y)[0] == CROSS_ENTROPY
        assert told(lambda y: F.cross_entropy(y.float(), CLASSES, weight=WEIGHT), y)[0] == CROSS_ENTROPY


@pytest.mark.parametrize(
    "loss", [lambda y: -y.sum() / 52, lambda y: y.mean(), lambda y: (y * classes(8, 13, num=2)).sum()]
)
def test_one_number_everywhere_is_of_a_sum_and_has_no_targets(loss):
    """Of log-probabilities that are nearly alike, as of an untrained model, it once was a BCE of ones."""
    for output in (-4.16 + 1e-2 * numbers(8, 13), numbers(8, 13)):
        assert told(loss, output) == ("", None)


def flat(y):
    return array("d", y.flatten().tolist())


def draw(kind, num=32):
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
def test_targets_that_follow_from_inputs_and_those_of_others(kind, is_shuffled):
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
def test_where_nothing_can_be_said(given, targets, output):
    found = Dependence()
    assert [found.add(sample_inputs(given), flat(torch.arange(targets) % 3), output) for _ in range(8)] == [None] * 8


@pytest.mark.parametrize("is_shuffled", [False, True])
@pytest.mark.parametrize("loss", ["classes", "numbers", "images"])
def test_targets_are_those_that_the_gradient_of_the_output_shows(loss, is_shuffled):
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
