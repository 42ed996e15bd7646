"""The table of gradients and weights."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import fastguard


def make_model() -> nn.Module:
    model = nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 1))
    model[0].weight.grad = torch.tensor([[3.0, 0.0, 0.0], [0.0, 4.0, 0.0]])
    model[0].bias.grad = torch.tensor([math.nan, 1.0])
    model[2].weight.grad = torch.tensor([[math.inf, 0.0]])
    return model


def test_each_line(backend):
    model = make_model().to(torch.get_default_device())
    table = fastguard.check_gradients(model, backend=backend)
    assert [line.name for line in table] == [name for name, _ in model.named_parameters()]
    first = table["0.weight"]
    assert (first.grad_norm, first.num_zeros, first.zero_ratio, first.shape) == (5.0, 4, 4 / 6, (2, 3))
    assert first.weight_norm == pytest.approx(float(model[0].weight.detach().double().norm()), rel=1e-6)
    assert first.ratio == pytest.approx(5.0 / first.weight_norm)
    assert math.isnan(table["0.bias"].grad_norm) and table["0.bias"].num_nans == 1
    assert table["2.weight"].grad_norm == math.inf and table["2.weight"].num_infs == 1
    last = table[3]
    assert last.grad_norm is None and last.ratio is None and last.num_elements == 0
    assert table.to_dict()["0.weight"]["ratio"] == first.ratio
    assert math.isnan(table.norm)


def test_the_table_as_text():
    lines = str(fastguard.check_gradients(make_model())).splitlines()
    assert lines[0].split() == ["parameter", "shape", "grad", "norm", "weight", "norm", "ratio", "zeros", "NaN", "Inf"]
    assert lines[2].split()[:3] == ["0.weight", "2x3", "5.000e+00"] and "66.7%" in lines[2]
    assert lines[3].split()[-1] == "1"
    assert lines[-1] == "norm of all gradients: nan; 1 without a gradient"


def test_named_parameters_and_wrappers_prefixes():
    model = make_model()
    table = fastguard.check_gradients(model.named_parameters())
    assert len(table) == 4
    assert fastguard.check_gradients(nn.DataParallel(model))["0.weight"] == table["0.weight"]


def test_a_model_without_parameters():
    table = fastguard.check_gradients(nn.ReLU())
    assert len(table) == 0 and table.norm == 0.0 and "norm of all gradients: 0" in str(table)


def test_refusals():
    with pytest.raises(TypeError, match=r"`model` must be a torch\.nn\.Module or its named_parameters"):
        fastguard.check_gradients([torch.ones(3)])
    with pytest.raises(KeyError, match=r"no parameter is named 'x'; the names are: 0\.weight"):
        fastguard.check_gradients(make_model())["x"]
    with pytest.raises(fastguard.UnsupportedTensorError, match="`weight` must hold data"):
        fastguard.check_gradients(nn.Linear(2, 2, device="meta"))
