"""What is read off the graph of the first observed loss: the operations it is made of, and whose parameters it uses."""

import pytest
import torch
from guard_helpers import make_model
from torch import nn
from torch.nn import functional as F

import fastguard
from fastguard.diagnosis import RULES
from fastguard.diagnosis.needs import descent
from fastguard.observers.loss_gradient import MAX_NODES, NUM_OPS, facts_of_loss

from made_runs import falling_losses, run

CLASSES = torch.tensor([0, 3, 1, 2, 0])
ROWS = torch.tensor([0, 2, 3])
UNIT = torch.full((5, 4), 0.5)


def output():
    return nn.Linear(6, 4)(torch.ones(5, 6))


def ops(loss):
    found = facts_of_loss(loss, None)["loss_ops"]
    return found[:-1] if found[-1] == "TBackward0" else found  # of the first layer's weight: nothing else has a graph


OPERATIONS = [
    (lambda x: F.cross_entropy(x, CLASSES), "NllLoss LogSoftmax"),
    (lambda x: F.cross_entropy(x.softmax(-1), CLASSES), "NllLoss LogSoftmax Softmax"),
    (lambda x: F.nll_loss(x, CLASSES), "NllLoss"),
    (lambda x: F.binary_cross_entropy_with_logits(x.sigmoid(), UNIT), "BinaryCrossEntropyWithLogits Sigmoid"),
    (lambda x: F.binary_cross_entropy(x.sigmoid(), UNIT), "BinaryCrossEntropy Sigmoid"),
    (lambda x: F.mse_loss(x.relu(), UNIT), "MseLoss Relu"),
    (lambda x: F.l1_loss(x, UNIT), "Mean Abs Sub"),
    (lambda x: F.smooth_l1_loss(x.tanh(), UNIT), "SmoothL1Loss Tanh"),
    (lambda x: (x - UNIT).square().mean(), "Mean Pow Sub"),
    (lambda x: -x.mean(), "Neg Mean"),
    (lambda x: F.cross_entropy(x, CLASSES) + 0.1 * x.square().mean(), "Add NllLoss LogSoftmax"),
]


@pytest.mark.parametrize(("loss", "expected"), OPERATIONS)
@pytest.mark.parametrize("is_late", [False, True], ids=["before backward", "after backward"])
def test_operations(loss, expected, is_late):
    made = loss(output())
    if is_late:
        made.backward()
    assert ops(made) == tuple(f"{name}Backward0" for name in f"{expected} Addmm".split())


def test_not_more_than_sixteen_and_of_a_huge_graph_a_part():
    own, far = nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(()))
    loss = far * 1.0
    for _ in range(MAX_NODES + 100):
        loss = loss + 1.0
    facts = facts_of_loss(loss * own, {id(own)})
    assert len(facts["loss_ops"]) == NUM_OPS and facts["num_foreign_parameters"] == 0  # beyond what is read
    assert facts_of_loss(far * own + 1.0, {id(own)})["num_foreign_parameters"] == 1


@pytest.mark.parametrize(
    "loss", [1.5, None, torch.ones(()), output().sum().detach(), "1.5", nn.Parameter(torch.ones(()))]
)
def test_what_has_no_graph_says_nothing(loss):
    assert facts_of_loss(loss, {1}) == {}


class TestForeignParameters:
    def count(self, loss, *own):
        ids = {id(p) for module in own for p in module.parameters()}
        return facts_of_loss(loss, ids)["num_foreign_parameters"]

    def test_a_generator_is_judged_by_a_discriminator(self):
        generator, judge = make_model(), nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
        loss = F.binary_cross_entropy_with_logits(judge(generator(torch.ones(5, 6))), torch.ones(5, 1))
        assert self.count(loss, generator) == 4
        assert self.count(loss, generator, judge) == 0
        loss.backward()
        assert self.count(loss, generator) == 4


class TestObserve:
    def guarded(self, model, named=None):
        return fastguard.wrap(torch.optim.SGD(model.parameters(), lr=0.1), named)

    def notes(self, optimizer):
        optimizer.guard.report()
        return optimizer.guard.history.model

    def test_softmax_under_cross_entropy_is_found(self):
        model = nn.Sequential(nn.Linear(6, 4), nn.Softmax(-1))
        optimizer = self.guarded(model, model)
        loss = F.cross_entropy(model(torch.ones(5, 6)), CLASSES)
        loss.backward()
        optimizer.step()
        optimizer.guard.observe(loss=loss)
        optimizer.guard.flush()
        notes = self.notes(optimizer)
        assert notes.loss_ops[:3] == ("NllLossBackward0", "LogSoftmaxBackward0", "SoftmaxBackward0")
        assert notes.num_foreign_parameters == 0
        found = RULES["output-against-loss"](optimizer.guard.history)
        assert found is not None and found.evidence["activation"] == "softmax"

    @pytest.mark.parametrize("is_maker_first", [True, False])
    def test_who_is_in_the_loss_of_another_is_in_a_game_too(self, is_maker_first):
        maker, judge = nn.Linear(3, 6), make_model()
        of_maker, of_judge = self.guarded(maker, maker), self.guarded(judge, judge)
        other = nn.Linear(2, 2)
        alone = self.guarded(other, other)
        for is_maker in (is_maker_first, not is_maker_first):
            made = maker(torch.ones(5, 3))
            loss = judge(made if is_maker else made.detach()).mean()
            loss.backward()
            optimizer = of_maker if is_maker else of_judge
            optimizer.step()
            optimizer.guard.observe(loss=loss)
        num_of_judge = len(list(judge.parameters()))
        assert self.notes(of_maker).num_foreign_parameters == num_of_judge
        assert self.notes(of_judge).num_foreign_parameters == num_of_judge
        assert descent(of_judge.guard.history) is False
        assert not self.notes(alone).num_foreign_parameters

    def test_who_is_guarded_later_is_in_the_game_too(self):
        maker, judge = nn.Linear(3, 6), make_model()
        kept = []  # as long as the test needs them
        for model, given in ((maker, judge(maker(torch.ones(5, 3)))), (judge, judge(torch.ones(5, 6)))):
            optimizer, loss = self.guarded(model, model), given.mean()
            loss.backward()
            optimizer.step()
            optimizer.guard.observe(loss=loss)
            kept.append(optimizer)
        assert self.notes(kept[1]).num_foreign_parameters == len(list(judge.parameters()))


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (lambda y: torch.nn.functional.cross_entropy(y, torch.zeros(3, dtype=torch.long)), True),
        (lambda y: (y.tanh() / 3.0).square().mean(), True),
        (lambda y: y.abs().pow(0.5).mean(), False),
        (lambda y: (y.tanh() / 3.0).mean(), True),
        (lambda y: (y / y.exp()).mean(), False),
        (lambda y: y.abs().sqrt().mean(), False),
        (lambda y: y.norm(), False),
    ],
)
def test_whether_all_derivatives_are_finite(made, expected):
    layer = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.LayerNorm(8), torch.nn.GELU(), torch.nn.Linear(8, 5))
    loss = made(layer(torch.randn(3, 4)))
    assert facts_of_loss(loss, {id(p) for p in layer.parameters()})["is_smooth"] is expected


