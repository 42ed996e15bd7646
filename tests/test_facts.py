"""What the rules are told of model and optimizer."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from fastguard import facts
from fastguard.history import TrainingHistory


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 32), nn.Dropout(0.25), nn.BatchNorm1d(32), nn.Linear(32, 8), nn.Embedding(10, 8))


def test_a_sound_model():
    net = model()
    told = facts.of_model(net, [torch.optim.SGD(net.parameters(), lr=0.1, weight_decay=0.01)])
    assert told["names"] == [name for name, _ in net.named_parameters()]
    assert not told["names_not_in_optimizer"] and not told["names_without_gradient"] and not told["names_with_zero_lr"]
    assert told["dropout"] == {"1": 0.25}
    assert list(told["initialization"]) == ["0.weight", "3.weight"]
    actual, expected = told["initialization"]["0.weight"]
    assert actual == pytest.approx(net[0].weight.std(unbiased=False).item(), rel=1e-6)
    assert expected == math.sqrt(2 / 64)
    assert (told["has_scheduler"], told["initial_lr"], told["decay_per_step"]) == (False, None, 0.1 * 0.01)
    TrainingHistory().note_model(**told)


def test_what_cannot_learn():
    net = model()
    net[2].weight.requires_grad_(False)
    groups = [{"params": [net[0].weight]}, {"params": [net[0].bias], "lr": 0.0}]
    told = facts.of_model(net, [torch.optim.SGD(groups, lr=0.1)])
    assert told["names_without_gradient"] == ["2.weight"]
    assert told["names_with_zero_lr"] == ["0.bias"]
    assert told["names_not_in_optimizer"] == ["2.bias", "3.weight", "3.bias", "4.weight"]


def test_names_are_those_of_the_records():
    net = nn.Sequential()
    net.add_module("module", model())  # as DataParallel does
    told = facts.of_model(net, [torch.optim.SGD(net.parameters(), lr=0.1)])
    assert told["names"][0] == "0.weight" and list(told["dropout"]) == ["1"]


def test_kernels_and_recurrent_weights():
    net = nn.ModuleDict({"conv": nn.Conv2d(3, 8, 3), "rnn": nn.LSTM(16, 32)})
    told = facts.of_model(net, [torch.optim.SGD(net.parameters(), lr=0.1)])["initialization"]
    assert told["conv.weight"][1] == pytest.approx(math.sqrt(2 / 27))
    assert told["rnn.weight_hh_l0"][1] == pytest.approx(math.sqrt(2 / 32))
    assert "rnn.bias_hh_l0" not in told


def test_a_scheduler_made_later_is_seen():
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=torch.tensor(0.02), weight_decay=0.5)
    assert facts.of_optimizers([optimizer])["has_scheduler"] is False
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.1)
    told = facts.of_optimizers([optimizer])
    assert told["has_scheduler"] is True
    assert told["initial_lr"] == pytest.approx(0.02)
    assert told["decay_per_step"] == pytest.approx(0.02 * 0.1 * 0.5)


def test_decay_inside_the_gradient_is_not_known():
    net = model()
    assert facts.of_optimizers([torch.optim.Adam(net.parameters(), weight_decay=1.0)])["decay_per_step"] is None
