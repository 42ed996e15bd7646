"""What a loss wants of free outputs, and that asking leaves everything as it was."""

import pytest
import torch
import torch.nn.functional as F

from fastguard.experiments import loss as asking
from fastguard.experiments.loss import ask_loss

losses = pytest.importorskip("benchmarks.losses.__main__", reason="benchmarks are not here", exc_type=ImportError)
UNDECIDABLE = ("no log/3-binary", "survival/0-survival", "policy/0-policy")
TUNE = [case for case in losses.CASES if case.half == "tune" and case.name not in UNDECIDABLE]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", TUNE[::5], ids=lambda case: case.name)
def test_wrong_losses_are_found_and_sound_ones_are_not(case):
    assert bool(losses.rules(losses.ask(case))) is case.is_wrong


def ask(loss, output, target, **options):
    return ask_loss(lambda o, t: loss(o[0], t[0]), [output], [target], **options)


def messages(loss, output, target, **options):
    return [problem.message for problem in ask(loss, output, target, **options).problems]


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (lambda o, t: F.mse_loss(o, t.roll(1)), "with the target of another one"),
        (lambda o, t: (o[:, None] - t).square().mean(), "with the targets of others as well"),
        (lambda o, t: F.mse_loss(o[::2], t[::2]), "16 of 32 samples have no effect on the loss"),
        (lambda o, t: F.mse_loss(o.detach(), t), "no gradient arrives at any of them"),
        (lambda o, t: o.square().mean(), "The targets have no effect on the loss."),
        (lambda o, t: -F.mse_loss(o, t), "and the loss has no lower bound"),
    ],
)
def test_what_is_wrong_is_said(loss, said):
    assert said in messages(loss, torch.randn(32), torch.randn(32))[0]


def test_classes_that_are_left_out_are_named():
    target = torch.arange(40) % 4
    assert messages(lambda o, t: F.cross_entropy(o, t, ignore_index=2), torch.randn(40, 4), target) == [
        "Samples of class 2 have no effect on the loss: it has no gradient there."
    ]


@pytest.mark.parametrize(("shift", "is_wrong"), [(0, True), (1, False), (2, True)])
def test_tokens_are_to_be_the_next_ones(shift, is_wrong):
    ids = torch.randint(7, (8, 12))

    def loss(o, t):
        return F.cross_entropy(o[:, : 12 - shift].flatten(0, 1), t[:, shift:].flatten())

    answer = ask(loss, torch.randn(8, 12, 7), ids, inputs=[ids], is_causal=True)
    assert [problem.evidence["shift"] for problem in answer.problems] == ([shift] if is_wrong else [])


@pytest.mark.parametrize(
    ("loss", "output", "target", "why"),
    [
        (lambda o, t: (o * t.square().sum(1)).square().sum(), torch.randn(8), torch.ones(8, 5), "not in the space"),
        (F.mse_loss, torch.randn(3), torch.randn(3), "fewer than 4 samples"),
        (F.mse_loss, torch.randn(4, asking.MAX_ELEMENTS), torch.randn(4, 1), "more than"),
        (lambda o, t: (o.log() - t).square().sum(), torch.randn(8), torch.randn(8), "not finite"),
    ],
)
def test_it_abstains(loss, output, target, why):
    assert why in ask(loss, output, target).abstained