@pytest.mark.parametrize(
    "chosen",
    [
        lambda y: y[ROWS],
        lambda y: y.index_select(0, ROWS),
        lambda y: y.gather(0, ROWS[:, None].expand(3, 4)),
        lambda y: y.masked_select(torch.tensor([[True], [False], [True], [True], [False]])).view(3, 4),
        lambda y: torch.cat([y[:1], y[1:3]]),
        lambda y: torch.stack(y.unbind()[:3]),
        lambda y: y.split(3)[0].squeeze().flip(0),
    ],
)
def test_the_loss_is_seen_through_a_choice_of_samples(chosen):
    """As of the nodes of a graph that are to be trained on: `F.nll_loss(y[idx], targets[idx])`."""
    for y, expected in ((output().log_softmax(-1), None), (output().softmax(-1), "softmax"), (output(), "none")):
        history = run(falling_losses(20), loss_ops=facts_of_loss(F.nll_loss(chosen(y), CLASSES[:3]), None)["loss_ops"])
        finding = RULES["output-against-loss"](history)
        assert (finding and finding.evidence["activation"]) == expected


@pytest.mark.parametrize(
    ("loss", "is_over_batch"),
    [
        (lambda x: F.nll_loss(x.log_softmax(0), CLASSES), True),
        (lambda x: F.nll_loss(x.log_softmax(-2), CLASSES), True),
        (lambda x: F.nll_loss(x.log_softmax(1), CLASSES), False),
        (lambda x: F.cross_entropy(x, CLASSES) + F.nll_loss(x.log_softmax(0), CLASSES), True),
        (lambda x: F.cross_entropy(x, CLASSES), False),
        (lambda x: F.cross_entropy(x[0], CLASSES[0]), False),
    ],
)
@pytest.mark.parametrize("is_late", [False, True])
def test_whether_the_softmax_is_over_the_batch(loss, is_over_batch, is_late):
    found = loss(output())
    if is_late:
        found.backward()
    assert facts_of_loss(found, set())["softmax_over_batch"] is is_over_batch


@pytest.mark.parametrize(
    ("loss", "is_weighted"),
    [
        (lambda x: F.cross_entropy(x, CLASSES), False),
        (lambda x: 2.0 * F.cross_entropy(x, CLASSES, weight=torch.ones(x.shape[1])), True),
        (lambda x: F.binary_cross_entropy_with_logits(x, x.detach().sigmoid()), False),
        (lambda x: F.binary_cross_entropy_with_logits(x, x.detach().sigmoid(), pos_weight=torch.ones(())), True),
    ],
)
@pytest.mark.parametrize("is_late", [False, True])
def test_whether_the_loss_is_weighted(loss, is_weighted, is_late):
    found = loss(output())
    if is_late:
        found.backward()
    assert facts_of_loss(found, set())["has_loss_weights"] is is_weighted

    def test_parameters_that_no_optimizer_changes_are_no_players_of_a_game(self):
        encoder, decoder = nn.Linear(6, 3), nn.Linear(3, 6)
        optimizer = self.guarded(decoder, decoder)
        for _ in range(30):
            loss = decoder(encoder(torch.ones(5, 6))).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.guard.observe(loss=loss)
        assert (self.notes(optimizer).num_untrained, self.notes(optimizer).num_foreign_parameters) == (2, 0)


@pytest.mark.parametrize(
    ("loss", "is_paired"),
    [
        (lambda y, t: ((y - t) ** 2).mean(), True),
        (lambda y, t: 2.0 * (y.squeeze(1) - t[:, None]).abs().mean() / 3.0, True),
        (lambda y, t: -(y * t).mean() + y.pow(2).mean(), True),  # a policy and a penalty
        (lambda y, t: ((y.squeeze(1) - t) ** 2).mean(), False),
        (lambda y, t: ((y[:1] - t[:1]) ** 2).mean(), False),  # one sample
        (lambda y, t: (y - t).abs().sum(1).mean(), False),  # pairs are meant, as of quantiles
    ],
)
def test_whether_outputs_are_paired_with_the_targets_of_all(loss, is_paired):
    found = loss(nn.Linear(4, 1)(torch.ones(5, 4)), torch.arange(5.0))
    found.backward()
    assert facts_of_loss(found, set())["is_paired"] is is_paired
